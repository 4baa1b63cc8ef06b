// What the kernels of every instruction set share. Included once by each lanes_<set>.hpp, after it has defined, in an
// unnamed namespace:
//   V                  sixteen lanes: F (float), I (int32), B (bytes), and the few operations on them
//   Half, Bfloat       elements of memory that V::load_as widens
//   processor_has_it   where there is a choice
// Everything here is inlined into functions of the including file, and so compiled for its instruction set.

#include "expert_ffn.hpp"

namespace tiermoe {
namespace {

constexpr int kLanes = 16;

// e^x by 2^n times a polynomial, to 2 ulp; the argument is kept within what a float can say. Keeps NaN.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

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
