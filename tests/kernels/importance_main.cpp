// Checks importance.cpp on random problems, with buffers of exactly their size; see test_sanitized.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "importance.hpp"

namespace {

std::mt19937 random_bits(7);

std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_bits() % static_cast<std::uint32_t>(n)); }

template <typename T>
std::unique_ptr<T[]> exact(std::size_t n) {  // no capacity behind its end
    return std::make_unique<T[]>(n);
}

int fail(const char* what) {
    std::printf("wrong: %s\n", what);
    return 1;
}

std::unique_ptr<std::int64_t[]> picks(std::int64_t tokens, std::int64_t top_k, std::int64_t experts) {
    auto ids = exact<std::int64_t>(static_cast<std::size_t>(tokens * top_k));
    std::vector<std::int64_t> all(static_cast<std::size_t>(experts));
    for (std::int64_t t = 0; t < tokens; ++t) {
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random_bits);
        std::copy(all.begin(), all.begin() + top_k, ids.get() + t * top_k);
    }
    return ids;
}

// Kept pairs are what was picked; no more experts are loaded than fit, or than every token's first ones.
int check_budget() {
    const std::int64_t experts = 1 + below(12), top_k = 1 + below(experts), tokens = 1 + below(5);
    const std::int64_t vacant = below(experts + 1), min_top_k = 1 + below(top_k + 1);
    const auto pairs = static_cast<std::size_t>(tokens * top_k);
    const auto ids = picks(tokens, top_k, experts);
    auto weights = exact<float>(pairs), scaled = exact<float>(pairs);
    auto present = exact<std::uint8_t>(static_cast<std::size_t>(experts));
    auto kept = exact<std::int64_t>(pairs);
    for (std::size_t i = 0; i < pairs; ++i) weights[i] = static_cast<float>(1 + below(4));
    for (std::int64_t e = 0; e < experts; ++e) present[e] = static_cast<std::uint8_t>(below(3));
    const bool fit = tiermoe::misses_fit(ids.get(), tokens * top_k, present.get(), experts, vacant);
    const std::int64_t dropped = tiermoe::budget_top_k(ids.get(), weights.get(), tokens, top_k, present.get(), experts,
                                                       vacant, min_top_k, true, kept.get(), scaled.get());
    if (fit && dropped) return fail("a routing that fits lost pairs");
    std::set<std::int64_t> loaded;
    std::int64_t zeros = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
        double before = 0.0, after = 0.0;
        for (std::int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
            before += weights[i];
            after += scaled[i];
            zeros += scaled[i] == 0.0f;
            if (scaled[i] != 0.0f && kept[i] != ids[i]) return fail("a kept pair has another expert");
            if (!present[kept[i]]) loaded.insert(kept[i]);
        }
        if (std::abs(before - after) > 1e-4 * before) return fail("a token's weights have another sum");
    }
    if (zeros != dropped) return fail("the number of dropped pairs");
    const auto most = std::max(vacant, tokens * std::min(min_top_k, top_k));
    return static_cast<std::int64_t>(loaded.size()) > most ? fail("more is loaded than fits") : 0;
}

int check_release(bool overrun) {
    const std::int64_t layers = 3, experts = 2 + below(10), window = 1 + below(4), top_k = 1 + below(experts);
    const auto keys = static_cast<std::size_t>(layers * experts);
    auto powers = exact<double>(static_cast<std::size_t>(2 * window)), values = exact<double>(keys);
    auto predicted = exact<double>(keys);
    auto picked = exact<std::int64_t>(static_cast<std::size_t>(layers * window * top_k)), stamp = exact<std::int64_t>(keys);
    auto seen = exact<std::int64_t>(static_cast<std::size_t>(layers));
    auto resident = exact<std::uint8_t>(keys), allowed = exact<std::uint8_t>(keys);
    for (std::int64_t i = 0; i < 2 * window; ++i) powers[i] = std::pow(0.9, static_cast<double>(i));
    tiermoe::Importance state{};
    state.layers = layers, state.experts = experts, state.window = window, state.top_k = top_k, state.alpha = 0.5;
    state.powers = powers.get(), state.values = values.get(), state.picked = picked.get(), state.seen = seen.get();
    state.predicted = predicted.get(), state.resident = resident.get(), state.stamp = stamp.get();
    for (int step = 0; step < 8; ++step) {
        for (std::size_t key = 0; key < keys; ++key) {
            resident[key] = static_cast<std::uint8_t>(below(2));
            allowed[key] = static_cast<std::uint8_t>(resident[key] && below(2));
            stamp[key] = below(50);
        }
        const std::int64_t tokens = 1 + below(6), layer = below(layers);
        tiermoe::importance_saw(state, layer, picks(tokens, top_k, experts).get(), tokens);
        auto logits = exact<float>(static_cast<std::size_t>(tokens * experts));
        for (std::int64_t i = 0; i < tokens * experts; ++i) logits[i] = static_cast<float>(below(9));
        const std::int64_t slots = tiermoe::importance_target(state, layer, logits.get(), tokens + overrun,
                                                              resident.get() + layer * experts, 0.02, below(4));
        if (slots > experts) return fail("a target of more slots than the layer has experts");
        const std::int64_t count = below(static_cast<std::int64_t>(keys) + 2);
        const std::int64_t found = tiermoe::importance_lowest(state, count, allowed.get());
        if (found > count) return fail("more victims than asked for");
        for (std::int64_t i = 0; i < found; ++i)
            if (!allowed[state.order[static_cast<std::size_t>(i)]]) return fail("a victim that may not leave");
    }
    return 0;
}

}  // namespace

int main(int count, char** args) {
    const bool overrun = count > 1 && std::strcmp(args[1], "overrun") == 0;
    for (int problem = 0; problem < 2000; ++problem)
        if (check_budget() || check_release(overrun)) return 1;
    std::printf("checked 2000 problems\n");
    return 0;
}
