// Passes of the core's CPU executor on a pool, with a copying thread: whole experts with each order of eviction, split
// ones, rules, prefetch by routers and slots that are freed ahead. Outputs are compared with those of the experts in host
// memory, and the core's invariants are checked.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../../actors/core/cpu_layer.hpp"
#include "../../actors/core/orders.hpp"
#include "../../actors/core/pre_eviction.hpp"
#include "../../actors/core/rules.hpp"
#include "../../actors/core/thread_link.hpp"

using namespace tiermoe;
using core::Segments;

namespace {

constexpr std::int64_t kLayers = 3, kExperts = 4, kNeurons = 6, kWidth = 16, kTop = 2, kKeys = kLayers * kExperts;

const KernelTable kernels{combine_f32, router_scores};
std::mt19937 random_bits(7);

std::vector<float> numbers(std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& value : out) value = normal(random_bits);
    return out;
}

Segments some(std::int64_t of, std::int64_t count) {
    Segments all;
    for (std::int64_t i = 0; i < of; ++i) all.push_back(i);
    std::shuffle(all.begin(), all.end(), random_bits);
    all.resize(static_cast<std::size_t>(count));
    return all;
}

// The experts of all layers in host memory, and a pool; each of exactly its size.
struct Memory {
    std::vector<std::vector<float>> gate_up, down;  // of each layer
    std::vector<float> pool_up, pool_down;

    explicit Memory(std::int64_t neurons) : pool_up(neurons * 2 * kWidth), pool_down(neurons * kWidth) {
        for (std::int64_t l = 0; l < kLayers; ++l) {
            gate_up.push_back(numbers(kExperts * kNeurons * 2 * kWidth));
            down.push_back(numbers(kExperts * kNeurons * kWidth));
        }
    }
    // positions: of each slot, in units of so many neurons. cut: neurons of tops; kNeurons: experts are whole.
    void place(core::ThreadLink& link, const std::vector<std::int64_t>& positions, std::int64_t unit, std::int64_t cut) {
        core::Places places;
        places.homes = {{{reinterpret_cast<char*>(pool_up.data()), unit * 2 * kWidth * 4},
                         {reinterpret_cast<char*>(pool_down.data()), unit * kWidth * 4}}};
        const std::int64_t segments = (cut < kNeurons ? 2 : 1) * kKeys;
        places.home_of.assign(segments, 0);
        places.position = positions;
        places.tensors = 2;
        for (std::int64_t s = 0; s < segments; ++s) {
            const std::int64_t key = s % kKeys, begin = key % kExperts * kNeurons + (s < kKeys ? 0 : cut);
            const std::int64_t count = s < kKeys ? cut : kNeurons - cut;
            for (std::int64_t rows : {2, 1}) {
                const auto& from = rows == 2 ? gate_up[key / kExperts] : down[key / kExperts];
                places.sources.push_back({reinterpret_cast<const char*>(from.data() + begin * rows * kWidth),
                                          count * rows * kWidth * 4, false});
            }
        }
        link.place(std::move(places));
    }
    float expected(std::int64_t key, const float* x, std::int64_t column) const {
        const std::int64_t first = key % kExperts * kNeurons;
        const float *up = gate_up[key / kExperts].data() + first * 2 * kWidth,
                    *into = down[key / kExperts].data() + first * kWidth;
        float sum = 0;
        for (std::int64_t j = 0; j < kNeurons; ++j) {
            float gate = 0, value = 0;
            for (std::int64_t h = 0; h < kWidth; ++h) {
                gate += x[h] * up[2 * j * kWidth + h];
                value += x[h] * up[(2 * j + 1) * kWidth + h];
            }
            sum += std::max(0.0f, gate) * value * into[j * kWidth + column];
        }
        return sum;
    }
};

