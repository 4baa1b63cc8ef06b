// What a layer's passes have in common, with whole experts (layer_module.cpp) and split ones (split.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "expert_ffn.hpp"

namespace tiermoe {

constexpr std::int64_t kMaxPairs = 1 << 12;

// One layer's experts on a pool, and its present pass.
struct Pass {
    std::int64_t index, experts, width, max_rows;
    const float* gate_up;
    const float* down;
    Activation activation;
    // of the pass
    std::int64_t tokens, top_k;
    std::vector<std::int64_t> counts, used;   // tokens of each expert [E]; the experts that have some
    std::vector<std::int64_t> order, starts;  // pairs by expert [N]; first pair of each of `used`, and N
    std::vector<Group> groups;
    std::vector<float> y, sums;

    std::int64_t key(std::int64_t expert) const { return index * experts + expert; }
};

// The first id that is no expert; -1: there is none.
inline std::int64_t foreign(const Pass& of, const std::int64_t* ids) {
    const std::int64_t* end = ids + of.tokens * of.top_k;
    const std::int64_t* found = std::find_if(ids, end, [&](std::int64_t id) { return id < 0 || id >= of.experts; });
    return found == end ? -1 : found - ids;
}

// Sorts the pairs by expert, in the order of `Routing.of`: as picked for a token of distinct experts, else rising.
// False: an expert has too many rows.
inline bool sort_pairs(Pass& of, const std::int64_t* ids) {
    const std::int64_t pairs = of.tokens * of.top_k;
    of.counts.assign(static_cast<std::size_t>(of.experts), 0);
    bool distinct = true;
    for (std::int64_t i = 0; i < pairs; ++i) {
        if (++of.counts[ids[i]] > of.max_rows) return false;
        distinct &= of.counts[ids[i]] == 1;
    }
    of.used.clear();
    if (of.tokens == 1 && distinct)
        of.used.assign(ids, ids + pairs);
    else
        for (std::int64_t e = 0; e < of.experts; ++e)
            if (of.counts[e]) of.used.push_back(e);
    of.order.resize(static_cast<std::size_t>(pairs));
    of.starts.assign(1, 0);
    std::int64_t at = 0;
    for (std::int64_t expert : of.used) {
        for (std::int64_t i = 0; i < pairs; ++i)
            if (ids[i] == expert) of.order[at++] = i;
        of.starts.push_back(at);
    }
    return true;
}

inline void size_rows(Pass& of) {
    const auto size = static_cast<std::size_t>(of.tokens * of.top_k * of.width);
    if (of.y.size() < size) of.y.resize(size);
    if (of.sums.empty()) of.sums.resize(static_cast<std::size_t>(kSumRows * of.width));
}

inline void run_groups(Pass& of, const float* hidden, std::size_t begin, std::size_t end) {
    expert_ffn_f32(hidden, of.gate_up, of.down, of.order.data(), of.groups.data() + begin,
                   static_cast<std::int64_t>(end - begin), of.top_k, of.width, of.activation, of.y.data(),
                   of.sums.data());
}

// Adds the pass to a record (layer_module.cpp); false: it is full.
inline bool record_fits(const Pass& of, const std::int64_t* record, std::int64_t words) {
    return record[0] + 3 + 2 * static_cast<std::int64_t>(of.used.size()) <= words;
}

inline void write_record(const Pass& of, std::int64_t* record) {
    const auto used = static_cast<std::int64_t>(of.used.size());
    std::int64_t* entry = record + record[0];
    *entry++ = of.index;
    *entry++ = of.tokens;
    *entry++ = used;
    for (std::int64_t expert : of.used) *entry++ = of.key(expert);
    for (std::int64_t expert : of.used) *entry++ = of.counts[expert];
    record[0] += 3 + 2 * used;
}

}  // namespace tiermoe
