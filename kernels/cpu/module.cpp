// Python bindings: addresses and sizes in, nothing out. The caller (kernels/cpu_ffn.py) checks shapes and types
// and keeps the buffers alive; the interpreter lock is released while a kernel runs.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "expert_ffn.hpp"

namespace {

template <typename T>
T* address(PyObject* value) {
    return static_cast<T*>(PyLong_AsVoidPtr(value));
}

bool expect(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
    return false;
}

// expert_ffn(hidden, gate_up, down, pairs, groups: list[tuple[start, stop, slot]], top_k, neurons, width,
//            activation, y)
PyObject* expert_ffn(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 10)) return nullptr;
    const float* hidden = address<const float>(args[0]);
    const float* gate_up = address<const float>(args[1]);
    const float* down = address<const float>(args[2]);
    const std::int64_t* pairs = address<const std::int64_t>(args[3]);
    if (!PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "groups must be a list of (start, stop, slot)");
        return nullptr;
    }
    std::vector<tiermoe::Group> groups(static_cast<std::size_t>(PyList_GET_SIZE(args[4])));
    for (std::size_t i = 0; i < groups.size(); ++i) {
        PyObject* item = PyList_GET_ITEM(args[4], static_cast<Py_ssize_t>(i));
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
            PyErr_SetString(PyExc_TypeError, "each group must be a tuple (start, stop, slot)");
            return nullptr;
        }
        groups[i] = {PyLong_AsLongLong(PyTuple_GET_ITEM(item, 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(item, 1)),
                     PyLong_AsLongLong(PyTuple_GET_ITEM(item, 2))};
    }
    const std::int64_t top_k = PyLong_AsLongLong(args[5]);
    const std::int64_t neurons = PyLong_AsLongLong(args[6]);
    const std::int64_t width = PyLong_AsLongLong(args[7]);
    const auto activation = static_cast<tiermoe::Activation>(PyLong_AsLongLong(args[8]));
    float* y = address<float>(args[9]);
    if (PyErr_Occurred()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    tiermoe::expert_ffn_f32(hidden, gate_up, down, pairs, groups.data(), static_cast<std::int64_t>(groups.size()),
                            top_k, neurons, width, activation, y);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// combine(y, weights, tokens, top_k, width, out)
PyObject* combine(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    const float* y = address<const float>(args[0]);
    const float* weights = address<const float>(args[1]);
    const std::int64_t tokens = PyLong_AsLongLong(args[2]);
    const std::int64_t top_k = PyLong_AsLongLong(args[3]);
    const std::int64_t width = PyLong_AsLongLong(args[4]);
    float* out = address<float>(args[5]);
    if (PyErr_Occurred()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    tiermoe::combine_f32(y, weights, tokens, top_k, width, out);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"expert_ffn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(expert_ffn)), METH_FASTCALL,
     "Expert FFN over groups of pairs; see expert_ffn.hpp."},
    {"combine", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(combine)), METH_FASTCALL,
     "Weighted sum of each token's pairs; see expert_ffn.hpp."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "CPU kernels of tiermoe.", -1, methods,
                          nullptr,               nullptr, nullptr,                  nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&definition); }
