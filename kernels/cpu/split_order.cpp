#include "split_order.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace tiermoe {

SplitOrder::SplitOrder(std::int64_t layers, std::int64_t experts, double rate, bool by_use)
    : experts_(experts), rate_(rate), by_use_(by_use), tokens_(layers), stamp_(layers), picked_(layers * experts),
      admitted_(layers * experts), value_(layers * experts, -std::numeric_limits<double>::infinity()),
      held_(layers * experts), present_(2 * layers * experts), next_(2 * layers * experts + 1),
      before_(2 * layers * experts + 1) {
    next_.back() = before_.back() = 2 * layers * experts;
}

void SplitOrder::routed(std::int64_t layer, const std::int64_t* keys, const std::int64_t* counts, std::int64_t count,
                        std::int64_t tokens) {
    if (by_use_) return;
    tokens_[layer] += tokens;
    // volatile: rounded before it is added, as in Python
    const volatile double age = static_cast<double>(tokens_[layer]) * rate_;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t key = keys[i];
        picked_[key] += counts[i];
        value_[key] = std::log(static_cast<double>(picked_[key])) + age;
        if (present_[key]) held_[key] = value_[key];
    }
}

void SplitOrder::admitted(std::int64_t key) {
    present_[key] = 1;
    if (key >= keys()) return link(key);
    if (by_use_) return touch(key);
    const std::int64_t layer = key / experts_;
    held_[key] = std::max(static_cast<double>(tokens_[layer]) * rate_, value_[key]);  // of one pick now
    admitted_[key] = ++stamp_[layer];
}

void SplitOrder::removed(std::int64_t key) {
    present_[key] = 0;
    if (key >= keys()) return unlink(key);
    if (by_use_) value_[key] = -std::numeric_limits<double>::infinity();
}

void SplitOrder::used(std::int64_t key) {
    if (key < keys()) {
        if (by_use_) touch(key);
        return;
    }
    unlink(key);
    link(key);
}

void SplitOrder::touch(std::int64_t key) { value_[key] = held_[key] = static_cast<double>(++stamp_[key / experts_]); }

void SplitOrder::sort(std::vector<std::int64_t>& keys, std::int64_t most) const {
    const auto before = [&](std::int64_t a, std::int64_t b) {
        return std::tie(held_[a], admitted_[a]) < std::tie(held_[b], admitted_[b]);
    };
    const auto count = std::min(keys.size(), static_cast<std::size_t>(most));
    std::partial_sort(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(count), keys.end(), before);
    keys.resize(count);
}

void SplitOrder::link(std::int64_t key) {
    const std::int64_t end = 2 * keys(), last = before_[end];
    next_[last] = before_[end] = key;
    before_[key] = last;
    next_[key] = end;
}

void SplitOrder::unlink(std::int64_t key) {
    next_[before_[key]] = next_[key];
    before_[next_[key]] = before_[key];
}

}  // namespace tiermoe
