// What modules that do not link each other call in each other, as tables of functions in capsules: the kernels, which are
// compiled for each kind of processor, and a layer's step, which a program runs between its segments.
#pragma once

#include <cstdint>

#include "dense.hpp"
#include "expert_ffn.hpp"
#include "importance.hpp"
#include "substitute.hpp"

namespace tiermoe {

inline constexpr const char* kKernelTable = "tiermoe.kernels.Table";
struct KernelTable {
    decltype(&expert_ffn_f32) expert_ffn;
    decltype(&combine_f32) combine;
    decltype(&tiermoe::router_scores) router_scores;
    decltype(&tiermoe::misses_fit) misses_fit;
    decltype(&tiermoe::budget_top_k) budget_top_k;
    decltype(&tiermoe::importance_saw) importance_saw;
    decltype(&tiermoe::importance_target) importance_target;
    decltype(&tiermoe::size_fault) size_fault;
    decltype(&tiermoe::replaceable) replaceable;
    decltype(&tiermoe::substitute) substitute;
};

// The inputs and the output of a layer's pass.
struct LayerInput {
    const float* hidden;      // [tokens, H]
    const std::int64_t* ids;  // [tokens, top_k]
    const float* weights;     // [tokens, top_k]
    std::int64_t tokens, top_k;
    float* out;  // [tokens, H]
};
// Who looks ahead once the loads are queued: the hooks in Python; routers, where an expert that they name may be absent;
// routers in any case. A layer that asks none does what it does.
enum class Asking : int { hooks, absent, always };
// left: nothing was done that the page would not do. failed: the layer says why (`CpuLayer.fail`).
enum class Stepped : int { ran, left, failed };
struct Spent {  // seconds of a pass; the kernels' only where they are timed: by the wall's clock and by the thread's
    double waited_s = 0.0, kernels_s = 0.0, kernels_cpu_s = 0.0;
};

inline constexpr const char* kLayerStep = "tiermoe.core.LayerStep";
struct LayerStep {
    // Without the interpreter's lock.
    Stepped (*run)(void* self, const LayerInput& given, Asking asking, Spent& spent);
    void* self;
};

}  // namespace tiermoe
