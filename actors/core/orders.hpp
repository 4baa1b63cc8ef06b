// Native orders of eviction behind `core::Order`. The orders themselves belong to the policies' own modules.
#pragma once

#include "core.hpp"
#include "../../kernels/cpu/order.hpp"
#include "../../kernels/cpu/split_order.hpp"

namespace tiermoe::core {

struct NativeOrder : Order {
    virtual std::int64_t layers() const = 0;
    virtual std::int64_t experts() const = 0;  // of a layer
    virtual std::int64_t parts() const = 0;    // of an expert
    virtual bool holds(Segment s) const = 0;
    std::int64_t keys() const { return layers() * experts(); }
    std::int64_t segments() const { return parts() * keys(); }
};

// Whole experts.
struct WholeOrder : NativeOrder {
    template <typename... Args>
    explicit WholeOrder(Args... args) : of(args...) {}
    std::int64_t layers() const override { return of.layers(); }
    std::int64_t experts() const override { return of.experts(); }
    std::int64_t parts() const override { return 1; }
    bool holds(Segment s) const override { return of.holds(s); }
    void admitted(Segment s) override { of.admitted(s); }
    void removed(Segment s) override { of.removed(s); }
    void used(const Segments& segments) override { of.used(segments); }
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t) override { of.routed(keys, counts); }
    Segments victims(std::int64_t, std::int64_t count, const std::uint8_t* allowed) override { return of.first(count, allowed); }

    tiermoe::Order of;
};

// Tops of each layer, and bottoms.
struct TopsAndBottoms : NativeOrder {
    template <typename... Args>
    explicit TopsAndBottoms(Args... args) : of(args...) {}
    std::int64_t layers() const override { return of.layers(); }
    std::int64_t experts() const override { return of.experts(); }
    std::int64_t parts() const override { return 2; }
    bool holds(Segment s) const override { return of.holds(s); }
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
