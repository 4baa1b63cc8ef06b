#include "cpu_layer.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <utility>

#include "../../kernels/cpu/link.hpp"
#include "../../kernels/cpu/sizes.hpp"

namespace tiermoe::core {
namespace {

constexpr std::int64_t kMaxPairs = 1 << 12;

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

CpuLayer::CpuLayer(Core& core, const Shape& shape, const KernelTable& kernels, CpuLayers& all)
    : core_(core), shape_(shape), kernels_(kernels), all_(all), step_{step, this},
      picked_(shape.experts), place_(static_cast<std::size_t>(shape.experts)), begun_(place_.size()) {
    if (shape.index < 0 || shape.index >= core.layout().layers || shape.experts != core.layout().experts)
        throw std::invalid_argument("there is no such layer");
    if (core.layout().split == core.layout().first_unit.empty()) throw std::invalid_argument("segments have places in the pool");
    all_.experts = shape.experts;
    all_.sums.resize(std::max(all_.sums.size(), static_cast<std::size_t>(kSumRows * shape.width)));
}

// Pairs by expert. False: an expert has too many rows.
bool CpuLayer::sort_pairs(std::int64_t tokens, const Routed& routed) {
    const std::int64_t pairs = tokens * routed.top_k;
    const std::int64_t* ids = routed.ids;
    if (!picked_.sort(ids, tokens, pairs, shape_.max_rows, key(0))) return false;
    starts_.assign(1, 0);
    for (std::size_t i = 0; i < picked_.experts.size(); ++i) {
        place_[picked_.experts[i]] = static_cast<std::int64_t>(i);
        starts_.push_back(starts_.back() + picked_.counts[i]);
    }
    next_.assign(starts_.begin(), starts_.end() - 1);
    order_.resize(static_cast<std::size_t>(pairs));
    for (std::int64_t p = 0; p < pairs; ++p) order_[next_[place_[ids[p]]]++] = p;
    return true;
}

// The groups of a stretch of the plan.
void CpuLayer::group(std::int64_t first, std::int64_t stop) {
    const Layout& layout = core_.layout();
    all_.groups.clear();
    for (std::int64_t i = first; i < stop; ++i) {
        const Segment s = core_.present().run[i];
        const std::int64_t expert = s % layout.keys() - key(0), at = place_[expert];
        const Slot slot = core_.slots()[s];
        const std::int64_t units = layout.split ? layout.units[s] : shape_.neurons;
        const std::int64_t unit = layout.first_unit.empty() ? slot * shape_.neurons : layout.first_unit[slot];
        all_.groups.push_back({starts_[at], starts_[at + 1], unit, units, std::exchange(begun_[expert], std::uint8_t{1}) != 0});
    }
}

// Residents, arrivals as they land, waves; then the sum.
void CpuLayer::compute(const Given& given, const Routed& routed) {
    const auto size = static_cast<std::size_t>(given.tokens * routed.top_k * shape_.width);
    if (all_.y.size() < size) all_.y.resize(size);
    std::fill(begun_.begin(), begun_.end(), std::uint8_t{0});
    const auto all = static_cast<std::int64_t>(core_.present().run.size());
    for (std::int64_t stop = 0; stop < all;) {
        const auto stretch = core_.next();
        stop = stretch.second;
        group(stretch.first, stop);
        const double wall_s = timed ? now_s() : 0.0, thread_s = timed ? cpu_s() : 0.0;
        kernels_.expert_ffn(given.hidden, shape_.gate_up, shape_.down, order_.data(), all_.groups.data(),
                            static_cast<std::int64_t>(all_.groups.size()), routed.top_k, shape_.width, shape_.activation,
                            all_.y.data(), all_.sums.data());
        if (stop == all)
            kernels_.combine(all_.y.data(), routed.weights, given.tokens, routed.top_k, shape_.width, given.out);
        if (!timed) continue;
        spent_.kernels_cpu_s += cpu_s() - thread_s;
        spent_.kernels_s += now_s() - wall_s;
    }
    core_.next();  // all has run
}

Stepped CpuLayer::run(const Given& given, Asking asking) {
    const std::int64_t tokens = given.tokens;
    if (tokens < 1 || given.top_k < 1 || !product_fits({tokens, given.top_k}, kMaxPairs)) return Stepped::left;
    picked_.expect(given.ids, tokens * given.top_k);
    core_.arrive(shape_.index);
    Routed routed{given.ids, given.weights, given.top_k};
    if (rule_ && !rule_->apply(*this, given, routed)) return Stepped::left;
    if (!sort_pairs(tokens, routed)) return Stepped::left;
    if (rule_) rule_->done();
    const double& blocked_s = core_.counts()[shape_.index].blocked_io_s;
    const double began_s = all_.records ? core_.link().now_s() : 0.0, waited_s = blocked_s;
    spent_ = Spent{};
    best_.clear();
    try {
        core_.plan(core_.open(shape_.index, picked_.keys, picked_.counts, tokens, {}), {});
        core_.begin();
        core_.load();
        if (ahead_ && asking != Asking::hooks && ahead_->takes(*this, given)) {
            ahead_->run(*this, given, asking == Asking::always, best_);
        } else if (hooks_) {
            hooks_(given);
        }
        compute(given, routed);
        core_.close();
    } catch (...) {
        core_.abandon();
        throw;
    }
    core_.rerouted(routed.substituted, routed.dropped);
    spent_.waited_s = blocked_s - waited_s;
    if (all_.records) {
        Passed& passed = all_.add();
        passed.layer = shape_.index;
        passed.tokens = tokens;
        passed.keys.assign(picked_.keys.begin(), picked_.keys.end());
        passed.counts.assign(picked_.counts.begin(), picked_.counts.end());
        passed.began_s = began_s;
        passed.ended_s = core_.link().now_s();
        passed.waited_s = spent_.waited_s;
        passed.scores.assign(best_.begin(), best_.end());
    }
    return Stepped::ran;
}

Stepped CpuLayer::step(void* self, const Given& given, Asking asking, Spent& spent) {
    CpuLayer& layer = *static_cast<CpuLayer*>(self);
    try {
        const Stepped how = layer.run(given, asking);
        spent = layer.spent_;
        return how;
    } catch (const abi::__forced_unwind&) {  // the thread ends: nobody may stop it
        throw;
    } catch (...) {
        layer.failure_ = std::current_exception();
        return Stepped::failed;
    }
}

bool DropUnfit::apply(CpuLayer& layer, const Given& given, Routed& routed) {
    const std::int64_t pairs = given.tokens * given.top_k, vacant = layer.core().free_slots();
    const std::int64_t experts = layer.shape().experts;
    if (layer.kernels().misses_fit(given.ids, pairs, layer.states(), experts, vacant)) return true;
    ids.resize(static_cast<std::size_t>(pairs));
    weights.resize(ids.size());
    routed.dropped = layer.kernels().budget_top_k(given.ids, given.weights, given.tokens, given.top_k, layer.states(),
                                                  experts, vacant, narrowest, renormalise, ids.data(), weights.data());
    if (routed.dropped) keep(given.tokens, ids, weights, routed);
    return true;
}

bool ReplaceMissing::apply(CpuLayer& layer, const Given& given, Routed& routed) {
    Core& core = layer.core();
    const std::int64_t pairs = given.tokens * given.top_k, experts = layer.shape().experts, vacant = core.free_slots();
    const bool by_router = weight && !draws;
    read = 0;
    if (given.top_k != problem.top_k || (by_router && given.tokens > max_rows)) return false;
    if (draws && *next + given.tokens * experts > drawn) return false;
    if (*emptied != core.emptied()) {
        *emptied = core.emptied();
        std::fill_n(full, core.layout().layers, std::uint8_t{0});
    }
    if (!full[layer.shape().index]) {
        full[layer.shape().index] = vacant == 0;
        if (vacant) return true;
    }
    const std::uint8_t* states = layer.states();
    const auto missing = [&](std::int64_t expert) { return states[expert] == 0; };
    if (std::none_of(given.ids, given.ids + pairs, missing)) return true;
    here.resize(static_cast<std::size_t>(experts));
    wanted.resize(here.size());
    reach.resize(here.size());
    for (std::int64_t e = 0; e < experts; ++e) reach[e] = here[e] = !missing(e);
    layer.kernels().replaceable(given.ids, pairs, here.data(), experts, beta, nullptr, 1, wanted.data());
    if (std::none_of(wanted.begin(), wanted.end(), [](std::uint8_t one) { return one != 0; })) return true;
    if (by_router) {
        probabilities.resize(static_cast<std::size_t>(given.tokens * experts));
        layer.kernels().router_scores(given.hidden, given.tokens, weight, layer.shape().width, experts, bias, experts,
                                      probabilities.data());
    }
    read = draws ? given.tokens * experts : 0;
    ids.resize(static_cast<std::size_t>(pairs));
    weights.resize(ids.size());
    problem.ids = given.ids;
    problem.weights = given.weights;
    problem.probabilities = by_router ? probabilities.data() : draws ? draws + *next : nullptr;
    problem.replace = wanted.data();
    problem.reach = reach.data();
    problem.tokens = given.tokens;
    problem.out_ids = ids.data();
    problem.out_weights = weights.data();
    problem.substituted = problem.dropped = 0;
    layer.kernels().substitute(problem);
    routed.substituted = problem.substituted;
    routed.dropped = problem.dropped;
    if (routed.substituted || routed.dropped) keep(given.tokens, ids, weights, routed);
    return true;
}

void AskRouters::run(CpuLayer& layer, const Given& given, bool always, std::vector<double>& best) {
    Core& core = layer.core();
    const std::int64_t experts = layer.shape().experts, outputs = layers * experts;
    const bool allowed = core.governor().allows();
    if (!layers || (!allowed && !always)) return;
    if (!always && core.there(first * experts, first * experts + outputs)) return;
    std::vector<float>& scores = layer.all().scores;
    scores.resize(static_cast<std::size_t>(given.tokens * outputs));
    layer.kernels().router_scores(given.hidden, given.tokens, weight, layer.shape().width, outputs, bias,
                                  prefetch.by_votes ? 0 : experts, scores.data());
    const auto read = [&](std::int64_t at, std::int64_t t, std::vector<double>& row) {
        const float* from = scores.data() + t * outputs + at * experts;
        row.assign(from, from + experts);
    };
    prefetch.run(core, first, layers, given.tokens, allowed, read, &best);
}

void ReleaseSlots::run(CpuLayer& layer, const Given& given, bool, std::vector<double>&) {
    Core& core = layer.core();
    const std::int64_t experts = layer.shape().experts, following = layer.shape().index + 1;
    std::vector<float>& scores = layer.all().scores;
    scores.resize(static_cast<std::size_t>(given.tokens * experts));
    layer.kernels().router_scores(given.hidden, given.tokens, weight, layer.shape().width, experts, bias, 0, scores.data());
    layer.kernels().importance_saw(*state, layer.shape().index, given.ids, given.tokens);
    const std::int64_t slots = layer.kernels().importance_target(*state, following, scores.data(), given.tokens,
                                                                 layer.states() + experts, threshold, most);
    core.vacate(slots, following);
}

}  // namespace tiermoe::core
