// A layer of split experts on a pool (MoEpic), planned, loaded, prefetched for and run without Python: the decisions of
// `engine.layer.MoeLayer.forward` with `LoadOnMiss`, `SplitOrder`'s order of eviction and prefetch by the next router.
//
//     plan      copies that have ended land, stale prefetches are dropped; segments in the order in which they run, victims
//     begin     priorities, counters, pins; victims are evicted, copies queued for the segments that have slots then
//     prefetch  segments of the next layer's experts, the most wanted first
//     finish    in waves: residents, arrivals as they land; unpin, what ran is used, and one gives its slot to a segment
//               that waits for it (`Turn`); after the last wave combine
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
    std::int64_t forwards, waves, hits, misses, top_hits, prefetched_hits, late, demanded, wasted;
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
    bool by_votes;        // as `NextGatePrefetch`; else as `SpeculativePrefetch`, by its probabilities
    std::uint8_t source;  // of its prefetches
};

// run[at] is loaded once run[after - 1] has run, into its slot. No two of a pass have one `after`.
struct Turn {
    std::size_t after, at;
};

struct SplitPass : Pass {
    Probe probe;
    bool decode;
    std::vector<std::int64_t> run, loads, victims;  // segments; `loads` start before any runs
    std::vector<Turn> turns;                        // of the other missing ones, by `after`
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
    bool begin(SplitPass& of);
    // Scores of the probe on hidden [T, H]; absent segments of the experts that they name are queued, in their order.
    // False: the link is closed.
    bool prefetch(SplitPass& of, const float* hidden);
    // unlocked: calls what it is given, without the interpreter's lock. False: a copy was cancelled.
    template <typename Unlocked>
    bool finish(SplitPass& of, const float* hidden, const float* weights, float* out, double (*now)(),
                const Unlocked& unlocked) {
        ready(of);
        std::size_t at = 0;
        for (const Turn& turn : of.turns) {
            unlocked([&] { run(of, at, turn.after, hidden, now); });
            if (of.cancelled) return false;
            end(of, at, turn.after);
            take(of, turn);
            at = turn.after;
        }
        unlocked([&] {
            run(of, at, of.run.size(), hidden, now);
            if (!of.cancelled) combine(of, weights, out, now);
        });
        if (of.cancelled) return false;
        end(of, at, of.run.size());
        return true;
    }

    Judged judge() { return std::exchange(judged_, Judged{}); }
    std::vector<SplitCounts>& counts() { return counts_; }
    std::array<PrefetchCounts, 256>& sources() { return sources_; }

  private:
    bool make_room(SplitPass& of, std::int64_t slot_class) const;
    bool load(const SplitPass& of, const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims);
    void ready(SplitPass& of);
    void run(SplitPass& of, std::size_t at, std::size_t stop, const float* hidden, double (*now)());
    void combine(SplitPass& of, const float* weights, float* out, double (*now)());
    void end(SplitPass& of, std::size_t at, std::size_t stop);
    void take(SplitPass& of, const Turn& turn);
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
