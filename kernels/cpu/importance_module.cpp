// Bindings of importance.hpp. The caller (kernels/importance.py) keeps the arrays of a state alive; what comes with each
// call is a buffer, whose size is checked here.
#include "importance.hpp"

#include <algorithm>
#include <vector>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kImportance = "tiermoe.kernels.Importance";

void delete_importance(PyObject* capsule) {
    delete static_cast<Importance*>(PyCapsule_GetPointer(capsule, kImportance));
}

// A contiguous buffer of so many bytes a row, held while in scope.
class Rows {
  public:
    ~Rows() {
        if (held_) PyBuffer_Release(&view_);
    }
    bool take(PyObject* object, std::int64_t row_bytes) {
        if (PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS) != 0) return false;
        held_ = true;
        return view_.len % row_bytes == 0 || refuse("a buffer has another row", static_cast<long long>(view_.len));
    }
    template <typename T>
    const T* data() const {
        return static_cast<const T*>(view_.buf);
    }
    std::int64_t bytes() const { return view_.len; }

  private:
    Py_buffer view_{};
    bool held_ = false;
};

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
    made->resident = address<const std::uint8_t>(args[10]);
    made->stamp = address<const std::int64_t>(args[11]);
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(made, kImportance, delete_importance);
    if (!capsule) delete made;
    return capsule;
}

bool is_layer(const Importance& state, std::int64_t layer) {
    return (layer >= 0 && layer < state.layers) || refuse("there is no such layer", layer);
}

// importance_saw(state, layer, ids: int64 [n, K])
PyObject* saw(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    auto* state = static_cast<Importance*>(PyCapsule_GetPointer(args[0], kImportance));
    if (!state) return nullptr;
    const std::int64_t layer = PyLong_AsLongLong(args[1]);
    Rows ids;
    if (PyErr_Occurred() || !is_layer(*state, layer) || !ids.take(args[2], state->top_k * 8)) return nullptr;
    for (std::int64_t i = 0; i < ids.bytes() / 8; ++i)
        if (const std::int64_t id = ids.data<std::int64_t>()[i]; id < 0 || id >= state->experts) {
            refuse("there is no such expert", id);
            return nullptr;
        }
    importance_saw(*state, layer, ids.data<std::int64_t>(), ids.bytes() / 8 / state->top_k);
    Py_RETURN_NONE;
}

// importance_target(state, layer, logits: float32 [T, E], held: bool [E], tau, r_max) -> slots
PyObject* target(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    auto* state = static_cast<Importance*>(PyCapsule_GetPointer(args[0], kImportance));
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

// importance_lowest(state, count) -> keys
PyObject* lowest(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    auto* state = static_cast<Importance*>(PyCapsule_GetPointer(args[0], kImportance));
    if (!state) return nullptr;
    const std::int64_t wanted = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    const std::int64_t found = wanted > 0 ? importance_lowest(*state, wanted) : 0;
    return list_of(state->order.data(), found);
}

}  // namespace

PyMethodDef importance_methods[] = {
    {"importance", fast(importance), METH_FASTCALL, "The state of ActiveEvict's eviction; see importance.hpp."},
    {"importance_saw", fast(saw), METH_FASTCALL, "Count a layer's routing; see importance.hpp."},
    {"importance_target", fast(target), METH_FASTCALL, "Predict a layer; its release target in slots."},
    {"importance_lowest", fast(lowest), METH_FASTCALL, "The least important residents."},
    {"lowest_products", fast(products), METH_FASTCALL, "The present keys of the lowest products."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
