#include "checks.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tiermoe {
namespace {

template <typename Word>
inline __attribute__((always_inline)) bool finite(const unsigned char* data, std::size_t count, Word exponent) {
    constexpr std::size_t BLOCK = 1024;  // an early end now and then; within a block the loop has no branch
    for (std::size_t begin = 0; begin < count; begin += BLOCK) {
        const std::size_t end = std::min(count, begin + BLOCK);
        Word bad = 0;
        for (std::size_t i = begin; i < end; ++i) {
            Word word;
            std::memcpy(&word, data + i * sizeof(Word), sizeof(Word));
            bad |= static_cast<Word>((word & exponent) == exponent ? 1 : 0);
        }
        if (bad) return false;
    }
    return true;
}

}  // namespace

#if defined(__x86_64__) && defined(__linux__) && !defined(TIERMOE_NO_CLONES)  // see kernels/cpu/expert_ffn.cpp
#define WIDEST __attribute__((target_clones("avx2", "default")))
#else
#define WIDEST
#endif

WIDEST bool all_finite_16(const void* data, std::size_t count, std::uint16_t exponent) {
    return finite<std::uint16_t>(static_cast<const unsigned char*>(data), count, exponent);
}

WIDEST bool all_finite_32(const void* data, std::size_t count) {
    return finite<std::uint32_t>(static_cast<const unsigned char*>(data), count, 0x7f800000u);
}

bool all_below(const std::int32_t* values, std::size_t count, std::int64_t limit) {
    int bad = 0;
    for (std::size_t i = 0; i < count; ++i) bad |= (values[i] < 0) | (values[i] >= limit);
    return bad == 0;
}

BatchFault check_batch(const std::int32_t* experts, const std::uint8_t* bits, const std::int32_t* starts,
                       std::size_t n, const std::int32_t* rows, std::size_t pairs, std::int64_t tokens,
                       std::int64_t max_experts) {
    if (!all_below(experts, n, max_experts)) return BatchFault::expert;
    std::vector<std::int32_t> sorted(experts, experts + n);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return BatchFault::repeated;
    for (std::size_t i = 0; i < n; ++i)
        if (bits[i] > 8) return BatchFault::width;
    if (starts[0] != 0 || static_cast<std::int64_t>(starts[n]) != static_cast<std::int64_t>(pairs))
        return BatchFault::starts;
    for (std::size_t i = 0; i < n; ++i)
        if (starts[i] > starts[i + 1]) return BatchFault::starts;
    if (!all_below(rows, pairs, tokens)) return BatchFault::row;
    return BatchFault::none;
}

}  // namespace tiermoe
