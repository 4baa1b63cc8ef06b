// What the source files of the module share.
#pragma once

#include <nanobind/ndarray.h>

#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../kernels/cpu/bindings.hpp"
#include "picked.hpp"
#include "places.hpp"

namespace tiermoe::bindings {

void bind_planner(nb::module_& m);  // planner_module.cpp
void bind_ranks(nb::module_& m);    // rank_module.cpp

}  // namespace tiermoe::bindings

namespace tiermoe::core {

using bindings::at, bindings::named, bindings::refuse;

// An array that Python owns from now on.
template <typename T, int Axes = 1>
using Made = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<Axes>>;

template <typename T, int Axes = 1>
Made<T, Axes> owned(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto* held = new std::vector<T>(std::move(values));
    return Made<T, Axes>(held->data(), shape, nanobind::capsule(held, [](void* of) noexcept { delete static_cast<std::vector<T>*>(of); }));
}

// The passes so far, layers that follow each other together: (first layer, tokens, counts [n, E], scores [n, E] with NaN in
// rows of none, or None, began_s, ended_s, waited_s).
nanobind::list take(Passes& passes);

// `Places` as Python gives them: of each form and tensor its address and the bytes from a slot to the next; of each segment
// and tensor its address (0: another link has it), bytes, or elements where they are cast, whether they are, and the bytes
// of an element there and in the slot.
using Homes = std::vector<std::vector<std::pair<std::uintptr_t, std::int64_t>>>;
using Sources = std::vector<std::tuple<std::uintptr_t, std::int64_t, bool, std::int64_t, std::int64_t>>;
Places places(const Homes& homes, std::vector<std::int32_t> home_of, std::vector<std::int64_t> position,
              const Sources& sources, std::int64_t tensors);

void bind_orders(nanobind::module_& m);  // order_module.cpp
void bind_cpu(nanobind::module_& m);     // cpu_module.cpp
void bind_gpu(nanobind::module_& m);     // gpu_module.cpp
void bind_maps(nanobind::module_& m);    // maps_module.cpp
void bind_placement(nanobind::module_& m);  // planned.cpp
void bind_python_layer(nanobind::module_& m);  // python_layer.cpp
void bind_routing(nanobind::module_& m);  // routing_module.cpp
void bind_rules(nanobind::module_& m);  // rule_module.cpp
void bind_streams(nanobind::module_& m);  // stream_module.cpp
void bind_virtual(nanobind::module_& m);  // virtual_module.cpp

}  // namespace tiermoe::core
