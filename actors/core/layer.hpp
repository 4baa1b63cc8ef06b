// A layer's pass in one call: asks the core what runs when, and has an executor compute it.
//
//     arrive -> rule -> open -> place -> plan, begin -> send to peers -> load -> prefetch or pre-eviction -> next: residents,
//     arrivals as they land, waves, what peers have lost -> sums -> close
//
// Whole experts and split ones are the same to it: a group is a segment's neurons. A layer has one executor for good
// (`engine.executors`): `CpuLayer` (cpu_layer.hpp), `GpuLayer` (gpu_module.cpp), `PythonLayer` (python_layer.cpp) with kernels
// that are Python's, `VirtualLayer` (virtual_run.hpp) of recorded layers. On each the rule, what looks ahead, the placement
// and the peers are native or Python's (`Parts`), and the order is this one.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
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
    Picked* picked = nullptr;
    bool large = false;  // an expert has more rows than the executor's kernels take
    Segments low;
    std::int64_t substituted = 0, dropped = 0;
};

// Segments that a peer runs, each on its replica of so many bits; 0: in full precision.
struct Away {
    std::string peer;
    Segments segments;
    std::vector<std::uint8_t> bits;
};

// Who runs a layer's experts, where that is native (`planned.cpp`). One of all layers of a cache.
struct Placement {
    // The routing is known: of the segments that the pass needs those that run on this device. keep: residents that leave last.
    virtual const Segments& where(const Layer& layer, const Routed& routed, const Segments& needed, Segments& keep) = 0;
    virtual const std::vector<Away>& away() const = 0;  // the others
    virtual void loaded(Layer&) {}                      // the pass's loads are queued
    virtual void ran(Layer&) {}                         // the pass is over
    virtual ~Placement() = default;
};

// Everything runs on this device, whose residents of these leave last.
struct Spared : Placement {
    Segments keys;
    const Segments& where(const Layer&, const Routed&, const Segments& needed, Segments& keep) override {
        keep = keys;
        return needed;
    }
    const std::vector<Away>& away() const override { return none_; }

  private:
    const std::vector<Away> none_;
};

// Of a layer: its number, experts, and neurons of a slot. max_rows: of an expert that the executor's kernels take.
struct Place {
    std::int64_t index, experts, neurons, max_rows;
};

// A router whose scores on the layer's input the layer finds, by its number there.
using Router = std::int64_t;
using Routers = std::vector<Router>;
constexpr Router kNoRouter = -1;

// The scores that a router of several later layers gives so many rows: those of row t for the at-th of the layers.
struct Scored {
    std::int64_t rows;
    std::function<void(std::int64_t at, std::int64_t t, std::vector<double>& row)> read;
};

// Changes the routing of a pass before it is planned.
struct LayerRule {
    virtual bool native() const { return true; }
    virtual void asks(Routers&) const {}  // adds those whose scores it probably reads
    virtual void apply(Layer& layer, const Given& given, Routed& routed) = 0;
    virtual ~LayerRule() = default;
};

// What is done once the loads are queued: prefetch, or slots freed for the next layer.
struct LayerAhead {
    virtual bool native() const { return true; }
    virtual bool takes(const Layer& /*layer*/, const Given& /*given*/) const { return true; }
    virtual void asks(Layer&, const Given&, Routers&) const {}  // as of `LayerRule`
    // best: the highest score of any row for each expert of the next layer; empty: there are none.
    virtual void run(Layer& layer, const Given& given, std::vector<double>& best) = 0;
    virtual ~LayerAhead() = default;
};

