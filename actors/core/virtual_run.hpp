// The executor of recorded layers on a virtual clock: kernels let time pass, nothing is computed.
//
//     dense part -> arrive, open, plan, begin, load -> prefetch -> the host's time -> next: kernels -> close
//
// It is the page of `actors.engine.layer.MoeLayer` for layers whose experts all run here and whose routing nothing
// changes, with `cluster.simulate.backend`'s figures.
#pragma once

#include <functional>
#include <vector>

#include "core.hpp"
#include "picked.hpp"
#include "virtual_link.hpp"

namespace tiermoe::core {

// Seconds of a machine (`cluster.simulate.machine.Machine`).
struct Costs {
    double expert_s, expert_row_s;  // of an expert's first row, and of each further one
    double share;                   // speed of kernels while a copy is under way
    double load_byte_s, miss_s;     // of the host: for each byte that is loaded, in a layer that misses
    std::int64_t neurons;           // of a whole expert, in the units of the layout
};

// A forward: ids [L, T, K] as picked, distinct in a row.
struct Recorded {
    const std::int64_t* ids;
    std::int64_t tokens, top_k;
    double dense_s;  // of a layer
    // what later routers pick on a layer's input [T, L, D, P]: experts, and their scores; null: not recorded
    const std::int64_t* next_ids;
    const double* next_scores;
    std::int64_t distances, picks;
    const Segments& last_rows;  // of which the last layer's next one, the first of the next forward, was recorded
};

// Prefetch by the recorded scores: `prefetch.NextGatePrefetch`, or `moepic.SpeculativePrefetch`.
struct ByScores {
    bool by_votes;
    std::int64_t distance, top;
    bool always;  // also where every expert in reach is in a slot
    bool synchronous;
    bool wraps;  // the last layer prefetches for the first one
    std::uint8_t source;
};

// What Python does in a layer. Empty: nothing.
struct Calls {
    std::function<void(std::int64_t, const Segments& experts, const Segments& counts)> routed;  // before the plan
    std::function<void(std::int64_t)> ahead;   // the layer's loads are queued
    std::function<void(std::int64_t)> ran;
};

class VirtualRun {
  public:
    VirtualRun(Core& core, VirtualLink& link, Clock& clock, const Costs& costs)
        : core_(core), link_(link), clock_(clock), costs_(costs), picked_(core.layout().experts) {
        passes.experts = core.layout().experts;
    }

    std::size_t layers() const { return static_cast<std::size_t>(core_.layout().layers); }
    Passes passes;  // of this forward; the next drops them

    // One forward. scores: what prefetches; null: `calls.ahead` does.
    void forward(const Recorded& recorded, const Segments& keep, const ByScores* scores, const Calls& calls);

  private:
    void layer(std::int64_t layer, const Recorded& recorded, const Segments& keep, const ByScores* scores,
               const Calls& calls);
    void prefetch(std::int64_t layer, const Recorded& recorded, const ByScores& scores);
    void compute(double seconds);
    double kernels(std::int64_t first, std::int64_t stop) const;

    Core& core_;
    VirtualLink& link_;
    Clock& clock_;
    const Costs costs_;
    std::int64_t submitted_ = 0;  // bytes whose loads the host has paid for
    Picked picked_;
    std::vector<double> best_;  // predicted for the next layer
};

}  // namespace tiermoe::core
