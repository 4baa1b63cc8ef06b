// What a layer's passes have in common, with whole experts (layer_module.cpp) and split ones (split.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "expert_ffn.hpp"
#include "loads.hpp"
#include "substitute.hpp"

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

// The routers of the layers behind, on this layer's input (`policies.prefetch.NextGatePrefetch`).
struct Ahead {
    const float* weight;                 // [layers * E, H]; null: nothing is prefetched here
    const float* bias;                   // [layers * E], or null
    std::int64_t layers, top, max_rows;  // of an input
};

// Slots that are freed for the next layer by its router's scores (`activeevict.PreEviction`).
struct Release {
    const float* weight;  // [E, H]; null: none are freed here
    const float* bias;    // [E], or null
    double threshold;
    std::int64_t most, max_rows;  // slots for uncertainty; rows of an input
};

// Pairs are dropped whose experts do not fit (`activeevict.BudgetAwareTopK`).
struct Budget {
    std::int64_t narrowest;  // experts that a token keeps; 0: no pair is dropped
    bool renormalise;
};

// Missing experts are replaced by others, or left out (`buddymoe.MissRule` on one GPU).
struct Replace {
    Substitution problem;  // options and lists; for routings of this top_k
    double beta;           // infinity: no gate
    const float *weight, *bias;  // the layer's router, whose probabilities are read; null: none are, or `draws`
    const float* draws;          // random numbers in their place, or null
    std::int64_t drawn, max_rows;  // numbers there; rows that the router's scores are computed of
    std::int64_t* next;            // the first draw that nobody has read
    std::uint8_t* full;            // [layers], whether the slots were all in use since the cache was empty
    std::int64_t* emptied;         // how often it had been, then
    // of one pass
    std::vector<std::uint8_t> here, wanted;  // [E]
    std::vector<float> reach, probabilities;
    std::int64_t read;  // draws
};

// A layer of whole experts (layer_module.cpp).
struct Layer : Pass {
    std::int64_t neurons, record_words;
    const std::uint8_t* states;  // `SlotState` of each expert of the layer [E]
    const std::int32_t* slots;   // [E]
    std::int64_t* record;
    const Counts* counters;
    Loads* loads;  // null: only passes without misses run here
    Ahead ahead;
    Release release;
    Budget budget;
    std::unique_ptr<Replace> replace;  // null: none is
    void* hooks;  // Python's, called once the missing experts' copies are queued; null: there are none
    double* times;  // where kernels' seconds are added, by the wall's clock and the thread's; null: nobody asks
    // of one pass
    bool planned;  // `layer_begin` gave its keys to Python, and `layer_finish` has not run it
    const float *hidden, *weights;
    const std::int64_t *picked, *ids;  // [tokens, picked_k] as the model picked them; [tokens, top_k] as they run
    float* out;
    std::int64_t resident, arriving, picked_k, substituted, dropped;
    std::vector<std::int64_t> kept_ids;  // of the pairs that run, where the routing was changed
    std::vector<float> kept_weights;
    std::vector<std::int64_t> run, missing;  // keys
    std::vector<float> scores;

    SlotState state(std::int64_t expert) const { return static_cast<SlotState>(states[expert]); }
    Order* evicts() const { return loads ? loads->order() : nullptr; }
};

// Changes the routing of a pass that was read by the layer's rule; false: the pass is not for native code, and no draw
// was read. reroute.cpp
bool reroute(Layer& of);

// The first id that is no expert; -1: there is none.
inline std::int64_t foreign(const Pass& of, const std::int64_t* ids) {
    const std::int64_t* end = ids + of.tokens * of.top_k;  // at most `kMaxPairs`
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
