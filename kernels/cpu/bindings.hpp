// What the bindings of the kernels share: addresses and arrays as arguments, refusing numbers.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "forms.hpp"
#include "sizes.hpp"
#include "table.hpp"

namespace tiermoe::bindings {

namespace nb = nanobind;
using namespace nb::literals;

// Addresses are those of contiguous buffers of the sizes given, which the caller checked and keeps alive.
template <typename T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

[[noreturn]] inline void refuse(const char* what, std::int64_t given) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(given));
}

inline void check_product(std::initializer_list<std::int64_t> sizes, std::int64_t most = kMostItems) {
    if (!product_fits(sizes, most)) refuse("sizes are negative, or their product is above", most);
}

// For the core's executor.
inline nb::capsule experts_capsule(std::unique_ptr<Experts> experts) {
    return nb::capsule(experts.release(), kExperts.c_str(), [](void* of) noexcept { delete static_cast<Experts*>(of); });
}

// What a capsule of this name holds. Throws nanobind::type_error: it is of another.
inline void* named(const nb::capsule& of, const std::string& name) {
    if (!of.name() || of.name() != name) throw nb::type_error("it is another kind of object");
    return of.data();
}

// Of an array: letters of Python's struct module, and the type for people.
template <typename T>
struct Item;
template <>
struct Item<float> {
    static constexpr char kinds[] = "f", hint[] = "numpy.float32";
};
template <>
struct Item<double> {
    static constexpr char kinds[] = "d", hint[] = "numpy.float64";
};
template <>
struct Item<std::int32_t> {
    static constexpr char kinds[] = "il", hint[] = "numpy.int32";
};
template <>
struct Item<std::int64_t> {
    static constexpr char kinds[] = "lq", hint[] = "numpy.int64";
};
template <>
struct Item<std::uint8_t> {
    static constexpr char kinds[] = "B?", hint[] = "numpy.uint8 | numpy.bool";
};

// A contiguous array of these items, const or to be written, and of so many axes (0: of any), held while in scope. null: of
// None, where an argument may be that. nanobind's own arrays cost 0.1 us more each.
template <typename T, int Axes = 0>
class Array {
  public:
    explicit Array(nb::handle given) {
        if (given.is_none()) return;
        constexpr int kFlags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(given.ptr(), &view_, kFlags) != 0) throw nb::python_error();
        const char* kind = view_.format ? view_.format : "B";
        using Of = Item<std::remove_const_t<T>>;
        const bool right = kind[0] && !kind[1] && std::strchr(Of::kinds, kind[0]) && view_.itemsize == sizeof(T);
        if (right && (!Axes || view_.ndim == Axes)) return;
        std::string what = std::string("an array must be ") + Of::hint + (Axes ? " with " + std::to_string(Axes) + " axes" : "");
        what += std::string(", not '") + kind + "' with " + std::to_string(view_.ndim);
        PyBuffer_Release(&view_);
        throw std::invalid_argument(what);
    }
    Array(const Array&) = delete;
    ~Array() { PyBuffer_Release(&view_); }  // nothing where there is none

    explicit operator bool() const { return view_.obj; }
    T* data() const { return static_cast<T*>(view_.buf); }
    T* begin() const { return data(); }
    T* end() const { return data() + size(); }
    std::int64_t size() const { return view_.len / static_cast<Py_ssize_t>(sizeof(T)); }
    std::int64_t shape(int axis) const { return view_.shape[axis]; }
    const T& operator[](std::int64_t i) const { return data()[i]; }

  private:
    Py_buffer view_{};
};

// A matrix in a published form: kind, scale_type, divides, outputs, inputs, group, block, and the addresses of weight,
// scale, zero, global_scale and order, 0 for none.
using MatrixNumbers = std::array<std::int64_t, 12>;
FormMatrix matrix_of(const MatrixNumbers& numbers);  // neuron_module.cpp; refuses what does not fit together

void bind_decode(nb::module_& m);      // decode_module.cpp
void bind_dense(nb::module_& m);       // dense_module.cpp
void bind_neurons(nb::module_& m);     // neuron_module.cpp

}  // namespace tiermoe::bindings

// What is wrong with an array is thrown where a function is called, since a conversion may throw nothing.
template <typename T, int Axes>
struct nanobind::detail::type_caster<tiermoe::bindings::Array<T, Axes>> {
    using Value = tiermoe::bindings::Array<T, Axes>;
    static constexpr auto Name = const_name("numpy.typing.NDArray[") +
                                 const_name(tiermoe::bindings::Item<std::remove_const_t<T>>::hint) + const_name("]");
    template <typename>
    using Cast = Value;
    bool from_python(handle given, std::uint32_t, cleanup_list*) noexcept {
        given_ = given;
        return true;
    }
    explicit operator Value() const { return Value(given_); }

  private:
    handle given_;
};
