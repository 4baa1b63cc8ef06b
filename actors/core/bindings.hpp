// What the source files of the module share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "picked.hpp"

namespace tiermoe::core {

// What a capsule of this name holds. Throws nanobind::type_error: it is of another.
inline void* named(const nanobind::capsule& of, const std::string& name) {
    if (!of.name() || of.name() != name) throw nanobind::type_error("it is another kind of object");
    return of.data();
}

// The passes so far: (layer, tokens, keys, counts, began_s, ended_s, waited_s, scores as bytes of float64).
nanobind::list take(Passes& passes);

void bind_orders(nanobind::module_& m);  // order_module.cpp
void bind_cpu(nanobind::module_& m);     // cpu_module.cpp

}  // namespace tiermoe::core
