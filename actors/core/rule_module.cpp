// Bindings of the rules of routing, and of ActiveEvict's state and pre-eviction.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "pre_eviction.hpp"
#include "rules.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

using bindings::Array;

using Ids = Array<const std::int64_t, 2>;  // [T, K]
using Floats = Array<const float, 2>;
using Flags = Array<const std::uint8_t>;

template <typename T, int Axes>
using Held = nb::ndarray<T, nb::ndim<Axes>, nb::c_contig, nb::device::cpu>;  // written and read in place

void check_experts(const Ids& ids, std::int64_t experts) {
    for (const std::int64_t id : ids)
        if (id < 0 || id >= experts) refuse("there is no such expert", id);
}

using Left = std::optional<std::tuple<Made<std::int64_t, 2>, Made<float, 2>, std::int64_t, std::int64_t>>;

Left reroute(Rule& rule, std::int64_t layer, const Ids& ids, const Floats& weights, const Floats& probabilities, const Flags& here,
             std::int64_t vacant, std::int64_t emptied, const Array<const std::int64_t>& shard_of, const Flags& filling) {
    const std::int64_t experts = here.size(), shards = shard_of ? filling.size() : 1;
    if (!rule.knows(layer, experts)) refuse("the rule is of other experts, or there is no such layer", layer);
    check_experts(ids, experts);
    if (weights.shape(0) != ids.shape(0) || weights.shape(1) != ids.shape(1)) refuse("weights are [T, K], not of tokens", weights.shape(0));
    if (probabilities && (probabilities.shape(0) != ids.shape(0) || probabilities.shape(1) != experts))
        refuse("probabilities are [T, E], not of tokens", probabilities.shape(0));
    if (rule.reads_probabilities() && !probabilities) throw std::invalid_argument("the rule needs the router's probabilities");
    if (shard_of && shard_of.size() != experts) refuse("each expert has a shard, not", shard_of.size());
    for (const std::int64_t shard : shard_of)
        if (shard < 0 || shard >= shards) refuse("there is no such shard", shard);
    const Given given{nullptr, ids.data(), weights.data(), ids.shape(0), ids.shape(1), nullptr};
    Rerouted found;
    rule.reroute(layer, given, {here.data(), experts, vacant, emptied, shard_of.data(), filling.data(), shards},
                 [&] { return probabilities.data(); }, found);
    if (!found.changed()) return std::nullopt;
    const auto tokens = static_cast<std::size_t>(ids.shape(0)), top_k = static_cast<std::size_t>(ids.shape(1));
    return std::tuple(owned<std::int64_t, 2>(std::move(found.ids), {tokens, top_k}),
                      owned<float, 2>(std::move(found.weights), {tokens, top_k}), found.substituted, found.dropped);
}

using BuddyArrays = std::vector<std::pair<Held<const std::int32_t, 2>, Held<const float, 2>>>;

// With the arrays of its lists.
struct HeldMissRule : MissRule {
    using MissRule::MissRule;
    BuddyArrays lists;
};

// rho, search, gamma, temperature, kappa, eta, reuse, drop, by_buddy, renormalise
using Options = std::tuple<std::optional<std::int64_t>, std::optional<std::int64_t>, std::optional<double>, double, double, float,
                           float, bool, bool, bool>;
using Adaptive = std::tuple<std::int64_t, double, std::int64_t>;  // expert_bytes, budget_s, window

