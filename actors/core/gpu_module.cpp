// The executor of a layer on a GPU, with the launches of `_launch` (kernels/triton/experts.hpp), and its bindings.
//
// The interpreter's lock is kept but where the pass waits for copies or calls others: a thread that gets it may keep it for
// milliseconds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "../../kernels/cpu/link.hpp"
#include "../../kernels/triton/experts.hpp"
#include "bindings.hpp"
#include "cpu_layer.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

class GpuLayer : public Layer {
  public:
    GpuLayer(Core& core, const Place& place, const ExpertLaunches& launches, Passes& passes)
        : Layer(core, place, passes), launches_(launches) {}

    // None: not run.
    nb::object run(nb::handle hidden, const std::int64_t* ids, nb::handle weights, std::int64_t tokens, std::int64_t top_k) {
        rows_ = {hidden.ptr(), weights.ptr(), tokens, top_k, nullptr};
        const int takes = launches_.takes(launches_.self, rows_);
        if (takes < 0) nb::raise_python_error();
        if (!takes || Layer::run({nullptr, ids, nullptr, tokens, top_k, nullptr}, Asking::hooks) != Stepped::ran) return nb::none();
        return std::exchange(out_, {});
    }

  protected:
    void load() override {
        std::optional<nb::gil_scoped_release> others;
        if (!core_.present().loads.empty()) others.emplace();
        core_.load();
    }

    void compute(const Given&, const Routed&) override {
        const double began_s = timed ? now_s() : 0.0, thread_s = timed ? cpu_s() : 0.0;
        rows_.order = order_.data();
        waited_s_ = waited_cpu_s_ = 0.0;
        out_ = nb::steal(launches_.run(launches_.self, rows_, {next_groups, this}));
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
        if (!out_.is_valid()) nb::raise_python_error();
        if (!timed) return;
        spent_.kernels_s = now_s() - began_s - waited_s_;
        spent_.kernels_cpu_s = cpu_s() - thread_s - waited_cpu_s_;
    }

  private:
    static bool next_groups(void* self, const Group** groups, std::int64_t* count) {
        GpuLayer& layer = *static_cast<GpuLayer*>(self);
        const double began_s = layer.timed ? now_s() : 0.0, thread_s = layer.timed ? cpu_s() : 0.0;
        try {
            const Plan& plan = layer.core_.present();
            std::optional<nb::gil_scoped_release> others;
            if (plan.resident < static_cast<std::int64_t>(plan.run.size())) others.emplace();
            const std::vector<Group>& found = layer.next();
            *groups = found.data();
            *count = static_cast<std::int64_t>(found.size());
        } catch (...) {
            layer.failure_ = std::current_exception();
            return false;
        }
        if (layer.timed) layer.waited_s_ += now_s() - began_s, layer.waited_cpu_s_ += cpu_s() - thread_s;
        return true;
    }

    const ExpertLaunches& launches_;
    LayerRows rows_{};  // of the present pass
    nb::object out_;
    std::exception_ptr failure_;
    double waited_s_ = 0.0, waited_cpu_s_ = 0.0;
};

nb::object run(GpuLayer& layer, nb::handle hidden, nb::handle ids, nb::handle weights) {
    Py_buffer view;
    if (PyObject_GetBuffer(ids.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) nb::raise_python_error();
    const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&view, PyBuffer_Release);
    const char kind = view.format && view.format[0] && !view.format[1] ? view.format[0] : 0;
    if (view.ndim != 2 || view.itemsize != sizeof(std::int64_t) || (kind != 'l' && kind != 'q'))
        throw nb::type_error("ids are an array [T, K] of int64");
    return layer.run(hidden, static_cast<const std::int64_t*>(view.buf), weights, view.shape[0], view.shape[1]);
}

}  // namespace

void bind_gpu(nb::module_& m) {
    nb::class_<GpuLayer>(m, "GpuLayer")
        .def("__init__", [](GpuLayer* made, Core& core, const nb::capsule& launches, std::int64_t index, std::int64_t experts,
                            std::int64_t neurons, std::int64_t max_rows, CpuLayers& all) {
            new (made) GpuLayer(core, {index, experts, neurons, max_rows, std::numeric_limits<std::int32_t>::max()},
                                *static_cast<const ExpertLaunches*>(named(launches, kExpertLaunches)), all);
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 8>(), "core"_a, "launches"_a, "index"_a,
             "experts"_a, "neurons"_a, "max_rows"_a, "all"_a)
        .def("call", [](GpuLayer& layer, nb::callable hooks) {
            layer.hooks([hooks = nb::object(hooks)](const Given&) { hooks(); });
        }, "hooks"_a)
        .def("run", &run, "hidden"_a, "ids"_a, "weights"_a)
        .def_rw("timed", &GpuLayer::timed)
        .def_prop_ro("kernels_s", [](const GpuLayer& layer) {
            return std::make_tuple(layer.spent().kernels_s, layer.spent().kernels_cpu_s);
        });
}

}  // namespace tiermoe::core
