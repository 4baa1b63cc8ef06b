// Bindings of the CPU's executor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <utility>

#include "../../kernels/cpu/sizes.hpp"
#include "bindings.hpp"
#include "cpu_layer.hpp"
#include "pre_eviction.hpp"
#include "python_parts.hpp"
#include "rules.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

// How a policy prefetches by scores: `prefetch.NextGatePrefetch`, or `moepic.SpeculativePrefetch`.
struct ByScores {
    bool by_votes;
    std::int64_t top;  // experts of a row
    bool wraps;        // the last layer prefetches for the first one
    bool streams;      // `Core::stream`, where a pass sweeps
    std::uint8_t source;
};

// Held by Python, read by layers.
struct Planned {
    bool now = false;
};

void sizes_fit(std::initializer_list<std::int64_t> sizes) {
    if (!product_fits(sizes, kMostItems)) throw std::invalid_argument("sizes are negative, or their product is too large");
}

void make(CpuLayer* made, Core& core, const nb::capsule& kernels, std::int64_t index, std::int64_t experts,
          const nb::capsule& run, CpuLayers& all) {
    new (made) CpuLayer(core, index, experts, *static_cast<const Experts*>(named(run, kExperts)),
                        *static_cast<const KernelTable*>(named(kernels, kKernelTable)), all);
}

// Of so many layers' experts.
void expect_router(const Layer& layer, Router router, std::int64_t layers = 1) {
    if (router < kNoRouter || router >= layer.routers() ||
        (router != kNoRouter && layer.outputs(router) != layers * layer.place().experts))
        throw std::invalid_argument("the layer has no such router");
}

void ask_routers(Layer& layer, Router router, std::int64_t first, std::int64_t layers, const ByScores& by,
                 std::shared_ptr<Announced> of) {
    const Layout& layout = layer.core().layout();
    expect_router(layer, router, layers);
    if (layers < 0 || first < 0 || first > layout.layers - layers || !by.source || (layers && router == kNoRouter))
        throw std::invalid_argument("there is no such prefetch");
    auto made = std::make_unique<AskRouters>();
    made->router = router, made->first = first, made->layers = layers, made->of = std::move(of);
    made->wraps = by.wraps, made->streams = by.streams;
    if (layers) made->reach.emplace_back(first * layout.experts, (first + layers) * layout.experts);
    made->prefetch = {by.by_votes, by.top, by.source, {}, {}};
    layer.ahead(std::move(made));
}

void release_slots(Layer& layer, Router own, Router router, std::shared_ptr<PreEviction> of) {
    const Place& place = layer.place();
    const std::int64_t layers = layer.core().layout().layers;
    expect_router(layer, own), expect_router(layer, router);
    if (of->state().experts != place.experts || of->state().layers != layers || (own == kNoRouter) != (place.index > 0) ||
        (router == kNoRouter) != (place.index + 1 == layers))
        throw std::invalid_argument("there is no such pre-eviction");
    auto made = std::make_unique<ReleaseSlots>();
    made->own = own, made->router = router, made->of = std::move(of);
    layer.ahead(std::move(made));
}

void rule(Layer& layer, std::shared_ptr<Rule> of, Router router) {
    expect_router(layer, router);
    if (!of->knows(layer.place().index, layer.place().experts) || of->reads_probabilities() != (router != kNoRouter))
        throw std::invalid_argument("there is no such rule of the layer");
    layer.rule(std::make_unique<NativeRule>(std::move(of), router));
}

void python_parts(Layer& layer, nb::object begin, const Planned& planned, bool rule, bool ahead, bool watched, bool alone) {
    if (layer.has_parts()) throw std::invalid_argument("a layer gets its parts once");  // its rules refer to them
    auto made = std::make_unique<PythonParts>(std::move(begin));
    made->planned = &planned.now, made->watched = watched, made->alone_where_planned = alone;
    if (rule) layer.rule(std::make_unique<PythonRule>(*made));
    if (ahead) layer.ahead(std::make_unique<PythonAhead>(*made));
    layer.parts(std::move(made));
}

}  // namespace

nb::list take(Passes& passes) {
    struct Run {
        std::int64_t first, tokens;
        std::vector<std::int64_t> counts;
        std::vector<double> scores, began_s, ended_s, waited_s;
        bool scored = false;
    };
    std::vector<Run> runs;
    const auto experts = static_cast<std::size_t>(passes.experts);
    passes.take([&](const Passed& p) {
        if (runs.empty() || p.layer != runs.back().first + static_cast<std::int64_t>(runs.back().began_s.size()) ||
            p.tokens != runs.back().tokens)
            runs.push_back({p.layer, p.tokens, {}, {}, {}, {}, {}});
        Run& run = runs.back();
        run.counts.resize(run.counts.size() + experts);
        for (std::size_t i = 0; i < p.keys.size(); ++i)
            (run.counts.end() - experts)[p.keys[i] - p.layer * passes.experts] = p.counts[i];
        run.scores.insert(run.scores.end(), p.scores.begin(), p.scores.end());
        if (p.scores.empty()) run.scores.resize(run.scores.size() + experts, std::numeric_limits<double>::quiet_NaN());
        run.scored |= !p.scores.empty();
        run.began_s.push_back(p.began_s), run.ended_s.push_back(p.ended_s), run.waited_s.push_back(p.waited_s);
    });
    nb::list found;
    for (Run& run : runs) {
        const std::size_t count = run.began_s.size();
        nb::object scores = nb::none();
        if (run.scored) scores = nb::cast(owned<double, 2>(std::move(run.scores), {count, experts}));
        found.append(nb::make_tuple(run.first, run.tokens, owned<std::int64_t, 2>(std::move(run.counts), {count, experts}),
                                    scores, run.began_s, run.ended_s, run.waited_s));
    }
    return found;
}

