#include "core.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace tiermoe::core {
namespace {

constexpr std::uint8_t kForgotten = 255;  // the source of prefetches that were queued before the counters were reset

}  // namespace

bool Governor::allows() {
    if (resting) {
        if (--resting) return false;
        used = wasted = 0;  // what was prefetched before the rest is judged already
        return true;
    }
    const std::int64_t outcomes = used + wasted;
    if (outcomes < window) return true;
    const bool bad = static_cast<double>(used) < min_useful * static_cast<double>(outcomes);
    used = wasted = 0;
    if (bad) resting = rest;
    return !bad;
}

Core::Core(const Layout& layout, std::shared_ptr<Link> link, std::shared_ptr<Order> order, const Governor& governor,
           bool writeback)
    : link_(std::move(link)), order_(std::move(order)), writeback_(writeback), governor_(governor) {
    if (layout.layers < 1 || layout.experts < 1 || layout.parts < 1) throw std::invalid_argument("there are no experts");
    lay_out(layout);
    if (slots_ < 1) throw std::invalid_argument("there are no slots");
    counts_.assign(static_cast<std::size_t>(layout.layers), LayerCounts{});
    sources_.assign(256, SourceCounts{});
    uses_.assign(static_cast<std::size_t>(layout.keys()), 0);
}

void Core::lay_out(const Layout& layout) {
    const auto segments = static_cast<std::size_t>(layout.segments());
    if (!layout.class_of.empty() && layout.class_of.size() != segments) throw std::invalid_argument("classes of segments");
    if (layout.bytes.size() != segments || (!layout.units.empty() && layout.units.size() != segments))
        throw std::invalid_argument("sizes of segments");
    for (std::int64_t c : layout.class_of)
        if (c < 0 || c >= static_cast<std::int64_t>(layout.slots.size())) throw std::invalid_argument("no such class");
    layout_ = layout;
    states_.assign(segments, 0);
    took_s_.assign(segments, 0.0);
    evictable_.assign(segments, 0);
    pending_.assign(segments, 0);
    vacant_.assign(static_cast<std::size_t>(layout.keys()), 0);
    slot_.assign(segments, -1);
    pins_.assign(segments, 0);
    free_.clear();
    first_of_.clear();
    Slot first = 0;
    for (std::int64_t count : layout.slots) {
        first_of_.push_back(first);
        std::vector<Slot> free(static_cast<std::size_t>(count));
        std::iota(free.rbegin(), free.rend(), first);
        free_.push_back(std::move(free));
        first += count;
    }
    generation_.assign(static_cast<std::size_t>(std::max(first, layout.most)), 0);
    slots_ = first;
    unwritten_.assign(writeback_ ? static_cast<std::size_t>(first) : 0, 0);
}

std::int64_t Core::free_slots() const {
    std::int64_t free = 0;
    for (const auto& slots : free_) free += static_cast<std::int64_t>(slots.size());
    return free;
}

void Core::reset_counts() {
    std::fill(counts_.begin(), counts_.end(), LayerCounts{});
    std::fill(sources_.begin(), sources_.end(), SourceCounts{});
    std::fill(uses_.begin(), uses_.end(), 0);
    const std::int64_t preloaded = totals_.bytes_preloaded;  // before the first request: stays
    totals_ = Totals{};
    totals_.bytes_preloaded = preloaded;
    ++resets_;
    for (std::uint8_t& source : pending_)
        if (source) source = kForgotten;
}

LayerCounts Core::summed() const {
    LayerCounts sum{};
    for (const LayerCounts& c : counts_) {
#define TIERMOE_ADD(name) sum.name += c.name;
        TIERMOE_LAYER_COUNTS(TIERMOE_ADD)
#undef TIERMOE_ADD
    }
    return sum;
}

void Core::timed(std::int64_t layer, const Times& times) {
    LayerCounts& c = of(layer);
    c.total_io_s += times.end_s - times.start_s;
    c.link_s += times.link_s;
    c.link_path_s += times.link_s;  // the pass itself counted what had ended while it ran
    c.writeback_link_s += times.back_s;
}

void Core::device_waited(std::int64_t layer, double waited_s, double writing_s) {
    LayerCounts& c = of(layer);
    c.blocked_io_s += waited_s;
    c.io_path_s += waited_s;
    c.writeback_blocked_s += writing_s;
    if (decode_only) totals_.decode_blocked_io_s += waited_s;
}

// -- slots ----------------------------------------------------------------------------------------------------------

void Core::expect_layer(std::int64_t layer) const {
    if (layer < 0 || layer >= layout_.layers) throw Broken("there is no MoE layer " + std::to_string(layer));
}

