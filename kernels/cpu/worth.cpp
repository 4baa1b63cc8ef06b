#include "worth.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

namespace tiermoe {

Worth::Worth(std::int64_t layers, std::int64_t experts, const std::uint8_t* held, const std::int64_t* stamps)
    : layers_(layers), experts_(experts), held_(held), stamps_(stamps), count_(static_cast<std::size_t>(layers)),
      is_refused_(static_cast<std::size_t>(layers * experts)), noted_(static_cast<std::size_t>(layers)) {}

void Worth::admitted(std::int64_t key) { ++count_[key / experts_]; }

void Worth::removed(std::int64_t key) {
    --count_[key / experts_];
    readmit(key);
}

void Worth::used(const std::vector<std::int64_t>& keys) {
    if (noting_)
        for (std::int64_t key : keys) noted_[key / experts_].push_back(static_cast<std::int32_t>(key % experts_));
}

void Worth::routed(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts) {
    now_ = keys[0] / experts_;
    if (noting_ && uses_)
        for (std::size_t i = 0; i < keys.size(); ++i) uses_[keys[i]] += counts[i];
}

void Worth::refuse(std::int64_t key) {
    if (!held_[key] || is_refused_[key]) return;
    is_refused_[key] = 1;
    refused_.push_back(key);
}

void Worth::readmit(std::int64_t key) {
    if (!is_refused_[key]) return;
    is_refused_[key] = 0;
    refused_.erase(std::find(refused_.begin(), refused_.end(), key));
}

void Worth::note() {
    for (auto& layer : noted_) layer.clear();
    noting_ = true;
}

std::vector<std::vector<std::int32_t>> Worth::take_noted() {
    noting_ = false;
    return std::exchange(noted_, std::vector<std::vector<std::int32_t>>(static_cast<std::size_t>(layers_)));
}

void Worth::rank(std::int64_t layer, std::vector<std::int64_t>& keys, std::int64_t count) const {
    const std::int64_t base = layer * experts_;
    const std::int64_t* uses = uses_ ? uses_ + base : nullptr;
    const bool prompt = uses && std::any_of(uses, uses + experts_, [](std::int64_t n) { return n != 0; });
    // by worth, ties by key, else by use; what is not a number is worth least, so that this is an order
    const auto place = [&](std::int64_t key) {
        if (prompt) return std::tuple(static_cast<double>(uses[key - base]), stamps_[key]);
        if (!worth_) return std::tuple(0.0, stamps_[key]);
        return std::tuple(std::isnan(worth_[key]) ? -std::numeric_limits<double>::infinity() : worth_[key], key);
    };
    const auto end = keys.begin() + std::min(count, static_cast<std::int64_t>(keys.size()));
    std::partial_sort(keys.begin(), end, keys.end(),
                      [&](std::int64_t a, std::int64_t b) { return place(a) < place(b); });
}

void Worth::add_least(std::int64_t layer, std::int64_t count, const std::uint8_t* may,
                      std::vector<std::int64_t>& to) const {
    const std::int64_t base = layer * experts_;
    std::vector<std::int64_t> keys;
    for (std::int64_t key = base; key < base + experts_; ++key)
        if (held_[key] && !is_refused_[key] && (!may || may[key])) keys.push_back(key);
    const auto taken = [&](std::int64_t key) { return std::find(to.begin(), to.end(), key) != to.end(); };
    if (!to.empty()) keys.erase(std::remove_if(keys.begin(), keys.end(), taken), keys.end());
    rank(layer, keys, count);
    keys.resize(static_cast<std::size_t>(std::min(count, static_cast<std::int64_t>(keys.size()))));
    to.insert(to.end(), keys.begin(), keys.end());
}

std::vector<std::int64_t> Worth::first(std::int64_t count, const std::uint8_t* may) const {
    std::vector<std::int64_t> found;
    const auto left = [&] { return count - static_cast<std::int64_t>(found.size()); };
    for (std::int64_t key : refused_)
        if (left() > 0 && (!may || may[key])) found.push_back(key);
    if (left() > 0 && count_[now_] >= share_) add_least(now_, left(), may, found);
    if (left() <= 0) return found;
    std::vector<std::int64_t> fullest(static_cast<std::size_t>(layers_));
    std::iota(fullest.begin(), fullest.end(), 0);
    std::stable_sort(fullest.begin(), fullest.end(), [&](auto a, auto b) { return count_[a] > count_[b]; });
    for (std::int64_t layer : fullest)
        if (layer != now_ && count_[layer] > share_ && left() > 0)
            add_least(layer, std::min(left(), count_[layer] - share_), may, found);
    for (std::int64_t layer : fullest)
        if (left() > 0) add_least(layer, left(), may, found);
    return found;
}

std::vector<std::int64_t> Worth::settled() const {
    std::vector<std::int64_t> found;
    for (std::int64_t layer = 0; layer < layers_; ++layer) {
        if (layer == now_) continue;
        std::vector<std::int64_t> keys;
        for (std::int64_t key = layer * experts_; key < (layer + 1) * experts_; ++key)
            if (held_[key]) keys.push_back(key);
        const std::int64_t over = count_[layer] - share_;
        if (over > 0) rank(layer, keys, over);  // a partial order: those over the share come first
        found.insert(found.end(), keys.begin() + std::max<std::int64_t>(over, 0), keys.end());
    }
    return found;
}

}  // namespace tiermoe
