#include "importance.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tiermoe {

void importance_saw(Importance& state, std::int64_t layer, const std::int64_t* ids, std::int64_t n) {
    const std::int64_t window = state.window, k = state.top_k, experts = state.experts;
    if (n > window) {
        ids += (n - window) * k;
        n = window;
    }
    if (n == 0) return;
    state.changed(layer);
    double* values = state.values + layer * experts;
    std::int64_t* ring = state.picked + layer * window * k;
    std::int64_t& seen = state.seen[layer];
    const std::int64_t counted = std::min(seen, window);
    if (n == window) {
        std::fill(values, values + experts, 0.0);
    } else {
        for (std::int64_t e = 0; e < experts; ++e) values[e] *= state.powers[n];
        const std::int64_t leaving = counted + n - window;
        for (std::int64_t i = 0; i < leaving; ++i) {
            const std::int64_t* gone = ring + (seen - counted + i) % window * k;
            for (std::int64_t j = 0; j < k; ++j) values[gone[j]] -= state.powers[counted + n - 1 - i];
        }
        if (leaving > 0)  // what rounding leaves of an expert that is out of the window
            for (std::int64_t e = 0; e < experts; ++e) values[e] = std::max(values[e], 0.0);
    }
    for (std::int64_t t = 0; t < n; ++t) {
        for (std::int64_t j = 0; j < k; ++j) values[ids[t * k + j]] += state.powers[n - 1 - t];
        std::copy(ids + t * k, ids + (t + 1) * k, ring + (seen + t) % window * k);
    }
    seen += n;
}

