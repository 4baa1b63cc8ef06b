// What modules that do not link each other call in each other, as tables of functions in capsules: the kernels, which are
// compiled for each kind of processor, and a layer's step, which a program runs between its segments.
#pragma once

#include <cstdint>
#include <string>

#include "dense.hpp"
#include "experts.hpp"

namespace tiermoe {

struct KernelTable {
    decltype(&combine_f32) combine;
    decltype(&tiermoe::router_scores) router_scores;
};

// The inputs and the output of a layer's pass.
struct LayerInput {
    const float* hidden;      // [tokens, H]
    const std::int64_t* ids;  // [tokens, top_k]
    const float* weights;     // [tokens, top_k]
    std::int64_t tokens, top_k;
    float* out;  // [tokens, H]
};
struct Spent {  // seconds of a pass; the kernels' only where they are timed: wall-clock and CPU time of the thread
    double waited_s = 0.0, kernels_s = 0.0, kernels_cpu_s = 0.0;
};

struct LayerStep {
    // Without the interpreter's lock. False: it has failed, and says why (`CpuLayer.fail`).
    bool (*run)(void* self, const LayerInput& given, Spent& spent);
    void* self;
};

// Names of capsules with these. A module takes none of a build with other layouts: sizes are part of the names, and so is a
// number that a change which leaves the sizes as they are raises.
inline std::string capsule_name(const char* what) {
    std::string name = std::string("tiermoe.") + what + ".3";
    for (const std::size_t size : {sizeof(KernelTable), sizeof(LayerInput), sizeof(Spent), sizeof(LayerStep),
                                   sizeof(Group), sizeof(Experts)})
        name += "." + std::to_string(size);
    return name;
}
inline const std::string kKernelTable = capsule_name("KernelTable"), kLayerStep = capsule_name("LayerStep");
inline const std::string kExperts = capsule_name("Experts");

}  // namespace tiermoe
