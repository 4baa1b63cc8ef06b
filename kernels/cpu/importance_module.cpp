// Bindings of importance.hpp. The caller (kernels/importance.py) keeps the arrays of a state alive; what comes with each
// call is an array, whose size is checked here.
#include "importance.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bindings.hpp"
#include "table.hpp"

namespace tiermoe::bindings {
namespace {

using Keys = std::vector<std::int64_t>;
using Ids = Array<const std::int64_t>;
using Floats = Array<const float>;
using Flags = Array<const std::uint8_t>;

// A capsule, since the core takes it too, and is of another module.
nb::capsule importance(std::int64_t layers, std::int64_t experts, std::int64_t window, std::int64_t top_k, double alpha,
                       std::uintptr_t powers, std::uintptr_t values, std::uintptr_t picked, std::uintptr_t seen,
                       std::uintptr_t predicted, std::uintptr_t resident, std::uintptr_t stamp) {
    if (layers < 1 || experts < 1 || window < 1 || top_k < 1)
        refuse("a size is out of range", std::min({layers, experts, window, top_k}));
    check_product({layers, experts}, kMostKeys);
    check_product({layers, window, top_k});
    auto made = std::make_unique<Importance>();
    made->layers = layers, made->experts = experts, made->window = window, made->top_k = top_k, made->alpha = alpha;
    made->powers = at<const double>(powers), made->values = at<double>(values), made->picked = at<std::int64_t>(picked);
    made->seen = at<std::int64_t>(seen), made->predicted = at<double>(predicted);
    made->resident = at<std::uint8_t>(resident), made->stamp = at<std::int64_t>(stamp);
    nb::capsule state(made.get(), kImportance.c_str(), [](void* of) noexcept { delete static_cast<Importance*>(of); });
    made.release();
    return state;
}

Importance& of(const nb::capsule& state) { return *static_cast<Importance*>(named(state, kImportance)); }

void check_layer(const Importance& state, std::int64_t layer) {
    if (layer < 0 || layer >= state.layers) refuse("there is no such layer", layer);
}

void check_ids(const Ids& ids, std::int64_t experts) {
    for (const std::int64_t id : ids)
        if (id < 0 || id >= experts) refuse("there is no such expert", id);
}

// Rows of so many numbers.
template <typename T>
std::int64_t rows(const Array<T>& array, std::int64_t width) {
    if (array.size() % width) refuse("an array has another row length than", width);
    return array.size() / width;
}

void saw(const nb::capsule& state, std::int64_t layer, const Ids& ids) {
    Importance& seen = of(state);
    check_layer(seen, layer);
    check_ids(ids, seen.experts);
    importance_saw(seen, layer, ids.data(), rows(ids, seen.top_k));
}

std::int64_t target(const nb::capsule& state, std::int64_t layer, const Floats& logits, const Flags& held, double tau,
                    std::int64_t most) {
    Importance& seen = of(state);
    check_layer(seen, layer);
    const std::int64_t tokens = rows(logits, seen.experts);
    if (held.size() != seen.experts || tokens == 0 || most < 0)
        refuse("a target has no rows, other experts, or a negative redundancy", most);
    return importance_target(seen, layer, logits.data(), tokens, held.data(), tau, most);
}

Keys lowest(const nb::capsule& state, std::int64_t count) {
    Importance& seen = of(state);
    const std::int64_t found = count > 0 ? importance_lowest(seen, count) : 0;
    return {seen.order.begin(), seen.order.begin() + found};
}

Keys release(const nb::capsule& state, std::int64_t seen_layer, const Ids& ids, std::int64_t layer, const Floats& logits,
             const Flags& states, const Flags& evictable, std::int64_t free, double tau, std::int64_t most) {
    Importance& seen = of(state);
    check_layer(seen, seen_layer), check_layer(seen, layer);
    check_ids(ids, seen.experts);
    const std::int64_t keys = seen.layers * seen.experts, tokens = rows(logits, seen.experts), routed = rows(ids, seen.top_k);
    if (states.size() != keys || evictable.size() != keys || tokens == 0 || most < 0)
        refuse("a release has no rows, other experts, or a negative redundancy", most);
    importance_saw(seen, seen_layer, ids.data(), routed);
    const std::int64_t slots =
        importance_target(seen, layer, logits.data(), tokens, states.data() + layer * seen.experts, tau, most);
    const std::int64_t found = slots > free ? importance_lowest(seen, slots - free, evictable.data()) : 0;
    return {seen.order.begin(), seen.order.begin() + found};
}

void expect_map(const Array<double>& probabilities, const Array<const std::int32_t>& keys, const Floats& priorities,
                std::int64_t now, std::int64_t experts, const Array<std::int64_t>& told) {
    if (keys.size() != priorities.size() || experts < 1 || told.size() * experts < probabilities.size())
        refuse("a map has other priorities than keys, or layers of", experts);
    constexpr double kLeast = 0x1p-150;  // below every positive probability in float32
    for (std::int64_t i = 0; i < keys.size(); ++i) {
        const std::int64_t key = keys[i];
        if (key < 0 || key >= probabilities.size()) continue;
        const auto ahead = static_cast<float>(key / experts + 1 - now);
        const auto found = static_cast<double>(priorities[i] * ahead);
        probabilities.data()[key] = std::max(found, kLeast);
        ++told.data()[key / experts];
    }
}

bool fits(const Ids& ids, const Flags& present, std::int64_t vacant) {
    check_ids(ids, present.size());
    return misses_fit(ids.data(), ids.size(), present.data(), present.size(), vacant);
}

std::int64_t budget(const Ids& ids, const Floats& weights, std::int64_t top_k, const Flags& present, std::int64_t vacant,
                    std::int64_t min_top_k, bool renormalise, const Array<std::int64_t>& ids_out,
                    const Array<float>& weights_out) {
    check_ids(ids, present.size());
    const std::int64_t pairs = ids.size();
    if (top_k < 1 || pairs % top_k || min_top_k < 1 || weights.size() != pairs || ids_out.size() != pairs ||
        weights_out.size() != pairs)
        refuse("a routing has other pairs, or a token keeps none of", top_k);
    return budget_top_k(ids.data(), weights.data(), pairs / top_k, top_k, present.data(), present.size(), vacant, min_top_k,
                        renormalise, ids_out.data(), weights_out.data());
}

}  // namespace

void bind_importance(nb::module_& m) {
    m.def("importance", &importance, "layers"_a, "experts"_a, "window"_a, "top_k"_a, "alpha"_a, "powers"_a, "values"_a,
          "picked"_a, "seen"_a, "predicted"_a, "resident"_a, "stamp"_a,
          "The state of ActiveEvict's eviction, of the addresses of its arrays, as in importance.hpp.\n\n"
          "The caller keeps them alive.");
    m.def("importance_saw", &saw, "state"_a, "layer"_a, "ids"_a,
          "Count a layer's routing. Raises ValueError: no such layer or expert, or rows of another width.");
    m.def("importance_target", &target, "state"_a, "layer"_a, "logits"_a, "held"_a, "tau"_a, "most"_a,
          "Predict a layer; its release target in slots. Raises ValueError: no such layer, no rows, or other experts.");
    m.def("importance_lowest", &lowest, "state"_a, "count"_a, "The least important residents.");
    m.def("importance_release", &release, "state"_a, "seen"_a, "ids"_a, "layer"_a, "logits"_a, "states"_a, "evictable"_a,
          "free"_a, "tau"_a, "most"_a,
          "The residents that make room for a layer. Raises ValueError: as `importance_saw` and `importance_target`.");
    m.def("misses_fit", &fits, "ids"_a, "present"_a, "vacant"_a,
          "Whether all missing experts of a routing fit. Raises ValueError: there is no such expert.");
    m.def("budget_top_k", &budget, "ids"_a, "weights"_a, "top_k"_a, "present"_a, "vacant"_a, "min_top_k"_a, "renormalise"_a,
          "ids_out"_a, "weights_out"_a, "The number of dropped pairs. Raises ValueError: no such expert, or other pairs.");
    m.def("expect_map", &expect_map, "probabilities"_a, "keys"_a, "priorities"_a, "now"_a, "experts"_a, "told"_a,
          "Sets the probabilities of those keys that there are; what is told of their layers [L] changes.\n\n"
          "Raises ValueError: lengths differ.");
}

}  // namespace tiermoe::bindings
