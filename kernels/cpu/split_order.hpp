// The orders of eviction of split experts: tops of each layer by least cache priority (MoEpic, equation 4) or by last use,
// bottoms by last use. The reference is `policies.eviction.split_eviction` of `policies.moepic.Lcp` (with the equation) and
// `policies.eviction.Lru`.
//
// Keys below N = layers * experts are tops, of slot class `layer`; the others are bottoms, of class `layers`.
#pragma once

#include <cstdint>
#include <vector>

namespace tiermoe {

class SplitOrder {
  public:
    // rate: log(1 / rho) / omega. by_use: tops by last use, whatever the rate.
    SplitOrder(std::int64_t layers, std::int64_t experts, double rate, bool by_use);

    std::int64_t layers() const { return static_cast<std::int64_t>(tokens_.size()); }
    std::int64_t experts() const { return experts_; }
    std::int64_t keys() const { return layers() * experts_; }
    bool holds(std::int64_t key) const { return present_[key] != 0; }

    // A layer's experts (keys below N) are picked by `counts` of `tokens`.
    void routed(std::int64_t layer, const std::int64_t* keys, const std::int64_t* counts, std::int64_t count,
                std::int64_t tokens);
    void admitted(std::int64_t key);
    void removed(std::int64_t key);  // which is present
    void used(std::int64_t key);     // which is present
    // -inf: never picked; by last use, not present.
    double value(std::int64_t key) const { return value_[key]; }

    // The first `most` present keys of a slot class that are wanted, in order of eviction.
    template <typename Wanted>
    std::vector<std::int64_t> first(std::int64_t slot_class, std::int64_t most, const Wanted& wanted) const {
        std::vector<std::int64_t> found;
        if (most <= 0) return found;
        if (slot_class == layers()) {
            const std::int64_t end = 2 * keys();
            for (std::int64_t key = next_[end]; key != end && static_cast<std::int64_t>(found.size()) < most;
                 key = next_[key])
                if (wanted(key)) found.push_back(key);
            return found;
        }
        for (std::int64_t key = slot_class * experts_; key < (slot_class + 1) * experts_; ++key)
            if (present_[key] && wanted(key)) found.push_back(key);
        sort(found, most);
        return found;
    }

  private:
    void sort(std::vector<std::int64_t>& keys, std::int64_t most) const;
    void touch(std::int64_t key);
    void link(std::int64_t key);
    void unlink(std::int64_t key);

    std::int64_t experts_;
    double rate_;
    bool by_use_;
    std::vector<std::int64_t> tokens_, stamp_;   // of each layer
    std::vector<std::int64_t> picked_, admitted_;  // of each top: tokens that picked it, stamp of its admission
    std::vector<double> value_, held_;           // of each top; `held_` orders those that are present
    std::vector<std::uint8_t> present_;          // [2 N]
    std::vector<std::int64_t> next_, before_;    // of bottoms, least recently used first; entry 2 N is the end of both
};

}  // namespace tiermoe
