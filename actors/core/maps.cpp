#include "maps.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tiermoe::core {
namespace {

typedef float Four __attribute__((vector_size(16)));
constexpr std::int64_t kLanes = 16;

float dot(const float* a, const float* b, std::int64_t count) {
    Four sums[4] = {};
    const auto add = [](Four& sum, const float* x, const float* y) {
        Four of_x, of_y;
        std::memcpy(&of_x, x, sizeof of_x);
        std::memcpy(&of_y, y, sizeof of_y);
        sum += of_x * of_y;
    };
    for (; count >= kLanes; count -= kLanes, a += kLanes, b += kLanes)
        for (int i = 0; i < 4; ++i) add(sums[i], a + 4 * i, b + 4 * i);
    Four* last = sums;
    for (; count >= 4; count -= 4, a += 4, b += 4) add(*last++, a, b);
    if (count) {
        float rest[2][4] = {};
        for (std::int64_t i = 0; i < count; ++i) rest[0][i] = a[i], rest[1][i] = b[i];
        add(*last, rest[0], rest[1]);
    }
    const Four sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

double squared(const float* of, std::int64_t count) {
    double sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(of[i]) * of[i];
    return sum;
}

// dot / (lengths of both) where both are above zero, else 0, as the dot product then is.
double cosine(double dot, double old_square, double new_square) {
    const double lengths = std::sqrt(old_square * new_square);
    return dot / (lengths > 0 ? lengths : 1.0);
}

void expect_finite(const float* of, std::int64_t count) {
    if (!std::all_of(of, of + count, [](float x) { return std::isfinite(x); }))
        throw std::invalid_argument("an entry has numbers that are not finite");
}

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

}  // namespace

std::int64_t MapStore::add(const float* embedding, const float* map, const double* redundancies) {
    expect_finite(embedding, width);
    expect_finite(map, layers * experts);
    std::int64_t row = count;
    if (count < capacity) {
        ++count;
    } else {
        std::vector<double> computed;
        if (!redundancies) {
            computed.resize(size(count));
            const double square = squared(map, layers * experts);
            for (std::int64_t y = 0; y < count; ++y) {
                double dots = 0, old = 0;
                for (std::int64_t l = 0; l < layers; ++l) {
                    dots += dot(layer(l) + y * experts, map + l * experts, experts);
                    old += squares[l * capacity + y];
                }
                computed[size(y)] = redundancy(dot(embeddings + y * width, embedding, width), cosine(dots, old, square));
            }
            redundancies = computed.data();
        }
        row = std::max_element(redundancies, redundancies + count) - redundancies;
    }
    std::copy(embedding, embedding + width, embeddings + row * width);
    for (std::int64_t l = 0; l < layers; ++l) {
        std::copy(map + l * experts, map + (l + 1) * experts, layer(l) + row * experts);
        squares[l * capacity + row] = squared(map + l * experts, experts);
    }
    ++generation;
    return row;
}

void MapStore::fill(std::int64_t entries) {
    for (std::int64_t l = 0; l < layers; ++l)
        for (std::int64_t y = 0; y < entries; ++y)
            squares[l * capacity + y] = squared(layer(l) + y * experts, experts);
    count = entries;
    ++generation;
}

MapSearch::MapSearch(MapStore& store, const float* embeddings, std::int64_t sequences)
    : store_(store), sequences_(sequences), generation_(store.generation), count_(store.count),
      embeddings_(embeddings, embeddings + sequences * store.width), semantic_(size(sequences * store.count)),
      maps_(size(sequences * store.layers * store.experts)), dots_(semantic_.size()), old_squares_(size(store.count)),
      new_squares_(size(sequences)), layers_(size(store.layers)) {
    for (std::int64_t y = 0; y < count_; ++y)
        for (std::int64_t s = 0; s < sequences; ++s)
            semantic_[size(s * count_ + y)] = dot(store.embeddings + y * store.width, embeddings + s * store.width, store.width);
}

void MapSearch::check_unchanged() const {
    if (store_.generation != generation_) throw std::invalid_argument("the store changed under the search");
}

void MapSearch::observe(std::int64_t layer, std::int64_t layers, const float* probabilities) {
    const std::int64_t experts = store_.experts;
    const auto seen = layers_.begin() + std::clamp<std::int64_t>(layer, 0, store_.layers);
    if (layer < 0 || layers > layers_.end() - seen || std::any_of(seen, seen + layers, [](std::uint8_t of) { return of != 0; }))
        throw std::invalid_argument("there is no layer " + std::to_string(layer) + ", or it was seen before");
    check_unchanged();
    for (std::int64_t at = 0; at < layers; ++at) {
        const std::int64_t l = layer + at;
        layers_[size(l)] = true;
        ++seen_;
        float* mine = maps_.data() + l * experts;  // of sequence 0; others are L * J further
        const std::int64_t stride = store_.layers * experts;
        for (std::int64_t s = 0; s < sequences_; ++s) {
            const float* row = probabilities + (s * layers + at) * experts;
            std::copy(row, row + experts, mine + s * stride);
            new_squares_[size(s)] += squared(row, experts);
        }
        const float* old = store_.layer(l);
        const double* squares = store_.squares + l * store_.capacity;
        for (std::int64_t y = 0; y < count_; ++y, old += experts) {
            old_squares_[size(y)] += squares[y];
            for (std::int64_t s = 0; s < sequences_; ++s)
                dots_[size(s * count_ + y)] += dot(old, mine + s * stride, experts);
        }
    }
}

double MapSearch::trajectory(std::int64_t s, std::int64_t entry) const {
    return cosine(dots_[size(s * count_ + entry)], old_squares_[size(entry)], new_squares_[size(s)]);
}

std::vector<double> MapSearch::scores() const {
    std::vector<double> found(dots_.size());
    for (std::int64_t s = 0; s < sequences_; ++s)
        for (std::int64_t y = 0; y < count_; ++y) found[size(s * count_ + y)] = trajectory(s, y);
    return found;
}

// fMoE equations 6 to 8: experts by falling probability, ties by number, until their sum exceeds delta = clip(1 - score, 0,
// 1) and at least K are taken; not dynamic: K. A row of zeros selects nothing.
void MapSearch::select(const float* probabilities, double score, std::int64_t top_k, bool dynamic) {
    const auto experts = static_cast<std::int32_t>(store_.experts);
    ranked_.clear();
    double total = 0;
    for (std::int32_t e = 0; e < experts; ++e) {
        ranked_.emplace_back(-probabilities[e], e);
        total += probabilities[e];
    }
    if (!(total > 0)) return;
    std::sort(ranked_.begin(), ranked_.end());
    const double delta = std::min(std::max(1.0 - score, 0.0), 1.0);
    double sum = 0;
    std::int64_t taken = 0;
    for (const auto& [negative, expert] : ranked_) {
        if (taken >= top_k && (!dynamic || sum > delta)) break;
        taken_[size(expert)] = true;
        sum -= negative;
        ++taken;
    }
}

bool MapSearch::match(bool semantic) {
    check_unchanged();
    entries_.clear();
    best_.clear();
    if (!count_ || (!semantic && !seen_)) return false;
    for (std::int64_t s = 0; s < sequences_; ++s) {
        const float* embedding = embeddings_.data() + s * store_.width;
        const auto zero = [](float x) { return x == 0; };
        if (semantic && std::all_of(embedding, embedding + store_.width, zero)) continue;  // unknown: 0 asks for everything
        std::vector<double> of(size(count_));
        for (std::int64_t y = 0; y < count_; ++y) of[size(y)] = semantic ? semantic_[size(s * count_ + y)] : trajectory(s, y);
        const auto best = std::max_element(of.begin(), of.end());
        entries_.push_back(best - of.begin());
        best_.push_back(*best);
    }
    return !entries_.empty();
}

bool MapSearch::forecast(bool semantic, std::int64_t first, std::int64_t stop, std::int64_t now, std::int64_t top_k,
                         bool dynamic, MapForecast& found) {
    if (now < 0 || now > first || first > stop || stop > store_.layers) throw std::invalid_argument("there are no such layers ahead");
    if (!match(semantic)) return false;
    const std::int64_t experts = store_.experts;
    std::vector<std::pair<float, std::int32_t>> wanted, others;  // negative priority, key
    for (std::int64_t l = first; l < stop; ++l) {
        taken_.assign(size(experts), false);
        highest_.clear();
        for (std::size_t s = 0; s < entries_.size(); ++s) {
            const float* of = store_.layer(l) + entries_[s] * experts;
            if (highest_.empty()) highest_.assign(of, of + experts);
            else
                for (std::int64_t e = 0; e < experts; ++e) highest_[size(e)] = std::max(highest_[size(e)], of[e]);
            select(of, best_[s], top_k, dynamic);
        }
        for (std::int64_t e = 0; e < experts; ++e) {
            const auto priority = static_cast<float>(static_cast<double>(highest_[size(e)]) / static_cast<double>(l + 1 - now));
            (taken_[size(e)] ? wanted : others).emplace_back(-priority, static_cast<std::int32_t>(l * experts + e));
        }
    }
    found.wanted = static_cast<std::int64_t>(wanted.size());
    for (auto* part : {&wanted, &others}) {
        std::sort(part->begin(), part->end());
        for (const auto& [negative, key] : *part) {
            found.keys.push_back(key);
            found.priorities.push_back(-negative);
        }
    }
    return true;
}

std::vector<std::int64_t> MapSearch::commit() {
    check_unchanged();
    if (!complete()) throw std::invalid_argument("a map with layers that were not seen is not stored");
    const std::int64_t length = store_.layers * store_.experts, width = store_.width;
    const std::int64_t after = std::min(store_.capacity, count_ + sequences_);
    const bool replaces = count_ + sequences_ >= store_.capacity;
    std::vector<double> redundancy(size(replaces ? sequences_ * after : 0));
    const auto embedding = [&](std::int64_t s) { return embeddings_.data() + s * width; };
    const auto map = [&](std::int64_t s) { return maps_.data() + s * length; };
    for (std::int64_t s = 0; replaces && s < sequences_; ++s)
        for (std::int64_t y = 0; y < count_; ++y)
            redundancy[size(s * after + y)] = store_.redundancy(semantic_[size(s * count_ + y)], trajectory(s, y));
    std::vector<std::int64_t> rows;
    for (std::int64_t s = 0; s < sequences_; ++s) {
        rows.push_back(store_.add(embedding(s), map(s), replaces ? redundancy.data() + s * after : nullptr));
        // later sequences are compared with this one's entry, too: equal ones share a row once the store is full
        for (std::int64_t later = s + 1; replaces && later < sequences_; ++later) {
            double dots = 0;
            for (std::int64_t l = 0; l < store_.layers; ++l)
                dots += dot(map(later) + l * store_.experts, map(s) + l * store_.experts, store_.experts);
            redundancy[size(later * after + rows.back())] = store_.redundancy(
                dot(embedding(later), embedding(s), width), cosine(dots, new_squares_[size(s)], new_squares_[size(later)]));
        }
    }
    return rows;
}

}  // namespace tiermoe::core