std::vector<Core::Flight>::iterator Core::flight(Segment s) {
    return std::find_if(flights_.begin(), flights_.end(), [s](const Flight& f) { return f.segment == s; });
}

void Core::pin(Segment s) {
    if (state(s) == State::absent) throw Broken("an absent segment cannot be pinned: " + std::to_string(s));
    ++pins_[s];
    evictable_[s] = 0;
}

void Core::unpin(Segment s) {
    if (!pins_[s]) throw Broken("a segment is not pinned: " + std::to_string(s));
    if (!--pins_[s]) evictable_[s] = state(s) == State::resident;
}

void Core::drop_slot(Segment s) {
    if (pins_[s]) throw Broken("a pinned segment cannot leave: " + std::to_string(s));
    free_[class_of(s)].push_back(slot_[s]);
    slot_[s] = -1;
    states_[s] = evictable_[s] = 0;
    emptied_ += free_slots() == slots_;
}

std::vector<Copy> Core::reserve(const Segments& segments, Cause cause) {
    std::vector<Copy> copies;
    if (segments.empty()) return copies;
    const Mark after = link_->mark();
    for (Segment s : segments) {
        if (state(s) != State::absent) throw Broken("a segment is there already: " + std::to_string(s));
        auto& free = free_[class_of(s)];
        if (free.empty()) throw Broken("no slot is free for segment " + std::to_string(s));
        const Slot slot = free.back();
        free.pop_back();
        slot_[s] = static_cast<std::int32_t>(slot);
        states_[s] = static_cast<std::uint8_t>(State::loading);
        took_s_[s] = -1.0;
        const bool back = writeback_ && unwritten_[slot];
        if (back) unwritten_[slot] = 0;
        copies.push_back({++tickets_, s, slot, ++generation_[slot], bytes_of(s), cause, after, back});
        flights_.push_back({tickets_, s, slot, generation_[slot], layer_of(s), cause, after, back});
        order_->admitted(s);
    }
    return copies;
}

void Core::submit(const std::vector<Copy>& copies, bool urgent) {
    if (copies.empty()) return;
    if (log)
        for (const Copy& copy : copies) log->push_back({copy.cause == Cause::prefetch ? 'p' : copy.cause == Cause::migration ? 'm' : 'd', copy.segment, copy.slot});
    if (!link_->submit(copies, urgent)) throw Closed("the expert cache is closed");
}

void Core::publish(const Flight& f) {
    if (state(f.segment) != State::loading || slot_[f.segment] != f.slot || generation_[f.slot] != f.generation)
        throw Broken("a copy ended in a slot that was given away: " + std::to_string(f.segment));
    states_[f.segment] = static_cast<std::uint8_t>(State::resident);
    evictable_[f.segment] = !pins_[f.segment];
}

void Core::landed(const Flight& f) {
    LayerCounts& c = of(f.layer);
    const std::int64_t bytes = bytes_of(f.segment);
    (f.cause == Cause::prefetch    ? c.bytes_loaded_prefetch
     : f.cause == Cause::migration ? c.bytes_loaded_migration
                                   : c.bytes_loaded_demand) += bytes;
    if (!layout_.split && f.segment >= layout_.keys()) c.bytes_loaded_low_bit += bytes;
    Times t;
    const bool known = link_->times(f.ticket, t);
    if (f.back) {
        c.bytes_written_back += bytes;
        ++c.writebacks;
        c.writeback_link_s += known ? t.back_s : 0.0;
    }
    if (known) {
        took_s_[f.segment] = t.end_s - t.start_s;
        c.total_io_s += t.end_s - t.start_s;
        c.link_s += t.link_s;
        if (seen) seen->push_back({false, f.layer, f.segment, f.cause, t.start_s, t.end_s, t.link_s});
    }
}

// Makes a finished copy resident; the slot of a failed one is free then.
void Core::land(Segment s) {
    auto found = flight(s);
    const Flight f = *found;
    if (link_->ending(f.ticket) != Ending::copied) return drop_failed(s);
    landed(f);
    publish(f);
    flights_.erase(found);
    link_->forget(f.ticket);
}

void Core::drop_failed(Segment s) {
    const Flight f = *flight(s);
    if (link_->ending(f.ticket) == Ending::cancelled) fail(s);
    if (f.cause == Cause::prefetch) ++of(f.layer).failed_prefetches;
    release(s);
}

void Core::fail(Segment s) {
    for (std::size_t i = 0; i < pins_.size(); ++i)
        if (pins_[i]) pins_[i] = 0, evictable_[i] = states_[i] == static_cast<std::uint8_t>(State::resident);
    const Flight f = *flight(s);
    if (link_->ending(f.ticket) == Ending::cancelled) {
        forget(s);
        throw Closed("the expert cache was closed during a forward");
    }
    try {
        link_->fail(f.ticket, f.layer);
    } catch (...) {
        forget(s);
        throw;
    }
    throw Broken("a link does not say why a copy failed");
}

