// A layer of split experts on a pool (MoEpic), planned, loaded, prefetched for and run without Python: the decisions of
// `engine.layer.MoeLayer.forward` with `LoadOnMiss`, `SplitOrder`'s order of eviction and the speculative prefetch.
//
//     plan      copies that have ended land, stale prefetches are dropped; segments in the order in which they run, victims
//     begin     priorities, counters, pins; victims are evicted, the missing segments' copies queued
//     prefetch  segments of the next layer's experts, by falling score
//     run       residents, arrivals as they land; combine
//     end       unpin, and what ran is used
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "layer.hpp"
#include "loads.hpp"
#include "split_order.hpp"

namespace tiermoe {

// Of one layer since the last `take`, as `engine.stats.LayerStats`; demanded and wasted in neurons.
struct SplitCounts {
    std::int64_t forwards, hits, misses, top_hits, prefetched_hits, late, demanded, wasted;
};

// Of one source of prefetches, as `engine.stats.SourceStats`.
struct PrefetchCounts {
    std::int64_t queued, hits, late, wasted, cancelled;
};

// Prefetches that layers used, and those that were for nothing: what the governor hears.
struct Judged {
    std::int64_t used, wasted;
};

// A router on the input of another layer.
struct Probe {
    const float* weight;  // [E, H]; null: there is none
    const float* bias;    // [E], or null
    std::int64_t layer, top;
    std::uint8_t source;  // of its prefetches
};

struct SplitPass : Pass {
    Probe probe;
    std::vector<std::int64_t> run, victims;  // segments
    std::int64_t resident, arriving;
    std::vector<std::shared_ptr<Copy>> copies;  // of each of `run`; null: it is there
    std::vector<float> scores;                  // the highest of any row [E]
    double waited_s, kernels_s;
    bool cancelled;
};

class Split {
  public:
    // marks: the source of each segment that was prefetched and not used yet, 0: none [2 N].
    Split(Loads& loads, SplitOrder& order, std::uint8_t* marks);

    // False: Python's step must run the pass, and what has changed it would have changed, too.
    bool plan(SplitPass& of);
    // False: the link is closed.
    bool begin(SplitPass& of, bool decode);
    // Scores of the probe on hidden [T, H]; experts by falling score; their absent segments are queued.
    // False: the link is closed.
    bool prefetch(SplitPass& of, const float* hidden);
    // Without the interpreter's lock between `ready` and `end`.
    void ready(SplitPass& of);
    void run(SplitPass& of, const float* hidden, const float* weights, float* out, double (*now)());
    void end(SplitPass& of);

    Judged judge() { return std::exchange(judged_, Judged{}); }
    std::vector<SplitCounts>& counts() { return counts_; }
    std::array<PrefetchCounts, 256>& sources() { return sources_; }

  private:
    void count(SplitPass& of);
    void evicted(const std::vector<std::int64_t>& keys);
    bool queue(const std::vector<std::int64_t>& experts, std::uint8_t source);

    Loads& loads_;
    SplitOrder& order_;
    std::uint8_t* marks_;
    std::vector<SplitCounts> counts_;  // [L]
    std::array<PrefetchCounts, 256> sources_{};
    Judged judged_{};
};

}  // namespace tiermoe
