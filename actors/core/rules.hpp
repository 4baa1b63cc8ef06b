// Rules that change a layer's routing before it is planned, each one of all layers of a model. A pass applies a rule to its
// own cache (`NativeRule`). Python calls the same rule with what it sees where several GPUs' caches decide, or the kernels are
// Python's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../../kernels/cpu/substitute.hpp"
#include "layer.hpp"

namespace tiermoe::core {

// What a rule knows of a layer's caches: `policies.routing.RerouteView`.
struct CacheView {
    const std::uint8_t* here;  // [E], not 0: resident or in flight
    std::int64_t experts, vacant, emptied;
    // of several shards: whose each expert is [E], and whether all of a shard's slots have never been in use [shards]
    const std::int64_t* shard_of = nullptr;
    const std::uint8_t* filling = nullptr;
    std::int64_t shards = 1;
};

// A routing as a rule leaves it; where no pair is substituted or dropped, it is the model's, and nothing else is set.
struct Rerouted {
    std::vector<std::int64_t> ids;  // [T, K]
    std::vector<float> weights;
    std::int64_t substituted = 0, dropped = 0;
    bool changed() const { return substituted || dropped; }
};

using Probabilities = std::function<const float*()>;  // of the layer's router [T, E]

class Rule {
  public:
    // Whether there is such a layer, of so many experts.
    virtual bool knows(std::int64_t, std::int64_t) const { return true; }
    virtual bool reads_probabilities() const { return false; }
    // Whether it is known without weights and probabilities that neither the routing nor the rule changes.
    virtual bool keeps(const Given&, const CacheView&) const { return false; }
    // probabilities: asked for at most once, and only where the rule reads them.
    virtual void reroute(std::int64_t layer, const Given& given, const CacheView& view, const Probabilities& probabilities,
                         Rerouted& found) = 0;
    virtual ~Rule() = default;
};

// Pairs are dropped whose experts do not fit (`activeevict.BudgetAwareTopK`).
class BudgetRule : public Rule {
  public:
    BudgetRule(std::int64_t min_top_k, bool renormalise) : min_top_k_(min_top_k), renormalise_(renormalise) {}
    bool keeps(const Given& given, const CacheView& view) const override;
    void reroute(std::int64_t layer, const Given& given, const CacheView& view, const Probabilities& probabilities,
                 Rerouted& found) override;

  private:
    const std::int64_t min_top_k_;
    const bool renormalise_;
};

// beta from a transfer budget (BuddyMoE, section 3.1): the least with n-cpu(l) * w <= B over the last calls of a layer.
class AdaptiveBeta {
  public:
    // expert_bytes: w. budget_s: seconds of link for a call's loads. window: calls that are remembered.
    AdaptiveBeta(std::int64_t expert_bytes, double budget_s, std::size_t window)
        : expert_bytes_(expert_bytes), budget_s_(budget_s), window_(window) {}
    // A call, before replacement.
    void saw(const Share& share);
    // For the next call; over 1 (replace always) where even a call whose experts all miss exceeds the budget.
    double beta(double link_bytes_per_s) const;

  private:
    std::int64_t expert_bytes_;
    double budget_s_;
    std::size_t window_;
    std::deque<std::pair<double, std::int64_t>> calls_;  // delta, and how many experts missed
};

// Missing experts are replaced by others, or left out (`buddymoe.MissRule`).
class MissRule : public Rule {
  public:
    // `buddymoe.substitution.SubstitutionOptions`; gamma: infinity: no margin gate.
    struct Options {
        std::optional<std::int64_t> rho, search;
        double gamma = std::numeric_limits<double>::infinity(), temperature = 1.0, kappa = 0.0;
        float eta = 0.0f, reuse = 0.0f;
        bool drop = false, by_buddy = false, renormalise = false;
    };
    // Of a layer [experts, ranks], as of `Substitution`.
    struct Buddies {
        const std::int32_t* ids;
        const float* similarity;
        std::int64_t ranks;
        double tau = -std::numeric_limits<double>::infinity();  // -infinity: no entropy gate
    };
    // Random numbers in [0, 1), so many, behind those in the vector.
    using Draw = std::function<void(std::vector<float>& drawn, std::int64_t count)>;

    // beta: infinity: no distribution gate. betas: of each layer, in its place; empty: it is fixed. draw: gives what stands for
    // the router's probabilities; null: those are read, if the options ask. Throws std::invalid_argument: an option is out of
    // range.
    MissRule(std::int64_t experts, std::vector<Buddies> buddies, const Options& options, double beta,
             std::vector<AdaptiveBeta> betas, Draw draw);

    bool knows(std::int64_t layer, std::int64_t experts) const override {
        return layer >= 0 && layer < static_cast<std::int64_t>(buddies_.size()) && experts == experts_;
    }
    bool reads_probabilities() const override { return !draw_ && (options_.eta > 0 || options_.by_buddy); }
    void reroute(std::int64_t layer, const Given& given, const CacheView& view, const Probabilities& probabilities,
                 Rerouted& found) override;

    double link_bytes_per_s = 0.0;  // as measured, for adaptive betas

  private:
    // Without a routing.
    Substitution problem(const Buddies& of, std::int64_t top_k) const;
    // The first of so many numbers that nobody has read.
    const float* drawn(std::int64_t count);

    const std::int64_t experts_;
    const std::vector<Buddies> buddies_;
    const Options options_;
    const double beta_;
    std::vector<AdaptiveBeta> betas_;
    const Draw draw_;
    std::vector<float> draws_;
    std::size_t next_ = 0;             // the first draw that nobody has read
    std::vector<std::uint8_t> full_;   // [layers], whether the lead's slots were all in use since the cache was empty
    std::int64_t emptied_ = 0;         // how often it had been, then
    std::vector<std::uint8_t> wanted_;  // of one call
    std::vector<float> reach_;
    std::vector<Share> shares_;
};

// A rule on a layer's own cache.
class NativeRule : public LayerRule {
  public:
    // router: the layer's own, whose probabilities the rule reads; kNoRouter: it reads none.
    NativeRule(std::shared_ptr<Rule> rule, Router router) : rule_(std::move(rule)), router_(router) {}
    void asks(Routers& routers) const override {
        if (router_ != kNoRouter) routers.push_back(router_);
    }
    void apply(Layer& layer, const Given& given, Routed& routed) override;

  private:
    const std::shared_ptr<Rule> rule_;
    const Router router_;
    Rerouted found_;
};

}  // namespace tiermoe::core
