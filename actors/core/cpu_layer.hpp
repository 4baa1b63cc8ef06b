// The executor of a layer on the CPU: asks the core what runs when, and runs it with the kernels of float32 slots.
//
//     routing -> rule -> core.open, plan, begin, load -> prefetch or pre-eviction -> core.next: residents, arrivals as they
//     land, waves -> combine
//
// Whole experts and split ones are the same to it: a group is a segment's neurons.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../../kernels/cpu/table.hpp"
#include "ahead.hpp"
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

class CpuLayer;

// Changes the routing of a pass before it is planned. False: the pass is for the page, and nothing has changed.
struct LayerRule {
    virtual bool apply(CpuLayer& layer, const Given& given, Routed& routed) = 0;
    virtual void done() {}  // the pass runs so
    virtual ~LayerRule() = default;
};

// What is done once the loads are queued: prefetch, or slots freed for the next layer.
struct LayerAhead {
    virtual bool takes(const CpuLayer& layer, const Given& given) const = 0;  // else the hooks are called
    // always: also where nothing that it may ask for is absent. best: the highest score of any row for each expert of the
    // next layer; empty: there are none.
    virtual void run(CpuLayer& layer, const Given& given, bool always, std::vector<double>& best) = 0;
    virtual ~LayerAhead() = default;
};

// Experts of which one takes `neurons` in the pool, and rows of `width`. max_rows: of an expert that the kernel takes.
struct Shape {
    std::int64_t index, experts, neurons, width, max_rows;
    const float *gate_up, *down;
    Activation activation;
};

// What the layers of a cache share: memory of a pass, and the passes that have run.
class CpuLayers : public Passes {
  public:
    std::vector<float> y, sums, scores;
    std::vector<Group> groups;
};

class CpuLayer {
  public:
    CpuLayer(Core& core, const Shape& shape, const KernelTable& kernels, CpuLayers& all);
    CpuLayer(const CpuLayer&) = delete;

    void rule(std::unique_ptr<LayerRule> rule) { rule_ = std::move(rule); }
    void ahead(std::unique_ptr<LayerAhead> ahead) { ahead_ = std::move(ahead); }
    // Takes the interpreter's lock. They see the routing as the model picked it.
    void hooks(std::function<void(const Given&)> hooks) { hooks_ = std::move(hooks); }
    // Throws what the core and the hooks do, and std::invalid_argument: there is no such expert. Then nothing is pinned.
    Stepped run(const Given& given, Asking asking);
    const LayerStep& step() const { return step_; }
    std::exception_ptr failure() { return std::exchange(failure_, nullptr); }

    Core& core() { return core_; }
    const Shape& shape() const { return shape_; }
    const KernelTable& kernels() const { return kernels_; }
    const Spent& spent() const { return spent_; }
    Key key(std::int64_t expert) const { return shape_.index * shape_.experts + expert; }
    const std::uint8_t* states() { return core_.states().data() + key(0); }
    CpuLayers& all() { return all_; }
    bool timed = false;  // the kernels

  private:
    static Stepped step(void* self, const Given& given, Asking asking, Spent& spent);
    bool sort_pairs(std::int64_t tokens, const Routed& routed);
    void group(std::int64_t first, std::int64_t stop);
    void compute(const Given& given, const Routed& routed);

    Core& core_;
    const Shape shape_;
    const KernelTable kernels_;
    CpuLayers& all_;
    const LayerStep step_;
    std::unique_ptr<LayerRule> rule_;
    std::unique_ptr<LayerAhead> ahead_;
    std::function<void(const Given&)> hooks_;
    std::exception_ptr failure_;
    // of the present pass
    Spent spent_;
    Picked picked_;
    std::vector<std::int64_t> order_, starts_, place_, next_;
    std::vector<std::uint8_t> begun_;
    std::vector<double> best_;
};

// `activeevict.BudgetAwareTopK`: pairs are dropped whose experts do not fit.
struct DropUnfit : LayerRule {
    DropUnfit(std::int64_t narrowest, bool renormalise) : narrowest(narrowest), renormalise(renormalise) {}
    bool apply(CpuLayer& layer, const Given& given, Routed& routed) override;
    const std::int64_t narrowest;
    const bool renormalise;
    std::vector<std::int64_t> ids;
    std::vector<float> weights;
};

// `buddymoe.MissRule` on one device: missing experts are replaced by others, or left out.
struct ReplaceMissing : LayerRule {
    bool apply(CpuLayer& layer, const Given& given, Routed& routed) override;
    void done() override {
        if (next) *next += read;
    }
    Substitution problem;        // options and lists; for routings of its top_k
    double beta;                 // infinity: no gate
    const float *weight, *bias;  // the layer's router, whose probabilities are read; null: none are, or `draws`
    const float* draws;          // random numbers in their place, or null
    std::int64_t drawn, max_rows;
    std::int64_t* next;          // the first draw that nobody has read
    std::uint8_t* full;          // [layers], whether the slots were all in use since the cache was empty
    std::int64_t* emptied;       // how often it had been, then
    std::int64_t read = 0;
    std::vector<std::uint8_t> here, wanted;
    std::vector<float> reach, probabilities, weights;
    std::vector<std::int64_t> ids;
};

// Prefetch by the routers of the layers behind, on this layer's input.
struct AskRouters : LayerAhead {
    bool takes(const CpuLayer&, const Given& given) const override { return given.tokens <= max_rows; }
    void run(CpuLayer& layer, const Given& given, bool always, std::vector<double>& best) override;
    const float *weight, *bias;            // [layers * E, H], [layers * E] or null
    std::int64_t first, layers, max_rows;  // first: layer asked
    RouterPrefetch prefetch;
};

// `activeevict.PreEviction`: slots that are freed for the next layer by its router's scores.
struct ReleaseSlots : LayerAhead {
    bool takes(const CpuLayer&, const Given& given) const override {
        return given.tokens <= max_rows && given.top_k == state->top_k;
    }
    void run(CpuLayer& layer, const Given& given, bool always, std::vector<double>& best) override;
    const float *weight, *bias;  // [E, H], [E] or null
    double threshold;
    std::int64_t most, max_rows;
    Importance* state;
};

}  // namespace tiermoe::core