// The parts of a pass that are Python's (`python_parts.hpp`), asked for only where a pass has them.
struct Parts {
    virtual void routed(Layer& layer) = 0;  // the routing is known, and a native placement decides next
    // The segments that run on this device. away: peers run others. keep: residents that leave last.
    virtual const Segments& place(Layer& layer, const Segments& needed, Segments& keep, bool& away) = 0;
    virtual void send(Layer& layer) = 0;  // the others leave for their peers
    // Of a router that the executor does not know: as `Layer::scores`.
    virtual const float* scores(Layer& layer, std::int64_t router, std::int64_t count) = 0;
    // All that is planned here has run: the experts of the next peer that is lost or late; empty: there is none.
    virtual Segments lost() = 0;
    // Groups and replicas that the executor leaves to Python's kernel; y: rows of the pairs.
    virtual void kernels(Layer& layer, const std::vector<Group>& groups, const std::vector<Group>& replicas, float* y) = 0;
    // The layer's sums are there: adds those of its peers. Of the other device with the most, in this pass: seconds that it
    // waited for copies, and that its link was busy.
    virtual std::pair<double, double> add() = 0;
    virtual void ran() = 0;   // the pass is closed
    virtual void over() noexcept = 0;  // the pass has ended, by an error or not
    // Of all layers of a cache, of each forward: the placement decides who runs where, and what looks ahead there is Python's.
    const bool* planned = nullptr;
    bool watched = false;          // it is asked in each pass
    bool alone_where_planned = false;  // no native rule or prefetch in planned passes
    virtual ~Parts() = default;
};

class Layer {
  public:
    Layer(Core& core, const Place& place, Passes& passes);
    Layer(const Layer&) = delete;
    virtual ~Layer() = default;

    // Of several the first applies: native ones, then Python's.
    void rule(std::unique_ptr<LayerRule> rule) { rules_.push_back(std::move(rule)); }
    void ahead(std::unique_ptr<LayerAhead> ahead) { aheads_.push_back(std::move(ahead)); }
    void parts(std::unique_ptr<Parts> parts) { parts_ = std::move(parts); }
    bool has_parts() const { return parts_ != nullptr; }
    // Decides in place of `Parts::place`.
    void placement(std::shared_ptr<Placement> placement) { placement_ = std::move(placement); }
    const Placement* placement() const { return placement_.get(); }
    // Throws what the core, the executor and Python's parts do, and std::invalid_argument: there is no such expert. Then
    // nothing is pinned.
    void run(const Given& given);

    Core& core() { return core_; }
    const Core& core() const { return core_; }
    const Place& place() const { return at_; }
    const Spent& spent() const { return spent_; }
    Key key(std::int64_t expert) const { return at_.index * at_.experts + expert; }
    const std::uint8_t* states() { return core_.states().data() + key(0); }
    // Of the present pass.
    bool under_way() const { return routed_; }
    bool planned() const { return parts_ && parts_->planned && *parts_->planned; }
    const Given& given() const { return *given_; }
    const Routed& routed() const { return *routed_; }
    // The next stretch of the plan, once it is there, and behind all that is planned what peers have lost; false: all has
    // run. Its groups and replicas are in `routed().picked`.
    bool next();
    virtual Router routers() const = 0;  // how many there are
    virtual std::int64_t outputs(Router router) const = 0;
    // Of the present pass [tokens, outputs of the router], until the next call.
    virtual const float* scores(const Given& given, Router router) = 0;
    // Of later layers, until the next call.
    virtual Scored scored(const Given& given, Router router);
    bool partial = false;  // pairs may have no expert (`kNowhere`): others run them
    double (*clock_s)() = nullptr;  // by which the parts of a pass are timed; null: they are not
    double placed_s() const { return placed_s_; }  // of a native placement in the last pass
    double timed_s() const { return clock_s ? clock_s() : 0.0; }
    double& kernels_s() { return clock_s == cpu_s ? spent_.kernels_cpu_s : spent_.kernels_s; }

  protected:
    // Whom a pass runs on.
    virtual void route(const Given& given, Routed& routed);
    virtual void load() { core_.load(); }
    virtual std::pair<std::int64_t, std::int64_t> stretch() { return core_.next(); }  // of `Core::next`
    // All of the plan, by `next`, and the sums, with `added`.
    virtual void compute(const Given& given, const Routed& routed) = 0;
    // The sums are there.
    void added() {
        if (away_) std::tie(peer_blocked_s_, peer_link_s_) = parts_->add();
    }
    // The first of the rules, or of what looks ahead, that may take the present pass.
    template <typename Some>
    std::size_t first_of(const Some& some) const {
        return planned() && parts_->alone_where_planned && !some.empty() ? some.size() - 1 : 0;
    }
    // What takes a pass; null: nothing does.
    LayerAhead* taking(const Given& given) const;

