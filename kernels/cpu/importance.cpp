#include "importance.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tiermoe {

void importance_saw(Importance& state, std::int64_t layer, const std::int64_t* ids, std::int64_t n) {
    const std::int64_t window = state.window, k = state.top_k, experts = state.experts;
    if (n > window) {
        ids += (n - window) * k;
        n = window;
    }
    if (n == 0) return;
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
    state.score.resize(static_cast<std::size_t>(experts));
    state.order.resize(static_cast<std::size_t>(experts));
    state.named.assign(static_cast<std::size_t>(experts), 0);
    std::fill(predicted, predicted + experts, 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float* row = logits + r * experts;
        const double shift = *std::max_element(row, row + experts);
        double sum = 0.0;
        for (std::int64_t e = 0; e < experts; ++e) sum += state.score[e] = std::exp(row[e] - shift);
        for (std::int64_t e = 0; e < experts; ++e) predicted[e] += state.score[e] / sum;
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

std::int64_t importance_lowest(Importance& state, std::int64_t count) {
    const std::int64_t experts = state.experts;
    state.score.resize(static_cast<std::size_t>(state.layers * experts));
    state.order.clear();
    for (std::int64_t first = 0; first < state.layers * experts; first += experts) {
        double sum = 0.0;
        const auto begin = state.order.size();
        for (std::int64_t key = first; key < first + experts; ++key)
            if (state.resident[key]) {
                sum += state.values[key];
                state.order.push_back(key);
            }
        for (auto i = begin; i < state.order.size(); ++i) {
            const std::int64_t key = state.order[i];
            const double hot = sum > 0 ? state.values[key] / sum : 0.0;
            state.score[key] = state.alpha * hot + (1.0 - state.alpha) * state.predicted[key];
        }
    }
    const auto found = std::min(count, static_cast<std::int64_t>(state.order.size()));
    const double* score = state.score.data();
    const std::int64_t* stamp = state.stamp;
    std::partial_sort(state.order.begin(), state.order.begin() + found, state.order.end(), [=](auto a, auto b) {
        return score[a] != score[b] ? score[a] < score[b] : stamp[a] != stamp[b] ? stamp[a] < stamp[b] : a < b;
    });
    return found;
}

}  // namespace tiermoe
