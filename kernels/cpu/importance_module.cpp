// Bindings of importance.hpp. The caller (kernels/importance.py) keeps the arrays of a state alive; what comes with each
// call is a buffer, whose size is checked here.
#include "importance.hpp"

#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "table.hpp"

namespace tiermoe::bindings {
namespace {

void delete_importance(PyObject* capsule) {
    delete static_cast<Importance*>(PyCapsule_GetPointer(capsule, kImportance.c_str()));
}

}  // namespace

Importance* importance_of(PyObject* capsule) {
    return static_cast<Importance*>(PyCapsule_GetPointer(capsule, kImportance.c_str()));
}

namespace {

// importance(layers, experts, window, top_k, alpha, powers, values, picked, seen, predicted, resident, stamp) -> capsule
PyObject* importance(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 12)) return nullptr;
    auto* made = new Importance{};
    made->layers = PyLong_AsLongLong(args[0]);
    made->experts = PyLong_AsLongLong(args[1]);
    made->window = PyLong_AsLongLong(args[2]);
    made->top_k = PyLong_AsLongLong(args[3]);
    made->alpha = PyFloat_AsDouble(args[4]);
    made->powers = address<const double>(args[5]);
    made->values = address<double>(args[6]);
    made->picked = address<std::int64_t>(args[7]);
    made->seen = address<std::int64_t>(args[8]);
    made->predicted = address<double>(args[9]);
    made->resident = address<std::uint8_t>(args[10]);
    made->stamp = address<std::int64_t>(args[11]);
    if (!PyErr_Occurred() && (made->layers < 1 || made->experts < 1 || made->window < 1 || made->top_k < 1))
        refuse("a size is out of range", std::min({made->layers, made->experts, made->window, made->top_k}));
    if (!PyErr_Occurred() && check_product({made->layers, made->experts}, kMostKeys))
        check_product({made->layers, made->window, made->top_k});
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(made, kImportance.c_str(), delete_importance);
    if (!capsule) delete made;
    return capsule;
}

bool is_layer(const Importance& state, std::int64_t layer) {
    return (layer >= 0 && layer < state.layers) || refuse("there is no such layer", layer);
}

// ids: int64 [n, K], in range.
bool take_ids(const Importance& state, PyObject* given, Rows& ids) {
    if (!ids.take(given, state.top_k * 8)) return false;
    for (std::int64_t i = 0; i < ids.bytes() / 8; ++i)
        if (const std::int64_t id = ids.data<std::int64_t>()[i]; id < 0 || id >= state.experts)
            return refuse("there is no such expert", id);
    return true;
}

// importance_saw(state, layer, ids: int64 [n, K])
PyObject* saw(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    auto* state = importance_of(args[0]);
    if (!state) return nullptr;
    const std::int64_t layer = PyLong_AsLongLong(args[1]);
    Rows ids;
    if (PyErr_Occurred() || !is_layer(*state, layer) || !take_ids(*state, args[2], ids)) return nullptr;
    importance_saw(*state, layer, ids.data<std::int64_t>(), ids.bytes() / 8 / state->top_k);
    Py_RETURN_NONE;
}

// importance_target(state, layer, logits: float32 [T, E], held: bool [E], tau, r_max) -> slots
PyObject* target(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    auto* state = importance_of(args[0]);
    if (!state) return nullptr;
    const std::int64_t layer = PyLong_AsLongLong(args[1]), most = PyLong_AsLongLong(args[5]);
    const double tau = PyFloat_AsDouble(args[4]);
    Rows logits, held;
    if (PyErr_Occurred() || !is_layer(*state, layer) || !logits.take(args[2], state->experts * 4) ||
        !held.take(args[3], state->experts))
        return nullptr;
    if (held.bytes() != state->experts || logits.bytes() == 0 || most < 0) {
        refuse("a target has no rows, other experts, or a negative redundancy", most);
        return nullptr;
    }
    return PyLong_FromLongLong(importance_target(*state, layer, logits.data<float>(),
                                                 logits.bytes() / 4 / state->experts, held.data<std::uint8_t>(), tau,
                                                 most));
}

PyObject* list_of(const std::int64_t* keys, std::int64_t count) {
    PyObject* list = PyList_New(count);
    for (std::int64_t i = 0; list && i < count; ++i) {
        PyObject* key = PyLong_FromLongLong(keys[i]);
        if (!key) Py_CLEAR(list);
        if (key) PyList_SET_ITEM(list, i, key);
    }
    return list;
}