// The pool, as the executor runs it.
struct Pool : Experts {
    explicit Pool(const Memory& memory) : memory(memory) { width = kWidth, neurons = kNeurons, max_rows = 8; }
    void run(const float* hidden, const std::int64_t* pairs, const Group* groups, std::int64_t group_count, std::int64_t top_k,
             float* y, float* sums) const override {
        expert_ffn_f32(hidden, memory.pool_up.data(), memory.pool_down.data(), pairs, groups, group_count, top_k, kWidth,
                       Activation::relu, y, sums);
    }
    const Memory& memory;
};

enum class Rule { none, drop, replace };

// What looks ahead in passes that the native prefetch does not take.
struct Counting : core::LayerAhead {
    explicit Counting(std::int64_t& calls) : calls(calls) {}
    void run(core::Layer&, const LayerInput&, std::vector<double>&) override { ++calls; }
    std::int64_t& calls;
};

// Runs 300 passes; the number of what is wrong. exact: nothing changes the routing.
int check(core::Core& made, Memory& memory, bool exact, bool overrun, Rule rule, Importance* state) {
    core::CpuLayers all;
    all.records = true;
    const std::vector<float> router = numbers(kLayers * kExperts * kWidth - (overrun ? 1 : 0)), bias = numbers(kKeys);
    const Pool pool(memory);
    std::vector<std::unique_ptr<core::CpuLayer>> layers;
    std::vector<std::int32_t> buddies;
    const std::vector<float> similarity(kExperts * kExperts, 0.5f);
    for (std::int64_t e = 0; e < kExperts; ++e)
        for (std::int64_t r = 0; r < kExperts; ++r) buddies.push_back(static_cast<std::int32_t>((e + r) % kExperts));
    std::int64_t calls = 0;
    const auto pre_eviction = state ? std::make_shared<core::PreEviction>(*state, 0.6, kTop) : nullptr;
    std::shared_ptr<core::Rule> changes;
    if (rule == Rule::drop) changes = std::make_shared<core::BudgetRule>(1, true);
    if (rule == Rule::replace) {
        core::MissRule::Options options;
        options.eta = 0.5f, options.drop = true;
        const std::vector<core::MissRule::Buddies> lists(kLayers, {buddies.data(), similarity.data(), kExperts});
        changes = std::make_shared<core::MissRule>(kExperts, lists, options, std::numeric_limits<double>::infinity(),
                                                   std::vector<core::AdaptiveBeta>{}, nullptr);
    }
    const auto announced = std::make_shared<core::Announced>();
    for (std::int64_t l = 0; l < kLayers; ++l) {
        layers.push_back(std::make_unique<core::CpuLayer>(made, l, kExperts, pool, kernels, all));
        const std::int64_t first = (l + 1) % kLayers, count = l + 1 < kLayers ? kLayers - 1 - l : 1;
        const auto router_of = [&](std::int64_t layer, std::int64_t layers_of, const float* biases, std::int64_t soft) {
            return layers[l]->add({router.data() + layer * kExperts * kWidth, biases, layers_of * kExperts, soft});
        };
        if (state) {
            auto ahead = std::make_unique<core::ReleaseSlots>();
            if (!l) ahead->own = router_of(0, 1, nullptr, 0);
            if (first) ahead->router = router_of(first, 1, nullptr, 0);
            ahead->of = pre_eviction;
            layers[l]->ahead(std::move(ahead));
        } else {
            auto ahead = std::make_unique<core::AskRouters>();
            ahead->router = router_of(first, count, bias.data() + first * kExperts, l % 2 ? kExperts : 0);
            ahead->first = first, ahead->layers = count, ahead->reach = {{first * kExperts, (first + count) * kExperts}};
            ahead->prefetch = {l % 2 == 0, kTop, 1, {}, {}};
            ahead->of = announced, ahead->wraps = true;
            layers[l]->ahead(std::move(ahead));
        }
        layers[l]->ahead(std::make_unique<Counting>(calls));
        const core::Router own = rule == Rule::replace ? router_of(l, 1, nullptr, kExperts) : core::kNoRouter;
        if (changes) layers[l]->rule(std::make_unique<core::NativeRule>(changes, own));
    }
    int wrong = 0;
    std::int64_t passed = 0;
    for (int step = 0; step < 300; ++step) {
        const std::int64_t l = step % kLayers, tokens = 1 + step % 2;
        made.decode_only = step % 2;
        std::vector<std::int64_t> ids;
        for (std::int64_t t = 0; t < tokens; ++t)
            for (std::int64_t id : some(kExperts, kTop)) ids.push_back(id);
        const std::vector<float> hidden = numbers(tokens * kWidth), weights = numbers(tokens * kTop);
        std::vector<float> out(hidden.size());
        const LayerInput given{hidden.data(), ids.data(), weights.data(), tokens, kTop, out.data()};
        Spent spent;
        const LayerStep& run = layers[l]->step();
        announced->rows = step % 3 ? tokens : 0, announced->last_rows = true, announced->always = step % 3 == 2;
        wrong += !run.run(run.self, given, spent);
        if (const std::string fault = made.check(); !fault.empty()) std::printf("%s\n", fault.c_str()), ++wrong;
        for (std::int64_t t = 0; exact && t < tokens; ++t)
            for (std::int64_t h = 0; h < kWidth; ++h) {
                float sum = 0, size = 1;
                for (std::int64_t k = 0; k < kTop; ++k) {
                    const float term = weights[t * kTop + k] *
                                       memory.expected(l * kExperts + ids[t * kTop + k], hidden.data() + t * kWidth, h);
                    sum += term;
                    size += std::abs(term);
                }
                wrong += std::abs(sum - out[t * kWidth + h]) > 1e-4f * size;
            }
        if (step % 30 == 29) all.take([&](const core::Passed& p) { passed += p.keys.size() == p.counts.size(); });
    }
    std::vector<std::int64_t> ids(kTop, kExperts);  // none of the layer's
    std::vector<float> row(kWidth), weight(kTop);
    Spent spent;
    const LayerStep& run = layers[0]->step();
    wrong += run.run(run.self, {row.data(), ids.data(), weight.data(), 1, kTop, row.data()}, spent);
    wrong += layers[0]->failure() == nullptr;
    made.link().close();
    std::int64_t forwards = 0;
    for (const core::LayerCounts& c : made.counts()) forwards += c.forwards;
    return wrong + (passed != 300) + (forwards != 300) + (calls == (state ? 0 : 100) ? 0 : 1);
}

