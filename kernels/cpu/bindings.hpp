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
class Link;
class Loads;
struct Copy;
struct Counts;
struct Importance;
struct Layer;
struct Substitution;
}  // namespace tiermoe

namespace tiermoe::bindings {

Link* link_of(PyObject* capsule);                      // link_module.cpp
PyObject* copy_capsule(std::shared_ptr<Copy> copy);
const std::shared_ptr<Copy>* copy_of(PyObject* capsule);
Loads* loads_of(PyObject* capsule);                    // loads_module.cpp
Counts* counts_of(PyObject* capsule);
Importance* importance_of(PyObject* capsule);          // importance_module.cpp
Layer* layer_of(PyObject* capsule);                    // layer_module.cpp
// The inputs and the output of a layer's pass.
struct Given {
    const float* hidden;        // [tokens, H]
    const std::int64_t* ids;    // [tokens, top_k]
    const float* weights;       // [tokens, top_k]
    std::int64_t tokens, top_k;
    float* out;                 // [tokens, H]
};
// How a pass in one call has ended. left: nothing was done that Python's step would not do, or an exception is set.
enum class Ended { ran, left, closed, cancelled };
// A layer's pass in one call (layer_module.cpp); waited_s: for copies, where it ran.
Ended step_layer(Layer& of, const Given& given, bool decode_only, std::int64_t source, double& waited_s);
// The same of a layer of split experts (split_module.cpp). always: of `Mode`; spent: seconds waited, and in kernels; judged:
// prefetches used and wasted are added.
bool is_split(PyObject* layer);
struct Mode {
    bool decode_only;
    std::int64_t source;  // of prefetches; 0: there are none
    bool always;          // split experts are probed for even where each is in a slot, since bottoms are loaded for each use
    bool cpu;             // kernels by the thread's CPU time
};
Ended step_split(PyObject* layer, const Given& given, const Mode& mode, double* spent, std::int64_t* judged);
// What a pass that was closed or cancelled has lost: the keys whose copies were cancelled; empty: the link is closed.
PyObject* failed_keys(const Layer& of, Ended how);
// The sizes and options of a substitution, from `kernels.substitute.numbers`; false: an exception is set.
bool read_options(PyObject* tuple, Substitution& problem);  // substitute_module.cpp
// Whether these keys can take slots, those of the victims included; else an exception is set.
bool check_start(const Loads& of, const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims);

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
extern PyMethodDef link_methods[];      // link_module.cpp
extern PyMethodDef layer_methods[];     // layer_module.cpp
extern PyMethodDef loads_methods[];     // loads_module.cpp
extern PyMethodDef dense_methods[];     // dense_module.cpp
extern PyMethodDef importance_methods[];  // importance_module.cpp
extern PyMethodDef split_methods[];     // split_module.cpp
extern PyMethodDef rank_methods[];      // rank_module.cpp
extern PyMethodDef decode_methods[];    // decode_module.cpp
extern PyMethodDef page_methods[];      // pages_module.cpp
extern PyMethodDef substitute_methods[];  // substitute_module.cpp

}  // namespace tiermoe::bindings
