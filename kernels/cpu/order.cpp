#include "order.hpp"

#include <algorithm>
#include <numeric>

namespace tiermoe {

namespace {
constexpr double kRescaleAt = 0x1p512;  // `eviction.RESCALE_AT`
}

Order::Order(Kind kind, std::int64_t layers, std::int64_t experts, double least, double growth,
             const double* probabilities, Importance* importance)
    : kind_(kind), layers_(layers), experts_(experts), least_(least), growth_(growth), probabilities_(probabilities),
      importance_(importance), own_held_(importance ? 0 : layers * experts), own_stamps_(own_held_.size()),
      picked_(kind == Kind::sweep ? layers * experts : 0), held_(importance ? importance->resident : own_held_.data()),
      stamps_(importance ? importance->stamp : own_stamps_.data()),
      worth_(kind == Kind::worth ? std::make_unique<Worth>(layers, experts, held_, stamps_) : nullptr),
      freq_(counts() ? layers * experts : 0), credit_(freq_.size()),
      next_(importance || counts() || worth_ ? 0 : keys() + 1), previous_(next_.size()) {
    std::iota(next_.begin(), next_.end(), 0);
    std::iota(previous_.begin(), previous_.end(), 0);
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
    held_[key] = 1;
    stamps_[key] = ++clock_;
    join_last(key);
    if (!counts()) return;
    credit_[key] = std::max(0.0, unit_ - freq_[key]);
    freq_[key] += credit_[key];
}

void Order::removed(std::int64_t key) {
    if (worth_ && held_[key]) worth_->removed(key);
    held_[key] = 0;
    leave(key);
    if (!counts()) return;
    freq_[key] -= credit_[key];
    credit_[key] = 0.0;
}

void Order::used(const std::vector<std::int64_t>& keys) {
    for (std::int64_t key : keys) {
        stamps_[key] = ++clock_;
        if (held_[key]) join_last(key);
        if (!counts()) continue;
        freq_[key] += unit_ - credit_[key];
        credit_[key] = 0.0;
    }
    if (worth_) worth_->used(keys);
    unit_ *= growth_;
    if (unit_ <= kRescaleAt) return;
    for (auto* counts : {&freq_, &credit_})
        for (double& count : *counts) count /= unit_;
    unit_ = 1.0;
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

// A sweep evicts the layer whose next use is farthest away, and of a layer what was picked least.
double Order::value(std::int64_t key) const {
    if (kind_ == Kind::lfu) return freq_[key];
    if (kind_ == Kind::map) return probabilities_[key] * freq_[key];
    if (now_ < 0) return 0.0;
    const std::int64_t until = (key / experts_ - now_ - 1 + layers_) % layers_;  // layers in between
    return static_cast<double>(layers_ - until) * 0x1p32 + static_cast<double>(picked_[key]);
}

std::vector<std::int64_t> Order::first(std::int64_t count, const std::uint8_t* may) const {
    struct Entry {
        double value;
        std::int64_t stamp, key;
        bool operator<(const Entry& other) const {
            return value != other.value ? value < other.value : stamp < other.stamp;
        }
    };
    std::vector<std::int64_t> keys;
    if (count <= 0) return keys;
    if (worth_) return worth_->first(count, may);
    if (importance_) {
        const std::int64_t found = importance_lowest(*importance_, count, may);
        return {importance_->order.begin(), importance_->order.begin() + found};
    }
    if (by_use()) {
        const std::int64_t end = this->keys();
        for (std::int64_t key = next_[end]; key != end && static_cast<std::int64_t>(keys.size()) < count; key = next_[key])
            if (!may || may[key]) keys.push_back(key);
        return keys;
    }
    std::vector<Entry> found;  // a heap of the first so far, the last of them on top
    for (std::int64_t key = 0; key < this->keys(); ++key) {
        if (!held_[key] || (may && !may[key])) continue;
        const Entry entry{value(key), stamps_[key], key};
        if (static_cast<std::int64_t>(found.size()) < count) {
            found.push_back(entry);
            std::push_heap(found.begin(), found.end());
        } else if (entry < found.front()) {
            std::pop_heap(found.begin(), found.end());
            found.back() = entry;
            std::push_heap(found.begin(), found.end());
        }
    }
    std::sort_heap(found.begin(), found.end());
    for (const Entry& entry : found) keys.push_back(entry.key);
    return keys;
}

}  // namespace tiermoe