int check_whole(Order::Kind kind, bool overrun, Rule rule = Rule::none) {
    constexpr std::int64_t kSlots = 7, kWindow = 4;
    Memory memory(kSlots * kNeurons);
    auto link = std::make_shared<core::ThreadLink>(0.0, 0.0);
    std::vector<std::int64_t> positions;
    for (std::int64_t s = 0; s < kSlots; ++s) positions.push_back(s);
    memory.place(*link, positions, kNeurons, kNeurons);
    const bool important = kind == Order::Kind::importance;
    std::vector<double> predicted(kKeys, 0.5), used(kKeys, 0.25), powers(2 * kWindow, 0.5);
    std::vector<std::uint8_t> resident(kKeys);
    std::vector<std::int64_t> stamps(kKeys), picked(kLayers * kWindow * kTop), seen(kLayers), told(kLayers);
    Importance state{};
    state.layers = kLayers, state.experts = kExperts, state.window = kWindow, state.top_k = kTop, state.alpha = 0.5;
    state.powers = powers.data(), state.values = used.data(), state.picked = picked.data(), state.seen = seen.data();
    state.predicted = predicted.data(), state.resident = resident.data(), state.stamp = stamps.data();
    const auto order = std::make_shared<core::WholeOrder>(kind, kLayers, kExperts, 2, kind == Order::Kind::lfu ? 1e100 : 1.0,
                                                          predicted.data(), told.data(), important ? &state : nullptr);
    if (Worth* worth = order->of.worth()) worth->bind(kSlots / kLayers, predicted.data()), worth->note();
    core::Layout layout;
    layout.layers = kLayers, layout.experts = kExperts, layout.slots = {kSlots};
    layout.bytes.assign(kKeys, kNeurons * 3 * kWidth * 4);
    core::Core made(layout, link, order, core::Governor{0.2, 16, 4}, kind == Order::Kind::lru);
    int wrong = check(made, memory, rule == Rule::none, overrun, rule, important ? &state : nullptr);
    for (std::int64_t key = 0; key < kKeys; ++key) wrong += order->of.holds(key) != (made.state(key) != core::State::absent);
    return wrong;
}

