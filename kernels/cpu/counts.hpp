// Counters of a cache of whole experts and the governor of its prefetches, in the arrays of
// `engine.cache.counting.CacheCounters` and `policies.prefetch.PrefetchGovernor`: what native passes count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tiermoe {

struct Counts {
    // of a layer: passes, experts, and pairs that another expert ran, or none; premature: loads of experts that were vacated
    enum Of {
        forwards, hits, misses, prefetched_hits, late, demanded, wasted, vacated, premature, substituted_pairs,
        dropped_pairs, kFields
    };
    enum Outcome { queued, used, arrived_late, left_unused, cancelled, kOutcomes };        // of a source's prefetches
    std::int64_t layers, experts;
    std::int64_t *fields, *outcomes;  // [layers, kFields], [sources, kOutcomes]
    std::int64_t* uses;               // [keys], forwards that ran each
    std::uint8_t* pending;            // [keys], number of the source of a prefetch that was not used yet, or 0
    std::uint8_t* vacant;             // [keys], pre-evicted since its layer last ran
    std::int64_t* governor;           // useful, wasted, layers left to rest
    double min_useful;
    std::int64_t window, rest;

    std::int64_t& of(std::int64_t layer, Of field) const { return fields[layer * kFields + field]; }
    // The prefetch of a key has ended so; whether there was one.
    bool settle(std::int64_t key, Outcome outcome) const {
        if (!pending[key]) return false;
        ++outcomes[pending[key] * kOutcomes + outcome];
        pending[key] = 0;
        return true;
    }
    // A layer loads these of its experts; those that were vacated before it are known no longer.
    void load(std::int64_t layer, const std::vector<std::int64_t>& keys) const {
        for (std::int64_t key : keys) of(layer, premature) += vacant[key];
        std::fill_n(vacant + layer * experts, experts, std::uint8_t{0});
    }
    // Pre-evicted before a layer runs.
    void vacate(std::int64_t layer, const std::vector<std::int64_t>& keys) const {
        for (std::int64_t key : keys) vacant[key] = 1;
        of(layer, vacated) += static_cast<std::int64_t>(keys.size());
    }
    // A layer begins to run these: the first `resident` are there, and the next `arriving` under way.
    void begin(std::int64_t layer, const std::vector<std::int64_t>& keys, std::int64_t resident) const {
        ++of(layer, forwards);
        of(layer, hits) += resident;
        of(layer, misses) += static_cast<std::int64_t>(keys.size()) - resident;
        for (std::int64_t i = 0; i < resident; ++i)
            if (settle(keys[i], used)) {
                ++of(layer, prefetched_hits);
                ++governor[0];
            }
    }
    void came_late(std::int64_t layer, std::int64_t key) const {
        settle(key, arrived_late);
        ++of(layer, late);
        ++governor[0];
    }
    void left(std::int64_t key) const {
        if (!settle(key, left_unused)) return;
        ++of(key / experts, wasted);
        ++governor[1];
    }
    void dropped(std::int64_t key) const { governor[1] += settle(key, cancelled); }
    // `PrefetchGovernor.allows`
    bool allows() const {
        if (governor[2]) {
            if (--governor[2]) return false;
            governor[0] = governor[1] = 0;
            return true;
        }
        const std::int64_t outcomes_now = governor[0] + governor[1];
        if (outcomes_now < window) return true;
        const bool bad = static_cast<double>(governor[0]) < min_useful * static_cast<double>(outcomes_now);
        governor[0] = governor[1] = 0;
        if (bad) governor[2] = rest;
        return !bad;
    }
};

}  // namespace tiermoe
