// The bindings of the executor of recorded layers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "virtual_run.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;   // [L, T, K]
using Next = nb::ndarray<const std::int64_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;  // [T, L, D, P]
using NextScores = nb::ndarray<const double, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // [L, T, K]

Recorded recorded(const VirtualRun& run, const Ids& ids, double dense_s, const std::optional<Weights>& weights,
                  const std::optional<Next>& next_ids, const std::optional<NextScores>& next_scores, const Segments& last_rows) {
    Recorded found{ids.data(), nullptr, static_cast<std::int64_t>(ids.shape(1)), static_cast<std::int64_t>(ids.shape(2)),
                   dense_s, nullptr, nullptr, 0, 0, last_rows};
    const std::size_t layers = run.layers().size();
    if (ids.shape(0) != layers) throw std::invalid_argument("ids are [layers, tokens, top_k]");
    if (weights) {
        for (std::size_t axis = 0; axis < 3; ++axis)
            if (weights->shape(axis) != ids.shape(axis)) throw std::invalid_argument("weights are as ids");
        found.weights = weights->data();
    }
    if (next_ids.has_value() != next_scores.has_value()) throw std::invalid_argument("experts ahead come with their scores");
    if (next_ids) {
        for (std::size_t axis = 0; axis < 4; ++axis)
            if (next_ids->shape(axis) != next_scores->shape(axis) || (axis < 2 && next_ids->shape(axis) != (axis ? layers : ids.shape(1))))
                throw std::invalid_argument("experts ahead and their scores are [tokens, layers, distances, picks]");
        found.next_ids = next_ids->data();
        found.next_scores = next_scores->data();
        found.distances = static_cast<std::int64_t>(next_ids->shape(2));
        found.picks = static_cast<std::int64_t>(next_ids->shape(3));
    }
    for (Segment row : last_rows)
        if (row < 0 || row >= found.tokens || !found.distances) throw std::invalid_argument("there is no such row");
    return found;
}

}  // namespace

void bind_virtual(nb::module_& m) {
    nb::class_<VirtualLayer, Layer>(m, "VirtualLayer")
        .def("router", [](VirtualLayer& layer, std::int64_t layers) {
            if (layers < 1 || layers > layer.core().layout().layers) refuse("there are no so many later layers", layers);
            return layer.add(layers);
        }, "layers"_a, "The number of the recorded scores of so many later layers.");
    nb::class_<VirtualRun>(m, "VirtualRun", "The layers of a device on a virtual clock (virtual_run.hpp).")
        .def("__init__", [](VirtualRun* made, Core& core, VirtualLink& link, Clock& clock, double expert_s,
                            double expert_row_s, double share, double load_byte_s, double miss_s, std::int64_t neurons) {
            new (made) VirtualRun(core, link, clock, {expert_s, expert_row_s, share, load_byte_s, miss_s, neurons});
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), "core"_a, "link"_a, "clock"_a,
           "expert_s"_a, "expert_row_s"_a, "share"_a, "load_byte_s"_a, "miss_s"_a, "neurons"_a)
        .def("forward", [](VirtualRun& run, Ids ids, double dense_s, std::optional<Weights> weights, std::optional<Next> next_ids,
                           std::optional<NextScores> next_scores, const Segments& last_rows) {
            run.forward(recorded(run, ids, dense_s, weights, next_ids, next_scores, last_rows));
        }, "ids"_a, "dense_s"_a, nb::kw_only(), "weights"_a = nb::none(), "next_ids"_a = nb::none(), "next_scores"_a = nb::none(),
           "last_rows"_a = Segments(),
           "All layers of a forward. ids, weights: as picked [L, T, K]. dense_s: of each layer. next_ids, next_scores: by which a\n"
           "prefetch goes [T, L, D, P].")
        .def("run", [](VirtualRun& run, std::int64_t layer, std::int64_t tokens, const Segments& experts,
                       const Segments& counts) {
            if (layer < 0 || layer >= static_cast<std::int64_t>(run.layers().size())) refuse("there is no such layer", layer);
            run.run(layer, tokens, {experts, counts});
        }, "layer"_a, "tokens"_a, "experts"_a, "counts"_a,
           "A layer's rows that came in a message: experts, and the rows of each.")
        .def_prop_ro("layers", [](VirtualRun& run) {
            nb::list found;
            for (const auto& layer : run.layers()) found.append(nb::cast(layer.get(), nb::rv_policy::reference_internal, nb::find(run)));
            return found;
        })
        .def_prop_ro("passes", &VirtualRun::passes, nb::rv_policy::reference_internal);
}

}  // namespace tiermoe::core