// lowest_products(a: float64 [n], b: float64 [n], stamps: int64 [n], present: bool [n], count) -> keys
PyObject* products(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 5)) return nullptr;
    Rows a, b, stamps, present;
    const std::int64_t wanted = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred() || !a.take(args[0], 8) || !b.take(args[1], 8) || !stamps.take(args[2], 8) ||
        !present.take(args[3], 1))
        return nullptr;
    const std::int64_t n = present.bytes();
    if (a.bytes() != 8 * n || b.bytes() != 8 * n || stamps.bytes() != 8 * n) {
        refuse("arrays of as many keys are needed", n);
        return nullptr;
    }
    static thread_local std::vector<double> values;
    static thread_local std::vector<std::int64_t> keys;
    values.resize(static_cast<std::size_t>(n));
    keys.clear();
    for (std::int64_t key = 0; key < n; ++key)
        if (present.data<std::uint8_t>()[key]) {
            values[key] = a.data<double>()[key] * b.data<double>()[key];
            keys.push_back(key);
        }
    const auto found = std::max<std::int64_t>(0, std::min(wanted, static_cast<std::int64_t>(keys.size())));
    const double* value = values.data();
    const std::int64_t* stamp = stamps.data<std::int64_t>();
    std::partial_sort(keys.begin(), keys.begin() + found, keys.end(), [=](auto x, auto y) {
        return value[x] != value[y] ? value[x] < value[y] : stamp[x] != stamp[y] ? stamp[x] < stamp[y] : x < y;
    });
    return list_of(keys.data(), found);
}

// expect_map(probabilities: float64 [keys], keys: int32 [n], priorities: float32 [n], now, experts, told: int64 [L]): of
// each key that there is, its probability in a map of which `now` layers were seen; its layer is told
PyObject* expect_map(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    Rows probabilities, keys, priorities, told;
    const std::int64_t now = PyLong_AsLongLong(args[3]), experts = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred() || !probabilities.take(args[0], 8, true) || !keys.take(args[1], 4) ||
        !priorities.take(args[2], 4) || !told.take(args[5], 8, true))
        return nullptr;
    const std::int64_t layers = told.bytes() / 8;
    if (keys.bytes() != priorities.bytes() || experts < 1 || layers * experts < probabilities.bytes() / 8) {
        refuse("a map has other priorities than keys, or layers of", experts);
        return nullptr;
    }
    constexpr double kLeast = 0x1p-150;  // below every positive probability in float32
    for (std::int64_t i = 0; i < keys.bytes() / 4; ++i) {
        const std::int64_t key = keys.data<std::int32_t>()[i];
        if (key < 0 || key >= probabilities.bytes() / 8) continue;
        const auto ahead = static_cast<float>(key / experts + 1 - now);
        const auto found = static_cast<double>(priorities.data<float>()[i] * ahead);
        probabilities.data<double>()[key] = std::max(found, kLeast);
        ++told.data<std::int64_t>()[key / experts];
    }
    Py_RETURN_NONE;
}

// importance_lowest(state, count) -> keys
PyObject* lowest(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    auto* state = importance_of(args[0]);
    if (!state) return nullptr;
    const std::int64_t wanted = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    const std::int64_t found = wanted > 0 ? importance_lowest(*state, wanted) : 0;
    return list_of(state->order.data(), found);
}