// Undoes the reservation of a load that was cancelled or failed.
void Core::release(Segment s) {
    const Flight f = *flight(s);
    if (const double share = link_->moved(f.ticket)) {
        const auto moved = static_cast<std::int64_t>(std::nearbyint(static_cast<double>(bytes_of(s)) * share));
        of(f.layer).bytes_loaded_prefetch += moved;
        of(f.layer).bytes_wasted += moved;
    }
    if (take_pending(s, &SourceCounts::cancelled)) ++governor_.wasted;
    forget(s);
}

void Core::forget(Segment s) {
    auto found = flight(s);
    const Flight f = *found;
    if (f.back && link_->ending(f.ticket) == Ending::cancelled) unwritten_[f.slot] = 1;
    flights_.erase(found);
    pending_[s] = 0;
    drop_slot(s);
    order_->removed(s);
    link_->forget(f.ticket);
}

bool Core::take_pending(Segment s, std::int64_t SourceCounts::* outcome) {
    if (!pending_[s]) return false;
    ++(sources_[pending_[s]].*outcome);
    pending_[s] = 0;
    return true;
}

void Core::await(const Flight& f, std::int64_t layer, bool overtaken) {
    if (link_->ending(f.ticket) != Ending::under_way) return;
    if (log) log->push_back({'w', f.segment, f.slot});
    const double start_s = link_->now_s();
    if (!(overtaken ? link_->overtake(f.ticket) : link_->join(f.ticket, layer))) return;
    const double end_s = link_->now_s();
    of(layer).blocked_io_s += end_s - start_s;
    if (decode_only) totals_.decode_blocked_io_s += end_s - start_s;
    if (seen) seen->push_back({true, layer, f.segment, f.cause, start_s, end_s, 0.0});
    Times t;
    if (f.back && link_->times(f.ticket, t) && t.back_s > 0)
        of(layer).writeback_blocked_s += std::max(0.0, std::min(end_s, t.start_s + t.back_s) - std::max(start_s, t.start_s));
}

void Core::land_needed(Segment s, std::int64_t layer) {
    await(*flight(s), layer, false);
    auto found = flight(s);
    if (found->cause != Cause::demand && link_->ending(found->ticket) == Ending::failed) {
        // a copy that no forward waited for failed: once more
        if (found->cause == Cause::prefetch) ++of(found->layer).failed_prefetches;
        pending_[s] = 0;
        const Copy again{++tickets_, s, found->slot, found->generation, bytes_of(s), Cause::demand, found->after, false};
        link_->forget(found->ticket);
        found->ticket = again.ticket;
        found->cause = Cause::demand;
        found->back = false;
        submit({again}, true);
        await(*flight(s), layer, false);
        found = flight(s);
    }
    const Ending ending = link_->ending(found->ticket);
    if (ending == Ending::failed || ending == Ending::cancelled) fail(s);
    landed(*found);
    publish(*found);
    const Ticket ticket = found->ticket;
    flights_.erase(found);
    link_->forget(ticket);
}

// Lands the first of plan_.run[first:stop] as far as they are there; where that ends.
std::int64_t Core::land_behind(std::int64_t first, std::int64_t stop) {
    for (; first < stop; ++first) {
        const Segment s = plan_.run[first];
        const auto found = flight(s);
        if (found == flights_.end()) continue;
        if (link_->ending(found->ticket) != Ending::copied) return first;
        land(s);
    }
    return first;
}

void Core::arrive(std::int64_t layer) {
    if (layer >= 0) {
        expect_layer(layer);
        blocked_s_ = of(layer).blocked_io_s;
        link_s_ = of(layer).link_s;
    }
    link_->poll();
    Segments ended;
    for (const Flight& f : flights_)
        if (link_->ending(f.ticket) != Ending::under_way) ended.push_back(f.segment);
    for (Segment s : ended) land(s);
}

void Core::drop_stale(std::int64_t layer, const Segments& needed) {
    Segments stale;
    for (const Flight& f : flights_)
        if (f.layer == layer && f.cause == Cause::prefetch && std::find(needed.begin(), needed.end(), f.segment) == needed.end())
            stale.push_back(f.segment);
    for (Segment s : stale) drop(s);
}

// Cancels a copy that was not begun. False: it was.
bool Core::drop(Segment s) {
    const auto f = flight(s);
    const bool dropped = link_->cancel(f->ticket);
    if (log) log->push_back({dropped ? 'x' : '-', s, f->slot});
    if (dropped) release(s);
    return dropped;
}

