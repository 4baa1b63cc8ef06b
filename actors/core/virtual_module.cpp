// The bindings of the executor of recorded layers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "virtual_run.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;   // [L, T, K]
using Next = nb::ndarray<const std::int64_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;  // [T, L, D, P]
using NextScores = nb::ndarray<const double, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

Recorded recorded(const VirtualRun& run, const Ids& ids, double dense_s, const std::optional<Next>& next_ids,
                  const std::optional<NextScores>& next_scores, const ByScores* scores, const Segments& last_rows) {
    Recorded found{ids.data(), static_cast<std::int64_t>(ids.shape(1)), static_cast<std::int64_t>(ids.shape(2)),
                   dense_s, nullptr, nullptr, 0, 0, last_rows};
    const std::size_t layers = run.layers();
    if (ids.shape(0) != layers) throw std::invalid_argument("ids are [layers, tokens, top_k]");
    if (!scores) return found;
    if (!next_ids || !next_scores) throw std::invalid_argument("a prefetch by scores needs them");
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (next_ids->shape(axis) != next_scores->shape(axis) || (axis < 2 && next_ids->shape(axis) != (axis ? layers : ids.shape(1))))
            throw std::invalid_argument("experts ahead and their scores are [tokens, layers, distances, picks]");
    found.next_ids = next_ids->data();
    found.next_scores = next_scores->data();
    found.distances = static_cast<std::int64_t>(next_ids->shape(2));
    found.picks = static_cast<std::int64_t>(next_ids->shape(3));
    for (Segment row : last_rows)
        if (row < 0 || row >= found.tokens || !found.distances) throw std::invalid_argument("there is no such row");
    return found;
}

// Of what `rule` gives: None, or (experts of the pairs that run, keys on replicas).
decltype(Calls::rule) rule_of(const nb::object& rule) {
    if (rule.is_none()) return {};
    return [&rule](std::int64_t layer) -> std::optional<Rerouted> {
        const nb::object found = rule(layer);
        if (found.is_none()) return std::nullopt;
        auto [pairs, low] = nb::cast<std::pair<Segments, Segments>>(found);
        return Rerouted{std::move(pairs), std::move(low)};
    };
}

// Of what `place` gives: (segments here, residents that leave last, whether others run on peers).
decltype(Calls::place) place_of(const nb::object& place, Core& core) {
    if (place.is_none()) return {};
    return [&place, &core](std::int64_t layer, const Segments& needed, const Segments& experts, const Segments& counts) {
        const auto [here, keep, away] = nb::cast<std::tuple<Segments, nb::object, bool>>(place(layer, needed, experts, counts));
        Placed found{here, {}, away};
        bool absent = false;  // else nobody leaves
        for (Segment s : found.here) absent |= core.state(s) == State::absent;
        if (absent)
            for (const nb::handle key : keep) found.keep.push_back(nb::cast<Key>(key));
        return found;
    };
}

}  // namespace

void bind_virtual(nb::module_& m) {
    nb::class_<ByScores>(m, "ByScores")
        .def("__init__", [](ByScores* made, bool by_votes, std::int64_t distance, std::int64_t top, bool always,
                            bool synchronous, bool wraps, std::uint8_t source) {
            if (distance < 0 || top < 1) throw std::invalid_argument("a prefetch by scores wants experts of a later layer");
            new (made) ByScores{by_votes, distance, top, always, synchronous, wraps, source};
        }, "by_votes"_a, "distance"_a, "top"_a, "always"_a, "synchronous"_a, "wraps"_a, "source"_a);
    nb::class_<VirtualRun>(m, "VirtualRun", "The layers of a device on a virtual clock (virtual_run.hpp).")
        .def("__init__", [](VirtualRun* made, Core& core, VirtualLink& link, Clock& clock, double expert_s,
                            double expert_row_s, double share, double load_byte_s, double miss_s, std::int64_t neurons) {
            new (made) VirtualRun(core, link, clock, {expert_s, expert_row_s, share, load_byte_s, miss_s, neurons});
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), "core"_a, "link"_a, "clock"_a,
           "expert_s"_a, "expert_row_s"_a, "share"_a, "load_byte_s"_a, "miss_s"_a, "neurons"_a)
        .def("forward", [](VirtualRun& run, Ids ids, double dense_s, std::optional<Next> next_ids,
                           std::optional<NextScores> next_scores, const ByScores* scores, const Segments& last_rows,
                           nb::object rule, nb::object place, decltype(Calls::send) send, decltype(Calls::ahead) ahead,
                           decltype(Calls::join) join, decltype(Calls::ran) ran) {
            const Recorded of = recorded(run, ids, dense_s, next_ids, next_scores, scores, last_rows);
            const Calls calls{rule_of(rule), place_of(place, run.core()), std::move(send), std::move(ahead), std::move(join),
                              std::move(ran)};
            run.forward(of, scores, calls);
        }, "ids"_a, "dense_s"_a, nb::kw_only(), "next_ids"_a = nb::none(), "next_scores"_a = nb::none(),
           "scores"_a = nb::none(), "last_rows"_a = Segments(), "rule"_a = nb::none(), "place"_a = nb::none(),
           "send"_a = nb::none(), "ahead"_a = nb::none(), "join"_a = nb::none(), "ran"_a = nb::none(),
           "All layers of a forward. ids: as picked [L, T, K]. dense_s: of each layer. next_ids, next_scores: by which\n"
           "`scores` prefetches [T, L, D, P]. The others are called in each layer, in this order.")
        .def("run", [](VirtualRun& run, std::int64_t layer, std::int64_t tokens, const Segments& experts,
                       const Segments& counts, const Segments& keep) {
            if (layer < 0 || layer >= static_cast<std::int64_t>(run.layers())) refuse("there is no such layer", layer);
            run.run(layer, tokens, {experts, counts, keep});
        }, "layer"_a, "tokens"_a, "experts"_a, "counts"_a, "keep"_a,
           "A layer's rows that came in a message: experts, and the rows of each. keep: residents that leave last.")
        .def_prop_rw("records", [](VirtualRun& run) { return run.passes().records; },
                     [](VirtualRun& run, bool records) { run.passes().records = records; })
        .def("take", [](VirtualRun& run) { return take(run.passes()); });
}

}  // namespace tiermoe::core