void bind_cpu(nb::module_& m) {
    nb::class_<Passes>(m, "Passes", "The passes that have run until they are taken, where somebody asks for them.")
        .def_rw("records", &Passes::records)
        .def("take", &take);
    nb::class_<CpuLayers, Passes>(m, "CpuLayers").def(nb::init<>());
    nb::class_<ByScores>(m, "ByScores")
        .def("__init__", [](ByScores* made, bool by_votes, std::int64_t top, bool wraps, bool streams, std::uint8_t source) {
            if (top < 1) throw std::invalid_argument("a prefetch by scores wants experts");
            new (made) ByScores{by_votes, top, wraps, streams, source};
        }, "by_votes"_a, "top"_a, "wraps"_a, "streams"_a, "source"_a);
    nb::class_<Announced>(m, "Announced", R"(What the prefetch of a forward goes by.

rows: of the present forward; 0: nobody has announced it. last_rows: the scores of each sequence's last row can be read.
rests: nothing is prefetched. always: a policy is asked also where nothing that it may name is absent. waits: for copies
under way, too.)")
        .def(nb::init<>())
        .def_rw("rows", &Announced::rows)
        .def_rw("last_rows", &Announced::last_rows)
        .def_rw("rests", &Announced::rests)
        .def_rw("always", &Announced::always)
        .def_rw("waits", &Announced::waits)
        .def("idle", [](const Announced& of, const Core& core, const std::vector<std::pair<Key, Key>>& reach, bool allowed) {
            for (const auto& [first, end] : reach)
                if (first < 0 || first > end || end > core.layout().keys()) refuse("there are no such keys, from", first);
            return of.idle(core, reach, allowed);
        }, "core"_a, "reach"_a, "allowed"_a, "Whether a prefetch for these keys (first, end) need not be asked.");
    nb::class_<Planned>(m, "Planned", "Whether the placement decides the present forward: `Parts::planned`.")
        .def(nb::init<>())
        .def_rw("now", &Planned::now);
    nb::class_<Layer>(m, "Layer", "A layer's pass in one call; routers are named by their numbers there, -1: none.")
        .def("rule", &rule, "of"_a, "router"_a, "router: the layer's own, if the rule reads its probabilities.")
        .def("ask_routers", &ask_routers, "router"_a, "first"_a, "layers"_a, "by"_a, "of"_a)
        .def("stream_next", [](Layer& layer, std::uint8_t source) { layer.ahead(std::make_unique<StreamNext>(source)); },
             "source"_a, "A pass that sweeps queues the next layer's experts of this device.")
        .def("release_slots", &release_slots, "own"_a, "router"_a, "of"_a)
        .def("parts", &python_parts, nb::keep_alive<1, 3>(), "begin"_a, "planned"_a, "rule"_a, "ahead"_a,
             "watched"_a, "alone"_a, R"(Parts in Python, behind the native ones: methods of what `begin` makes (`engine.layer.Pass`).

rule, ahead: there are such. watched: it says who runs where in each pass; else in planned ones. alone: planned passes have
no native rule or prefetch.)")
        .def("placement", [](Layer& layer, std::shared_ptr<Placement> of) { layer.placement(std::move(of)); }, "of"_a,
             "It decides in place of Python's part.")
        .def_rw("partial", &Layer::partial, "Whether ids may be -1: pairs that run elsewhere, and count as zeros here.")
        .def("time", [](Layer& layer, std::optional<bool> by_cpu) {
            layer.clock_s = !by_cpu ? nullptr : *by_cpu ? cpu_s : now_s;
        }, "by_cpu"_a.none(), "Whether the parts of a pass are timed, by the thread's CPU time or by wall-clock; None: they are not.")
        .def_prop_ro("kernels_s", [](Layer& layer) { return layer.kernels_s(); })
        .def_prop_ro("placed_s", &Layer::placed_s, "Of a native placement.");
    nb::class_<CpuLayer, Layer>(m, "CpuLayer")
        .def("__init__", &make, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
             "core"_a, "kernels"_a, "index"_a, "experts"_a, "run"_a, "all"_a, "run: the experts, as `_cpu.slot_experts`.")
        .def("router", [](CpuLayer& layer, std::uintptr_t weight, std::uintptr_t bias, std::int64_t outputs, std::int64_t soft) {
            sizes_fit({outputs, soft});
            return layer.add({at<const float>(weight), at<const float>(bias), outputs, soft});
        }, "weight"_a, "bias"_a, "outputs"_a, "soft"_a, "The number of a linear router of these addresses.")
        .def("run", [](CpuLayer& layer, std::uintptr_t hidden, std::uintptr_t ids, std::uintptr_t weights,
                       std::int64_t tokens, std::int64_t top_k, std::uintptr_t out) {
            layer.run({at<const float>(hidden), at<const std::int64_t>(ids), at<const float>(weights), tokens, top_k,
                              at<float>(out)});
        }, "hidden"_a, "ids"_a, "weights"_a, "tokens"_a, "top_k"_a, "out"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("step", [](CpuLayer& layer) { return nb::capsule(&layer.step(), kLayerStep.c_str()); })
        .def("fail", [](CpuLayer& layer) {
            if (const std::exception_ptr failure = layer.failure()) std::rethrow_exception(failure);
        });
}

}  // namespace tiermoe::core