void make_miss_rule(HeldMissRule* made, std::int64_t experts, BuddyArrays lists, const Options& given,
                    const std::optional<std::vector<double>>& taus, std::optional<double> beta,
                    const std::optional<Adaptive>& adaptive, nb::object draw) {
    constexpr double kNone = std::numeric_limits<double>::infinity();
    if (taus && taus->size() != lists.size()) refuse("each layer has a threshold, not", static_cast<std::int64_t>(taus->size()));
    std::vector<MissRule::Buddies> buddies;
    for (const auto& [ids, similarity] : lists) {
        const std::size_t rows = ids.shape(0), ranks = ids.shape(1);
        if (static_cast<std::int64_t>(rows) != experts || similarity.shape(0) != rows || similarity.shape(1) != ranks)
            refuse("buddies are [E, R], not of", static_cast<std::int64_t>(rows));
        for (std::size_t i = 0; i < ids.size(); ++i)
            if (ids.data()[i] < 0 || ids.data()[i] >= experts) refuse("there is no buddy", ids.data()[i]);
        buddies.push_back({ids.data(), similarity.data(), static_cast<std::int64_t>(ranks), taus ? (*taus)[buddies.size()] : -kNone});
    }
    MissRule::Options options;
    std::optional<double> gamma;
    std::tie(options.rho, options.search, gamma, options.temperature, options.kappa, options.eta, options.reuse, options.drop,
             options.by_buddy, options.renormalise) = given;
    options.gamma = gamma.value_or(kNone);
    std::vector<AdaptiveBeta> betas;
    if (adaptive) {
        const auto [expert_bytes, budget_s, window] = *adaptive;
        if (expert_bytes < 1 || !(budget_s >= 0) || window < 1) throw std::invalid_argument("experts have bytes, a budget is 0 s or more, and a window holds a call");
        betas.assign(lists.size(), AdaptiveBeta(expert_bytes, budget_s, static_cast<std::size_t>(window)));
    }
    MissRule::Draw drawing;
    if (!draw.is_none())
        drawing = [draw = std::move(draw)](std::vector<float>& drawn, std::int64_t count) {
            const nb::gil_scoped_acquire lock;
            const auto found = nb::cast<Held<const float, 1>>(draw(count));
            if (static_cast<std::int64_t>(found.size()) != count) refuse("other numbers were drawn than", count);
            drawn.insert(drawn.end(), found.data(), found.data() + count);
        };
    new (made) HeldMissRule(experts, std::move(buddies), options, beta.value_or(kNone), std::move(betas), std::move(drawing));
    made->lists = std::move(lists);
}

void make_importance(Importance* made, double alpha, const Held<const double, 1>& powers, const Held<double, 2>& values,
                     const Held<std::int64_t, 3>& picked, const Held<std::int64_t, 1>& seen, const Held<double, 2>& predicted,
                     const Held<std::uint8_t, 1>& resident, const Held<std::int64_t, 1>& stamp) {
    const std::size_t layers = values.shape(0), experts = values.shape(1), window = picked.shape(1), top_k = picked.shape(2);
    if (!layers || !experts || !window || !top_k || powers.size() != 2 * window || picked.shape(0) != layers || seen.size() != layers ||
        predicted.shape(0) != layers || predicted.shape(1) != experts || resident.size() != layers * experts || stamp.size() != layers * experts)
        refuse("the arrays are not of so many layers", static_cast<std::int64_t>(layers));
    new (made) Importance{};
    made->layers = static_cast<std::int64_t>(layers), made->experts = static_cast<std::int64_t>(experts);
    made->window = static_cast<std::int64_t>(window), made->top_k = static_cast<std::int64_t>(top_k), made->alpha = alpha;
    made->powers = powers.data(), made->values = values.data(), made->picked = picked.data(), made->seen = seen.data();
    made->predicted = predicted.data(), made->resident = resident.data(), made->stamp = stamp.data();
}

Logits logits(const PreEviction& of, const Floats& scores) {
    if (scores && scores.shape(1) != of.state().experts) refuse("a router has other experts", scores.shape(1));
    return {scores.data(), scores ? scores.shape(0) : 0};
}

std::int64_t release(PreEviction& of, std::int64_t layer, const Ids& ids, const Floats& own, const Floats& next, const Flags& states) {
    const Importance& state = of.state();
    if (layer < 0 || layer >= state.layers) refuse("there is no such layer", layer);
    if (ids.shape(1) != state.top_k) refuse("a token has other picks", ids.shape(1));
    check_experts(ids, state.experts);
    if (states.size() != state.layers * state.experts) refuse("states are of other experts", states.size());
    if (layer == 0) of.first(logits(of, own));
    return of.slots(layer, {nullptr, ids.data(), nullptr, ids.shape(0), ids.shape(1), nullptr}, logits(of, next), states.data());
}

}  // namespace

