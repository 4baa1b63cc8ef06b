// The executor of a layer on a GPU, with the launches of `_launch` (kernels/triton/experts.hpp), and its bindings.
//
// The interpreter's lock is kept but where the pass waits for copies of a thread, or calls others: a thread that gets it may
// keep it for milliseconds. For copies on streams the host does not wait.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "../../kernels/triton/experts.hpp"
#include "bindings.hpp"
#include "cpu_layer.hpp"
#include "python_parts.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

using HostIds = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // [T, K]

class GpuLayer : public Layer {
  public:
    // low: launches low-bit replicas; null: there are none. reads: what reads fast; null: `fetch` does. scored_rows: of the
    // inputs whose scores it finds. fetch (tensors, hidden, routers' numbers) -> arrays.
    GpuLayer(Core& core, const Place& place, const ExpertLaunches& launches, const ExpertLaunches* low, const LayerReads* reads,
             std::int64_t scored_rows, nb::object fetch, Passes& passes)
        : Layer(core, place, passes), launches_(launches), low_(low), reads_(reads), scored_rows_(scored_rows), fetch_(std::move(fetch)) {}

    // operands: of a linear router, as `LayerReads` takes them; none: it is another.
    Router add(nb::object operands, std::int64_t outputs) {
        return routers_.push_back({std::move(operands), outputs, {}, false}), routers() - 1;
    }
    Router routers() const override { return static_cast<Router>(routers_.size()); }
    std::int64_t outputs(Router router) const override { return routers_[static_cast<std::size_t>(router)].outputs; }

    // ids: a tensor on the device, or an array on the host, which is not read again.
    // into: of hidden's shape and type, contiguous, for the sums where its launches make them; none: a new tensor.
    nb::object run(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle into) {
        const nb::object shape = nb::steal(PyObject_GetAttrString(ids.ptr(), "shape"));
        if (!shape.is_valid()) nb::raise_python_error();
        const auto [tokens, top_k] = nb::cast<std::pair<std::int64_t, std::int64_t>>(shape);
        if (!parts_) throw Broken("a GPU's layer has parts in Python, which run what its launches do not take");
        takes(hidden, weights, into, tokens, top_k);
        for (Asked& one : routers_) one.known = false;
        Given given{nullptr, nullptr, nullptr, tokens, top_k, nullptr};
        if (looks(given)) {  // one read for all of Python's parts
            const struct Over {
                PythonParts& of;
                ~Over() { of.over(); }
            } over{python()};
            const nb::object view = python().pass(*this).attr("view");
            const auto picked = nb::cast<HostIds>(view.attr("picked"));
            ids_.assign(picked.data(), picked.data() + picked.size());
            given.ids = ids_.data();
            Layer::run(given);
        } else {
            wanted_.clear();
            for (const auto& rule : rules_) rule->asks(wanted_);
            if (const LayerAhead* ahead = taking(given)) ahead->asks(*this, given, wanted_);
            const bool weighed = !rules_.empty();
            if (PyObject_CheckBuffer(ids.ptr())) {
                const auto known = nb::cast<HostIds>(ids);
                ids_.assign(known.data(), known.data() + known.size());
                if (weighed || !wanted_.empty()) throw std::invalid_argument("rules and prefetch read ids of the device");
            } else {
                read(hidden, weighed ? nb::make_tuple(ids, weights) : nb::make_tuple(ids), wanted_);
            }
            given.ids = ids_.data(), given.weights = weighed ? weights_.data() : nullptr;
            Layer::run(given);
        }
        return std::exchange(out_, {});
    }

    const float* scores(const Given&, Router router) override {
        Asked& asked = routers_[static_cast<std::size_t>(router)];
        if (!asked.known) read(rows_.hidden, nb::make_tuple(), {router});
        return asked.scores.data();
    }

    // Seconds of the last pass, where it is timed: of reading, and of the waits in it.
    std::pair<double, double> read_s() const { return {read_s_, read_waited_s_}; }

