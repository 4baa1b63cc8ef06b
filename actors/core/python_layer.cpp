// The executor of a layer whose parts are methods of Python, and its bindings: other dtypes, many rows, published forms,
// replicas, norms, observers, peers, and recorded layers. Only the order of the parts and the core's steps are native.
//
// The interpreter's lock is kept but where the pass may wait for copies.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "cpu_layer.hpp"
#include "routing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

class PythonLayer : public Layer {
  public:
    using Layer::Layer;

    // parts: of this pass, which nothing holds behind it: no collector would see a cycle through the core.
    nb::object run(nb::handle parts) {
        if (parts_.is_valid()) throw Broken("a pass runs within one of the same layer");
        parts_ = parts;
        struct Over {
            PythonLayer& of;
            ~Over() {
                of.parts_ = nb::handle(), of.routing_.reset(), of.routed_ = nullptr, of.picked_of_ = nullptr, of.away_ = false;
            }
        } over{*this};
        Layer::run({nullptr, nullptr, nullptr, 0, 0, nullptr}, Asking::hooks);
        return std::exchange(out_, {});
    }
    Router routers() const override { return 0; }
    std::int64_t outputs(Router) const override { return 0; }
    const float* scores(const Given&, Router) override { throw Broken("rules of Python ask their own routers"); }

  protected:
    bool route(const Given&, Routed& routed) override {
        nb::object low;
        std::tie(routing_, low) = nb::cast<std::pair<nb::object, nb::object>>(parts_.attr("route")());
        Routing& routing = nb::cast<Routing&>(routing_);
        if (routing.layer != place().index) throw std::invalid_argument("the routing is of another layer");
        picked_of_ = &routing;
        routed_ = &routed;
        routed.picked = picked_of_, routed.tokens = routing.tokens, routed.top_k = routing.top_k;
        for (const nb::handle key : low) routed.low.push_back(nb::cast<Key>(key));
        return true;
    }
    const Segments& here(const Segments& needed) override {
        if (placement_) {
            parts_.attr("routed")();
            const Segments& here = placement_->where(*this, *routed_, needed, keep_);
            away_ = !placement_->away().empty();
            return here;
        }
        nb::object keep, here;
        std::tie(here, keep, away_) = nb::cast<std::tuple<nb::object, nb::object, bool>>(parts_.attr("place")(needed));
        here_ = nb::cast<Segments>(here);
        bool absent = false;  // else nobody leaves
        for (Segment s : here_) absent |= core_.state(s) == State::absent;
        if (absent)
            for (const nb::handle key : keep) keep_.push_back(nb::cast<Key>(key));
        return here_;
    }
    void send() override {
        if (!away_) return;
        if (placement_) {
            nb::list remote;
            for (const Away& to : placement_->away()) remote.append(nb::make_tuple(to.peer, to.segments, to.bits));
            parts_.attr("remote") = remote;
        }
        parts_.attr("send")();
    }
    void load() override {
        const nb::gil_scoped_release others;
        core_.load();
    }
    void look_ahead(const Given&, Asking) override { parts_.attr("ahead")(); }
    void compute(const Given&, const Routed&) override {
        run_planned();
        while (away_) {
            const auto lost = nb::cast<Segments>(parts_.attr("join")());
            if (lost.empty()) break;
            core_.arrive();  // background copies of these may have begun since the layer did
            core_.plan(core_.segments_of(lost), {});
            core_.begin();
            load();
            run_planned();
        }
        std::tie(out_, peer_blocked_s_, peer_link_s_) =
            nb::cast<std::tuple<nb::object, double, double>>(parts_.attr("combine")());
    }

  private:
    void run_planned() {
        while (true) {
            std::pair<std::int64_t, std::int64_t> found;
            {
                const nb::gil_scoped_release others;
                found = core_.next();
            }
            if (found.first == found.second) return;
            nb::list groups, replicas;
            for (const Group& g : picked_of_->groups(core_, found.first, found.second, place().neurons))
                groups.append(nb::make_tuple(g.start, g.stop, g.first, g.neurons, g.add));
            for (const Group& g : picked_of_->replicas) replicas.append(nb::make_tuple(g.start, g.stop, g.first));
            parts_.attr("run")(groups, replicas);
        }
    }

    nb::handle parts_;
    nb::object routing_, out_;
    const Routed* routed_ = nullptr;
    Routing* picked_of_ = nullptr;
    Segments here_;
    bool away_ = false;  // some of it runs on peers
};

}  // namespace

void bind_python_layer(nb::module_& m) {
    nb::class_<PythonLayer, Layer>(m, "PythonLayer", "A layer whose parts are methods of Python (`engine.layer.Pass`).")
        .def("__init__", [](PythonLayer* made, Core& core, std::int64_t index, std::int64_t experts, std::int64_t neurons,
                            CpuLayers& all) {
            new (made) PythonLayer(core, {index, experts, neurons, 0, 0}, KernelTable{}, all);
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 6>(), "core"_a, "index"_a, "experts"_a, "neurons"_a, "all"_a)
        .def("placement", [](PythonLayer& layer, std::shared_ptr<Placement> of) { layer.placement(std::move(of)); }, "of"_a,
             "In place of `parts.place`.")
        .def("run", &PythonLayer::run, "parts"_a, "One pass; what `parts.combine` gives.");
}

}  // namespace tiermoe::core
