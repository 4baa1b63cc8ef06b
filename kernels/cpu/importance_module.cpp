// Bindings of importance.hpp. The caller (kernels/importance.py) keeps the arrays of a state alive; what comes with each
// call is a buffer, whose size is checked here.
#include "importance.hpp"

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

// importance_lowest(state, count) -> keys
PyObject* lowest(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    auto* state = static_cast<Importance*>(PyCapsule_GetPointer(args[0], kImportance));
    if (!state) return nullptr;
    const std::int64_t wanted = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    const std::int64_t found = wanted > 0 ? importance_lowest(*state, wanted) : 0;
    PyObject* keys = PyList_New(found);
    for (std::int64_t i = 0; keys && i < found; ++i) {
        PyObject* key = PyLong_FromLongLong(state->order[i]);
        if (!key) Py_CLEAR(keys);
        if (key) PyList_SET_ITEM(keys, i, key);
    }
    return keys;
}

}  // namespace

PyMethodDef importance_methods[] = {
    {"importance", fast(importance), METH_FASTCALL, "The state of ActiveEvict's eviction; see importance.hpp."},
    {"importance_saw", fast(saw), METH_FASTCALL, "Count a layer's routing; see importance.hpp."},
    {"importance_target", fast(target), METH_FASTCALL, "Predict a layer; its release target in slots."},
    {"importance_lowest", fast(lowest), METH_FASTCALL, "The least important residents."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
