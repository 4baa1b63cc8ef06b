#include "order.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tiermoe {

namespace {
constexpr double kRescaleAt = 0x1p512;
}

Order::Order(Kind kind, std::int64_t layers, std::int64_t experts, double least, double growth,
             const double* probabilities, const std::int64_t* told, Importance* importance, double rate)
    : kind_(kind), layers_(layers), experts_(experts), least_(least), growth_(growth), rate_(rate),
      probabilities_(probabilities), told_(told), ranks_(heaped() ? layers * experts : 0), known_(kind == Kind::map ? layers : 0),
      importance_(importance), own_held_(importance ? 0 : layers * experts), own_stamps_(heaped() ? 0 : own_held_.size()),
      picked_(kind == Kind::sweep || kind == Kind::lcp ? layers * experts : 0),
      priorities_(kind == Kind::lcp ? layers * experts : 0, -std::numeric_limits<double>::infinity()), held_(importance ? importance->resident : own_held_.data()),
      stamps_(importance ? importance->stamp : own_stamps_.data()),
      worth_(kind == Kind::worth ? std::make_unique<Worth>(layers, experts, held_, stamps_, next_) : nullptr),
      uses_(heaped() ? layers * experts : 0),
      next_(importance || heaped() ? 0 : keys() + (worth_ ? layers : 1)), previous_(next_.size()) {
    std::iota(next_.begin(), next_.end(), 0);
    std::iota(previous_.begin(), previous_.end(), 0);
    if (importance_) importance_->follows = true;
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
    const std::int64_t end = keys() + (worth_ ? key / experts_ : 0), last = previous_[end];
    next_[last] = previous_[end] = key;
    previous_[key] = last;
    next_[key] = end;
}

void Order::admitted(std::int64_t key) {
    const bool before = held_[key] != 0;
    held_[key] = 1;
    if (counts()) {
        Use& use = uses_[key];
        use.stamp = ++clock_;
        use.credit = std::max(0.0, unit_ - use.freq);
        use.freq += use.credit;
        ranks_.come(key);
        return;
    }
    if (kind_ == Kind::lcp) {
        uses_[key] = {std::max(static_cast<double>(tokens_) * rate_, priorities_[key]), 0.0, ++clock_};  // of one pick now
        ranks_.come(key);
        return;
    }
    if (worth_ && !before) worth_->admitted(key);
    stamps_[key] = ++clock_;
    if (importance_) importance_->admitted(key, before);
    join_last(key);
}

void Order::removed(std::int64_t key) {
    if (counts()) {
        ranks_.remove(key);
        uses_[key].freq -= uses_[key].credit;
        uses_[key].credit = 0.0;
    }
    if (kind_ == Kind::lcp) ranks_.remove(key);
    if (worth_ && held_[key]) worth_->removed(key);
    if (importance_ && held_[key]) importance_->removed(key);
    held_[key] = 0;
    leave(key);
}

void Order::used(const std::vector<std::int64_t>& keys) {
    if (kind_ == Kind::lcp) return;  // `routed` has told, also of what runs elsewhere
    if (!counts()) {
        for (std::int64_t key : keys) {
            stamps_[key] = ++clock_;
            if (held_[key]) join_last(key);
        }
        if (worth_) worth_->used(keys);
        return;
    }
    for (std::int64_t key : keys) {  // whose values rise
        Use& use = uses_[key];
        use.stamp = ++clock_;
        use.freq += unit_ - use.credit;
        use.credit = 0.0;
    }
    unit_ *= growth_;
    if (unit_ <= kRescaleAt) return;
    for (Use& use : uses_) {
        use.freq /= unit_;
        use.credit /= unit_;
    }
    unit_ = 1.0;
    ranks_.clear();
    for (std::int64_t key = 0; key < this->keys(); ++key)
        if (held_[key]) ranks_.come(key);
}

// All tokens of a forward are one moment, and a forward begins with a layer that does not follow the last one.
void Order::pick(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts, std::int64_t tokens) {
    if (keys.empty()) return;
    const std::int64_t layer = keys[0] / experts_;
    if (layer <= last_) before_ = tokens_;
    last_ = layer;
    tokens_ = std::max(tokens_, before_ + tokens);
    const volatile double age = static_cast<double>(tokens_) * rate_;  // volatile: rounded before it is added, as in Python
    for (std::size_t i = 0; i < keys.size(); ++i) {
        const std::int64_t key = keys[i];
        picked_[key] += counts[i];
        priorities_[key] = std::log(static_cast<double>(picked_[key])) + age;
        if (held_[key]) uses_[key].freq = priorities_[key];
    }
}

double Order::priority(std::int64_t key) const {
    switch (kind_) {
        case Kind::lru:
        case Kind::sweep: return held_[key] ? static_cast<double>(stamps_[key]) : -1.0;
        case Kind::lfu: return uses_[key].freq;
        case Kind::lcp: return priorities_[key];
        default: return 0.0;
    }
}

void Order::routed(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts, std::int64_t tokens) {
    if (kind_ == Kind::lcp) return pick(keys, counts, tokens);
    if (worth_ && !keys.empty()) worth_->routed(keys, counts);
    if (kind_ != Kind::sweep) return;
    now_ = -1;
    if (keys.empty() || static_cast<double>(keys.size()) < least_) return;
    now_ = keys[0] / experts_;
    std::fill_n(picked_.begin() + now_ * experts_, experts_, 0);
    for (std::size_t i = 0; i < keys.size(); ++i) picked_[keys[i]] = counts[i];
}

double Order::value(std::int64_t key) const {
    const double found = kind_ == Kind::map ? probabilities_[key] * uses_[key].freq : uses_[key].freq;
    return std::isnan(found) ? std::numeric_limits<double>::infinity() : found;
}

std::vector<std::int64_t> Order::ranked(std::int64_t count, const std::uint8_t* may) {
    for (std::size_t layer = 0; layer < known_.size(); ++layer) {
        if (known_[layer] == told_[layer]) continue;
        known_[layer] = told_[layer];
        const std::int64_t base = static_cast<std::int64_t>(layer) * experts_;
        for (std::int64_t key = base; key < base + experts_; ++key)
            if (held_[key]) ranks_.lower(key, rank(key));
    }
    const auto present = [&](std::int64_t key) { return rank(key); };
    std::vector<std::int64_t> found;
    ranks_.first(count, may, present, present, found);
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
    if (heaped()) return ranked(count, may);
    if (!by_use()) return swept(count, may);
    std::vector<std::int64_t> keys;
    const std::int64_t end = this->keys();
    for (std::int64_t key = next_[end]; key != end && static_cast<std::int64_t>(keys.size()) < count; key = next_[key])
        if (!may || may[key]) keys.push_back(key);
    return keys;
}

}  // namespace tiermoe
