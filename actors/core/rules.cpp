#include "rules.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>

#include "../../kernels/cpu/importance.hpp"

namespace tiermoe::core {
namespace {

constexpr std::int64_t kDraws = 1 << 14;  // that are made at a time, at least

// Without the columns in which nothing runs (`LayerView.reroute`).
void keep(std::int64_t tokens, std::vector<std::int64_t>& ids, std::vector<float>& weights, Routed& routed) {
    const std::int64_t top_k = routed.top_k;
    routed.ids = ids.data();
    routed.weights = weights.data();
    if (!routed.dropped) return;
    std::vector<std::int64_t> columns;
    for (std::int64_t k = 0; k < top_k; ++k) {
        bool used = false;
        for (std::int64_t t = 0; t < tokens; ++t) used |= weights[t * top_k + k] != 0.0f;
        if (used) columns.push_back(k);
    }
    const auto left = static_cast<std::int64_t>(columns.size());
    if (!left || left == top_k) return;
    for (std::int64_t t = 0, at = 0; t < tokens; ++t)
        for (std::int64_t k : columns) {
            ids[at] = ids[t * top_k + k];
            weights[at++] = weights[t * top_k + k];
        }
    routed.top_k = left;
}

}  // namespace

void NativeRule::apply(Layer& layer, const Given& given, Routed& routed) {
    const Core& core = layer.core();
    const CacheView view{layer.states(), layer.place().experts, core.free_slots(), core.emptied()};
    rule_->reroute(layer.place().index, given, view, [&] { return layer.scores(given, router_); }, found_);
    if (!found_.changed()) return;
    routed.substituted = found_.substituted, routed.dropped = found_.dropped;
    keep(given.tokens, found_.ids, found_.weights, routed);
}

bool BudgetRule::keeps(const Given& given, const CacheView& view) const {
    return misses_fit(given.ids, given.tokens * given.top_k, view.here, view.experts, view.vacant);
}

void BudgetRule::reroute(std::int64_t, const Given& given, const CacheView& view, const Probabilities&, Rerouted& found) {
    found.dropped = 0;
    if (keeps(given, view)) return;
    found.ids.resize(static_cast<std::size_t>(given.tokens * given.top_k));
    found.weights.resize(found.ids.size());
    found.dropped = budget_top_k(given.ids, given.weights, given.tokens, given.top_k, view.here, view.experts, view.vacant,
                                 min_top_k_, renormalise_, found.ids.data(), found.weights.data());
}

void AdaptiveBeta::saw(const Share& share) {
    calls_.emplace_back(share.delta(), share.absent);
    if (calls_.size() > window_) calls_.pop_front();
}

// A call with delta >= beta loads its missing experts, another none. So a beta costs w times the mean of n over the remembered
// calls with delta >= beta. With bandwidth to spare beta is 0, and nothing is replaced.
double AdaptiveBeta::beta(double link_bytes_per_s) const {
    const double allowed = budget_s_ * link_bytes_per_s * static_cast<double>(calls_.size());
    std::map<double, std::int64_t, std::greater<>> missing_at;  // by delta
    for (const auto& [delta, missing] : calls_) missing_at[delta] += missing;
    double cost = 0.0, least = std::nextafter(1.0, 2.0);
    for (const auto& [delta, missing] : missing_at) {
        cost += static_cast<double>(missing * expert_bytes_);
        if (cost > allowed) return least;
        least = delta;
    }
    return 0.0;
}

MissRule::MissRule(std::int64_t experts, std::vector<Buddies> buddies, const Options& options, double beta,
                   std::vector<AdaptiveBeta> betas, Draw draw)
    : experts_(experts), buddies_(std::move(buddies)), options_(options), beta_(beta), betas_(std::move(betas)),
      draw_(std::move(draw)), full_(buddies_.size(), 0), wanted_(static_cast<std::size_t>(experts)), reach_(wanted_.size()) {
    if (!betas_.empty() && betas_.size() != buddies_.size()) throw std::invalid_argument("each layer has a beta");
    for (const Buddies& of : buddies_)
        if (const Fault fault = size_fault(problem(of, 1), true); !fault.empty()) throw std::invalid_argument(fault);
}

Substitution MissRule::problem(const Buddies& of, std::int64_t top_k) const {
    Substitution made{};
    made.buddies = of.ids, made.similarity = of.similarity, made.experts = experts_, made.ranks = of.ranks;
    made.top_k = top_k, made.log_top_k = std::log(static_cast<double>(top_k));
    made.rho = options_.rho.value_or(top_k), made.search = std::min(options_.search.value_or(of.ranks), of.ranks);
    made.tau = of.tau, made.gamma = options_.gamma, made.temperature = options_.temperature;
    made.eta = options_.eta, made.reuse = options_.reuse;
    made.drop = options_.drop, made.by_buddy = options_.by_buddy, made.renormalise = options_.renormalise;
    return made;
}

const float* MissRule::drawn(std::int64_t count) {
    if (static_cast<std::int64_t>(draws_.size() - next_) < count) {  // in the order in which they are drawn, however many at a time
        draws_.erase(draws_.begin(), draws_.begin() + static_cast<std::ptrdiff_t>(next_));
        next_ = 0;
        draw_(draws_, std::max(count, kDraws));
    }
    return draws_.data() + std::exchange(next_, next_ + static_cast<std::size_t>(count));
}

void MissRule::reroute(std::int64_t layer, const Given& given, const CacheView& view, const Probabilities& probabilities,
                       Rerouted& found) {
    found.substituted = found.dropped = 0;
    const std::int64_t pairs = given.tokens * given.top_k;
    if (view.emptied != emptied_) {  // nothing was resident since: all layers fill again
        emptied_ = view.emptied;
        std::fill(full_.begin(), full_.end(), std::uint8_t{0});
    }
    if (!full_[layer]) {
        full_[layer] = view.vacant == 0;
        if (view.vacant && !view.shard_of) return;
    }
    const bool missing = std::any_of(given.ids, given.ids + pairs, [&](std::int64_t expert) { return !view.here[expert]; });
    if (!missing && betas_.empty()) return;
    const auto fills = [&](std::int64_t shard) { return shard ? view.filling[shard] != 0 : !full_[layer]; };
    const double beta = betas_.empty() || !missing ? beta_ : betas_[layer].beta(link_bytes_per_s);
    const Fault fault = replaceable(given.ids, pairs, view.here, experts_, beta, view.shard_of, view.shards, shares_, wanted_.data());
    if (!fault.empty()) throw std::invalid_argument(fault);
    if (!betas_.empty())
        for (std::int64_t shard = 0; shard < view.shards; ++shard)
            if (!fills(shard)) betas_[layer].saw(shares_[shard]);
    if (!missing) return;
    bool some = false;
    for (std::int64_t e = 0; e < experts_; ++e) {
        const std::int64_t shard = view.shard_of ? view.shard_of[e] : 0;
        if (fills(shard)) wanted_[e] = 0;
        some |= wanted_[e] != 0;
        // hop of equation 3: 0 on the lead, where the rows are, else 1
        reach_[e] = view.here[e] ? static_cast<float>(shard ? std::max(1.0 - options_.kappa, 0.0) : 1.0) : 0.0f;
    }
    if (!some) return;
    found.ids.resize(static_cast<std::size_t>(pairs));
    found.weights.resize(found.ids.size());
    Substitution problem = this->problem(buddies_[layer], given.top_k);
    problem.ids = given.ids, problem.weights = given.weights, problem.tokens = given.tokens;
    problem.probabilities = draw_ ? drawn(given.tokens * experts_) : reads_probabilities() ? probabilities() : nullptr;
    problem.replace = wanted_.data(), problem.reach = reach_.data();
    problem.out_ids = found.ids.data(), problem.out_weights = found.weights.data();
    substitute(problem);
    found.substituted = problem.substituted, found.dropped = problem.dropped;
}

}  // namespace tiermoe::core
