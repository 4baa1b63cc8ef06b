// The slots of a cache and the copies under way into them, for passes that Python does not plan.
//
// An expert is one key with slots of one class or, where experts are split, two: key k is its top and N + k its bottom,
// in slots of their own classes (`policies.moepic.split.Segments`).
//
// The state is that of `policies.residency.Residency`, in whose arrays it lies; a copy under way is here or a `LoadJob`
// of `engine.cache.loads.Loads`, never both. Who calls these holds the interpreter's lock, except for `await`.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "counts.hpp"
#include "link.hpp"
#include "order.hpp"

namespace tiermoe {

enum class SlotState : std::uint8_t { absent = 0, loading = 1, resident = 2 };

// `Residency.arrays`.
struct SlotArrays {
    std::int64_t keys, slots;
    std::uint8_t *states, *evictable;     // [keys]
    std::int32_t *slot, *pins;            // [keys]
    std::int32_t* free;                   // [slots], a stack
    std::int64_t *generation, *counts;    // [slots]; how often the last expert has left, free slots of each class
};

// Where split experts lie, in units of one neuron. All empty: an expert is one unit, and slot s is the s-th of the pool.
struct Layout {
    std::vector<std::int64_t> class_of, class_first;  // [keys], [classes]: the first slot
    std::vector<std::int64_t> first;                  // of each slot in the pool
    std::vector<std::int64_t> begin, units;           // [keys]: in the expert; 0 units: there is no such segment
};

// One tensor of each expert: in the slots, and in host memory by layer.
struct ExpertPart {
    char* target;
    std::int64_t target_unit, source_stride, source_unit, count;  // bytes of a unit in the pool, between experts, of a
    Piece::Kind kind;                                             // unit in the source; elements of a unit
    std::vector<const char*> sources;  // [layers]
};

// A copy under way into the slot of a LOADING expert.
struct Flight {
    std::int64_t key;
    bool prefetch;
    std::shared_ptr<Copy> copy;
};

// What has landed for one layer since it was counted last, in units.
struct Landed {
    std::int64_t demands = 0, prefetches = 0;
    double io_s = 0.0, link_s = 0.0;  // the link was busy: by the wall's clock, by its own
    double path_s = 0.0;              // part of link_s: the layer was running
};

class Loads {
   public:
    // order: null: Python has it, and is told who comes and goes; counts: null: the caller counts.
    Loads(Link* link, const SlotArrays& arrays, std::int64_t experts, std::vector<ExpertPart> parts, Layout layout,
          const Counts* counts, Order* order);

    // Other slots of the same pool; no copy is under way.
    void divide(const SlotArrays& arrays, Layout layout);
    bool split() const { return !layout_.first.empty(); }
    SlotState state(std::int64_t key) const { return static_cast<SlotState>(arrays_.states[key]); }
    std::int32_t slot(std::int64_t key) const { return arrays_.slot[key]; }
    std::int64_t keys() const { return arrays_.keys; }
    std::int64_t experts() const { return experts_; }
    std::int64_t whole() const { return split() ? arrays_.keys / 2 : arrays_.keys; }  // experts of all layers
    std::int64_t layer_of(std::int64_t key) const { return key % whole() / experts_; }
    std::int64_t class_of(std::int64_t key) const { return split() ? layout_.class_of[key] : 0; }
    std::int64_t classes() const { return split() ? static_cast<std::int64_t>(layout_.class_first.size()) : 1; }
    std::int64_t units(std::int64_t key) const { return split() ? layout_.units[key] : 1; }
    std::int64_t first_unit(std::int64_t slot) const { return split() ? layout_.first[slot] : slot; }
    std::int64_t free_slots(std::int64_t slot_class = 0) const { return arrays_.counts[1 + slot_class]; }
    std::int64_t evictable() const;
    std::int64_t emptied() const { return arrays_.counts[0]; }
    Order* order() const { return order_; }
    bool may_evict(std::int64_t key) const { return arrays_.evictable[key] != 0; }
    bool pinned(std::int64_t key) const { return arrays_.pins[key] != 0; }
    void pin(std::int64_t key);
    void unpin(std::int64_t key);

    // Evict these, which `may_evict`, then copy these ABSENT ones in this order into free slots. False: the link is
    // closed; then the copies are cancelled.
    bool start(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims, bool prefetch);
    // `ExpertCache.prefetch` of whole experts with native order: absent ones of these, most wanted first, in slots that are free or those
    // of experts that are neither wanted nor in `nearer`. The number queued; -1: the link is closed.
    std::int64_t prefetch(const std::vector<std::int64_t>& wanted, const std::vector<std::int64_t>& nearer,
                          std::uint8_t source);
    std::int64_t absent(std::int64_t first, std::int64_t stop) const;
    // The order's next victims; none of these slots is used by the pass or the copies under way.
    std::vector<std::int64_t> victims(std::int64_t count) const { return order_->first(count, arrays_.evictable); }
    // Copies that have ended: their experts are RESIDENT. layer: that runs. False: one was cancelled by the link's end.
    bool land_ended(std::int64_t layer);
    // Cancel the queued prefetches of experts of this layer that it does not need (counts [E] of 0).
    void drop_stale(std::int64_t layer, const std::int64_t* counts);
    bool any_dropped() const { return !dropped_.empty(); }
    // Those that were cancelled since the last call, for the order that Python has.
    std::vector<std::int64_t> take_dropped() { return std::exchange(dropped_, {}); }
    // The copy of a key under way; null: there is none.
    const Flight* flight(std::int64_t key) const;
    void promote(const Flight& flight) { link_->promote(flight.copy); }
    // Wait for a copy, without the interpreter's lock; the seconds waited.
    double await(const Copy& copy);
    // Make this key's copy, which has ended, resident. False: it was cancelled.
    bool land(std::int64_t key, std::int64_t layer);
    // All copies under way, oldest first, which are no longer known here.
    std::vector<Flight> take() { return std::exchange(flights_, {}); }
    // A copy into the slot of a LOADING expert that was known elsewhere.
    void give(Flight flight) { flights_.push_back(std::move(flight)); }
    std::vector<Landed>& landed() { return landed_; }
    const std::vector<Flight>& flights() const { return flights_; }
    std::int64_t generation(std::int64_t key) const { return arrays_.generation[arrays_.slot[key]]; }

   private:
    void drop(std::int64_t key);
    void publish(const Flight& flight, std::int64_t layer);

    Link* link_;
    SlotArrays arrays_;
    std::int64_t experts_;
    std::vector<ExpertPart> parts_;
    Layout layout_;
    const Counts* counts_;
    Order* order_;
    std::vector<std::uint8_t> may_;  // of `prefetch`
    std::vector<Flight> flights_;
    std::vector<Landed> landed_;  // [layers]
    std::vector<std::int64_t> dropped_;
};

}  // namespace tiermoe
