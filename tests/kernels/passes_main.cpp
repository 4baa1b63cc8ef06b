// Passes on a pool under AddressSanitizer: orders of eviction, loads and prefetches of whole experts, and whole passes of
// split ones, whose outputs are compared with those of the experts in host memory.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "dense.hpp"
#include "loads.hpp"
#include "split.hpp"

using namespace tiermoe;

namespace {

constexpr std::int64_t kLayers = 3, kExperts = 4, kNeurons = 6, kWidth = 16, kTop = 2, kKeys = kLayers * kExperts;

std::mt19937 random_bits(7);

std::vector<float> numbers(std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& value : out) value = normal(random_bits);
    return out;
}

std::vector<std::int64_t> some(std::int64_t of, std::int64_t count) {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < of; ++i) all.push_back(i);
    std::shuffle(all.begin(), all.end(), random_bits);
    all.resize(static_cast<std::size_t>(count));
    return all;
}

// A pool of some units, the experts of all layers in host memory, and the slots' state; each of exactly its size.
struct Memory {
    std::vector<std::vector<float>> gate_up, down;  // of each layer
    std::vector<float> pool_up, pool_down;
    std::vector<std::uint8_t> states, evictable;
    std::vector<std::int32_t> slot, pins, free;
    std::vector<std::int64_t> generation, counts;

    Memory(std::int64_t keys, const std::vector<std::int64_t>& slots, std::int64_t units)
        : pool_up(units * 2 * kWidth), pool_down(units * kWidth), states(keys), evictable(keys), slot(keys, -1), pins(keys),
          counts{0} {
        for (std::int64_t l = 0; l < kLayers; ++l) {
            gate_up.push_back(numbers(kExperts * kNeurons * 2 * kWidth));
            down.push_back(numbers(kExperts * kNeurons * kWidth));
        }
        for (std::int64_t count : slots) {
            for (std::int64_t i = 0; i < count; ++i) free.push_back(static_cast<std::int32_t>(free.size()));
            counts.push_back(count);
        }
        generation.resize(free.size());
    }
    SlotArrays arrays() {
        return {static_cast<std::int64_t>(states.size()), static_cast<std::int64_t>(free.size()), states.data(),
                evictable.data(), slot.data(), pins.data(), free.data(), generation.data(), counts.data()};
    }
    // units: neurons of a unit
    std::vector<ExpertPart> parts(std::int64_t units) {
        std::vector<ExpertPart> out;
        for (std::int64_t rows : {2, 1}) {
            const std::int64_t row = rows * kWidth * static_cast<std::int64_t>(sizeof(float));
            auto& pool = rows == 2 ? pool_up : pool_down;
            ExpertPart part{reinterpret_cast<char*>(pool.data()), units * row, kNeurons * row, units * row, units * row,
                            Piece::Kind::bytes, {}};
            for (auto& layer : rows == 2 ? gate_up : down) part.sources.push_back(reinterpret_cast<const char*>(layer.data()));
            out.push_back(part);
        }
        return out;
    }
};

