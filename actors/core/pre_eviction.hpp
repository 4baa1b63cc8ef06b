// ActiveEvict's pre-eviction (`policies.activeevict`): slots that are freed for the next layer by its router's scores. The last
// layer's next one is the first, of the next forward, whose prediction is its own distribution in the present forward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../../kernels/cpu/importance.hpp"
#include "layer.hpp"

namespace tiermoe::core {

// Logits of a router [rows, E].
struct Logits {
    const float* of = nullptr;
    std::int64_t rows = 0;
};

// One of all layers of a cache.
class PreEviction {
  public:
    // threshold, most: tau and r_max. state: of the eviction, which sees routing and predictions.
    PreEviction(Importance& state, double threshold, std::int64_t most) : state_(state), threshold_(threshold), most_(most) {}

    // last_rows: of each sequence of the forward that begins; empty: unknown, all rows.
    void begin_forward(Segments last_rows) { last_rows_ = std::move(last_rows); }
    // What the first layer's router gives this forward's rows.
    void first(const Logits& found) {
        const Segments used = std::exchange(last_rows_, {});
        const std::int64_t experts = state_.experts;
        const bool known = !used.empty() && used.front() >= 0 && used.back() == found.rows - 1 && std::is_sorted(used.begin(), used.end());
        first_.clear();
        if (!known) first_.assign(found.of, found.of + found.rows * experts);
        else
            for (const std::int64_t row : used) first_.insert(first_.end(), found.of + row * experts, found.of + (row + 1) * experts);
    }
    // A layer's routing is known, and what the next one's router gives its rows; at the last layer `first` has said it. The
    // slots that `following` should find free, at most as many as it has experts without one. states: of all [L * E].
    std::int64_t slots(std::int64_t layer, const Given& given, Logits next, const std::uint8_t* states) {
        const std::int64_t after = following(layer);
        if (!after) next = {first_.data(), static_cast<std::int64_t>(first_.size()) / state_.experts};
        importance_saw(state_, layer, given.ids, given.tokens);
        return next.rows ? importance_target(state_, after, next.of, next.rows, states + after * state_.experts, threshold_, most_) : 0;
    }
    std::int64_t following(std::int64_t layer) const { return (layer + 1) % state_.layers; }
    const Importance& state() const { return state_; }

  private:
    Importance& state_;
    const double threshold_;
    const std::int64_t most_;
    Segments last_rows_;
    std::vector<float> first_;  // of the first layer in this forward, one row a sequence [rows, E]
};

// On a layer's own cache.
struct ReleaseSlots : LayerAhead {
    bool takes(const Layer&, const Given& given) const override { return given.top_k == of->state().top_k; }
    void asks(Layer&, const Given&, Routers& routers) const override {
        for (const Router one : {own, router})
            if (one != kNoRouter) routers.push_back(one);
    }
    void run(Layer& layer, const Given& given, std::vector<double>&) override {
        Core& core = layer.core();
        const std::int64_t index = layer.place().index;
        if (own != kNoRouter) of->first({layer.scores(given, own), given.tokens});
        const Logits next = router == kNoRouter ? Logits{} : Logits{layer.scores(given, router), given.tokens};
        core.vacate(of->slots(index, given, next, core.states().data()), of->following(index));
    }
    Router own = kNoRouter, router = kNoRouter;  // own: the first layer's, there; router: the next layer's, but at the last
    std::shared_ptr<PreEviction> of;
};

}  // namespace tiermoe::core
