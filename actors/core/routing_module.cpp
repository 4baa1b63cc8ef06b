// A layer's routing for Python: what is planned, sent to peers and run of a layer is said by it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "routing.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

template <typename T>
using Pairs = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;  // [T, K]

void of_ids(Routing* made, std::int64_t layer, std::int64_t experts, const Pairs<std::int64_t>& ids, bool partial) {
    const auto tokens = static_cast<std::int64_t>(ids.shape(0)), top_k = static_cast<std::int64_t>(ids.shape(1));
    auto held = std::make_unique<Routing>(layer, experts, tokens, top_k);
    const std::int64_t pairs = tokens * top_k;
    held->expect(ids.data(), pairs, partial ? kNowhere : 0);
    held->sort(ids.data(), tokens, pairs, pairs, layer * experts);
    held->place();
    held->group(ids.data(), pairs);
    new (made) Routing(std::move(*held));
}

// Of pairs [first, end) in `order`; the tokens of all of them, rising, and each one's place among these.
struct Part {
    std::vector<std::int32_t> experts, starts{0}, rows;
    std::vector<float> weights;
    std::vector<std::int64_t> tokens;
};

Part part(const Routing& routing, const Segments& keys, const float* weights) {
    Part found;
    std::vector<std::int32_t> place(static_cast<std::size_t>(routing.tokens), 0);
    for (Key key : keys) {
        const std::int64_t expert = routing.expert(key);
        const auto [first, end] = routing.span(expert);
        found.experts.push_back(static_cast<std::int32_t>(expert));
        found.starts.push_back(found.starts.back() + static_cast<std::int32_t>(end - first));
        for (std::int64_t i = first; i < end; ++i) {
            const std::int64_t token = routing.order[i] / routing.top_k;
            place[token] = 1;
            found.rows.push_back(static_cast<std::int32_t>(token));
            found.weights.push_back(weights[routing.order[i]]);
        }
    }
    for (std::int64_t t = 0; t < routing.tokens; ++t)
        if (place[t]) place[t] = static_cast<std::int32_t>(found.tokens.size()), found.tokens.push_back(t);
    for (std::int32_t& row : found.rows) row = place[row];
    return found;
}

template <typename T>
Made<T> array(std::vector<T>&& values) {
    const std::size_t size = values.size();
    return owned<T>(std::move(values), {size});
}

}  // namespace

void bind_routing(nb::module_& m) {
    nb::class_<Routing>(m, "Routing", "A layer's routing as it runs, with its pairs t * top_k + k grouped by expert.")
        .def("__init__", &of_ids, "layer"_a, "experts"_a, "ids"_a, "partial"_a = false,
             "experts: of the layer. ids: int64 [T, K]. partial: pairs may have no expert (-1), and do not run.\n\n"
             "Raises ValueError: there is no such expert.")
        .def_ro("layer", &Routing::layer)
        .def_ro("tokens", &Routing::tokens)
        .def_ro("top_k", &Routing::top_k)
        .def_prop_ro("pairs", &Routing::pairs, "How many run.")
        .def_prop_ro("experts", [](const Routing& r) { return r.experts; },
                     "Distinct: as picked for one token of distinct experts, else rising.")
        .def_prop_ro("counts", [](const Routing& r) { return r.counts; }, "Rows of each.")
        .def_prop_ro("in_order", [](const Routing& r) {
            return r.tokens == 1 && r.pairs() == r.top_k && static_cast<std::int64_t>(r.experts.size()) == r.top_k;
        },
                     "Whether `order` is 0, 1, ..: of one token of distinct experts.")
        .def_prop_ro("order", [](nb::handle_t<Routing> self) {
            Routing& r = nb::cast<Routing&>(self);
            return Made<std::int64_t>(r.order.data(), {r.order.size()}, self);
        }, "The pairs, grouped by expert [T * K]; those that do not run come last.")
        .def("pairs_of", [](const Routing& r, const Segments& keys) {
            std::vector<std::int64_t> found;
            for (Key key : keys) {
                const auto [first, end] = r.span(r.expert(key));
                found.insert(found.end(), r.order.begin() + first, r.order.begin() + end);
            }
            return array(std::move(found));
        }, "keys"_a, "The pairs of these needed experts.")
        .def("part", [](const Routing& r, const Segments& keys, const Pairs<float>& weights) {
            if (static_cast<std::int64_t>(weights.shape(0)) != r.tokens || static_cast<std::int64_t>(weights.shape(1)) != r.top_k)
                refuse("weights are [T, K], not of tokens", static_cast<std::int64_t>(weights.shape(0)));
            Part p = part(r, keys, weights.data());
            return std::make_tuple(array(std::move(p.experts)), array(std::move(p.starts)), array(std::move(p.rows)),
                                   array(std::move(p.weights)), array(std::move(p.tokens)));
        }, "keys"_a, "weights"_a,
             "Of some needed experts, in this order, as `ExpertBatch` has them: experts, starts, rows, weights; and the tokens\n"
             "of these rows, rising. weights: of all pairs [T, K].");
}

}  // namespace tiermoe::core