int check_whole(Order::Kind kind) {
    constexpr std::int64_t kSlots = 7;
    Memory memory(kKeys, {kSlots}, kSlots * kNeurons);
    std::vector<std::int64_t> fields(kLayers * Counts::kFields), outcomes(256 * Counts::kOutcomes), uses(kKeys), governor(3);
    std::vector<std::uint8_t> pending(kKeys), vacant(kKeys);
    const Counts counts{kLayers, kExperts, fields.data(), outcomes.data(), uses.data(), pending.data(), vacant.data(),
                        governor.data(), 0.5, 16, 4};
    const bool important = kind == Order::Kind::importance;
    std::vector<double> predicted(kKeys, 0.5), used(kKeys, 0.25);
    std::vector<std::uint8_t> resident(kKeys);
    std::vector<std::int64_t> stamps(kKeys);
    Importance state{};
    state.layers = kLayers;
    state.experts = kExperts;
    state.alpha = 0.5;
    state.values = used.data();
    state.predicted = predicted.data();
    state.resident = resident.data();
    state.stamp = stamps.data();
    Order order(kind, kLayers, kExperts, 2, kind == Order::Kind::lfu ? 1e100 : 1.0, predicted.data(),
                important ? &state : nullptr);
    std::vector<std::int64_t> asked(kKeys);  // by prompts
    if (Worth* worth = order.worth()) worth->bind(kSlots / kLayers, predicted.data()), worth->note();
    Link link(0.0, 0.0);
    Loads loads(&link, memory.arrays(), kExperts, memory.parts(kNeurons), {}, &counts, &order);
    int wrong = 0;
    for (int step = 0; step < 400; ++step) {
        const std::int64_t layer = step % kLayers;
        std::vector<std::int64_t> keys = some(kExperts, kTop), needed(kExperts), missing;
        if (Worth* worth = order.worth()) {
            for (std::int64_t key : some(kKeys, 3)) predicted[key] = step % 7 ? 0.1 * static_cast<double>(key) : NAN, ++asked[key];
            worth->prompt(step % 3 ? asked.data() : nullptr);
            for (std::int64_t key : some(kKeys, 3)) worth->refuse(key);
            for (std::int64_t key : some(kKeys, 2)) worth->readmit(key);
            for (std::int64_t key : worth->settled()) wrong += !order.holds(key) || key / kExperts == (step + kLayers - 1) % kLayers;
            for (std::int64_t key : worth->refused()) wrong += !order.holds(key);
        }
        for (std::int64_t& key : keys) {
            needed[key] = 1;
            key += layer * kExperts;
        }
        loads.land_ended(layer);
        loads.drop_stale(layer, needed.data());
        order.routed(keys, {1, 2});
        for (std::int64_t key : keys)
            if (loads.state(key) == SlotState::absent)
                missing.push_back(key);
            else
                loads.pin(key);
        const std::int64_t lacking = static_cast<std::int64_t>(missing.size()) - loads.free_slots();
        const auto victims = loads.victims(lacking);
        if (static_cast<std::int64_t>(victims.size()) >= lacking) {
            loads.start(missing, victims, false);
            for (std::int64_t key : missing) loads.pin(key);
            if (counts.allows()) loads.prefetch(some(kKeys, 3), keys, 1);
            for (std::int64_t key : keys) {
                if (const Flight* flight = loads.flight(key)) {
                    const std::shared_ptr<Copy> copy = flight->copy;
                    loads.await(*copy);
                    loads.land(key, layer);
                }
                const std::int64_t row = kNeurons * kWidth;
                wrong += std::memcmp(memory.pool_down.data() + loads.slot(key) * row,
                                     memory.down[layer].data() + key % kExperts * row, row * sizeof(float)) != 0;
            }
            order.used(keys);
        }
        for (std::int64_t key : keys)
            if (loads.pinned(key)) loads.unpin(key);
    }
    if (Worth* worth = order.worth()) {
        for (const auto& layer : worth->take_noted()) wrong += layer.empty();
        wrong += order.first(kKeys, nullptr).size() != static_cast<std::size_t>(kSlots - loads.free_slots());
    }
    for (std::int64_t key = 0; key < kKeys; ++key) wrong += order.holds(key) != (loads.state(key) != SlotState::absent);
    return wrong + (outcomes[Counts::kOutcomes + Counts::queued] == 0);
}

float expected(const Memory& memory, std::int64_t key, const float* x, std::int64_t column) {
    const std::int64_t first = key % kExperts * kNeurons;
    const float *up = memory.gate_up[key / kExperts].data() + first * 2 * kWidth,
                *down = memory.down[key / kExperts].data() + first * kWidth;
    float sum = 0;
    for (std::int64_t j = 0; j < kNeurons; ++j) {
        float gate = 0, value = 0;
        for (std::int64_t h = 0; h < kWidth; ++h) {
            gate += x[h] * up[2 * j * kWidth + h];
            value += x[h] * up[(2 * j + 1) * kWidth + h];
        }
        sum += std::max(0.0f, gate) * value * down[j * kWidth + column];
    }
    return sum;
}