bool Core::displaced(Segment s, std::int64_t layer) {
    const Flight f = *flight(s);
    if (drop(s)) return false;
    await(f, layer < 0 ? f.layer : layer, true);
    const bool copied = link_->ending(f.ticket) == Ending::copied;
    land(s);
    return copied;
}

void Core::evict(const Segments& segments, std::int64_t layer) {
    Segments here;
    for (Segment s : segments)
        if (flight(s) == flights_.end() || displaced(s, layer)) here.push_back(s);
    for (Segment s : here) {
        if (state(s) != State::resident) throw Broken("a segment that leaves is not resident: " + std::to_string(s));
        if (pins_[s]) throw Broken("a pinned segment cannot leave: " + std::to_string(s));
    }
    for (Segment s : here) {
        if (writeback_ && s < layout_.keys()) unwritten_[slot_[s]] = 1;
        drop_slot(s);
    }
    for (Segment s : here) order_->removed(s);
    for (Segment s : here)
        if (take_pending(s, &SourceCounts::wasted)) {
            of(layer_of(s)).bytes_wasted += bytes_of(s);
            ++governor_.wasted;
        }
}

std::vector<std::uint8_t> Core::allowed(const Segments& kept) const {
    std::vector<std::uint8_t> found = evictable_;
    for (Segment s : kept) found[s] = 0;
    return found;
}

Segments Core::make_room(const Segments& absent, const std::vector<std::uint8_t>& may) {
    Segments fit;
    std::vector<std::uint8_t> classes(free_.size()), fits(states_.size());
    for (Segment first : absent) {
        const std::int64_t c = class_of(first);
        if (std::exchange(classes[c], std::uint8_t{1})) continue;
        Segments own;
        for (Segment s : absent)
            if (class_of(s) == c) own.push_back(s);
        const auto lacking = static_cast<std::int64_t>(own.size()) - free_of(c);
        if (lacking > 0) evict(order_->victims(c, lacking, may.data()), -1);
        const auto room = static_cast<std::size_t>(free_of(c));
        for (std::size_t i = 0; i < own.size() && i < room; ++i) fits[own[i]] = 1;
    }
    for (Segment s : absent)
        if (fits[s]) fit.push_back(s);
    return fit;
}

void Core::expect(const Segments& given, Segment first, Segment stop) const {
    for (Segment s : given)
        if (s < first || s >= stop)
            throw Broken("expert " + std::to_string(s) + " is not one of " + std::to_string(first) + " to " +
                         std::to_string(stop - 1));
}

Segments Core::segments_of(const Segments& keys) const {
    expect(keys, 0, layout_.split ? layout_.keys() : layout_.segments());
    if (!layout_.split) return keys;
    Segments found;
    for (Key key : keys)
        for (Segment s : {key, key + layout_.keys()})
            if (has(s)) found.push_back(s);
    return found;
}

// -- between passes -------------------------------------------------------------------------------------------------

void Core::divide(const Layout& layout, const Segments& fill) {
    if (layout.layers != layout_.layers || layout.experts != layout_.experts) throw std::invalid_argument("other experts");
    expect(fill, 0, layout_.keys());
    settle();
    flush();
    lay_out(layout);
    std::vector<std::int64_t> room = layout_.slots;
    std::vector<std::uint8_t> seen(static_cast<std::size_t>(layout_.keys()));
    Segments loads;
    for (Key key : fill) {
        if (std::exchange(seen[key], std::uint8_t{1})) continue;
        std::int64_t& left = room[key / layout_.experts];
        if (left) --left, loads.push_back(key);
    }
    submit(reserve(loads, Cause::migration), false);
}

void Core::settle() {
    for (Segment s : under_way()) drop(s);
    wait_all();
}

void Core::wait_all() {
    for (Segment s : under_way()) finish(s);
}

// Waits on the host for a copy, at nobody's cost.
void Core::finish(Segment s) {
    const Flight f = *flight(s);
    if (log) log->push_back({'w', s, f.slot});
    link_->wait(f.ticket);
    land(s);
}