// Tops of each layer by priority or by last use, and bottoms by last use.
std::shared_ptr<core::Order> split_order(std::int64_t layers, std::int64_t experts, bool by_use) {
    using Kind = tiermoe::Order::Kind;
    std::vector<std::shared_ptr<core::Order>> members;
    for (std::int64_t layer = 0; layer < layers; ++layer)
        members.push_back(std::make_shared<core::WholeOrder>(by_use ? Kind::lru : Kind::lcp, std::int64_t{1}, experts, 0.0, 1.0,
                                                        nullptr, nullptr, nullptr, 0.01));
    members.push_back(std::make_shared<core::WholeOrder>(Kind::lru, layers, experts, 0.0, 1.0));
    return std::make_shared<core::ByClass>(layers, experts, true, members);
}

// tops: slots of a layer; bottoms: of all. Where they are few, segments take the slots of others that have run.
int check_split(std::int64_t tops, std::int64_t bottoms, bool by_use) {
    constexpr std::int64_t kCut = 2;
    Memory memory(kLayers * tops * kCut + bottoms * (kNeurons - kCut));
    auto link = std::make_shared<core::ThreadLink>(0.0, 0.0);
    core::Layout layout;
    layout.layers = kLayers, layout.experts = kExperts, layout.parts = 2, layout.split = true;
    layout.slots.assign(kLayers, tops);
    layout.slots.push_back(bottoms);
    for (std::int64_t s = 0; s < 2 * kKeys; ++s) {
        layout.class_of.push_back(s < kKeys ? s / kExperts : kLayers);
        layout.units.push_back(s < kKeys ? kCut : kNeurons - kCut);
        layout.bytes.push_back(layout.units.back() * 3 * kWidth * 4);
    }
    for (std::int64_t s = 0, unit = 0; s < kLayers * tops + bottoms; ++s) {
        layout.first_unit.push_back(unit);
        unit += s < kLayers * tops ? kCut : kNeurons - kCut;
    }
    memory.place(*link, layout.first_unit, 1, kCut);
    core::Core made(layout, link, split_order(kLayers, kExperts, by_use), core::Governor{}, false);
    int wrong = check(made, memory, true, false, Rule::none, nullptr);
    std::int64_t waves = 0;
    for (const core::LayerCounts& c : made.counts()) waves += c.waves - c.forwards;
    return wrong + (bottoms < kTop && waves == 0) + (made.sources()[1].hits == 0);
}

}  // namespace

int main(int argc, char** argv) {
    const bool overrun = argc > 1 && !std::strcmp(argv[1], "overrun");
    int wrong = check_split(3, 7, false) + check_split(1, 1, false) + check_split(3, 7, true);
    for (Order::Kind kind : {Order::Kind::lru, Order::Kind::sweep, Order::Kind::lfu, Order::Kind::map,
                             Order::Kind::importance, Order::Kind::worth})
        wrong += check_whole(kind, overrun);
    for (Rule rule : {Rule::drop, Rule::replace}) wrong += check_whole(Order::Kind::lru, false, rule);
    std::printf("checked passes, %d wrong\n", wrong);
    return wrong != 0;
}
