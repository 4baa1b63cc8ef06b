// The executor of a layer on the CPU: runs it with the kernels of float32 slots.
#pragma once

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "ahead.hpp"
#include "layer.hpp"

namespace tiermoe::core {

class CpuLayer;

// `Layer::reroute`, by a rule.
struct LayerRule {
    virtual bool apply(CpuLayer& layer, const Given& given, Routed& routed) = 0;
    virtual void done() {}
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

// Rows of `width`, and the pool.
struct Shape {
    std::int64_t width;
    const float *gate_up, *down;
    Activation activation;
};

// What the layers of a cache share: memory of a pass, and the passes that have run.
class CpuLayers : public Passes {
  public:
    std::vector<float> y, sums, scores;
};

class CpuLayer : public Layer {
  public:
    CpuLayer(Core& core, const Place& place, const Shape& shape, const KernelTable& kernels, CpuLayers& all);

    void rule(std::unique_ptr<LayerRule> rule) { rule_ = std::move(rule); }
    void ahead(std::unique_ptr<LayerAhead> ahead) { ahead_ = std::move(ahead); }
    const LayerStep& step() const { return step_; }
    std::exception_ptr failure() { return std::exchange(failure_, nullptr); }

    const Shape& shape() const { return shape_; }
    const KernelTable& kernels() const { return kernels_; }
    CpuLayers& all() { return all_; }

  protected:
    bool reroute(const Given& given, Routed& routed) override { return !rule_ || rule_->apply(*this, given, routed); }
    void rerouted() override {
        if (rule_) rule_->done();
    }
    bool look_ahead(const Given& given, Asking asking) override {
        if (!ahead_ || asking == Asking::hooks || !ahead_->takes(*this, given)) return false;
        ahead_->run(*this, given, asking == Asking::always, best_);
        return true;
    }
    void compute(const Given& given, const Routed& routed) override;

  private:
    static Stepped step(void* self, const Given& given, Asking asking, Spent& spent);

    const Shape shape_;
    const KernelTable kernels_;
    CpuLayers& all_;
    const LayerStep step_;
    std::unique_ptr<LayerRule> rule_;
    std::unique_ptr<LayerAhead> ahead_;
    std::exception_ptr failure_;
};

// `activeevict.BudgetAwareTopK`: pairs are dropped whose experts do not fit.
struct DropUnfit : LayerRule {
    DropUnfit(std::int64_t min_top_k, bool renormalise) : min_top_k(min_top_k), renormalise(renormalise) {}
    bool apply(CpuLayer& layer, const Given& given, Routed& routed) override;
    const std::int64_t min_top_k;
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
