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
constexpr int kChunk = 128;      // neurons whose gate and up rows are read before their down rows
constexpr int kAhead = 16;       // rows between what is read and what is prefetched

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

typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(4), may_alias));

__attribute__((always_inline)) static inline Four quarters(const Vec& v) {
    Four part[4];
    std::memcpy(part, &v, sizeof(part));
    return (part[0] + part[2]) + (part[1] + part[3]);
}

// The sums of the lanes of four vectors, pairwise, so that no sum waits for fifteen additions or loses their precision.
__attribute__((always_inline)) static inline Four sums_of(const Vec& v0, const Vec& v1, const Vec& v2, const Vec& v3) {
    const Four a = quarters(v0), b = quarters(v1), c = quarters(v2), d = quarters(v3);
    const Four one = Four{a[0], a[1], b[0], b[1]} + Four{a[2], a[3], b[2], b[3]};
    const Four two = Four{c[0], c[1], d[0], d[1]} + Four{c[2], c[3], d[2], d[3]};
    return Four{one[0], one[2], two[0], two[2]} + Four{one[1], one[3], two[1], two[3]};
}

// What is read kAhead rows after `at`: of the `left` rows that begin there, or of those that are read next.
__attribute__((always_inline)) static inline const float* ahead_of(const float* at, std::int64_t left, const float* next,
                                                                   std::int64_t width) {
    return left > kAhead ? at + kAhead * width : next + (kAhead - left) * width;
}

// scale[n][r] = act(x[r] . gate row of neuron n) * (x[r] . its up row), for N neurons, 1 or an even number. One row of x
// reads weight after weight as they are stored; several share their loads between a gate row and an up row. What is at
// `ahead` is prefetched, or of it one line where mask is 0.
template <int R, int N>
__attribute__((always_inline)) static inline void neurons_of(const float* const* x, const float* rows,
                                                             const float* ahead, std::int64_t mask, std::int64_t width,
                                                             Activation activation, float (*scale)[kRows]) {
    constexpr int M = 2 * N, Together = R == 1 ? 1 : 2;
    const std::int64_t whole = width / kLanes * kLanes;
    Vec sum[M][R] = {};
#pragma GCC unroll 8
    for (int from = 0; from < M; from += Together)
        for (std::int64_t h = 0; h < whole; h += kLanes) {
            for (int m = from; m < from + Together; ++m) __builtin_prefetch(ahead + ((m * width + h) & mask), 0, 2);
            Vec v[R];
            for (int r = 0; r < R; ++r) v[r] = *reinterpret_cast<const Vec*>(x[r] + h);
            for (int m = from; m < from + Together; ++m) {
                const Vec weight = *reinterpret_cast<const Vec*>(rows + m * width + h);
                for (int r = 0; r < R; ++r) sum[m][r] += weight * v[r];
            }
        }
    for (int r = 0; r < R; ++r) {
        float dots[M < 4 ? 4 : M];
        for (int m = 0; m < M; m += 4) {
            const Four found = sums_of(sum[m][r], sum[m + 1][r], sum[(m + 2) % M][r], sum[(m + 3) % M][r]);
            std::memcpy(dots + m, &found, sizeof(found));
        }
        for (int m = 0; m < M; ++m)
            for (std::int64_t h = whole; h < width; ++h) dots[m] += rows[m * width + h] * x[r][h];
        for (int n = 0; n < N; ++n) scale[n][r] = activate(dots[2 * n], activation) * dots[2 * n + 1];
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

// R rows through one expert; inlined, so that each clone of the caller has it in its own instruction set. Its rows are
// read in long runs, and prefetched beyond the end of each: gate_up of a chunk, down of the chunk, the next chunk or the
// next expert. Else an expert of short rows waits for memory at each page and each turn.
template <int R>
__attribute__((always_inline)) static inline void block(const float* const* x, float* const* y, const float* gate_up,
                                                        const float* down, const float* next, std::int64_t neurons,
                                                        std::int64_t width, Activation activation) {
    constexpr int kTogether = R <= 2 ? 4 : 2;  // neurons; more would need more registers than there are
    for (int r = 0; r < R; ++r) std::memset(y[r], 0, static_cast<std::size_t>(width) * sizeof(float));
    float scale[kChunk][kRows];
    for (std::int64_t left = neurons; left > 0; left -= kChunk) {
        const std::int64_t count = left < kChunk ? left : kChunk;
        std::int64_t n = 0;
        for (; n + kTogether <= count; n += kTogether, gate_up += 2 * kTogether * width)
            neurons_of<R, kTogether>(x, gate_up, ahead_of(gate_up, 2 * (count - n), down, width), -1, width, activation,
                                     scale + n);
        for (; n < count; ++n, gate_up += 2 * width)
            neurons_of<R, 1>(x, gate_up, x[0], 0, width, activation, scale + n);
        const float* after = left > kChunk ? gate_up : next;
        for (n = 0; n + kNeurons <= count; n += kNeurons, down += kNeurons * width) {
            const float* ahead = ahead_of(down, count - n, after, width);
            for (std::int64_t h = 0; h < kNeurons * width; h += kLanes) __builtin_prefetch(ahead + h, 0, 2);
            scatter<R, kNeurons>(down, scale + n, width, y);
        }
        for (; n < count; ++n, down += width) scatter<R, 1>(down, scale + n, width, y);
    }
}

TIERMOE_CLONES
void expert_ffn_f32(const float* hidden, const float* gate_up, const float* down, const std::int64_t* pairs,
                    const Group* groups, std::int64_t group_count, std::int64_t top_k, std::int64_t width,
                    Activation activation, float* y, float* sums) {
    for (std::int64_t g = 0; g < group_count; ++g) {
        const float* expert_up = gate_up + groups[g].first * 2 * width;
        const float* expert_down = down + groups[g].first * width;
        const float* next = gate_up + groups[g + 1 < group_count ? g + 1 : g].first * 2 * width;
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
                case 1: block<1>(rows_in, rows_out, expert_up, expert_down, next, neurons, width, activation); break;
                case 2: block<2>(rows_in, rows_out, expert_up, expert_down, next, neurons, width, activation); break;
                case 3: block<3>(rows_in, rows_out, expert_up, expert_down, next, neurons, width, activation); break;
                default: block<4>(rows_in, rows_out, expert_up, expert_down, next, neurons, width, activation); break;
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
