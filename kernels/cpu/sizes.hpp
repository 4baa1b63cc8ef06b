// Products of sizes that come from Python: checked before anything is multiplied with them.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace tiermoe {

constexpr std::int64_t kMostItems = std::int64_t{1} << 56;  // of a buffer: item sizes and a sum of some do not overflow
constexpr std::int64_t kMostKeys = std::int64_t{1} << 31;   // of a model's experts

// Whether sizes are at least 0 and their product at most `most`; nothing overflows on the way.
inline bool product_fits(std::initializer_list<std::int64_t> sizes, std::int64_t most = kMostItems) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes) {
        if (size < 0 || (size > 0 && product > most / size)) return false;
        product *= size;
    }
    return product <= most;
}

}  // namespace tiermoe
