// What launches ask of Python objects, tensors above all, with the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::launch {

inline PyObject* not_null(PyObject* found) {
    if (!found) nb::raise_python_error();
    return found;
}

inline PyObject* name_of(const char* text) { return not_null(PyUnicode_InternFromString(text)); }

inline nb::object attribute(PyObject* of, const char* text, PyObject*& name) {
    if (!name) name = name_of(text);
    return nb::steal(not_null(PyObject_GetAttr(of, name)));
}

inline nb::object called(PyObject* of, const char* text, PyObject*& name) {
    if (!name) name = name_of(text);
    return nb::steal(not_null(PyObject_CallMethodNoArgs(of, name)));
}
// The method or attribute of a Python object, whose name is interned once.
#define TIERMOE_ATTRIBUTE(of, text) ([&] { static PyObject* name; return attribute(of, text, name); }())
#define TIERMOE_CALLED(of, text) ([&] { static PyObject* name; return called(of, text, name); }())

inline std::int64_t number(PyObject* value) {
    const long long found = PyLong_AsLongLong(value);
    if (found == -1 && PyErr_Occurred()) nb::raise_python_error();
    return found;
}

inline std::uint64_t address(PyObject* tensor) {
    const nb::object found = TIERMOE_CALLED(tensor, "data_ptr");
    const std::uint64_t at = PyLong_AsUnsignedLongLong(found.ptr());
    if (at == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) nb::raise_python_error();
    return at;
}

const void* dtype(PyObject* tensor) { return TIERMOE_ATTRIBUTE(tensor, "dtype").ptr(); }  // torch keeps each forever

inline bool is_contiguous(PyObject* of) { return TIERMOE_CALLED(of, "is_contiguous").ptr() == Py_True; }

inline nb::object contiguous(nb::handle of) { return is_contiguous(of.ptr()) ? nb::borrow(of) : of.attr("contiguous")(); }

inline nb::object shape_of(PyObject* of) {
    nb::object shape = TIERMOE_ATTRIBUTE(of, "shape");
    if (!PyTuple_Check(shape.ptr())) throw nb::type_error("a tensor's shape is a tuple");
    return shape;
}

inline bool is_shape(PyObject* shape, std::int64_t rows, std::int64_t columns) {
    return PyTuple_GET_SIZE(shape) == 2 && number(PyTuple_GET_ITEM(shape, 0)) == rows &&
           number(PyTuple_GET_ITEM(shape, 1)) == columns;
}

inline std::string text_of(nb::handle value) { return nb::str(value).c_str(); }

inline std::string text_of_shape(nb::handle shape) { return text_of(nb::steal(PySequence_Tuple(shape.ptr()))); }

// As functions in C have it.
template <typename Result, typename Call>
inline Result guarded(Result failed, Call&& call) {
    try {
        return call();
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failed;
}

}  // namespace tiermoe::launch
