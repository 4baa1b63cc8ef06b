// A layer's pass in one call: asks the core what runs when, and has an executor compute it.
//
//     arrive -> rule -> open -> place -> plan, begin -> send to peers -> load -> prefetch or pre-eviction -> next: residents,
//     arrivals as they land, waves -> join peers, load and run what they lost -> combine -> close
//
// Whole experts and split ones are the same to it: a group is a segment's neurons. Rules and what looks ahead are the same on
// each executor, which finds routers' scores for them: `CpuLayer` (cpu_layer.hpp), `GpuLayer` (gpu_module.cpp),
// `VirtualLayer` (virtual_run.hpp) of recorded layers, and `PythonLayer` (python_layer.cpp), whose parts are Python's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../kernels/cpu/link.hpp"
#include "../../kernels/cpu/table.hpp"
#include "ahead.hpp"
#include "core.hpp"
#include "picked.hpp"

namespace tiermoe::core {

using Given = LayerInput;
class Layer;

// A routing as it runs. low: keys of experts that run on their replicas.
struct Routed {
    const std::int64_t* ids;
    const float* weights;
    std::int64_t top_k, tokens;
    const Picked* picked = nullptr;
    Segments low;
    std::int64_t substituted = 0, dropped = 0;
};

// Segments that a peer runs, each on its replica of so many bits; 0: in full precision.
struct Away {
    std::string peer;
    Segments segments;
    std::vector<std::uint8_t> bits;
};

// Who runs a layer's experts; without one all run on this device. One of all layers of a cache (`planned.cpp`).
struct Placement {
    // The routing is known: of the segments that the pass needs those that run on this device. keep: residents that leave last.
    virtual const Segments& where(const Layer& layer, const Routed& routed, const Segments& needed, Segments& keep) = 0;
    virtual const std::vector<Away>& away() const = 0;  // the others
    virtual void loaded(Layer&) {}                      // the pass's loads are queued
    virtual void ran(Layer&) {}                         // the pass is over
    virtual ~Placement() = default;
};

// Of a layer: its number, experts, and neurons of a slot. max_rows: of an expert that the kernels take; max_pairs: of a pass.
struct Place {
    std::int64_t index, experts, neurons, max_rows, max_pairs;
};

// A router whose scores on the layer's input the layer finds, by its number there.
using Router = std::int64_t;
using Routers = std::vector<Router>;
constexpr Router kNoRouter = -1;

// Changes the routing of a pass before it is planned.
struct LayerRule {
    virtual void asks(Routers&) const {}  // adds those whose scores it probably reads
    // False: the pass is for another executor, and nothing has changed.
    virtual bool apply(Layer& layer, const Given& given, Routed& routed) = 0;
    virtual void done() {}  // the pass runs so
    virtual ~LayerRule() = default;
};

// What is done once the loads are queued: prefetch, or slots freed for the next layer.
struct LayerAhead {
    virtual bool takes(std::int64_t /*top_k*/) const { return true; }  // else the hooks are called
    virtual void asks(Layer& layer, bool always, Routers& routers) const = 0;  // as of `LayerRule`
    // always: also where nothing that it may ask for is absent. best: the highest score of any row for each expert of the
    // next layer; empty: there are none.
    virtual void run(Layer& layer, const Given& given, bool always, std::vector<double>& best) = 0;
    virtual ~LayerAhead() = default;
};

class Layer {
  public:
    Layer(Core& core, const Place& place, const KernelTable& kernels, Passes& passes);
    Layer(const Layer&) = delete;
    virtual ~Layer() = default;

    // Takes the interpreter's lock. They see the routing as the model picked it.
    void hooks(std::function<void(const Given&)> hooks) { hooks_ = std::move(hooks); }
    void rule(std::unique_ptr<LayerRule> rule) { rule_ = std::move(rule); }
    void ahead(std::unique_ptr<LayerAhead> ahead) { ahead_ = std::move(ahead); }
    void placement(std::shared_ptr<Placement> placement) { placement_ = std::move(placement); }
    // Throws what the core, the executor and the hooks do, and std::invalid_argument: there is no such expert. Then nothing
    // is pinned.
    Stepped run(const Given& given, Asking asking);

    Core& core() { return core_; }
    const Place& place() const { return at_; }
    const Spent& spent() const { return spent_; }
    const KernelTable& kernels() const { return kernels_; }
    Key key(std::int64_t expert) const { return at_.index * at_.experts + expert; }
    const std::uint8_t* states() { return core_.states().data() + key(0); }
    virtual Router routers() const = 0;  // how many there are
    virtual std::int64_t outputs(Router router) const = 0;
    // Of the present pass [tokens, outputs of the router], until the next call.
    virtual const float* scores(const Given& given, Router router) = 0;
    double (*clock_s)() = nullptr;  // by which the parts of a pass are timed; null: they are not
    double timed_s() const { return clock_s ? clock_s() : 0.0; }
    double& kernels_s() { return clock_s == cpu_s ? spent_.kernels_cpu_s : spent_.kernels_s; }

