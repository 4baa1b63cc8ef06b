#include "expert_ffn.hpp"

#include <cmath>
#include <cstring>

// The loader picks the widest version that the processor has; elsewhere the plain one is all there is.
// TIERMOE_NO_CLONES leaves the plain one alone: sanitizers cannot resolve clones at start-up.
#if !defined(TIERMOE_NO_CLONES) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define TIERMOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TIERMOE_CLONES
#endif

namespace tiermoe {
namespace {

constexpr int kLanes = 16;
// Lowered to the vectors that the chosen instruction set has; unaligned, since H need not be a multiple.
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

constexpr int kRows = kSumRows;  // rows that share one read of a neuron
constexpr int kNeurons = 8;      // neurons that share one read and write of the result rows

inline float activate(float v, Activation activation) {
    switch (activation) {
        case Activation::silu:
            return v / (1.0f + std::exp(-v));
        case Activation::gelu:
            return 0.5f * v * (1.0f + std::erf(v * 0.70710678118654752f));
        case Activation::gelu_tanh:
            return 0.5f * v * (1.0f + std::tanh(0.79788456080286536f * (v + 0.044715f * v * v * v)));
        case Activation::relu:
            return v < 0.0f ? 0.0f : v;  // keeps NaN
    }
    return v;
}

}  // namespace

// Pairwise, so that the sum neither waits for fifteen dependent additions nor loses the precision of one.
__attribute__((always_inline)) static inline float sum_lanes(const Vec& v) {
    float part[kLanes];
    std::memcpy(part, &v, sizeof(part));
    for (int width = kLanes / 2; width; width /= 2)
        for (int lane = 0; lane < width; ++lane) part[lane] += part[lane + width];
    return part[0];
}

// scale[r] = act(x[r] . gate_row) * (x[r] . up_row)
template <int R>
__attribute__((always_inline)) static inline void neuron(const float* const* x, const float* gate_row,
                                                         std::int64_t width, Activation activation, float* scale) {
    const float* up_row = gate_row + width;
    const std::int64_t whole = width / kLanes * kLanes;
    Vec gate_sum[R] = {}, up_sum[R] = {};
    for (std::int64_t h = 0; h < whole; h += kLanes) {
        const Vec g = *reinterpret_cast<const Vec*>(gate_row + h);
        const Vec u = *reinterpret_cast<const Vec*>(up_row + h);
        for (int r = 0; r < R; ++r) {
            const Vec v = *reinterpret_cast<const Vec*>(x[r] + h);
            gate_sum[r] += g * v;
            up_sum[r] += u * v;
        }
    }
    for (int r = 0; r < R; ++r) {
        float g = sum_lanes(gate_sum[r]), u = sum_lanes(up_sum[r]);
        for (std::int64_t h = whole; h < width; ++h) {
            g += gate_row[h] * x[r][h];
            u += up_row[h] * x[r][h];
        }
        scale[r] = activate(g, activation) * u;
    }
}

// y[r] += sum over N neurons of scale[n][r] * down_row(n)
template <int R, int N>
__attribute__((always_inline)) static inline void scatter(const float* down_rows, const float (*scale)[kRows],
                                                          std::int64_t width, float* const* y) {
    const std::int64_t whole = width / kLanes * kLanes;
    for (std::int64_t h = 0; h < whole; h += kLanes) {
        Vec sum[R];
        for (int r = 0; r < R; ++r) sum[r] = *reinterpret_cast<const Vec*>(y[r] + h);
        for (int n = 0; n < N; ++n) {
            const Vec d = *reinterpret_cast<const Vec*>(down_rows + n * width + h);
            for (int r = 0; r < R; ++r) sum[r] += d * scale[n][r];
        }
        for (int r = 0; r < R; ++r) *reinterpret_cast<Vec*>(y[r] + h) = sum[r];
    }
    for (std::int64_t h = whole; h < width; ++h)
        for (int n = 0; n < N; ++n)
            for (int r = 0; r < R; ++r) y[r][h] += down_rows[n * width + h] * scale[n][r];
}

// R rows through one expert; inlined, so that each clone of the caller has it in its own instruction set.
template <int R>
__attribute__((always_inline)) static inline void block(const float* const* x, float* const* y, const float* gate_up,
                                                        const float* down, std::int64_t neurons, std::int64_t width,
                                                        Activation activation) {
    for (int r = 0; r < R; ++r) std::memset(y[r], 0, static_cast<std::size_t>(width) * sizeof(float));
    float scale[kNeurons][kRows];
    std::int64_t j = 0;
    for (; j + kNeurons <= neurons; j += kNeurons) {
        for (int n = 0; n < kNeurons; ++n)
            neuron<R>(x, gate_up + (j + n) * 2 * width, width, activation, scale[n]);
        scatter<R, kNeurons>(down + j * width, scale, width, y);
    }
    for (; j < neurons; ++j) {
        neuron<R>(x, gate_up + j * 2 * width, width, activation, scale[0]);
        scatter<R, 1>(down + j * width, scale, width, y);
    }
}

TIERMOE_CLONES
void expert_ffn_f32(const float* hidden, const float* gate_up, const float* down, const std::int64_t* pairs,
                    const Group* groups, std::int64_t group_count, std::int64_t top_k, std::int64_t width,
                    Activation activation, float* y, float* sums) {
    for (std::int64_t g = 0; g < group_count; ++g) {
        const float* expert_up = gate_up + groups[g].first * 2 * width;
        const float* expert_down = down + groups[g].first * width;
        const std::int64_t neurons = groups[g].neurons;
        const bool add = groups[g].add;
        for (std::int64_t at = groups[g].start; at < groups[g].stop;) {
            const float* rows_in[kRows];
            float* rows_out[kRows];
            const std::int64_t from = at;
            int count = 0;
            for (; count < kRows && at < groups[g].stop; ++count, ++at) {
                rows_in[count] = hidden + pairs[at] / top_k * width;
                rows_out[count] = add ? sums + count * width : y + pairs[at] * width;
            }
            switch (count) {
                case 1: block<1>(rows_in, rows_out, expert_up, expert_down, neurons, width, activation); break;
                case 2: block<2>(rows_in, rows_out, expert_up, expert_down, neurons, width, activation); break;
                case 3: block<3>(rows_in, rows_out, expert_up, expert_down, neurons, width, activation); break;
                default: block<4>(rows_in, rows_out, expert_up, expert_down, neurons, width, activation); break;
            }
            if (!add) continue;
            for (int r = 0; r < count; ++r) {
                float* row = y + pairs[from + r] * width;
                for (std::int64_t h = 0; h < width; ++h) row[h] += rows_out[r][h];
            }
        }
    }
}

TIERMOE_CLONES
void combine_f32(const float* y, const float* weights, std::int64_t tokens, std::int64_t top_k, std::int64_t width,
                 float* out) {
    for (std::int64_t t = 0; t < tokens; ++t) {
        float* row = out + t * width;
        std::memset(row, 0, static_cast<std::size_t>(width) * sizeof(float));
        for (std::int64_t k = 0; k < top_k; ++k) {
            const float w = weights[t * top_k + k];
            const float* pair = y + (t * top_k + k) * width;
            for (std::int64_t h = 0; h < width; ++h) row[h] += w * pair[h];
        }
    }
}

}  // namespace tiermoe