  protected:
    void load() override {
        std::optional<nb::gil_scoped_release> others;
        if (!core_.present().loads.empty() && core_.link().waits()) others.emplace();
        core_.load();
    }
    std::pair<std::int64_t, std::int64_t> stretch() override {
        const Plan& plan = core_.present();
        std::optional<nb::gil_scoped_release> others;
        if (plan.resident < static_cast<std::int64_t>(plan.run.size()) && core_.link().waits()) others.emplace();
        return core_.next();
    }

    void compute(const Given& given, const Routed& routed) override {
        const double began_s = timed_s();
        if (!launched_ || routed.large) {  // of other types, or by other kernels
            out_ = python().compute(*this);
            added();
            return;
        }
        nb::object changed;  // weights that a rule in Python has brought to the device
        if (python().rerouted) changed = python().pass(*this).attr("view").attr("device_weights"), rows_.weights = changed.ptr();
        rows_.order = picked_.order.data(), rows_.top_k = routed.top_k, rows_.zeroed = holes(), rows_.low = low_;
        rows_.changed = routed.weights == given.weights || python().rerouted ? nullptr : routed.weights;
        waited_s_ = 0.0;
        out_ = nb::steal(launches_.run(launches_.self, rows_, {next_groups, this}));
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
        if (!out_.is_valid()) nb::raise_python_error();
        kernels_s() = timed_s() - began_s - waited_s_;
        if (away_) python().out = out_;
        added();
    }

  private:
    struct Asked {
        nb::object operands;
        std::int64_t outputs;
        std::vector<float> scores;
        bool known;  // of the present pass
    };

    void takes(nb::handle hidden, nb::handle weights, nb::handle into, std::int64_t tokens, std::int64_t top_k) {
        read_s_ = read_waited_s_ = 0.0;
        rows_ = {hidden.ptr(), weights.ptr(), into.is_none() ? nullptr : into.ptr(), tokens, top_k, nullptr, nullptr};
        const int found = launches_.takes(launches_.self, rows_);
        if (found < 0) nb::raise_python_error();
        launched_ = found;
    }
    PythonParts& python() { return static_cast<PythonParts&>(*parts_); }
    // Whether a part that is Python's is asked in the present pass in any case.
    bool looks(const Given& given) const {
        const std::size_t rule = first_of(rules_), ahead = first_of(aheads_);
        return planned() || parts_->watched || (rule < rules_.size() && !rules_[rule]->native()) ||
               (ahead < aheads_.size() && !aheads_[ahead]->native() && aheads_[ahead]->takes(*this, given));
    }

