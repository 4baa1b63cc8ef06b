// The rules that change a layer's routing before it is planned: `engine.rerouting.Rerouter` of a pass in one native call.
#include <algorithm>
#include <vector>

#include "dense.hpp"
#include "importance.hpp"
#include "layer.hpp"

namespace tiermoe {
namespace {

// The pass runs what was kept, without the columns in which nothing runs (`LayerView.reroute`).
void keep(Layer& of) {
    const std::int64_t tokens = of.tokens, top_k = of.top_k;
    of.ids = of.kept_ids.data();
    of.weights = of.kept_weights.data();
    if (!of.dropped) return;
    std::vector<std::int64_t> columns;
    for (std::int64_t k = 0; k < top_k; ++k) {
        bool used = false;
        for (std::int64_t t = 0; t < tokens; ++t) used |= of.kept_weights[t * top_k + k] != 0.0f;
        if (used) columns.push_back(k);
    }
    const auto left = static_cast<std::int64_t>(columns.size());
    if (!left || left == top_k) return;
    for (std::int64_t t = 0, at = 0; t < tokens; ++t)
        for (std::int64_t k : columns) {
            of.kept_ids[at] = of.kept_ids[t * top_k + k];
            of.kept_weights[at++] = of.kept_weights[t * top_k + k];
        }
    of.top_k = left;
}

// Drops the pairs whose experts do not fit.
void drop_unfit(Layer& of) {
    Loads& loads = *of.loads;
    const std::int64_t tokens = of.tokens, top_k = of.top_k, vacant = loads.free_slots();
    if (misses_fit(of.picked, tokens * top_k, of.states, of.experts, vacant)) return;
    of.kept_ids.resize(static_cast<std::size_t>(tokens * top_k));
    of.kept_weights.resize(of.kept_ids.size());
    of.dropped = budget_top_k(of.picked, of.weights, tokens, top_k, of.states, of.experts, vacant, of.budget.narrowest,
                              of.budget.renormalise, of.kept_ids.data(), of.kept_weights.data());
    if (of.dropped) keep(of);
}

// Replaces missing experts; false: the pass is not for native code, and nothing has changed.
bool replace_missing(Layer& of) {
    Replace& rule = *of.replace;
    Substitution& problem = rule.problem;
    const std::int64_t pairs = of.tokens * of.top_k, vacant = of.loads->free_slots();
    const bool by_router = rule.weight && !rule.draws;
    if (of.top_k != problem.top_k || (by_router && of.tokens > rule.max_rows)) return false;
    if (rule.draws && *rule.next + of.tokens * of.experts > rule.drawn) return false;
    if (*rule.emptied != of.loads->emptied()) {
        *rule.emptied = of.loads->emptied();
        std::fill_n(rule.full, of.counters->layers, std::uint8_t{0});
    }
    if (!rule.full[of.index]) {
        rule.full[of.index] = vacant == 0;
        if (vacant) return true;
    }
    const auto missing = [&](std::int64_t expert) { return of.state(expert) == SlotState::absent; };
    if (std::none_of(of.picked, of.picked + pairs, missing)) return true;
    rule.here.resize(static_cast<std::size_t>(of.experts));
    rule.wanted.resize(rule.here.size());
    rule.reach.resize(rule.here.size());
    for (std::int64_t e = 0; e < of.experts; ++e) rule.reach[e] = rule.here[e] = !missing(e);
    replaceable(of.picked, pairs, rule.here.data(), of.experts, rule.beta, nullptr, 1, rule.wanted.data());
    if (std::none_of(rule.wanted.begin(), rule.wanted.end(), [](std::uint8_t one) { return one != 0; })) return true;
    if (by_router) {
        rule.probabilities.resize(static_cast<std::size_t>(of.tokens * of.experts));
        router_scores(of.hidden, of.tokens, rule.weight, of.width, of.experts, rule.bias, of.experts,
                      rule.probabilities.data());
    }
    rule.read = rule.draws ? of.tokens * of.experts : 0;
    of.kept_ids.resize(static_cast<std::size_t>(pairs));
    of.kept_weights.resize(of.kept_ids.size());
    problem.ids = of.picked;
    problem.weights = of.weights;
    problem.probabilities = by_router ? rule.probabilities.data() : rule.draws ? rule.draws + *rule.next : nullptr;
    problem.replace = rule.wanted.data();
    problem.reach = rule.reach.data();
    problem.tokens = of.tokens;
    problem.out_ids = of.kept_ids.data();
    problem.out_weights = of.kept_weights.data();
    problem.substituted = problem.dropped = 0;
    substitute(problem);
    of.substituted = problem.substituted;
    of.dropped = problem.dropped;
    if (of.substituted || of.dropped) keep(of);
    return true;
}

}  // namespace

bool reroute(Layer& of) {
    if (of.budget.narrowest > 0) drop_unfit(of);
    if (!of.replace) return true;
    of.replace->read = 0;
    return replace_missing(of);
}

}  // namespace tiermoe
