// Native orders of eviction behind `core::Order`. The orders themselves belong to the policies' own modules.
#pragma once

#include "core.hpp"
#include "../../kernels/cpu/order.hpp"

namespace tiermoe::core {

struct NativeOrder : Order {
    virtual std::int64_t layers() const = 0;
    virtual std::int64_t experts() const = 0;  // of a layer
    virtual std::int64_t parts() const = 0;    // of an expert
    virtual std::int64_t classes() const { return 1; }  // of slots
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
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        of.routed(keys, counts, tokens);
    }
    Segments victims(std::int64_t, std::int64_t count, const std::uint8_t* allowed) override { return of.first(count, allowed); }

    tiermoe::Order of;
};

// Orders of a cache with several classes of slots: of all parts 0, or where experts are split of each layer's tops; and of
// parts 1, bottoms or replicas. Each of them numbers its segments from 0.
struct ByClass : NativeOrder {
    ByClass(std::int64_t layers, std::int64_t experts, bool split, std::vector<std::shared_ptr<Order>> members)
        : members(std::move(members)), layers_(layers), experts_(experts), split_(split), held_(2 * layers * experts) {}
    std::int64_t layers() const override { return layers_; }
    std::int64_t experts() const override { return experts_; }
    std::int64_t parts() const override { return 2; }
    std::int64_t classes() const override { return static_cast<std::int64_t>(members.size()); }
    bool holds(Segment s) const override { return held_[s] != 0; }
    void admitted(Segment s) override {
        held_[s] = 1;
        members[of(s)]->admitted(s - first(of(s)));
    }
    void removed(Segment s) override {
        held_[s] = 0;
        members[of(s)]->removed(s - first(of(s)));
    }
    void used(const Segments& segments) override {
        Segments some, second;
        std::size_t at = 0;
        for (Segment s : segments) {
            if (s >= keys()) {
                second.push_back(s - keys());
                continue;
            }
            if (of(s) != at && !some.empty()) members[at]->used(some), some.clear();
            at = of(s);
            some.push_back(s - first(at));
        }
        if (!split_ || !some.empty()) members[at]->used(some);  // a pass of replicas counts for the age of uses
        if (!second.empty()) members.back()->used(second);
    }
    void routed(std::int64_t layer, const Segments& needed, const Segments& counts, std::int64_t tokens) override {
        if (!split_) return members[0]->routed(layer, needed, counts, tokens);
        if (needed.empty()) return;
        Segments own = needed;
        for (Segment& s : own) s -= layer * experts_;
        members[layer]->routed(0, own, counts, tokens);
    }
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        const Segment begin = first(static_cast<std::size_t>(slot_class));
        Segments found = members[slot_class]->victims(0, count, allowed + begin);
        for (Segment& s : found) s += begin;
        return found;
    }

    const std::vector<std::shared_ptr<Order>> members;

  private:
    std::size_t of(Segment s) const { return s >= keys() ? members.size() - 1 : split_ ? s / experts_ : 0; }
    Segment first(std::size_t member) const {
        return member + 1 == members.size() ? keys() : static_cast<Segment>(member) * experts_;
    }
    const std::int64_t layers_, experts_;
    const bool split_;
    std::vector<std::uint8_t> held_;
};

}  // namespace tiermoe::core