std::vector<Move> Core::resize(std::int64_t slots) {
    if (free_.size() != 1 || slots < 1 || slots > static_cast<std::int64_t>(generation_.size()))
        throw Broken("this cache cannot have " + std::to_string(slots) + " slots");
    const std::int64_t left = std::min(slots, slots_);
    for (Segment s : under_way())
        if (slot_[s] >= left && !drop(s)) finish(s);
    // one by one: an order that shares slots out between layers goes by what each has left
    for (std::int64_t excess = slots_ - free_slots() - slots; excess > 0; --excess)
        evict(order_->victims(0, 1, evictable_.data()), -1);
    std::vector<Segment> held(static_cast<std::size_t>(std::max(slots, slots_)), -1);
    for (std::size_t s = 0; s < slot_.size(); ++s)
        if (slot_[s] >= 0) held[slot_[s]] = static_cast<Segment>(s);
    std::vector<Slot> free;
    for (Slot slot = 0; slot < slots; ++slot)
        if (held[slot] < 0) free.push_back(slot);
    std::vector<Move> moves;
    for (Slot slot = slots; slot < slots_; ++slot) {
        const Segment s = held[slot];
        if (s < 0) continue;
        if (pins_[s] || state(s) != State::resident || moves.size() == free.size())
            throw Broken("expert " + std::to_string(s) + " cannot move from slot " + std::to_string(slot) +
                         ": it is pinned or loading");
        moves.push_back({s, slot, free[moves.size()]});
    }
    for (const Move& move : moves) {
        slot_[move.segment] = static_cast<std::int32_t>(move.to);
        ++generation_[move.to];
    }
    free_[0].assign(free.rbegin(), free.rend() - static_cast<std::ptrdiff_t>(moves.size()));
    emptied_ += slots > slots_;  // there are slots to fill, as in an empty cache
    layout_.slots[0] = slots_ = slots;
    return moves;
}

void Core::migrate(const Segments& keys, bool keep_others) {
    const Segments wanted = segments_of(keys);
    Segments absent;
    for (Segment s : wanted)
        if (state(s) == State::absent) absent.push_back(s);
    std::vector<std::uint8_t> may(states_.size(), 1);
    for (std::size_t i = 0; i < may.size(); ++i) may[i] = !pins_[i];
    for (Segment s : wanted) may[s] = 0;
    if (!keep_others)
        for (std::int64_t c = 0; c < static_cast<std::int64_t>(free_.size()); ++c)
            evict(order_->victims(c, layout_.slots[c], may.data()), -1);
    submit(reserve(make_room(absent, may), Cause::migration), true);
}

void Core::preload(const Segments& keys) {
    const Segments fit = make_room(segments_of(keys), std::vector<std::uint8_t>(states_.size()));
    submit(reserve(fit, Cause::preload), true);
    for (Segment s : fit) {
        const Flight f = *flight(s);
        if (log) log->push_back({'w', s, f.slot});
        link_->wait(f.ticket);
        if (link_->ending(f.ticket) != Ending::copied) fail(s);
        publish(f);
        totals_.bytes_preloaded += bytes_of(s);
        flights_.erase(flight(s));
        link_->forget(f.ticket);
    }
}

void Core::flush() {
    wait_all();
    Segments held;
    for (std::size_t i = 0; i < states_.size(); ++i)
        if (states_[i]) held.push_back(static_cast<Segment>(i));
    evict(held, -1);
}

Segments Core::under_way() const {
    Segments found;
    for (const Flight& f : flights_) found.push_back(f.segment);
    return found;
}

// -- one pass -------------------------------------------------------------------------------------------------------

const Segments& Core::open(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens,
                           const Segments& low) {
    expect_layer(layer);
    expect(keys, layer * layout_.experts, (layer + 1) * layout_.experts);
    if (counts.size() != keys.size()) throw Broken("as many counts as experts");
    layer_ = layer;
    needed_ = segments_of(keys);
    if (!low.empty())
        for (Segment& s : needed_)
            if (std::find(low.begin(), low.end(), s) != low.end()) s += layout_.keys();
    drop_stale(layer, needed_);
    order_->routed(layer, keys, counts, tokens);
    return needed_;
}

Segments Core::victims(std::int64_t slot_class, std::int64_t count, const std::vector<std::uint8_t>& kept) {
    std::vector<std::uint8_t> may = evictable_;
    for (std::size_t i = 0; i < may.size(); ++i) may[i] &= !kept[i];
    Segments found = order_->victims(slot_class, count, may.data());
    const auto lacking = count - static_cast<std::int64_t>(found.size());
    if (lacking > 0) {  // copies in flight for other layers
        bool any = false;
        for (std::size_t i = 0; i < may.size(); ++i) {
            may[i] = states_[i] == static_cast<std::uint8_t>(State::loading) && !kept[i] && !pins_[i];
            any |= may[i];
        }
        if (any) {
            const Segments more = order_->victims(slot_class, lacking, may.data());
            found.insert(found.end(), more.begin(), more.end());
        }
    }
    return found;
}

