// Native orders of eviction behind `core::Order`. The orders themselves belong to the policies' own modules.
#pragma once

#include "core.hpp"
#include "../../kernels/cpu/order.hpp"
#include "../../kernels/cpu/split_order.hpp"

namespace tiermoe::core {

// Whole experts.
struct WholeOrder : Order {
    template <typename... Args>
    explicit WholeOrder(Args... args) : of(args...) {}
    void admitted(Segment s) override { of.admitted(s); }
    void removed(Segment s) override { of.removed(s); }
    void used(const Segments& segments) override { of.used(segments); }
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t) override { of.routed(keys, counts); }
    Segments victims(std::int64_t, std::int64_t count, const std::uint8_t* allowed) override { return of.first(count, allowed); }

    tiermoe::Order of;
};

// Tops of each layer, and bottoms.
struct TopsAndBottoms : Order {
    template <typename... Args>
    explicit TopsAndBottoms(Args... args) : of(args...) {}
    void admitted(Segment s) override { of.admitted(s); }
    void removed(Segment s) override { of.removed(s); }
    void used(const Segments& segments) override {
        for (Segment s : segments) of.used(s);
    }
    void routed(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        of.routed(layer, keys.data(), counts.data(), static_cast<std::int64_t>(keys.size()), tokens);
    }
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        return of.first(slot_class, count, [&](std::int64_t key) { return allowed[key] != 0; });
    }

    SplitOrder of;
};

}  // namespace tiermoe::core
