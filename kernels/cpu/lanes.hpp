// What the kernels of every instruction set share. Included once by each lanes_<set>.hpp, after it has defined, in an
// unnamed namespace:
//   V                  sixteen lanes: F (float), I (int32), B (bytes), and the few operations on them
//   Half, Bfloat       elements of memory that V::load_as widens
//   processor_has_it   where there is a choice
// Everything here is inlined into functions of the including file, and so compiled for its instruction set.

#include "exponential.hpp"
#include "expert_ffn.hpp"

namespace tiermoe {
namespace {

constexpr int kLanes = 16;

// h = act(gate) * up on sixteen lanes
inline void activate(const float* gate, const float* up, Activation activation, float* h) {
    switch (activation) {
        case Activation::silu:
            for (int i = 0; i < kLanes; ++i) h[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
            return;
        case Activation::gelu:
            for (int i = 0; i < kLanes; ++i)
                h[i] = 0.5f * gate[i] * (1.0f + std::erf(gate[i] * 0.70710678118654752f)) * up[i];
            return;
        case Activation::gelu_tanh:
            for (int i = 0; i < kLanes; ++i) {
                const float v = gate[i];
                h[i] = 0.5f * v * (1.0f + std::tanh(0.79788456080286536f * (v + 0.044715f * v * v * v))) * up[i];
            }
            return;
        case Activation::relu:
            for (int i = 0; i < kLanes; ++i) h[i] = (gate[i] < 0.0f ? 0.0f : gate[i]) * up[i];  // keeps NaN
            return;
        case Activation::gpt_oss:
            for (int i = 0; i < kLanes; ++i) {
                const float g = gate[i] > 7.0f ? 7.0f : gate[i];
                const float u = up[i] > 7.0f ? 7.0f : up[i] < -7.0f ? -7.0f : up[i];
                h[i] = g / (1.0f + exponential(-1.702f * g)) * (u + 1.0f);
            }
            return;
    }
}

// Pairwise: neither fifteen dependent additions, nor the error of one sum.
inline float sum_lanes(V::F v) {
    float part[kLanes];
    V::store(part, v);
    for (int width = kLanes / 2; width; width /= 2)
        for (int lane = 0; lane < width; ++lane) part[lane] += part[lane + width];
    return part[0];
}

// Calls f<R>(first) for blocks of rows: as many of kBlock as there are, then of halves.
template <int R, typename F>
inline void row_blocks(int rows, int first, F&& f) {
    for (; first + R <= rows; first += R) f(std::integral_constant<int, R>(), first);
    if constexpr (R > 1) row_blocks<R / 2>(rows, first, f);
}

}  // namespace
}  // namespace tiermoe
