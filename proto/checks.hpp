// Checks of what came from another process, in one pass over the bytes and without temporaries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiermoe {

// Whether no number is infinite or NaN: the exponent's bits are never all set. Any alignment.
bool all_finite_16(const void* data, std::size_t count, std::uint16_t exponent);
bool all_finite_32(const void* data, std::size_t count);

enum class BatchFault : int {
    none = 0,
    expert = 1,    // an expert id out of range
    repeated = 2,  // an expert named twice
    width = 3,     // more than 8 bits
    starts = 4,    // not rising from 0 to the number of pairs
    row = 5,       // a row number out of range
};

// experts, bits [n], starts [n + 1], rows [pairs]; 0 <= experts < max_experts, 0 <= rows < tokens.
BatchFault check_batch(const std::int32_t* experts, const std::uint8_t* bits, const std::int32_t* starts,
                       std::size_t n, const std::int32_t* rows, std::size_t pairs, std::int64_t tokens,
                       std::int64_t max_experts);

// Whether 0 <= all values < limit.
bool all_below(const std::int32_t* values, std::size_t count, std::int64_t limit);

}  // namespace tiermoe
