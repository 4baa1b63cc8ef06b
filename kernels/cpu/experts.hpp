// The experts of a layer as an executor runs them, whatever form they have and wherever they lie.
#pragma once

#include <cstdint>

#include "expert_ffn.hpp"

namespace tiermoe {

struct Experts {
    // y[pair] = FFN(hidden[pair / top_k]), for every pair of every group; other rows of y are left alone. pairs, groups, sums:
    // as of `expert_ffn_f32`, the neurons of slot s being those from s * neurons on. Throws std::invalid_argument: a group is of
    // another slot, or of a part of one where experts are whole.
    virtual void run(const float* hidden, const std::int64_t* pairs, const Group* groups, std::int64_t group_count,
                     std::int64_t top_k, float* y, float* sums) const = 0;
    virtual ~Experts() = default;

    std::int64_t width = 0, neurons = 0;  // of rows, H; of a slot
    std::int64_t max_rows = 0;            // of an expert: above, Python's kernel is the faster one
};

}  // namespace tiermoe
