// The executor of a layer on the CPU: asks the core what runs when, and runs it with the kernels of float32 slots.
//
//     routing -> rule -> core.open, plan, begin, load -> prefetch or pre-eviction -> core.next: residents, arrivals as they
//     land, waves -> combine
//
// Whole experts and split ones are the same to it: a group is a segment's neurons.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../../kernels/cpu/expert_ffn.hpp"
#include "../../kernels/cpu/importance.hpp"
#include "../../kernels/cpu/substitute.hpp"
#include "core.hpp"

namespace tiermoe::core {

// What the kernels' module gives: it is compiled for each kind of processor, and apart.
struct Kernels {
    void (*expert_ffn)(const float*, const float*, const float*, const std::int64_t*, const Group*, std::int64_t,
                       std::int64_t, std::int64_t, Activation, float*, float*);
    void (*combine)(const float*, const float*, std::int64_t, std::int64_t, std::int64_t, float*);
    void (*router_scores)(const float*, std::int64_t, const float*, std::int64_t, std::int64_t, const float*, std::int64_t,
                          float*);
};

// A pass as the model gives it: hidden [T, H], ids and weights [T, K], out [T, H].
struct Given {
    const float* hidden;
    const std::int64_t* ids;
    const float* weights;
    std::int64_t tokens, top_k;
    float* out;
};

// A routing as it runs.
struct Routed {
    const std::int64_t* ids;
    const float* weights;
    std::int64_t top_k;
    std::int64_t substituted = 0, dropped = 0;
};

class CpuLayer;

// Changes the routing of a pass before it is planned. False: the pass is not for native code, and nothing has changed.
struct LayerRule {
    virtual bool apply(CpuLayer& layer, const Given& given, Routed& routed) = 0;
    virtual void done() {}  // the pass runs so
    virtual ~LayerRule() = default;
};

// What is done once the loads are queued: prefetch, or slots freed for the next layer.
struct LayerAhead {
    virtual bool takes(const CpuLayer&, const Given&) const { return true; }  // else the pass is not for native code
    virtual void run(CpuLayer& layer, const Given& given) = 0;
    virtual ~LayerAhead() = default;
};

struct Shape {
    std::int64_t index, experts, neurons, width, max_rows;
    const float *gate_up, *down;
    Activation activation;
};

enum class Step { ran, left };  // left: the pass is not for native code, and nothing has changed

// A pass that has run, for whoever records them.
struct Passed {
    std::int64_t tokens = 0;
    Segments keys, counts;
    double began_s = 0.0, ended_s = 0.0, waited_s = 0.0, kernels_s = 0.0;
};

class CpuLayer {
  public:
    // first_unit: of each slot in the pool, in neurons; empty: slot s begins at s * neurons. It may change between passes.
    CpuLayer(Core& core, const Shape& shape, const Kernels& kernels, const std::vector<std::int64_t>& first_unit);

    void rule(std::unique_ptr<LayerRule> rule) { rule_ = std::move(rule); }
    void ahead(std::unique_ptr<LayerAhead> ahead) { ahead_ = std::move(ahead); }
    // Throws CopyFailed, NoSlot.
    Step run(const Given& given);

    Core& core() { return core_; }
    const Shape& shape() const { return shape_; }
    const Kernels& kernels() const { return kernels_; }
    const Passed& passed() const { return passed_; }
    Key key(std::int64_t expert) const { return shape_.index * shape_.experts + expert; }
    const std::uint8_t* states() { return core_.states().data() + key(0); }
    std::vector<float>& scratch() { return scratch_; }
    double (*clock)() = nullptr;  // of the kernels' seconds: null: they are not timed

  private:
    bool sort_pairs(std::int64_t tokens, const Routed& routed);
    void group(std::int64_t first, std::int64_t stop);

    Core& core_;
    const Shape shape_;
    const Kernels kernels_;
    const std::vector<std::int64_t>& first_unit_;
    std::unique_ptr<LayerRule> rule_;
    std::unique_ptr<LayerAhead> ahead_;
    Passed passed_;
    // of the present pass
    std::vector<std::int64_t> counts_, used_, order_, starts_, place_;
    std::vector<std::uint8_t> begun_;
    std::vector<Group> groups_;
    std::vector<float> y_, sums_, scratch_;
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

// `prefetch.NextGatePrefetch` and `moepic.SpeculativePrefetch`: the routers of the layers behind, on this layer's input.
struct AskRouters : LayerAhead {
    bool takes(const CpuLayer&, const Given& given) const override { return given.tokens <= max_rows; }
    void run(CpuLayer& layer, const Given& given) override;
    const float *weight, *bias;          // [layers * E, H], [layers * E] or null
    std::int64_t first, layers, top, max_rows;  // first: layer asked
    bool by_votes, soft, always;         // always: also where each expert is in a slot
    std::uint8_t source;
    std::vector<float> best;             // the highest score of any row, of the first layer asked [E]
};

// `activeevict.PreEviction`: slots that are freed for the next layer by its router's scores.
struct ReleaseSlots : LayerAhead {
    bool takes(const CpuLayer&, const Given& given) const override {
        return given.tokens <= max_rows && given.top_k == state->top_k;
    }
    void run(CpuLayer& layer, const Given& given) override;
    const float *weight, *bias;  // [E, H], [E] or null
    double threshold;
    std::int64_t most, max_rows;
    Importance* state;
};

// Hooks of Python.
struct CallHooks : LayerAhead {
    void run(CpuLayer&, const Given& given) override { call(given); }
    std::function<void(const Given&)> call;
};

}  // namespace tiermoe::core
