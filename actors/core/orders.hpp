// Native orders of eviction behind `core::Order`. The orders themselves belong to the policies' own modules.
#pragma once

#include "core.hpp"
#include "../../kernels/cpu/order.hpp"
#include "../../kernels/cpu/split_order.hpp"

namespace tiermoe::core {

// Whole experts.
class WholeOrder : public Order {
  public:
    explicit WholeOrder(tiermoe::Order& of) : of_(of) {}
    void admitted(Segment s) override { of_.admitted(s); }
    void removed(Segment s) override { of_.removed(s); }
    void used(const Segments& segments) override { of_.used(segments); }
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t) override { of_.routed(keys, counts); }
    Segments victims(std::int64_t, std::int64_t count, const std::uint8_t* allowed) override { return of_.first(count, allowed); }

  private:
    tiermoe::Order& of_;
};

// Tops of each layer, and bottoms.
class TopsAndBottoms : public Order {
  public:
    explicit TopsAndBottoms(SplitOrder& of) : of_(of) {}
    void admitted(Segment s) override { of_.admitted(s); }
    void removed(Segment s) override { of_.removed(s); }
    void used(const Segments& segments) override {
        for (Segment s : segments) of_.used(s);
    }
    void routed(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        of_.routed(layer, keys.data(), counts.data(), static_cast<std::int64_t>(keys.size()), tokens);
    }
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        return of_.first(slot_class, count, [&](std::int64_t key) { return allowed[key] != 0; });
    }

  private:
    SplitOrder& of_;
};

}  // namespace tiermoe::core
