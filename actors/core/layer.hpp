// A layer's pass in one call: asks the core what runs when, and has an executor compute it.
//
//     routing -> rule -> core.open, plan, begin, load -> prefetch or pre-eviction -> core.next: residents, arrivals as they
//     land, waves -> combine
//
// Whole experts and split ones are the same to it: a group is a segment's neurons. Executors: `CpuLayer` (cpu_layer.hpp), and
// `GpuLayer` (gpu_module.cpp).
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "../../kernels/cpu/table.hpp"
#include "core.hpp"
#include "picked.hpp"

namespace tiermoe::core {

using Given = LayerInput;

// A routing as it runs.
struct Routed {
    const std::int64_t* ids;
    const float* weights;
    std::int64_t top_k;
    std::int64_t substituted = 0, dropped = 0;
};

// Of a layer: its number, experts, and neurons of a slot. max_rows: of an expert that the kernels take; max_pairs: of a pass.
struct Place {
    std::int64_t index, experts, neurons, max_rows, max_pairs;
};

class Layer {
  public:
    Layer(Core& core, const Place& place, Passes& passes);
    Layer(const Layer&) = delete;
    virtual ~Layer() = default;

    // Takes the interpreter's lock. They see the routing as the model picked it.
    void hooks(std::function<void(const Given&)> hooks) { hooks_ = std::move(hooks); }
    // Throws what the core, the executor and the hooks do, and std::invalid_argument: there is no such expert. Then nothing
    // is pinned.
    Stepped run(const Given& given, Asking asking);

    Core& core() { return core_; }
    const Place& place() const { return at_; }
    const Spent& spent() const { return spent_; }
    Key key(std::int64_t expert) const { return at_.index * at_.experts + expert; }
    const std::uint8_t* states() { return core_.states().data() + key(0); }
    bool timed = false;  // the kernels

  protected:
    // Changes the routing of a pass before it is planned. False: the pass is for the page, and nothing has changed.
    virtual bool reroute(const Given&, Routed&) { return true; }
    virtual void rerouted() {}  // the pass runs so
    // What is done once the loads are queued. False: the hooks are called.
    virtual bool look_ahead(const Given&, Asking) { return false; }
    virtual void load() { core_.load(); }
    // All of the plan, and the sums.
    virtual void compute(const Given& given, const Routed& routed) = 0;
    // The next stretch of the plan, once it is there; empty: all has run.
    const std::vector<Group>& next();

    Core& core_;
    Spent spent_;                       // of the present pass
    std::vector<std::int64_t> order_;   // its pairs, by expert
    std::vector<double> best_;          // `Passed::scores`

  private:
    bool sort_pairs(std::int64_t tokens, const Routed& routed);

    const Place at_;
    Passes& passes_;
    std::function<void(const Given&)> hooks_;
    // of the present pass
    Picked picked_;
    std::vector<Group> groups_;
    std::vector<std::int64_t> starts_, place_, next_;
    std::vector<std::uint8_t> begun_;
};

}  // namespace tiermoe::core