  protected:
    // Whom a pass runs on. False: the pass is for another executor, and nothing has changed.
    virtual bool route(const Given& given, Routed& routed);
    // Of the segments that a pass needs those that run on this device; sets `keep_`.
    virtual const Segments& here(const Segments& needed) { return needed; }
    virtual void send() {}  // the others leave for their peers
    virtual void load() { core_.load(); }
    virtual void look_ahead(const Given& given, Asking asking);
    // All of the plan, what peers have lost, and the sums; sets `peer_blocked_s_` and `peer_link_s_`.
    virtual void compute(const Given& given, const Routed& routed) = 0;
    // The next stretch of the plan, once it is there; empty: all has run.
    const std::vector<Group>& next();

    Core& core_;
    std::unique_ptr<LayerRule> rule_;
    std::unique_ptr<LayerAhead> ahead_;
    std::shared_ptr<Placement> placement_;  // null: all here
    Spent spent_;                       // of the present pass
    Picked picked_;                     // its routing
    Segments keep_;                     // residents that leave last
    std::vector<double> best_;          // `Passed::scores` of the present pass
    double peer_blocked_s_ = 0.0, peer_link_s_ = 0.0;  // of the present pass, of the other device with the most

  private:
    const Place at_;
    const KernelTable kernels_;
    Passes& passes_;
    std::function<void(const Given&)> hooks_;
};

// `activeevict.BudgetAwareTopK`: pairs are dropped whose experts do not fit.
struct DropUnfit : LayerRule {
    DropUnfit(std::int64_t min_top_k, bool renormalise) : min_top_k(min_top_k), renormalise(renormalise) {}
    bool apply(Layer& layer, const Given& given, Routed& routed) override;
    const std::int64_t min_top_k;
    const bool renormalise;
    std::vector<std::int64_t> ids;
    std::vector<float> weights;
};

// `buddymoe.MissRule` on one device: missing experts are replaced by others, or left out.
struct ReplaceMissing : LayerRule {
    void asks(Routers& routers) const override {
        if (router != kNoRouter) routers.push_back(router);
    }
    bool apply(Layer& layer, const Given& given, Routed& routed) override;
    void done() override {
        if (next) *next += read;
    }
    Substitution problem;        // options and lists; for routings of its top_k
    double beta;                 // infinity: no gate
    Router router = kNoRouter;   // the layer's own, whose probabilities are read
    const float* draws;          // random numbers in their place, or null
    std::int64_t drawn;
    std::int64_t* next;          // the first draw that nobody has read
    std::uint8_t* full;          // [layers], whether the slots were all in use since the cache was empty
    std::int64_t* emptied;       // how often it had been, then
    std::int64_t read = 0;
    std::vector<std::uint8_t> here, wanted;
    std::vector<float> reach, weights;
    std::vector<std::int64_t> ids;
};

// Prefetch by the routers of the layers behind, on this layer's input.
struct AskRouters : LayerAhead {
    void asks(Layer& layer, bool always, Routers& routers) const override {
        if (layers && (always || (layer.core().governor().next_allows() && !idle(layer.core())))) routers.push_back(router);
    }
    void run(Layer& layer, const Given& given, bool always, std::vector<double>& best) override;
    bool idle(const Core& core) const {
        const std::int64_t experts = core.layout().experts;
        return core.there(first * experts, (first + layers) * experts);
    }
    Router router = kNoRouter;  // of all these layers
    std::int64_t first, layers;  // first: layer asked
    RouterPrefetch prefetch;
};

// What the first layer's router says of the next forward's: its distribution in this one, of each sequence's last row.
struct FirstScores {
    Segments last_rows;          // of the present forward, until its first layer has run; empty: unknown, all rows
    std::vector<double> scores;  // [rows, E]
    std::int64_t rows = 0;

    template <typename Number>
    void keep(const Number* of, std::int64_t tokens, std::int64_t experts) {
        Segments used = std::exchange(last_rows, {});
        scores.clear();
        if (used.empty() || used.back() != tokens - 1) {
            scores.assign(of, of + tokens * experts);
        } else {
            for (const std::int64_t row : used) scores.insert(scores.end(), of + row * experts, of + (row + 1) * experts);
        }
        rows = static_cast<std::int64_t>(scores.size()) / experts;
    }
};

// `activeevict.PreEviction`: slots that are freed for the next layer by its router's scores. The last layer's next one is the
// first, of the next forward.
struct ReleaseSlots : LayerAhead {
    bool takes(std::int64_t top_k) const override { return top_k == state->top_k; }
    void asks(Layer&, bool, Routers& routers) const override {
        for (const Router one : {own, router})
            if (one != kNoRouter) routers.push_back(one);
    }
    void run(Layer& layer, const Given& given, bool always, std::vector<double>& best) override;
    Router own = kNoRouter, router = kNoRouter;  // own: the first layer's, there; router: the next layer's, but at the last
    double threshold;
    std::int64_t most;
    Importance* state;
    std::shared_ptr<FirstScores> first;
    std::vector<float> logits;
};

}  // namespace tiermoe::core