    Core& core_;
    std::unique_ptr<Parts> parts_;  // null: nothing is Python's
    std::shared_ptr<Placement> placement_;
    std::vector<std::unique_ptr<LayerRule>> rules_;
    std::vector<std::unique_ptr<LayerAhead>> aheads_;
    Spent spent_;                       // of the present pass
    Picked picked_;                     // its routing
    Segments keep_;                     // residents that leave last
    bool away_ = false;                 // peers run some of it
    // Whether kernels here leave the rows of some pairs unwritten.
    bool holes() const { return away_ || picked_.starts.back() < static_cast<std::int64_t>(picked_.order.size()); }
    bool placed_ = false;               // `placement_` has decided
    std::vector<double> best_;          // `Passed::scores` of the present pass
    double peer_blocked_s_ = 0.0, peer_link_s_ = 0.0;  // of the present pass, of the other device with the most

  private:
    // Of the segments that a pass needs those that run on this device; sets `keep_` and `away_`.
    const Segments& here(const Segments& needed);

    const Place at_;
    Passes& passes_;
    double placed_s_ = 0.0;
    const Given* given_ = nullptr;  // of the present pass
    Routed* routed_ = nullptr;
};

// What the prefetch of a forward goes by, of all layers; its policy in Python (`prefetching.Prefetching`) says it.
struct Announced {
    std::int64_t rows = 0;   // of the present forward; 0: nobody has announced it
    bool last_rows = false;  // the scores of each sequence's last row can be read
    bool rests = false;      // nothing is prefetched
    bool always = false;     // a policy is asked also where nothing that it may name is absent
    bool waits = false;      // for copies under way, too

    // Whether a prefetch for these keys [first, end) need not be asked. allowed: by the governor.
    bool idle(const Core& core, const std::vector<std::pair<Key, Key>>& reach, bool allowed) const {
        if (rests || reach.empty()) return true;
        if (always) return false;
        if (!allowed || waits) return !allowed;
        return std::all_of(reach.begin(), reach.end(), [&](const auto& keys) { return core.there(keys.first, keys.second); });
    }
};

// A pass that sweeps queues the next layer whole; others prefetch nothing.
struct StreamNext : LayerAhead {
    explicit StreamNext(std::uint8_t source) : source(source) {}
    void run(Layer& layer, const Given&, std::vector<double>&) override { layer.core().stream(source); }
    const std::uint8_t source;
};

// Prefetch by the routers of the layers behind, on this layer's input.
struct AskRouters : LayerAhead {
    // A policy that wraps keeps account of forwards: those that nobody has announced are for Python.
    bool takes(const Layer& layer, const Given& given) const override {
        if (!wraps || of->rests) return true;
        return of->rows == given.tokens && (layer.place().index + 1 < layer.core().layout().layers || of->last_rows);
    }
    void asks(Layer& layer, const Given& given, Routers& routers) const override {
        Core& core = layer.core();
        if (whole() && core.may_sweep(given.tokens * given.top_k)) return;
        if (!of->idle(core, reach, core.governor().next_allows())) routers.push_back(router);
    }
    void run(Layer& layer, const Given& given, std::vector<double>& best) override;
    Router router = kNoRouter;  // of all these layers
    std::int64_t first, layers;  // first: layer asked
    std::vector<std::pair<Key, Key>> reach;  // their keys
    bool wraps = false;
    bool streams = false;  // a pass that sweeps prefetches the next layer whole
    std::shared_ptr<Announced> of;
    RouterPrefetch prefetch;

  private:
    bool whole() const { return streams && !of->always; }
};

}  // namespace tiermoe::core
