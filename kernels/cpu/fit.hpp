// Data-free quantization of a layer's experts: each group's scale and offset with the least squared error of its
// weights, its codes, and their packed layout (kernels/pack.py), in one pass over the full-precision weights.
//
// Rule for a group of n weights w of one output, at b bits: from a few clipped ranges around the mean, turns of nearest
// codes c and the least squares line w ~= scale * c + offset; the best line wins, in float16. At 1 bit that is Lloyd's
// 2-means. At 8 bits the range itself. GPTQ (kernels/quantize.py) fits its groups by the same code.
//
// A block of 32 neurons of gate and up, or a group of neurons of down, is one job. Results do not depend on the number
// of threads. Cost: 9 to 25 turns of about 8 instructions for 16 weights.
#pragma once

#include <cstdint>
#include <vector>

#include "neuron_ffn.hpp"

namespace tiermoe {

constexpr int kMostWidths = 5;

// Where the replicas of one width go: the arrays of PackedShape.tensors(), [E, ...] each.
struct FitWidth {
    int bits;
    std::uint8_t* gate_up;
    std::uint16_t* gate_up_scales;
    std::uint8_t* down;
    std::uint16_t* down_scales;
    float* errors;  // [E, I, 3] squared error of each neuron's gate, up and down
};

struct FitLayer {
    FullLayer full;
    int group;
    const FitWidth* widths;
    int count;      // of widths
    float* powers;  // [E, I, 3] sum of squares of each neuron's gate, up and down
};

// One group of a GPTQ sweep (kernels/quantize.py): fits the lines to the compensated weights with each input's pivot as
// its weight, then rounds input after input, and compensates for what is left of each in the block's later inputs. 16
// outputs are one job.
struct GptqBlock {
    std::int64_t outputs;
    int inputs, bits;
    float* left;           // [n, O] compensated weights; then their errors times the pivots
    const float* weights;  // [n, O] as they were given
    const float* factor;   // [n, n] of M, rows `stride` apart; above the diagonal
    std::int64_t stride;
    const float* pivots;      // [n]
    float *codes, *rest;      // [n, O]; rest: weights less their values
    float *scales, *offsets;  // [O]
};

}  // namespace tiermoe
