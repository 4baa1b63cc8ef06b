#include "order.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

namespace tiermoe {

namespace {
constexpr double kRescaleAt = 0x1p512;  // `eviction.RESCALE_AT`
}

Order::Order(Kind kind, std::int64_t layers, std::int64_t experts, double least, double growth,
             const double* probabilities, const std::int64_t* told, Importance* importance)
    : kind_(kind), layers_(layers), experts_(experts), least_(least), growth_(growth), probabilities_(probabilities),
      told_(told), ranks_(kind == Kind::lfu ? 1 : kind == Kind::map ? layers : 0),
      placed_(ranks_.empty() ? 0 : layers * experts), known_(kind == Kind::map ? layers : 0), importance_(importance), own_held_(importance ? 0 : layers * experts), own_stamps_(own_held_.size()),
      picked_(kind == Kind::sweep ? layers * experts : 0), held_(importance ? importance->resident : own_held_.data()),
      stamps_(importance ? importance->stamp : own_stamps_.data()),
      worth_(kind == Kind::worth ? std::make_unique<Worth>(layers, experts, held_, stamps_) : nullptr),
      freq_(counts() ? layers * experts : 0), credit_(freq_.size()),
      next_(importance || counts() || worth_ ? 0 : keys() + 1), previous_(next_.size()) {
    std::iota(next_.begin(), next_.end(), 0);
    std::iota(previous_.begin(), previous_.end(), 0);
    if (importance_) importance_->follows = true;
}

void Order::place(std::int64_t key) {
    placed_[key] = value(key);
    ranks_[ranks_.size() > 1 ? key / experts_ : 0].insert({placed_[key], stamps_[key], key});
}

void Order::unplace(std::int64_t key) {
    ranks_[ranks_.size() > 1 ? key / experts_ : 0].erase({placed_[key], stamps_[key], key});
}

void Order::place_all(std::int64_t rank) {
    ranks_[rank].clear();
    const std::int64_t size = keys() / static_cast<std::int64_t>(ranks_.size());
    for (std::int64_t key = rank * size; key < (rank + 1) * size; ++key)
        if (held_[key]) place(key);
}

void Order::leave(std::int64_t key) {
    if (next_.empty()) return;
    next_[previous_[key]] = next_[key];
    previous_[next_[key]] = previous_[key];
    next_[key] = previous_[key] = key;
}

void Order::join_last(std::int64_t key) {
    if (next_.empty()) return;
    leave(key);
    const std::int64_t end = keys(), last = previous_[end];
    next_[last] = previous_[end] = key;
    previous_[key] = last;
    next_[key] = end;
}

void Order::admitted(std::int64_t key) {
    if (worth_ && !held_[key]) worth_->admitted(key);
    if (importance_) importance_->changed(key / experts_);
    if (counts() && held_[key]) unplace(key);
    held_[key] = 1;
    stamps_[key] = ++clock_;
    join_last(key);
    if (!counts()) return;
    credit_[key] = std::max(0.0, unit_ - freq_[key]);
    freq_[key] += credit_[key];
    place(key);
}

void Order::removed(std::int64_t key) {
    if (worth_ && held_[key]) worth_->removed(key);
    if (importance_) importance_->changed(key / experts_);
    if (counts() && held_[key]) unplace(key);
    held_[key] = 0;
    leave(key);
    if (!counts()) return;
    freq_[key] -= credit_[key];
    credit_[key] = 0.0;
}

void Order::used(const std::vector<std::int64_t>& keys) {
    for (std::int64_t key : keys) {
        if (importance_) importance_->changed(key / experts_);
        if (counts() && held_[key]) unplace(key);
        stamps_[key] = ++clock_;
        if (held_[key]) join_last(key);
        if (!counts()) continue;
        freq_[key] += unit_ - credit_[key];
        credit_[key] = 0.0;
        if (held_[key]) place(key);
    }
    if (worth_) worth_->used(keys);
    unit_ *= growth_;
    if (unit_ <= kRescaleAt) return;
    for (auto* counts : {&freq_, &credit_})
        for (double& count : *counts) count /= unit_;
    unit_ = 1.0;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) place_all(static_cast<std::int64_t>(rank));
}