void bind_rules(nb::module_& m) {
    nb::class_<Rule>(m, "Rule", "Changes a layer's routing before it is planned (rules.hpp).")
        .def("keeps", [](const Rule& rule, const Ids& ids, const Flags& here, std::int64_t vacant) {
            check_experts(ids, here.size());
            return rule.keeps({nullptr, ids.data(), nullptr, ids.shape(0), ids.shape(1), nullptr}, {here.data(), here.size(), vacant, 0});
        }, "ids"_a, "here"_a, "vacant"_a, "Whether it is known without weights and probabilities that nothing changes.")
        .def("reroute", &reroute, "layer"_a, "ids"_a, "weights"_a, "probabilities"_a.none(), "here"_a, "vacant"_a, "emptied"_a,
             "shard_of"_a.none() = nb::none(), "filling"_a.none() = nb::none(),
             "ids and weights that run [T, K], pairs substituted and dropped; None: the routing stays. The arguments are those of\n"
             "`routing.Rerouting.reroute` and `routing.RerouteView`.\n\nRaises ValueError: an array has another layout, type or\n"
             "shape, an expert, layer or shard does not exist, or probabilities are missing.");
    nb::class_<BudgetRule, Rule>(m, "BudgetRule")
        .def("__init__", [](BudgetRule* made, std::int64_t min_top_k, bool renormalise) {
            if (min_top_k < 1) refuse("a token keeps an expert, not", min_top_k);
            new (made) BudgetRule(min_top_k, renormalise);
        }, "min_top_k"_a, "renormalise"_a);
    nb::class_<HeldMissRule, Rule>(m, "MissRule", R"(Algorithm 1 of BuddyMoE with its gates, of all layers.

buddies: of each layer ids int32 and similarity float32 [E, R]. options: rho, search, gamma, temperature, kappa, eta, reuse,
drop, by_buddy, renormalise. taus: of each layer. beta: None: no distribution gate. adaptive: bytes of an expert, seconds of
link and calls to remember, for betas that adapt in its place. draw: gives so many random numbers, float32, which stand for the
router's probabilities.)")
        .def("__init__", &make_miss_rule, "experts"_a, "buddies"_a, "options"_a, "taus"_a.none(), "beta"_a.none(), "adaptive"_a.none(),
             "draw"_a.none())
        .def_rw("link_bytes_per_s", &HeldMissRule::link_bytes_per_s, "As measured, for betas that adapt.");
    nb::class_<Importance>(m, "Importance", R"(The state of ActiveEvict's eviction, on arrays that are read and written in place.

powers: of gamma [2 T]. values, predicted: u and p-hat [L, E]. picked, seen: the tokens of each layer [L, T, K], and how many there
were [L]. resident, stamp: [L * E].)")
        .def("__init__", &make_importance, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
             nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), "alpha"_a, "powers"_a.noconvert(),
             "values"_a.noconvert(), "picked"_a.noconvert(), "seen"_a.noconvert(), "predicted"_a.noconvert(), "resident"_a.noconvert(),
             "stamp"_a.noconvert());
    nb::class_<PreEviction>(m, "PreEviction", "The release target of ActiveEvict, of all layers (pre_eviction.hpp).")
        .def("__init__", [](PreEviction* made, Importance& state, double threshold, std::int64_t most) {
            if (most < 0) refuse("a redundancy is 0 or more, not", most);
            new (made) PreEviction(state, threshold, most);
        }, nb::keep_alive<1, 2>(), "state"_a, "threshold"_a, "most"_a)
        .def("begin_forward", &PreEviction::begin_forward, "last_rows"_a, "last_rows: of each sequence; empty: unknown.")
        .def("slots", &release, "layer"_a, "ids"_a, "own"_a.none(), "next"_a.none(), "states"_a,
             "Slots that should be free for the layer behind this one.\n\nids: [T, K] as picked. own, next: logits of the first layer's\n"
             "router, at that one, and of the next one's, but at the last [T, E]; None: unknown. states: of all experts [L * E].\n\n"
             "Raises ValueError: no such layer or expert, or arrays of other shapes.");
}

}  // namespace tiermoe::core
