// The executor of a layer whose kernels are Python's: other dtypes and forms, norms behind experts.
// The routing is Python's, too.
//
// The interpreter's lock is kept but where the pass may wait for copies.
#include "bindings.hpp"
#include "cpu_layer.hpp"
#include "python_parts.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

class PythonLayer : public Layer {
  public:
    PythonLayer(Core& core, const Place& place, Passes& passes, nb::object begin) : Layer(core, place, passes) {
        auto made = std::make_unique<PythonParts>(std::move(begin));
        python_ = made.get();
        made->watched = true;
        parts(std::move(made));
        ahead(std::make_unique<PythonAhead>(*python_));
    }

    nb::object run() {
        Layer::run({nullptr, nullptr, nullptr, 0, 0, nullptr});
        return std::exchange(out_, {});
    }
    Router routers() const override { return 0; }
    std::int64_t outputs(Router) const override { return 0; }
    const float* scores(const Given&, Router) override { throw Broken("rules of Python ask their own routers"); }

  protected:
    void route(const Given&, Routed& routed) override {
        auto [made, low] = nb::cast<std::pair<nb::object, nb::object>>(python_->pass(*this).attr("route")());
        Routing& routing = nb::cast<Routing&>(made);
        if (routing.layer != place().index) throw std::invalid_argument("the routing is of another layer");
        routed.picked = &routing, routed.tokens = routing.tokens, routed.top_k = routing.top_k;
        python_->routing(std::move(made));
        for (const nb::handle key : low) routed.low.push_back(nb::cast<Key>(key));
    }
    void load() override {
        const nb::gil_scoped_release others;
        core_.load();
    }
    std::pair<std::int64_t, std::int64_t> stretch() override {
        const nb::gil_scoped_release others;
        return core_.next();
    }
    void compute(const Given&, const Routed&) override {
        out_ = python_->compute(*this);
        added();
    }

  private:
    PythonParts* python_;
    nb::object out_;
};

}  // namespace

void bind_python_layer(nb::module_& m) {
    nb::class_<PythonLayer, Layer>(m, "PythonLayer", "A layer whose routing and kernels are Python's.")
        .def("__init__", [](PythonLayer* made, Core& core, std::int64_t index, std::int64_t experts, std::int64_t neurons,
                            CpuLayers& all, nb::object begin) {
            new (made) PythonLayer(core, {index, experts, neurons, 0}, all, std::move(begin));
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 6>(), "core"_a, "index"_a, "experts"_a, "neurons"_a, "all"_a, "begin"_a,
             "begin: makes the `engine.layer.Pass` of the present pass; it refers weakly to what holds this layer.")
        .def("run", &PythonLayer::run, "One pass; what `Pass.combine` gives.");
}

}  // namespace tiermoe::core