std::int64_t importance_target(Importance& state, std::int64_t layer, const float* logits, std::int64_t rows,
                               const std::uint8_t* held, double tau, std::int64_t most) {
    const std::int64_t experts = state.experts, top_k = std::min(state.top_k, experts);
    double* predicted = state.predicted + layer * experts;
    state.changed(layer);
    std::vector<double>& exponentials = state.exponentials;
    exponentials.resize(static_cast<std::size_t>(experts));
    state.order.resize(static_cast<std::size_t>(experts));
    state.named.assign(static_cast<std::size_t>(experts), 0);
    std::fill(predicted, predicted + experts, 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float* row = logits + r * experts;
        const double shift = *std::max_element(row, row + experts);
        double sum = 0.0;
        for (std::int64_t e = 0; e < experts; ++e) sum += exponentials[e] = std::exp(row[e] - shift);
        for (std::int64_t e = 0; e < experts; ++e) predicted[e] += exponentials[e] / sum;
        if (rows == 1) continue;
        std::iota(state.order.begin(), state.order.end(), 0);
        std::partial_sort(state.order.begin(), state.order.begin() + top_k, state.order.end(),
                          [row](auto a, auto b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
        for (std::int64_t j = 0; j < top_k; ++j) state.named[state.order[j]] = 1;
    }
    for (std::int64_t e = 0; e < experts; ++e) predicted[e] /= static_cast<double>(rows);
    const std::int64_t width =
        rows == 1 ? state.top_k : std::accumulate(state.named.begin(), state.named.end(), std::int64_t{0});
    std::iota(state.order.begin(), state.order.end(), 0);
    std::stable_sort(state.order.begin(), state.order.end(),
                     [predicted](auto a, auto b) { return predicted[a] > predicted[b]; });
    std::int64_t slots = width, absent = 0;
    for (std::int64_t i = 0; i < std::min(width, experts); ++i) slots -= held[state.order[i]] != 0;
    for (std::int64_t i = std::max<std::int64_t>(width, 1) - 1; i + 1 < std::min(width + most, experts); ++i)
        slots += predicted[state.order[i]] - predicted[state.order[i + 1]] < tau;
    for (std::int64_t e = 0; e < experts; ++e) absent += held[e] == 0;
    return std::min(slots, absent);
}

namespace {

constexpr double kHeadroom = 1.25;  // of a layer's sum until its residents take other places

// Alpha of the share in the use of the layer's residents, and 1 - alpha of what is predicted; falls as the sum rises.
double importance(const Importance& state, std::int64_t key, double sum) {
    const double hot = sum > 0 ? state.values[key] / sum : 0.0;
    const double found = state.alpha * hot + (1.0 - state.alpha) * state.predicted[key];
    return std::isnan(found) ? std::numeric_limits<double>::infinity() : found;  // last, as NumPy sorts it
}

// Adds to a sum as if it had twice the digits, so that what is left after a resident has gone is not rounding alone.
void add(Importance::Layer& layer, double value) {
    const double sum = layer.sum + value, part = sum - layer.sum;
    const double rest = layer.rest + ((layer.sum - (sum - part)) + (value - part));
    layer.sum = sum + rest;
    layer.rest = rest - (layer.sum - sum);
}

LazyHeap::Rank reach(const Importance& state, std::int64_t key) {
    const auto& layer = state.layers_now[state.layer_of(key)];
    // a sum of 0 makes all shares 0, below those of any other
    return {importance(state, key, layer.sum > 0 ? layer.most : 0.0), state.stamp[key]};
}

// Places a layer's residents.
void place(Importance& state, std::int64_t at) {
    auto& layer = state.layers_now[static_cast<std::size_t>(at)];
    const std::int64_t first = at * state.experts;
    layer = {true, 0.0, 0.0, 0.0};
    for (std::int64_t key = first; key < first + state.experts; ++key)
        if (state.resident[key]) add(layer, state.values[key]);
    layer.most = layer.sum * kHeadroom;
    for (std::int64_t key = first; key < first + state.experts; ++key)
        if (state.resident[key]) state.ranks.lower(key, reach(state, key));
}

}  // namespace

void Importance::admitted(std::int64_t key, bool before) {
    if (layers_now.empty()) return;
    auto& layer = layers_now[layer_of(key)];
    if (!layer.known || before) return;
    add(layer, values[key]);
    if (layer.sum > layer.most)
        changed(static_cast<std::int64_t>(layer_of(key)));
    else
        ranks.come(key);
}

void Importance::removed(std::int64_t key) {
    if (layers_now.empty()) return;
    ranks.remove(key);
    auto& layer = layers_now[layer_of(key)];
    if (!layer.known) return;
    add(layer, -values[key]);
    // of a far larger one that has gone, even twice the digits leave little
    if (layer.sum < layer.most * 0x1p-40) changed(static_cast<std::int64_t>(layer_of(key)));
}

std::int64_t importance_lowest(Importance& state, std::int64_t count, const std::uint8_t* allowed) {
    if (!state.follows || state.layers_now.empty()) {
        state.layers_now.assign(static_cast<std::size_t>(state.layers), {});
        state.ranks = LazyHeap(state.layers * state.experts);
        state.unknown.resize(state.layers_now.size());
        std::iota(state.unknown.begin(), state.unknown.end(), 0);
    }
    for (std::int64_t layer : state.unknown) place(state, layer);
    state.unknown.clear();
    state.ranks.first(
        count, allowed, [&state](std::int64_t key) { return reach(state, key); },
        [&state](std::int64_t key) {
            const auto& layer = state.layers_now[state.layer_of(key)];
            return LazyHeap::Rank{importance(state, key, layer.sum), state.stamp[key]};
        },
        state.order);
    return static_cast<std::int64_t>(state.order.size());
}

bool misses_fit(const std::int64_t* ids, std::int64_t pairs, const std::uint8_t* present, std::int64_t experts,
                std::int64_t vacant) {
    static thread_local std::vector<std::uint8_t> seen;
    seen.assign(present, present + experts);
    for (std::int64_t i = 0; i < pairs && vacant >= 0; ++i) {
        vacant -= !seen[ids[i]];
        seen[ids[i]] = 1;
    }
    return vacant >= 0;
}

namespace {

// k of each token (equations 18 to 21). order: of each token its places by falling weight [tokens, top_k].
void routing_widths(const std::int64_t* ids, const float* weights, std::int64_t tokens, std::int64_t top_k,
                    const std::int64_t* order, const std::uint8_t* present, std::int64_t experts, std::int64_t vacant,
                    std::int64_t min_top_k, std::vector<std::int64_t>& widths) {
    const auto at = [&](std::int64_t t, std::int64_t rank) { return t * top_k + order[t * top_k + rank]; };
    std::vector<std::uint8_t> granted(present, present + experts);  // of them the present ones take no slot
    std::int64_t taken = 0;
    const auto grant = [&](std::int64_t expert) {
        taken += !granted[expert];
        granted[expert] = 1;
    };
    widths.assign(static_cast<std::size_t>(tokens), top_k);
    for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t rank = 0; rank < min_top_k; ++rank) grant(ids[at(t, rank)]);
    std::vector<std::int64_t> turn(static_cast<std::size_t>(tokens));
    for (std::int64_t rank = min_top_k; rank < top_k; ++rank) {
        std::iota(turn.begin(), turn.end(), 0);
        std::stable_sort(turn.begin(), turn.end(),
                         [&](auto a, auto b) { return weights[at(a, rank)] > weights[at(b, rank)]; });
        for (std::int64_t t : turn) {
            const std::int64_t expert = ids[at(t, rank)];
            if (widths[t] < rank || granted[expert]) continue;
            if (taken < vacant)
                grant(expert);
            else
                widths[t] = rank;
        }
    }
}

}  // namespace

std::int64_t budget_top_k(const std::int64_t* ids, const float* weights, std::int64_t tokens, std::int64_t top_k,
                          const std::uint8_t* present, std::int64_t experts, std::int64_t vacant, std::int64_t min_top_k,
                          bool renormalise, std::int64_t* ids_out, float* weights_out) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(tokens * top_k)), widths;
    for (std::int64_t t = 0; t < tokens; ++t) {
        const auto row = order.begin() + t * top_k;
        std::iota(row, row + top_k, 0);
        const float* of = weights + t * top_k;
        std::stable_sort(row, row + top_k, [of](auto a, auto b) { return of[a] > of[b]; });
    }
    routing_widths(ids, weights, tokens, top_k, order.data(), present, experts, vacant, std::min(min_top_k, top_k),
                   widths);
    std::copy(ids, ids + tokens * top_k, ids_out);
    std::copy(weights, weights + tokens * top_k, weights_out);
    std::int64_t dropped = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
        if (widths[t] == top_k) continue;
        const std::int64_t* places = order.data() + t * top_k;
        std::int64_t* row_ids = ids_out + t * top_k;
        float* row = weights_out + t * top_k;
        double whole = 0.0, left = 0.0;
        for (std::int64_t rank = widths[t]; rank < top_k; ++rank, ++dropped) {
            row[places[rank]] = 0.0f;
            row_ids[places[rank]] = ids[t * top_k + places[0]];
        }
        for (std::int64_t j = 0; j < top_k; ++j) {
            whole += weights[t * top_k + j];
            left += row[j];
        }
        if (!renormalise || left == 0.0) continue;
        for (std::int64_t j = 0; j < top_k; ++j) row[j] = static_cast<float>(row[j] * (whole / left));
    }
    return dropped;
}

}  // namespace tiermoe