const Plan& Core::plan(const Segments& here, const Segments& keep) {
    expect(here, 0, layout_.segments());
    expect(keep, 0, layout_.segments());
    plan_ = Plan{};
    given_ = done_ = 0;
    late_ = false;
    Segments by[3];
    for (Segment s : here) by[2 - states_[s]].push_back(s);
    plan_.resident = static_cast<std::int64_t>(by[0].size());
    plan_.arriving = static_cast<std::int64_t>(by[1].size());
    plan_.run = by[0];
    for (int i : {1, 2}) plan_.run.insert(plan_.run.end(), by[i].begin(), by[i].end());
    const Segments& missing = by[2];
    if (missing.empty()) return plan_;
    std::vector<std::uint8_t> kept(states_.size());
    for (Segment s : keep) kept[s] = 1;
    if (free_.size() == 1) {
        plan_class(0, plan_.run, missing, kept, !keep.empty(), plan_.loads);
    } else {
        std::unordered_map<Segment, std::int64_t> place;
        for (std::size_t i = 0; i < plan_.run.size(); ++i) place[plan_.run[i]] = static_cast<std::int64_t>(i);
        std::vector<std::uint8_t> classes(free_.size());
        std::int64_t several = 0;
        for (Segment first : missing) {
            const std::int64_t c = class_of(first);
            if (std::exchange(classes[c], std::uint8_t{1})) continue;
            ++several;
            Segments run, own;
            for (Segment s : plan_.run)
                if (class_of(s) == c) run.push_back(s);
            for (Segment s : missing)
                if (class_of(s) == c) own.push_back(s);
            const std::size_t begun = plan_.loads.size();
            plan_class(c, run, own, kept, !keep.empty(), plan_.loads);
            for (std::size_t i = begun; i < plan_.loads.size(); ++i)
                if (plan_.loads[i].after) plan_.loads[i].after = place[run[plan_.loads[i].after - 1]] + 1;
        }
        if (several > 1)
            std::stable_sort(plan_.loads.begin(), plan_.loads.end(), [&](const Load& a, const Load& b) {
                return a.after != b.after ? a.after < b.after : place[a.segment] < place[b.segment];
            });
    }
    for (const Load& l : plan_.loads) late_ |= l.after > 0;
    return plan_;
}

void Core::plan_class(std::int64_t slot_class, const Segments& run, const Segments& missing,
                      const std::vector<std::uint8_t>& keep, bool any_kept, std::vector<Load>& loads) {
    const auto free = std::min(free_of(slot_class), static_cast<std::int64_t>(missing.size()));
    const auto lacking = static_cast<std::int64_t>(missing.size()) - free;
    for (std::int64_t i = 0; i < free; ++i) loads.push_back({missing[i], -1, 0});
    if (!lacking) return;
    std::vector<std::uint8_t> kept = keep;
    for (Segment s : run) kept[s] = 1;
    Segments out = victims(slot_class, lacking, kept);
    if (static_cast<std::int64_t>(out.size()) == lacking) {
        for (std::int64_t i = 0; i < lacking; ++i) loads.push_back({missing[free + i], out[i], 0});
        return;
    }
    // What is kept gives way only where the layer has nothing of its own to take turns with.
    const std::size_t first = run.size() - missing.size();
    std::vector<std::int64_t> turns;
    for (std::size_t i = 0; i < run.size(); ++i)
        if (i >= first || !keep[run[i]]) turns.push_back(static_cast<std::int64_t>(i));
    if (any_kept && run[turns[0]] == missing[free + static_cast<std::int64_t>(out.size())]) {
        std::vector<std::uint8_t> mine(states_.size());
        for (Segment s : run) mine[s] = 1;
        for (Segment s : out) mine[s] = 1;
        const Segments more = victims(slot_class, lacking - static_cast<std::int64_t>(out.size()), mine);
        out.insert(out.end(), more.begin(), more.end());
        turns.resize(run.size());
        std::iota(turns.begin(), turns.end(), 0);
    }
    for (std::size_t i = 0; i < out.size(); ++i) loads.push_back({missing[free + i], out[i], 0});
    // Each further load takes the slot of the next segment to have run.
    std::size_t at = 0;
    for (auto i = static_cast<std::size_t>(free) + out.size(); i < missing.size() && at < turns.size(); ++i, ++at) {
        if (run[turns[at]] == missing[i])
            throw NoSlot("no slot can be freed for expert " + std::to_string(missing[i]) + ": the pool has " +
                         std::to_string(layout_.slots[slot_class]));
        loads.push_back({missing[i], run[turns[at]], turns[at] + 1});
    }
}

