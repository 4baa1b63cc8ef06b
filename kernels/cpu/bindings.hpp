// What the parts of the extension module share: reading arguments, refusing numbers.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "sizes.hpp"

namespace tiermoe {
struct Importance;
struct Substitution;
}  // namespace tiermoe

namespace tiermoe::bindings {

Importance* importance_of(PyObject* capsule);  // importance_module.cpp
// The sizes and options of a substitution, from `kernels.substitute.numbers`; false: an exception is set.
bool read_options(PyObject* tuple, Substitution& problem);  // substitute_module.cpp

template <typename T>
T* address(PyObject* value) {
    return static_cast<T*>(PyLong_AsVoidPtr(value));
}

inline bool expect(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
    return false;
}

inline bool refuse(const char* what, long long given) {
    PyErr_Format(PyExc_ValueError, "%s: %lld", what, given);
    return false;
}

// As `product_fits`; else an exception is set.
inline bool check_product(std::initializer_list<std::int64_t> sizes, std::int64_t most = kMostItems) {
    return product_fits(sizes, most) || refuse("sizes are negative, or their product is above", most);
}

// What `make` makes; null and an exception where there is too little memory.
template <typename F>
auto made(F&& make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::length_error&) {
        PyErr_NoMemory();
    }
    return nullptr;
}

inline PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline bool read_keys(PyObject* list, std::vector<std::int64_t>& keys) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "keys must be a list");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) keys.push_back(PyLong_AsLongLong(PyList_GET_ITEM(list, i)));
    return !PyErr_Occurred();
}

inline PyObject* list_of(const std::vector<std::int64_t>& numbers) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
    for (std::size_t i = 0; list && i < numbers.size(); ++i) {
        PyObject* number = PyLong_FromLongLong(numbers[i]);
        if (!number) Py_CLEAR(list);
        if (list) PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
    }
    return list;
}

// A contiguous buffer of so many bytes a row, held while in scope.
class Rows {
  public:
    Rows() = default;
    Rows(const Rows&) = delete;
    ~Rows() {
        if (held_) PyBuffer_Release(&view_);
    }
    bool take(PyObject* object, std::int64_t row_bytes, bool writable = false) {
        if (PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) != 0) return false;
        held_ = true;
        return view_.len % row_bytes == 0 || refuse("a buffer has another row", static_cast<long long>(view_.len));
    }
    template <typename T>
    T* data() const {
        return static_cast<T*>(view_.buf);
    }
    std::int64_t bytes() const { return view_.len; }

  private:
    Py_buffer view_{};
    bool held_ = false;
};

// Each ends with a null entry.
extern PyMethodDef neuron_methods[];    // neuron_module.cpp
extern PyMethodDef measure_methods[];   // measure_module.cpp
extern PyMethodDef dense_methods[];     // dense_module.cpp
extern PyMethodDef importance_methods[];  // importance_module.cpp
extern PyMethodDef rank_methods[];      // rank_module.cpp
extern PyMethodDef decode_methods[];    // decode_module.cpp
extern PyMethodDef page_methods[];      // pages_module.cpp
extern PyMethodDef substitute_methods[];  // substitute_module.cpp

}  // namespace tiermoe::bindings
