#include "cpu_layer.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <utility>

#include "../../kernels/cpu/link.hpp"
#include "../../kernels/cpu/sizes.hpp"

namespace tiermoe::core {
namespace {

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

CpuLayer::CpuLayer(Core& core, const Place& place, const Shape& shape, const KernelTable& kernels, CpuLayers& all)
    : Layer(core, place, all), shape_(shape), kernels_(kernels), all_(all), step_{step, this} {
    all_.sums.resize(std::max(all_.sums.size(), static_cast<std::size_t>(kSumRows * shape.width)));
}

void CpuLayer::compute(const Given& given, const Routed& routed) {
    const auto size = static_cast<std::size_t>(given.tokens * routed.top_k * shape_.width);
    if (all_.y.size() < size) all_.y.resize(size);
    const auto timing = [this](auto&& compute) {
        const double wall_s = timed ? now_s() : 0.0, thread_s = timed ? cpu_s() : 0.0;
        compute();
        if (!timed) return;
        spent_.kernels_cpu_s += cpu_s() - thread_s;
        spent_.kernels_s += now_s() - wall_s;
    };
    for (const std::vector<Group>* groups = &next(); !groups->empty(); groups = &next())
        timing([&] {
            kernels_.expert_ffn(given.hidden, shape_.gate_up, shape_.down, order_.data(), groups->data(),
                                static_cast<std::int64_t>(groups->size()), routed.top_k, shape_.width, shape_.activation,
                                all_.y.data(), all_.sums.data());
        });
    timing([&] {
        kernels_.combine(all_.y.data(), routed.weights, given.tokens, routed.top_k, shape_.width, given.out);
    });
}

Stepped CpuLayer::step(void* self, const Given& given, Asking asking, Spent& spent) {
    CpuLayer& layer = *static_cast<CpuLayer*>(self);
    try {
        const Stepped how = layer.run(given, asking);
        spent = layer.spent();
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
    const std::int64_t experts = layer.place().experts;
    if (layer.kernels().misses_fit(given.ids, pairs, layer.states(), experts, vacant)) return true;
    ids.resize(static_cast<std::size_t>(pairs));
    weights.resize(ids.size());
    routed.dropped = layer.kernels().budget_top_k(given.ids, given.weights, given.tokens, given.top_k, layer.states(),
                                                  experts, vacant, min_top_k, renormalise, ids.data(), weights.data());
    if (routed.dropped) keep(given.tokens, ids, weights, routed);
    return true;
}

bool ReplaceMissing::apply(CpuLayer& layer, const Given& given, Routed& routed) {
    Core& core = layer.core();
    const std::int64_t pairs = given.tokens * given.top_k, experts = layer.place().experts, vacant = core.free_slots();
    const bool by_router = weight && !draws;
    read = 0;
    if (given.top_k != problem.top_k || (by_router && given.tokens > max_rows)) return false;
    if (draws && *next + given.tokens * experts > drawn) return false;
    if (*emptied != core.emptied()) {
        *emptied = core.emptied();
        std::fill_n(full, core.layout().layers, std::uint8_t{0});
    }
    if (!full[layer.place().index]) {
        full[layer.place().index] = vacant == 0;
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
    const std::int64_t experts = layer.place().experts, outputs = layers * experts;
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
    const std::int64_t experts = layer.place().experts, following = layer.place().index + 1;
    std::vector<float>& scores = layer.all().scores;
    scores.resize(static_cast<std::size_t>(given.tokens * experts));
    layer.kernels().router_scores(given.hidden, given.tokens, weight, layer.shape().width, experts, bias, 0, scores.data());
    layer.kernels().importance_saw(*state, layer.place().index, given.ids, given.tokens);
    const std::int64_t slots = layer.kernels().importance_target(*state, following, scores.data(), given.tokens,
                                                                 layer.states() + experts, threshold, most);
    core.vacate(slots, following);
}

}  // namespace tiermoe::core
