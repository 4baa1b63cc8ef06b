// Expert FFN and combine on fp32 slots: the decode path of the CPU stand-in.
//
// An expert is a list of neurons (gate row, up row, down row of H floats each), stored neuron by neuron:
//   y = sum_j  act(x . gate_j) * (x . up_j) * down_j
// One pass reads every weight once, in storage order, for all rows of a group; so for few rows the cost is
// the bytes of the expert over the memory bandwidth.
#pragma once

#include <cstdint>

namespace tiermoe {

enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3 };

// Rows of one expert: pairs[start..stop) index (token, k) pairs t * top_k + k.
struct Group {
    std::int64_t start;
    std::int64_t stop;
    std::int64_t slot;
};

// y[pair] = FFN_slot(hidden[pair / top_k]) for every pair of every group; other rows of y are left alone.
// hidden [T, H], gate_up [S, I, 2, H], down [S, I, H], pairs [N], y [T * top_k, H]; all contiguous.
void expert_ffn_f32(const float* hidden, const float* gate_up, const float* down, const std::int64_t* pairs,
                    const Group* groups, std::int64_t group_count, std::int64_t top_k, std::int64_t neurons,
                    std::int64_t width, Activation activation, float* y);

// out[t] = sum_k weights[t, k] * y[t * top_k + k], in order of k.
void combine_f32(const float* y, const float* weights, std::int64_t tokens, std::int64_t top_k, std::int64_t width,
                 float* out);

}  // namespace tiermoe
