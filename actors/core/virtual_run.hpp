// The executor of recorded layers on a virtual clock: kernels let time pass, nothing is computed. A layer's pass is
// `Layer::run`.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "layer.hpp"
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

// What a rule has made of a layer's routing: the experts of the pairs that run, and the keys of those that run on replicas.
struct Rerouted {
    Segments pairs, low;
};

// Where a layer's segments run. keep: residents that leave last.
struct Placed {
    Segments here, keep;
    std::vector<Away> away;
};

// What Python does in a layer, in this order. Empty: nothing; the routing is as picked, and all runs here.
struct Calls {
    std::function<std::optional<Rerouted>(std::int64_t)> rule;  // none: as picked
    std::function<Placed(std::int64_t, const Segments& needed, const Picked& picked)> place;
    std::function<void(std::int64_t)> show;                     // before a native placement decides
    std::function<void(std::int64_t, const std::vector<Away>& away, const Picked& picked)> send;
    std::function<void(std::int64_t)> ahead;                      // the layer's loads are queued, and `ByScores` has run
    std::function<std::pair<double, double>(std::int64_t)> join;  // the peers' answers: `Core::close`
    std::function<void(std::int64_t)> ran;
};

// Rows of a layer that came in a message: experts, and the rows of each.
struct Part {
    const Segments &experts, &counts, &keep;
};

// What the layers of one device share: its clock and link, and what runs at present.
struct Virtual {
    Virtual(VirtualLink& link, Clock& clock, const Costs& costs) : link(link), clock(clock), costs(costs) {}
    void compute(double seconds) { link.compute(seconds, costs.share); }

    VirtualLink& link;
    Clock& clock;
    const Costs costs;
    std::int64_t submitted = 0;  // bytes whose loads the host has paid for
    Passes passes;               // of this forward; the next drops them
    // a forward, or a part of a layer. scores: what prefetches; null: nothing in native code does
    const Recorded* recorded = nullptr;
    const ByScores* scores = nullptr;
    const Calls* calls = nullptr;
    const Part* part = nullptr;
};

// The host's time, then kernels that let time pass.
class VirtualLayer : public Layer {
  public:
    VirtualLayer(Core& core, std::int64_t index, Virtual& of)
        : Layer(core, {index, core.layout().experts, of.costs.neurons, 0}, KernelTable{}, of.passes), of_(of) {}
    Router routers() const override { return 0; }
    std::int64_t outputs(Router) const override { return 0; }
    const float* scores(const Given&, Router) override { throw Broken("recorded scores have no router"); }

  protected:
    void route(const Given& given, Routed& routed) override;
    const Segments& here(const Segments& needed) override;
    void load() override;
    void look_ahead(const Given& given) override;
    void compute(const Given& given, const Routed& routed) override;

  private:
    void prefetch(const ByScores& scores);
    void kernels(std::int64_t first, std::int64_t stop);  // of a stretch of the plan

    Virtual& of_;
    const Routed* routing_ = nullptr;  // of the present pass
    Placed where_;                   // what `calls->place` says of it
    const std::vector<Away>* sent_ = nullptr;
};

class VirtualRun {
  public:
    VirtualRun(Core& core, VirtualLink& link, Clock& clock, const Costs& costs);
    VirtualRun(const VirtualRun&) = delete;  // its layers refer to it

    std::size_t layers() const { return layers_.size(); }
    Passes& passes() { return of_.passes; }
    Core& core() { return layers_.at(0)->core(); }
    // One forward. scores: what prefetches in native code, or null. placement: decides in place of `calls.place`, or null.
    void forward(const Recorded& recorded, const ByScores* scores, const std::shared_ptr<Placement>& placement, const Calls& calls);
    // A layer's rows that another device has sent: `tokens` of them.
    void run(std::int64_t layer, std::int64_t tokens, const Part& part);

  private:
    Virtual of_;
    std::vector<std::unique_ptr<VirtualLayer>> layers_;
};

}  // namespace tiermoe::core