void Core::count_begin() {
    LayerCounts& c = of(layer_);
    const std::int64_t keys = layout_.keys(), experts = layout_.experts, base = layer_ * experts;
    const auto resident = static_cast<std::size_t>(plan_.resident), size = plan_.run.size();
    const std::size_t here = resident + static_cast<std::size_t>(plan_.arriving);
    const std::int64_t hits = c.hits, misses = c.misses;
    ++c.forwards;
    ++c.waves;
    std::int64_t after = 0;
    for (const Load& l : plan_.loads)
        if (l.after > after) after = l.after, ++c.waves;
    for (std::size_t i = here; i < size; ++i)
        if (plan_.run[i] < keys && vacant_[plan_.run[i]]) c.bytes_premature += bytes_of(plan_.run[i]);
    std::fill_n(vacant_.begin() + base, experts, std::uint8_t{0});
    std::vector<std::uint8_t> there(static_cast<std::size_t>(experts)), lacking(there), brought(there), late(there);
    for (std::size_t i = 0; i < size; ++i) (i < resident ? there : lacking)[plan_.run[i] % keys - base] = 1;
    if (layout_.split) {
        for (std::size_t i = 0; i < resident; ++i) c.top_hits += plan_.run[i] < keys && lacking[plan_.run[i] - base];
        for (std::int64_t e = 0; e < experts; ++e) c.hits += there[e] && !lacking[e], c.misses += lacking[e];
    } else {
        c.hits += plan_.resident;
        c.misses += static_cast<std::int64_t>(size - resident);
        for (std::size_t i = 0; i < size; ++i)
            if (plan_.run[i] >= keys) ++(i < resident ? c.low_bit_hits : c.low_bit_misses);
    }
    if (decode_only) {
        totals_.decode_hits += c.hits - hits;
        totals_.decode_misses += c.misses - misses;
    }
    for (std::size_t i = 0; i < resident; ++i)
        if (take_pending(plan_.run[i], &SourceCounts::hits)) brought[plan_.run[i] % keys - base] = 1, ++governor_.used;
    for (std::int64_t e = 0; e < experts; ++e) c.prefetched_hits += brought[e] && !lacking[e];
    for (std::size_t i = 0; i < here; ++i) pin(plan_.run[i]);
    for (std::size_t i = resident; i < here; ++i) {
        if (flight(plan_.run[i])->cause != Cause::prefetch) continue;
        take_pending(plan_.run[i], &SourceCounts::late);
        ++governor_.used;
        late[plan_.run[i] % keys - base] = 1;
    }
    c.late_prefetches += std::count(late.begin(), late.end(), 1);
}

void Core::expect_open() const {
    if (layer_ < 0) throw Broken("no pass is open");
}

void Core::begin() {
    expect_open();
    for (Segment s : plan_.run)
        if (layer_of(s) != layer_) throw Broken("segment " + std::to_string(s) + " is not of layer " + std::to_string(layer_));
    count_begin();
    for (std::int64_t i = plan_.resident; i < plan_.resident + plan_.arriving; ++i) {
        const auto f = flight(plan_.run[i]);
        // loads of another cut come after demand, too
        if (f->cause != Cause::prefetch && !(layout_.split && f->cause == Cause::migration)) continue;
        if (log) log->push_back({'^', f->segment, f->slot});
        link_->promote(f->ticket);
    }
}

void Core::load() {
    expect_open();
    issue(0);
}

void Core::issue(std::int64_t after) {
    Segments loads, leaving;
    for (const Load& l : plan_.loads)
        if (l.after == after) {
            loads.push_back(l.segment);
            if (l.victim >= 0) leaving.push_back(l.victim);
        }
    if (loads.empty()) return;
    evict(leaving, layer_);
    const auto copies = reserve(loads, Cause::demand);
    for (Segment s : loads) pin(s);
    if (decode_only)
        for (Segment s : loads) of(layer_).bytes_demanded_decode += bytes_of(s);
    submit(copies, true);
}

void Core::ran(std::int64_t first, std::int64_t stop) {
    const Segments run(plan_.run.begin() + first, plan_.run.begin() + stop);
    const std::int64_t keys = layout_.keys();
    for (Segment s : run) {
        unpin(s);
        if (!layout_.split || s == (has(s % keys) ? s % keys : s % keys + keys)) ++uses_[s % keys];
    }
    order_->used(run);
}

std::pair<std::int64_t, std::int64_t> Core::next() {
    expect_open();
    const auto size = static_cast<std::int64_t>(plan_.run.size());
    if (late_ && given_ < done_) {
        ran(given_, done_);
        issue(done_);
    }
    if (done_ == size) {
        if (!late_ && given_ < done_) ran(0, size);
        given_ = done_;
        return {size, size};
    }
    const std::int64_t first = done_;
    std::int64_t stop = first < plan_.resident ? plan_.resident : size;
    if (late_) {
        if (first >= plan_.resident) stop = first + 1;
        for (const Load& l : plan_.loads)
            if (l.after > first) stop = std::min(stop, l.after);
    }
    if (late_ || first < plan_.resident) {
        for (std::int64_t i = first; i < stop; ++i)
            if (flight(plan_.run[i]) != flights_.end()) land_needed(plan_.run[i], layer_);
    } else {
        if (flight(plan_.run[first]) != flights_.end()) land_needed(plan_.run[first], layer_);
        stop = land_behind(first + 1, stop);
    }
    given_ = first;
    done_ = stop;
    return {first, stop};
}

