// Expert FFN and combine on fp32 slots: the decode path of the CPU stand-in.
//
// An expert is a list of neurons (gate row, up row, down row of H floats each), stored neuron by neuron:
//   y = sum_j  act(x . gate_j) * (x . up_j) * down_j
// One pass reads every weight once, in storage order, for all rows of a group; so for few rows the cost is
// the bytes of the expert over the memory bandwidth.
#pragma once

#include <cstdint>

namespace tiermoe {

// gpt_oss: x * sigmoid(1.702 x) * (up + 1), with x = min(gate, 7) and up within -7 .. 7; of forms.hpp alone.
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, gpt_oss = 4 };

// Rows of one expert or of one segment of it: pairs[start..stop) index (token, k) pairs t * top_k + k. Its neurons are
// `first` and those behind it. `add`: y holds the rows of the expert's other segment.
struct Group {
    std::int64_t start;
    std::int64_t stop;
    std::int64_t first;
    std::int64_t neurons;
    bool add;
};

// y[pair] = FFN(hidden[pair / top_k]) over the group's neurons, or y[pair] += it, for every pair of every group; other
// rows of y are left alone. What is added is summed apart first, so that of two segments either may come first.
// hidden [T, H], gate_up [J, 2, H], down [J, H], pairs [N], y [T * top_k, H]; all contiguous. sums: room for kSumRows
// rows of H, where a group adds.
inline constexpr int kSumRows = 4;
void expert_ffn_f32(const float* hidden, const float* gate_up, const float* down, const std::int64_t* pairs,
                    const Group* groups, std::int64_t group_count, std::int64_t top_k, std::int64_t width,
                    Activation activation, float* y, float* sums);

// out[t] = sum_k weights[t, k] * y[t * top_k + k], in order of k.
void combine_f32(const float* y, const float* weights, std::int64_t tokens, std::int64_t top_k, std::int64_t width,
                 float* out);

}  // namespace tiermoe