    // Tensors (ids and weights, ids, or none) and scores, in copies: who is called within a pass reads by the same buffer.
    void read(nb::handle hidden, const nb::tuple& tensors, const Routers& routers) {
        const double began_s = timed_s();
        const std::size_t given = tensors.size(), count = given + routers.size();
        bool fast = reads_ && launched_ && routers.size() <= LayerReads::kRouters && (routers.empty() || rows_.tokens <= scored_rows_);
        for (Router one : routers) fast &= !routers_[static_cast<std::size_t>(one)].operands.is_none();
        nb::list asked;
        for (Router one : routers) asked.append(fast ? routers_[static_cast<std::size_t>(one)].operands : nb::int_(one));
        double waited_s = 0.0;
        if (fast) {
            ReadPart parts[2 + LayerReads::kRouters];
            if (reads_->read(reads_->self, tensors.ptr(), hidden.ptr(), asked.ptr(), parts, clock_s, &waited_s) < 0)
                nb::raise_python_error();
            for (std::size_t i = 0; i < count; ++i) take(i, given, routers, parts[i]);
        } else {
            const nb::object found = fetch_(tensors, hidden, asked);
            for (std::size_t i = 0; i < count; ++i) {
                Py_buffer view;
                if (PyObject_GetBuffer(nb::object(found[i]).ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
                const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&view, PyBuffer_Release);
                take(i, given, routers, {view.buf, view.len / view.itemsize, view.itemsize});
            }
        }
        read_s_ += timed_s() - began_s - waited_s, read_waited_s_ += waited_s;
    }

    void take(std::size_t i, std::size_t given, const Routers& routers, const ReadPart& part) {
        const auto* floats = static_cast<const float*>(part.at);
        if (i >= given) {
            Asked& asked = routers_[static_cast<std::size_t>(routers[i - given])];
            if (part.count != rows_.tokens * asked.outputs) throw std::invalid_argument("a router has other experts");
            asked.scores.assign(floats, floats + part.count);
            asked.known = true;
        } else if (i == 1 && part.bytes == sizeof(double)) {
            weights_.assign(static_cast<const double*>(part.at), static_cast<const double*>(part.at) + part.count);
        } else if (i == 1) {
            weights_.assign(floats, floats + part.count);
        } else if (part.bytes == sizeof(std::int64_t)) {
            ids_.assign(static_cast<const std::int64_t*>(part.at), static_cast<const std::int64_t*>(part.at) + part.count);
        } else {
            ids_.assign(static_cast<const std::int32_t*>(part.at), static_cast<const std::int32_t*>(part.at) + part.count);
        }
    }

    static bool next_groups(void* self, Landed* landed) {
        GpuLayer& layer = *static_cast<GpuLayer*>(self);
        const double began_s = layer.timed_s();
        try {
            if (layer.next()) {
                const std::vector<Group>&groups = layer.picked_.found(), &replicas = layer.picked_.replicas;
                *landed = {groups.data(), static_cast<std::int64_t>(groups.size()), replicas.data(),
                           static_cast<std::int64_t>(replicas.size())};
            }
        } catch (...) {
            layer.failure_ = std::current_exception();
            return false;
        }
        layer.waited_s_ += layer.timed_s() - began_s;
        return true;
    }

    const ExpertLaunches& launches_;
    const ExpertLaunches* const low_;
    const LayerReads* const reads_;
    const std::int64_t scored_rows_;
    const nb::object fetch_;
    std::vector<Asked> routers_;
    LayerRows rows_{};      // of the present pass
    bool launched_ = true;  // its types are those of the launches
    Routers wanted_;
    std::vector<std::int64_t> ids_;
    std::vector<float> weights_;
    double read_s_ = 0.0, read_waited_s_ = 0.0;
    nb::object out_;
    std::exception_ptr failure_;
    double waited_s_ = 0.0;
};

}  // namespace

void bind_gpu(nb::module_& m) {
    nb::class_<GpuLayer, Layer>(m, "GpuLayer", R"(low: launches low-bit replicas, or None. reads: `_launch.Fetch.reads`, or None. scored_rows: of inputs whose routers' scores it finds.

fetch: (tensors, hidden, numbers of routers) -> contiguous arrays, where `reads` cannot.)")
        .def("__init__", [](GpuLayer* made, Core& core, const nb::capsule& launches, std::optional<nb::capsule> low,
                            std::optional<nb::capsule> reads, std::int64_t scored_rows, nb::object fetch, std::int64_t index,
                            std::int64_t experts, std::int64_t neurons, std::int64_t max_rows, CpuLayers& all) {
            const auto* read = reads ? static_cast<const LayerReads*>(named(*reads, kLayerReads)) : nullptr;
            const auto expert_launches = [](const nb::capsule& of) { return static_cast<const ExpertLaunches*>(named(of, kExpertLaunches)); };
            new (made) GpuLayer(core, {index, experts, neurons, max_rows},
                                *expert_launches(launches), low ? expert_launches(*low) : nullptr, read, scored_rows,
                                std::move(fetch), all);
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 12>(),
             "core"_a, "launches"_a, "low"_a.none(), "reads"_a.none(), "scored_rows"_a, "fetch"_a, "index"_a, "experts"_a,
             "neurons"_a, "max_rows"_a, "all"_a)
        .def("router", &GpuLayer::add, "operands"_a.none(), "outputs"_a, "The number of a router (weight, bias, layers, softmax), or of another.")
        .def("run", &GpuLayer::run, "hidden"_a, "ids"_a, "weights"_a, "into"_a.none() = nb::none())
        .def_prop_ro("read_s", &GpuLayer::read_s, "Of reading, and of the waits in it.");
}

}  // namespace tiermoe::core