void Order::routed(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts) {
    if (worth_ && !keys.empty()) worth_->routed(keys, counts);
    if (kind_ != Kind::sweep) return;
    now_ = -1;
    if (keys.empty() || static_cast<double>(keys.size()) < least_) return;
    now_ = keys[0] / experts_;
    std::fill_n(picked_.begin() + now_ * experts_, experts_, 0);
    for (std::size_t i = 0; i < keys.size(); ++i) picked_[keys[i]] = counts[i];
}

double Order::value(std::int64_t key) const {
    const double found = kind_ == Kind::map ? probabilities_[key] * freq_[key] : freq_[key];
    return std::isnan(found) ? std::numeric_limits<double>::infinity() : found;
}

std::vector<std::int64_t> Order::ranked(std::int64_t count, const std::uint8_t* may) {
    for (std::size_t layer = 0; layer < known_.size(); ++layer)
        if (known_[layer] != told_[layer]) {
            known_[layer] = told_[layer];
            place_all(static_cast<std::int64_t>(layer));
        }
    using At = std::pair<Rank::const_iterator, const Rank*>;
    const auto later = [](const At& a, const At& b) { return *b.first < *a.first; };
    std::vector<At> heads;  // a heap, the first of all on top
    const auto add = [&](Rank::const_iterator at, const Rank* rank) {
        while (at != rank->end() && may && !may[at->key]) ++at;
        if (at != rank->end()) heads.push_back({at, rank});
        return at != rank->end();
    };
    for (const Rank& rank : ranks_) add(rank.begin(), &rank);
    std::make_heap(heads.begin(), heads.end(), later);
    std::vector<std::int64_t> found;
    while (!heads.empty() && static_cast<std::int64_t>(found.size()) < count) {
        std::pop_heap(heads.begin(), heads.end(), later);
        const auto [at, rank] = heads.back();
        heads.pop_back();
        found.push_back(at->key);
        if (add(std::next(at), rank)) std::push_heap(heads.begin(), heads.end(), later);
    }
    return found;
}

// A sweep evicts the layer whose next use is farthest away, and of a layer what was picked least.
std::vector<std::int64_t> Order::swept(std::int64_t count, const std::uint8_t* may) const {
    std::vector<std::int64_t> found;
    for (std::int64_t i = 0; i < layers_ && static_cast<std::int64_t>(found.size()) < count; ++i) {
        const std::int64_t base = (now_ - i + layers_) % layers_ * experts_;  // the layer at work is next used last of all
        const auto begun = static_cast<std::ptrdiff_t>(found.size());
        for (std::int64_t key = base; key < base + experts_; ++key)
            if (held_[key] && (!may || may[key])) found.push_back(key);
        std::sort(found.begin() + begun, found.end(), [&](std::int64_t a, std::int64_t b) {
            return picked_[a] != picked_[b] ? picked_[a] < picked_[b] : stamps_[a] < stamps_[b];
        });
    }
    found.resize(std::min(found.size(), static_cast<std::size_t>(count)));
    return found;
}

std::vector<std::int64_t> Order::first(std::int64_t count, const std::uint8_t* may) {
    if (count <= 0) return {};
    if (worth_) return worth_->first(count, may);
    if (importance_) {
        const std::int64_t found = importance_lowest(*importance_, count, may);
        return {importance_->order.begin(), importance_->order.begin() + found};
    }
    if (counts()) return ranked(count, may);
    if (!by_use()) return swept(count, may);
    std::vector<std::int64_t> keys;
    const std::int64_t end = this->keys();
    for (std::int64_t key = next_[end]; key != end && static_cast<std::int64_t>(keys.size()) < count; key = next_[key])
        if (!may || may[key]) keys.push_back(key);
    return keys;
}

}  // namespace tiermoe