void Core::close(double peer_blocked_s, double peer_link_s) {
    expect_open();
    LayerCounts& c = of(layer_);
    c.io_path_s += std::max(c.blocked_io_s - blocked_s_, peer_blocked_s);
    c.link_path_s += std::max(c.link_s - link_s_, peer_link_s);
    layer_ = -1;
}

void Core::abandon() noexcept {
    for (std::size_t i = 0; i < pins_.size(); ++i)
        if (pins_[i]) pins_[i] = 0, evictable_[i] = states_[i] == static_cast<std::uint8_t>(State::resident);
    layer_ = -1;
}

// -- ahead ----------------------------------------------------------------------------------------------------------

std::int64_t Core::prefetch(const Segments& keys, const Segments& keep, std::uint8_t source) {
    const std::int64_t whole = layout_.keys();
    expect(keys, 0, layout_.segments());
    expect(keep, 0, layout_.segments());
    Segments wanted;
    for (Segment s : keys)
        if (layout_.split || layout_.parts == 1 || s < whole || state(s - whole) == State::absent) wanted.push_back(s);
    Segments absent;
    for (Segment s : segments_of(wanted))
        if (state(s) == State::absent) absent.push_back(s);
    if (absent.empty()) return 0;
    Segments kept = wanted;
    kept.insert(kept.end(), keep.begin(), keep.end());
    if (layout_.parts > 1)  // with an expert its bottom, or its replica, stays
        for (std::size_t i = 0, n = kept.size(); i < n; ++i)
            if (kept[i] < whole) kept.push_back(kept[i] + whole);
    const Segments fit = make_room(absent, allowed(kept));
    sources_[source].queued += static_cast<std::int64_t>(fit.size());
    for (Segment s : fit) pending_[s] = source;
    submit(reserve(fit, Cause::prefetch), false);
    return static_cast<std::int64_t>(fit.size());
}

void Core::finish_prefetch(const Segments& keys, std::int64_t layer) {
    expect_layer(layer);
    for (Segment s : segments_of(keys)) {
        const auto f = flight(s);
        if (f == flights_.end()) continue;
        await(*f, layer, false);
        land(s);
    }
}

void Core::vacate(std::int64_t slots, std::int64_t layer) {
    leave(order_->victims(0, slots - free_slots(), evictable_.data()), layer);
}

void Core::leave(const Segments& leaving, std::int64_t layer) {
    expect_layer(layer);
    expect(leaving, 0, layout_.segments());
    evict(leaving, layer);
    for (Segment s : leaving)
        if (s < layout_.keys()) vacant_[s] = 1;
    of(layer).vacated += static_cast<std::int64_t>(leaving.size());
}

std::string Core::check() const {
    std::vector<std::uint8_t> taken(static_cast<std::size_t>(slots_));
    for (std::size_t c = 0; c < free_.size(); ++c)
        for (Slot slot : free_[c]) {
            if (slot < first_of_[c] || slot >= first_of_[c] + layout_.slots[c]) return "a free slot is of another class";
            if (std::exchange(taken[slot], std::uint8_t{1})) return "a slot is free twice";
        }
    std::size_t loading = 0;
    for (std::size_t s = 0; s < states_.size(); ++s) {
        const bool held = states_[s] != 0;
        if (held != (slot_[s] >= 0)) return "a segment's slot says otherwise than its state: " + std::to_string(s);
        if (held && std::exchange(taken[slot_[s]], std::uint8_t{1})) return "a slot is shared: " + std::to_string(slot_[s]);
        if (evictable_[s] != (states_[s] == 2 && !pins_[s])) return "a segment is wrongly evictable: " + std::to_string(s);
        if (pins_[s] < 0 || (pins_[s] && !held)) return "an absent segment is pinned: " + std::to_string(s);
        if (pending_[s] && !held) return "an unused prefetch is not held: " + std::to_string(s);
        loading += states_[s] == 1;
    }
    if (std::count(taken.begin(), taken.end(), 1) != static_cast<std::ptrdiff_t>(taken.size())) return "a slot is lost";
    if (loading != flights_.size()) return "loads under way are not the loading segments";
    return "";
}

}  // namespace tiermoe::core
