// Eviction `worth` on arrays: each resident has a number, the least leaves first, and each layer has an equal share of the
// slots. The reference is tests/orders_reference.py, whose decisions these are to the last expert.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tiermoe {

class Worth {
  public:
    // held, stamps [keys], next [keys + layers]: of the order, which outlives this: experts with a slot, when each was last
    // used or admitted, and after which: of each layer a ring, the least recent one behind entry `keys + layer`.
    Worth(std::int64_t layers, std::int64_t experts, const std::uint8_t* held, const std::int64_t* stamps,
          const std::vector<std::int64_t>& next);

    // A layer's share of the slots, and what each expert is worth [keys]; null: residents leave by last use.
    void bind(std::int64_t share, const double* worth) { share_ = share, worth_ = worth; }
    // Uses of each expert by the prompts that run now [keys], which rank the layers that they have used; null: none runs.
    // Passes that are noted add theirs.
    void prompt(std::int64_t* uses) { uses_ = uses; }
    void admitted(std::int64_t key);  // it had no slot
    void removed(std::int64_t key);
    void used(const std::vector<std::int64_t>& keys);
    // A layer needs these, picked by so many tokens each; at least one.
    void routed(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& counts);
    // The layer at work, or for which a copy is made; returns the one before.
    std::int64_t at_work(std::int64_t layer) { return std::exchange(now_, layer); }
    std::int64_t layer() const { return now_; }
    // A resident leaves before all others, in this order; `readmit` undoes it.
    void refuse(std::int64_t key);
    void readmit(std::int64_t key);
    const std::vector<std::int64_t>& refused() const { return refused_; }
    // The first `count` held keys of which `may` [keys] is not 0; null: of all.
    std::vector<std::int64_t> first(std::int64_t count, const std::uint8_t* may) const;
    // Of each layer but the one at work the residents of greatest worth that are within its share.
    std::vector<std::int64_t> settled() const;
    // Begin to note the experts that passes use.
    void note();
    // Of each layer the experts used since `note`, which are noted no longer.
    std::vector<std::vector<std::int32_t>> take_noted();

  private:
    std::int64_t keys() const { return layers_ * experts_; }
    void add_least(std::int64_t layer, std::int64_t count, const std::uint8_t* may, std::vector<std::int64_t>& to) const;
    // `ranks_`: the first `count` of the residents of a layer that are wanted, in order.
    template <typename Wanted>
    void rank(std::int64_t layer, std::int64_t count, const Wanted& wanted) const;

    std::int64_t layers_, experts_, share_ = 0, now_ = 0;
    const std::uint8_t* held_;
    const std::int64_t* stamps_;
    const std::vector<std::int64_t>& next_;
    const double* worth_ = nullptr;
    std::int64_t* uses_ = nullptr;
    std::vector<std::int64_t> count_, refused_;  // held experts of each layer; refused ones, the first to go first
    struct Rank {
        double value;
        std::int64_t tie, key;
    };
    mutable std::vector<Rank> ranks_;            // of one call
    std::vector<std::uint8_t> is_refused_;       // [keys]
    bool noting_ = false;
    std::vector<std::vector<std::int32_t>> noted_;  // [layers]
};

}  // namespace tiermoe
