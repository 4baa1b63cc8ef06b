#include "worth.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tiermoe {

Worth::Worth(std::int64_t layers, std::int64_t experts, const std::uint8_t* held, const std::int64_t* stamps,
             const std::vector<std::int64_t>& next)
    : layers_(layers), experts_(experts), held_(held), stamps_(stamps), next_(next), count_(static_cast<std::size_t>(layers)),
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

template <typename Wanted>
void Worth::rank(std::int64_t layer, std::int64_t count, const Wanted& wanted) const {
    const std::int64_t base = layer * experts_;
    const std::int64_t* uses = uses_ ? uses_ + base : nullptr;
    const bool prompt = uses && std::any_of(uses, uses + experts_, [](std::int64_t n) { return n != 0; });
    // by worth, ties by key, else by use; what is not a number is worth least, so that this is an order
    const auto rank_of = [&](std::int64_t key) -> Rank {
        if (prompt) return {static_cast<double>(uses[key - base]), stamps_[key], key};
        if (!worth_) return {0.0, stamps_[key], key};
        return {std::isnan(worth_[key]) ? -std::numeric_limits<double>::infinity() : worth_[key], key, key};
    };
    const std::int64_t end = keys() + layer;
    const bool by_use = !prompt && !worth_;
    ranks_.clear();
    for (std::int64_t key = next_[end]; key != end; key = next_[key])
        if (wanted(key)) {
            if (by_use && static_cast<std::int64_t>(ranks_.size()) == count) return;
            ranks_.push_back(rank_of(key));
        }
    const auto found = std::min(static_cast<std::size_t>(count), ranks_.size());
    std::partial_sort(ranks_.begin(), ranks_.begin() + static_cast<std::ptrdiff_t>(found), ranks_.end(),
                      [](const Rank& a, const Rank& b) { return a.value != b.value ? a.value < b.value : a.tie < b.tie; });
    ranks_.resize(found);
}

void Worth::add_least(std::int64_t layer, std::int64_t count, const std::uint8_t* may,
                      std::vector<std::int64_t>& to) const {
    rank(layer, count, [&](std::int64_t key) {
        return !is_refused_[key] && (!may || may[key]) && (to.empty() || std::find(to.begin(), to.end(), key) == to.end());
    });
    for (const Rank& one : ranks_) to.push_back(one.key);
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
        rank(layer, std::max<std::int64_t>(count_[layer] - share_, 0), [](std::int64_t) { return true; });
        for (std::int64_t key = layer * experts_; key < (layer + 1) * experts_; ++key)
            if (held_[key] && std::none_of(ranks_.begin(), ranks_.end(), [key](const Rank& out) { return out.key == key; }))
                found.push_back(key);
    }
    return found;
}

}  // namespace tiermoe