// tops: slots of a layer; bottoms: of all. Where they are few, segments take the slots of others that have run.
int check_split(std::int64_t tops, std::int64_t bottoms, bool overrun, bool by_use) {
    constexpr std::int64_t kHalf = kNeurons / 2;
    Memory memory(2 * kKeys, {tops, tops, tops, bottoms}, (kLayers * tops + bottoms) * kHalf);
    Layout layout;
    for (std::int64_t key = 0; key < 2 * kKeys; ++key) {
        layout.class_of.push_back(key < kKeys ? key / kExperts : kLayers);
        layout.begin.push_back(key < kKeys ? 0 : kHalf);
        layout.units.push_back(kHalf);
    }
    for (std::int64_t l = 0; l <= kLayers; ++l) layout.class_first.push_back(l * tops);
    for (std::int64_t s = 0; s < kLayers * tops + bottoms; ++s) layout.first.push_back(s * kHalf);
    Link link(0.0, 0.0);
    Loads loads(&link, memory.arrays(), kExperts, memory.parts(1), layout, nullptr, nullptr);
    SplitOrder order(kLayers, kExperts, 0.01, by_use);
    std::vector<std::uint8_t> marks(2 * kKeys);
    Split split(loads, order, marks.data());
    const std::vector<float> router = numbers(kExperts * kWidth - (overrun ? 1 : 0)), bias = numbers(kExperts);
    int wrong = 0, ran = 0;
    std::size_t turns = 0;
    for (int step = 0; step < 400; ++step) {
        SplitPass of{};
        of.index = step % kLayers;
        of.experts = kExperts;
        of.width = kWidth;
        of.max_rows = 8;
        of.gate_up = memory.pool_up.data();
        of.down = memory.pool_down.data();
        of.activation = Activation::relu;
        of.tokens = 1 + step % 2;
        of.top_k = kTop;
        of.probe = {router.data(), bias.data(), (of.index + 1) % kLayers, kTop, of.index % 2 == 0, 1};
        std::vector<std::int64_t> ids;
        for (std::int64_t t = 0; t < of.tokens; ++t)
            for (std::int64_t id : some(kExperts, kTop)) ids.push_back(id);
        const std::vector<float> hidden = numbers(of.tokens * kWidth), weights = numbers(of.tokens * kTop);
        std::vector<float> out(hidden.size());
        if (!sort_pairs(of, ids.data()) || !split.plan(of)) continue;
        ++ran;
        turns += of.turns.size();
        of.decode = true;
        split.begin(of);
        split.prefetch(of, hidden.data());
        wrong += !split.finish(of, hidden.data(), weights.data(), out.data(), now_s, [](const auto& work) { work(); });
        for (std::int64_t t = 0; t < of.tokens; ++t)
            for (std::int64_t h = 0; h < kWidth; ++h) {
                float sum = 0, size = 1;
                for (std::int64_t k = 0; k < kTop; ++k) {
                    const float term = weights[t * kTop + k] *
                                       expected(memory, of.key(ids[t * kTop + k]), hidden.data() + t * kWidth, h);
                    sum += term;
                    size += std::abs(term);
                }
                wrong += std::abs(sum - out[t * kWidth + h]) > 1e-4f * size;
            }
    }
    return wrong + (ran < 100) + (turns == 0) + (split.sources()[1].hits == 0);
}

}  // namespace

int main(int argc, char** argv) {
    const bool overrun = argc > 1 && !std::strcmp(argv[1], "overrun");
    int wrong = check_split(3, 7, overrun, false) + check_split(1, 2, false, false) + check_split(3, 7, false, true);
    for (Order::Kind kind : {Order::Kind::lru, Order::Kind::sweep, Order::Kind::lfu, Order::Kind::map,
                             Order::Kind::importance, Order::Kind::worth})
        wrong += check_whole(kind);
    std::printf("checked passes, %d wrong\n", wrong);
    return wrong != 0;
}