// importance_release(state, seen layer, ids: int64 [n, K], layer, logits: float32 [T, E], states: uint8 [L * E],
//                    evictable: uint8 [L * E], free slots, tau, r_max) -> keys
PyObject* release(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 10)) return nullptr;
    auto* state = importance_of(args[0]);
    if (!state) return nullptr;
    const std::int64_t seen = PyLong_AsLongLong(args[1]), layer = PyLong_AsLongLong(args[3]);
    const std::int64_t free = PyLong_AsLongLong(args[7]), most = PyLong_AsLongLong(args[9]);
    const double tau = PyFloat_AsDouble(args[8]);
    const std::int64_t keys = state->layers * state->experts;
    Rows ids, logits, states, evictable;
    if (PyErr_Occurred() || !is_layer(*state, seen) || !is_layer(*state, layer) || !take_ids(*state, args[2], ids) ||
        !logits.take(args[4], state->experts * 4) || !states.take(args[5], keys) || !evictable.take(args[6], keys))
        return nullptr;
    if (states.bytes() != keys || evictable.bytes() != keys || logits.bytes() == 0 || most < 0) {
        refuse("a release has no rows, other experts, or a negative redundancy", most);
        return nullptr;
    }
    importance_saw(*state, seen, ids.data<std::int64_t>(), ids.bytes() / 8 / state->top_k);
    const std::int64_t slots =
        importance_target(*state, layer, logits.data<float>(), logits.bytes() / 4 / state->experts,
                          states.data<std::uint8_t>() + layer * state->experts, tau, most);
    const std::int64_t found =
        slots > free ? importance_lowest(*state, slots - free, evictable.data<std::uint8_t>()) : 0;
    return list_of(state->order.data(), found);
}

// ids: int64 [T, K] of experts that there are; present: uint8 or bool [E].
bool take_routing(PyObject* of_ids, PyObject* of_present, Rows& ids, Rows& present) {
    if (!ids.take(of_ids, 8) || !present.take(of_present, 1)) return false;
    for (std::int64_t i = 0; i < ids.bytes() / 8; ++i)
        if (const std::int64_t id = ids.data<std::int64_t>()[i]; id < 0 || id >= present.bytes())
            return refuse("there is no such expert", id);
    return true;
}

// misses_fit(ids, present, vacant) -> bool
PyObject* fit_misses(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Rows ids, present;
    const std::int64_t vacant = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || !take_routing(args[0], args[1], ids, present)) return nullptr;
    return PyBool_FromLong(misses_fit(ids.data<std::int64_t>(), ids.bytes() / 8, present.data<std::uint8_t>(),
                                      present.bytes(), vacant));
}

// budget_top_k(ids, weights: float32 [T, K], top_k, present, vacant, narrowest, renormalise, ids out, weights out) ->
// pairs dropped
PyObject* budget(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 9)) return nullptr;
    Rows ids, weights, present, ids_out, weights_out;
    const std::int64_t top_k = PyLong_AsLongLong(args[2]), vacant = PyLong_AsLongLong(args[4]);
    const std::int64_t narrowest = PyLong_AsLongLong(args[5]);
    const int renormalise = PyObject_IsTrue(args[6]);
    if (PyErr_Occurred() || !take_routing(args[0], args[3], ids, present) || !weights.take(args[1], 4) ||
        !ids_out.take(args[7], 8, true) || !weights_out.take(args[8], 4, true))
        return nullptr;
    const std::int64_t pairs = ids.bytes() / 8;
    if (top_k < 1 || pairs % top_k || narrowest < 1 || weights.bytes() != 4 * pairs || ids_out.bytes() != 8 * pairs ||
        weights_out.bytes() != 4 * pairs) {
        refuse("a routing has other pairs, or a token keeps none of", top_k);
        return nullptr;
    }
    return PyLong_FromLongLong(budget_top_k(
        ids.data<std::int64_t>(), weights.data<float>(), pairs / top_k, top_k, present.data<std::uint8_t>(),
        present.bytes(), vacant, narrowest, renormalise, ids_out.data<std::int64_t>(), weights_out.data<float>()));
}

}  // namespace

PyMethodDef importance_methods[] = {
    {"importance", fast(importance), METH_FASTCALL, "The state of ActiveEvict's eviction; see importance.hpp."},
    {"importance_saw", fast(saw), METH_FASTCALL, "Count a layer's routing; see importance.hpp."},
    {"importance_target", fast(target), METH_FASTCALL, "Predict a layer; its release target in slots."},
    {"importance_release", fast(release), METH_FASTCALL, "The residents that make room for a layer."},
    {"misses_fit", fast(fit_misses), METH_FASTCALL, "Whether all missing experts of a routing fit."},
    {"budget_top_k", fast(budget), METH_FASTCALL, "Budget-aware top-k of a routing."},
    {"importance_lowest", fast(lowest), METH_FASTCALL, "The least important residents."},
    {"expect_map", fast(expect_map), METH_FASTCALL, "The probabilities of a matched map."},
    {"lowest_products", fast(products), METH_FASTCALL, "The present keys of the lowest products."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
