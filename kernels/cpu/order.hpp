// The orders of eviction: by rising value, then by last use or admission. The classes of `actors/policies` that make them say
// what each is. What maps, importance and worth are told of predictions is in the policies' arrays.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "importance.hpp"
#include "lazy_heap.hpp"
#include "worth.hpp"

namespace tiermoe {

class Order {
 public:
    enum class Kind { lru, sweep, lfu, map, importance, worth, lcp };
    // sweep: a layer that needs `least` experts sweeps. growth: what a use counts more than one a pass earlier (lfu, map).
    // rate: by which a priority falls with a token, as a logarithm (lcp).
    // probabilities: of a map [keys]; told: how often those of each layer have changed [layers]; importance: the state; all
    // outlive the order.
    Order(Kind kind, std::int64_t layers, std::int64_t experts, double least, double growth,
          const double* probabilities = nullptr, const std::int64_t* told = nullptr, Importance* importance = nullptr, double rate = 0.0);
    Order(const Order&) = delete;

    std::int64_t layers() const { return layers_; }
    std::int64_t experts() const { return experts_; }
    std::int64_t keys() const { return layers_ * experts_; }
    Worth* worth() const { return worth_.get(); }  // null: of another kind
    bool holds(std::int64_t key) const { return held_[key] != 0; }
    // An expert got a slot.
    void admitted(std::int64_t key);
    // It lost its slot.
    void removed(std::int64_t key);
    // A pass ran these, in this order.
    void used(const std::vector<std::int64_t>& keys);
    // A layer needs these, picked by so many tokens each of `tokens`.
    void routed(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts, std::int64_t tokens);
    // By which experts are ranked, whether they are held or not: of lru its last use, of lfu its uses, of lcp its priority.
    double priority(std::int64_t key) const;
    // The first `count` held keys of which `may` [keys] is not 0; null: of all.
    std::vector<std::int64_t> first(std::int64_t count, const std::uint8_t* may);

 private:
    double value(std::int64_t key) const;
    LazyHeap::Rank rank(std::int64_t key) const { return {value(key), uses_[key].stamp}; }
    std::vector<std::int64_t> ranked(std::int64_t count, const std::uint8_t* may);
    std::vector<std::int64_t> swept(std::int64_t count, const std::uint8_t* may) const;
    bool counts() const { return kind_ == Kind::lfu || kind_ == Kind::map; }
    bool heaped() const { return counts() || kind_ == Kind::lcp; }
    void pick(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts, std::int64_t tokens);
    bool by_use() const { return kind_ == Kind::lru || (kind_ == Kind::sweep && now_ < 0); }
    void leave(std::int64_t key);
    void join_last(std::int64_t key);

    Kind kind_;
    std::int64_t layers_, experts_;
    double least_, growth_, rate_, unit_ = 1.0;
    std::int64_t clock_ = 0, now_ = -1;  // now: the layer that sweeps
    const double* probabilities_;
    const std::int64_t* told_;
    LazyHeap ranks_;                   // by count or priority: the held keys
    std::vector<std::int64_t> known_;  // of `told_`
    Importance* importance_;
    std::vector<std::uint8_t> own_held_;
    std::vector<std::int64_t> own_stamps_, picked_;  // picked: by how many tokens, of the last sweep or so far [keys]
    // By priority: the tokens before the present forward, and with it; its last layer; the priorities [keys].
    std::int64_t before_ = 0, tokens_ = 0, last_ = std::numeric_limits<std::int64_t>::max();
    std::vector<double> priorities_;
    std::uint8_t* held_;    // [keys], of importance_ where there is one
    std::int64_t* stamps_;  // [keys], as held_
    std::unique_ptr<Worth> worth_;
    // By count: uses, what of them admission lent until the first use, and the stamp [keys]. By priority: that of a held
    // one, and the stamp of its admission.
    struct Use {
        double freq = 0.0, credit = 0.0;
        std::int64_t stamp = 0;
    };
    std::vector<Use> uses_;
    // Of lru and sweep the held keys by their stamps, a ring through keys(); of worth those of each layer, through
    // keys() + layer. A key that is not held is a ring of its own.
    std::vector<std::int64_t> next_, previous_;
};

}  // namespace tiermoe
