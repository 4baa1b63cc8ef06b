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

void Core::Flights::add(const Flight& f) {
    if (all_.size() > 2 * live_ + 64) {  // mostly ended ones
        all_.erase(std::remove_if(all_.begin(), all_.end(), [](const Flight& one) { return !one.ticket; }), all_.end());
        for (std::size_t i = 0; i < all_.size(); ++i) place_[all_[i].segment] = static_cast<std::int32_t>(i);
    }
    place_[f.segment] = static_cast<std::int32_t>(all_.size());
    all_.push_back(f);
    ++live_;
}

class Core::Kept {
  public:
    Kept(Core& core, const Segments& some, const Segments& others) : core_(core), lists_{&some, &others} {
        for (const Segments* list : lists_)
            for (Segment s : *list) core_.evictable_[s] = 0;
    }
    Kept(const Kept&) = delete;
    ~Kept() {
        for (const Segments* list : lists_)
            for (Segment s : *list) core_.evictable_[s] = core_.state(s) == State::resident && !core_.pins_[s];
    }

  private:
    Core& core_;
    const Segments* lists_[2];
};

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
    if (!layout.first_unit.empty() &&
        static_cast<Slot>(layout.first_unit.size()) != std::accumulate(layout.slots.begin(), layout.slots.end(), Slot{0}))
        throw std::invalid_argument("places of slots");
    if (layout.first_unit.empty() != layout_.first_unit.empty() && !states_.empty()) throw std::invalid_argument("places of slots");
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
    vacated_.assign(static_cast<std::size_t>(layout.layers), 0);
    flights_.size(segments);
    flags_.assign(static_cast<std::size_t>(layout.experts), 0);
    classes_.assign(layout.slots.size(), 0);
    room_.assign(layout.slots.size(), 0);
    place_.assign(segments, 0);
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
    slots_ = free_count_ = first;
    unwritten_.assign(writeback_ ? generation_.size() : 0, 0);
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

void Core::settle_times() {
    late_times_.clear();
    link_->late(late_times_);
    for (const Late& found : late_times_) {
        const Times& t = found.times;
        const std::int64_t layer = found.wait ? found.layer : layer_of(found.segment);
        LayerCounts& c = of(layer);
        if (found.wait) {
            const double waited_s = t.end_s - t.start_s;
            c.blocked_io_s += waited_s;
            c.io_path_s += waited_s;
            c.writeback_blocked_s += found.writing_s;
            if (decode_only) totals_.decode_blocked_io_s += waited_s;
        } else {
            c.total_io_s += t.end_s - t.start_s;
            c.link_s += t.link_s;
            c.link_path_s += t.link_s;  // the pass itself counted what had ended while it ran
            c.writeback_link_s += t.back_s;
        }
        if (seen) seen->push_back({found.wait, layer, found.segment, found.cause, t.start_s, t.end_s, t.link_s});
    }
}

// -- slots ----------------------------------------------------------------------------------------------------------

void Core::expect_layer(std::int64_t layer) const {
    if (layer < 0 || layer >= layout_.layers) throw Broken("there is no MoE layer " + std::to_string(layer));
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
    if (slot_[s] < 0) throw Broken("a segment leaves twice: " + std::to_string(s));
    if (pins_[s]) throw Broken("a pinned segment cannot leave: " + std::to_string(s));
    free_[class_of(s)].push_back(slot_[s]);
    slot_[s] = -1;
    states_[s] = evictable_[s] = 0;
    emptied_ += ++free_count_ == slots_;
}

const std::vector<Copy>& Core::reserve(const Segments& segments, Cause cause) {
    copies_.clear();
    if (segments.empty()) return copies_;
    const Mark after = link_->mark();
    for (std::size_t i = 0; i < segments.size(); ++i) {  // all of them get a slot, or nothing changes
        const Segment s = segments[i];
        auto& free = free_[class_of(s)];
        if (state(s) != State::absent || free.empty()) {
            const char* why = free.empty() ? "no slot is free for segment " : "a segment is there already: ";
            while (i--) {
                free_[class_of(segments[i])].push_back(slot_[segments[i]]);
                ++free_count_;
                slot_[segments[i]] = -1;
                states_[segments[i]] = static_cast<std::uint8_t>(State::absent);
            }
            throw Broken(why + std::to_string(s));
        }
        slot_[s] = static_cast<std::int32_t>(free.back());
        free.pop_back();
        --free_count_;
        states_[s] = static_cast<std::uint8_t>(State::loading);
    }
    for (Segment s : segments) {
        const Slot slot = slot_[s];
        took_s_[s] = -1.0;
        const bool back = writeback_ && unwritten_[slot];
        if (back) unwritten_[slot] = 0;
        copies_.push_back({++tickets_, s, slot, ++generation_[slot], bytes_of(s), cause, after, back});
        flights_.add({tickets_, s, slot, generation_[slot], layer_of(s), cause, after, back});
        order_->admitted(s);
    }
    return copies_;
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
    const Flight f = flight(s);
    if (link_->ending(f.ticket) != Ending::copied) return drop_failed(s);
    landed(f);
    publish(f);
    flights_.erase(s);
    link_->forget(f.ticket);
}

void Core::drop_failed(Segment s) {
    const Flight f = flight(s);
    if (link_->ending(f.ticket) == Ending::cancelled) fail(s);
    if (f.cause == Cause::prefetch) ++of(f.layer).failed_prefetches;
    release(s);
}

void Core::fail(Segment s) {
    for (std::size_t i = 0; i < pins_.size(); ++i)
        if (pins_[i]) pins_[i] = 0, evictable_[i] = states_[i] == static_cast<std::uint8_t>(State::resident);
    const Flight f = flight(s);
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
    const Flight f = flight(s);
    if (const double share = link_->moved(f.ticket)) {
        const auto moved = static_cast<std::int64_t>(std::nearbyint(static_cast<double>(bytes_of(s)) * share));
        of(f.layer).bytes_loaded_prefetch += moved;
        of(f.layer).bytes_wasted += moved;
    }
    if (take_pending(s, &SourceCounts::cancelled)) ++governor_.wasted;
    forget(s);
}

void Core::forget(Segment s) {
    const Flight f = flight(s);
    if (f.back && link_->ending(f.ticket) == Ending::cancelled) unwritten_[f.slot] = 1;
    flights_.erase(s);
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
    link_->look();
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
    await(flight(s), layer, false);
    Flight& found = *flights_.find(s);
    if (found.cause != Cause::demand && link_->ending(found.ticket) == Ending::failed) {
        // a copy that no forward waited for failed: once more
        if (found.cause == Cause::prefetch) ++of(found.layer).failed_prefetches;
        pending_[s] = 0;
        copies_.assign(1, {++tickets_, s, found.slot, found.generation, bytes_of(s), Cause::demand, found.after, false});
        link_->forget(found.ticket);
        found.ticket = tickets_;
        found.cause = Cause::demand;
        found.back = false;
        submit(copies_, true);
        await(flight(s), layer, false);
    }
    const Ending ending = link_->ending(found.ticket);
    if (ending == Ending::failed || ending == Ending::cancelled) fail(s);
    landed(found);
    publish(found);
    const Ticket ticket = found.ticket;
    flights_.erase(s);
    link_->forget(ticket);
}

// Lands the first of plan_.run[first:stop] as far as they are there; where that ends.
std::int64_t Core::land_behind(std::int64_t first, std::int64_t stop) {
    for (; first < stop; ++first) {
        const Segment s = plan_.run[first];
        if (!loading(s)) continue;
        if (link_->ending(flight(s).ticket) != Ending::copied) return first;
        land(s);
    }
    return first;
}

void Core::arrive(std::int64_t layer) {
    settle_times();
    if (layer >= 0) {
        expect_layer(layer);
        blocked_s_ = of(layer).blocked_io_s;
        link_s_ = of(layer).link_s;
    }
    link_->poll();
    if (!flights_.count()) return;
    ended_.clear();
    flights_.each([&](const Flight& f) {
        if (link_->ending(f.ticket) != Ending::under_way) ended_.push_back(f.segment);
    });
    for (Segment s : ended_) land(s);
}

void Core::drop_stale(std::int64_t layer, const Segments& needed) {
    if (!flights_.count()) return;
    stale_.clear();
    flights_.each([&](const Flight& f) {
        if (f.layer == layer && f.cause == Cause::prefetch && std::find(needed.begin(), needed.end(), f.segment) == needed.end())
            stale_.push_back(f.segment);
    });
    for (Segment s : stale_) drop(s);
}

// Cancels a copy that was not begun. False: it was.
bool Core::drop(Segment s) {
    const Flight& f = flight(s);
    const bool dropped = link_->cancel(f.ticket);
    if (log) log->push_back({dropped ? 'x' : '-', s, f.slot});
    if (dropped) release(s);
    return dropped;
}

bool Core::displaced(Segment s, std::int64_t layer) {
    const Flight f = flight(s);
    if (drop(s)) return false;
    await(f, layer < 0 ? f.layer : layer, true);
    const bool copied = link_->ending(f.ticket) == Ending::copied;
    land(s);
    return copied;
}

void Core::evict(const Segments& segments, std::int64_t layer) {
    here_.clear();
    for (Segment s : segments)
        if (!loading(s) || displaced(s, layer)) here_.push_back(s);
    for (Segment s : here_) {
        if (state(s) != State::resident) throw Broken("a segment that leaves is not resident: " + std::to_string(s));
        if (pins_[s]) throw Broken("a pinned segment cannot leave: " + std::to_string(s));
    }
    for (Segment s : here_) {
        if (writeback_ && s < layout_.keys()) unwritten_[slot_[s]] = 1;
        drop_slot(s);
    }
    for (Segment s : here_) order_->removed(s);
    for (Segment s : here_)
        if (take_pending(s, &SourceCounts::wasted)) {
            of(layer_of(s)).bytes_wasted += bytes_of(s);
            ++governor_.wasted;
        }
}

const Segments& Core::make_room(const Segments& absent, const std::uint8_t* may) {
    fit_.clear();
    if (free_.size() == 1) {
        const auto lacking = static_cast<std::int64_t>(absent.size()) - free_of(0);
        if (lacking > 0) evict(order_->victims(0, lacking, may), -1);
        const auto room = std::min(absent.size(), static_cast<std::size_t>(free_of(0)));
        fit_.assign(absent.begin(), absent.begin() + static_cast<std::ptrdiff_t>(room));
        return fit_;
    }
    for (Segment s : absent) classes_[class_of(s)] = 0;
    for (Segment first : absent) {
        const std::int64_t c = class_of(first);
        if (std::exchange(classes_[c], std::uint8_t{1})) continue;
        const auto own = std::count_if(absent.begin(), absent.end(), [&](Segment s) { return class_of(s) == c; });
        if (own > free_of(c)) evict(order_->victims(c, own - free_of(c), may), -1);
        room_[c] = free_of(c);
    }
    for (Segment s : absent)
        if (room_[class_of(s)]-- > 0) fit_.push_back(s);
    return fit_;
}

void Core::expect(const Segments& given, Segment first, Segment stop) const {
    for (Segment s : given)
        if (s < first || s >= stop)
            throw Broken("expert " + std::to_string(s) + " is not one of " + std::to_string(first) + " to " +
                         std::to_string(stop - 1));
}

void Core::into_segments(const Segments& keys, Segments& found) const {
    if (!layout_.split) {
        found.assign(keys.begin(), keys.end());
        return;
    }
    found.clear();
    for (Key key : keys)
        for (Segment s : {key, key + layout_.keys()})
            if (has(s)) found.push_back(s);
}

Segments Core::segments_of(const Segments& keys) const {
    expect(keys, 0, layout_.split ? layout_.keys() : layout_.segments());
    Segments found;
    into_segments(keys, found);
    return found;
}

// -- between passes -------------------------------------------------------------------------------------------------

void Core::divide(const Layout& layout, const Segments& fill) {
    if (layout.layers != layout_.layers || layout.experts != layout_.experts || layout.parts != layout_.parts)
        throw std::invalid_argument("other experts");
    expect(fill, 0, layout_.keys());
    settle();
    flush();
    lay_out(layout);
    load_behind(fill);
}

// Into free slots, behind demand; returns what is loaded.
Segments Core::load_behind(const Segments& keys) {
    std::vector<std::int64_t> room;
    for (std::int64_t c = 0; c < static_cast<std::int64_t>(free_.size()); ++c) room.push_back(free_of(c));
    std::vector<std::uint8_t> seen(static_cast<std::size_t>(layout_.keys()));
    Segments loads;
    for (Key key : keys) {
        if (std::exchange(seen[key], std::uint8_t{1}) || !has(key) || state(key) != State::absent) continue;
        std::int64_t& left = room[static_cast<std::size_t>(class_of(key))];
        if (left) --left, loads.push_back(key);
    }
    submit(reserve(loads, Cause::migration), false);
    return loads;
}

std::int64_t Core::fill(const Segments& keys) {
    expect(keys, 0, layout_.keys());
    const Segments loads = load_behind(keys);
    for (auto s = loads.rbegin(); s != loads.rend(); ++s) {  // by the order in which they are admitted, some orders evict
        order_->removed(*s);
        order_->admitted(*s);
    }
    return static_cast<std::int64_t>(loads.size());
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
    const Flight f = flight(s);
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
    free_count_ = static_cast<Slot>(free_[0].size());
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
    submit(reserve(make_room(absent, may.data()), Cause::migration), true);
}

void Core::preload(const Segments& keys) {
    const Segments fit = make_room(segments_of(keys), std::vector<std::uint8_t>(states_.size()).data());
    submit(reserve(fit, Cause::preload), true);
    for (Segment s : fit) {
        const Flight f = flight(s);
        if (log) log->push_back({'w', s, f.slot});
        link_->wait(f.ticket);
        if (link_->ending(f.ticket) != Ending::copied) fail(s);
        publish(f);
        totals_.bytes_preloaded += bytes_of(s);
        flights_.erase(s);
        link_->forget(f.ticket);
    }
    late_times_.clear();
    link_->late(late_times_);  // counted in no layer
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
    flights_.each([&](const Flight& f) { found.push_back(f.segment); });
    return found;
}

// -- one pass -------------------------------------------------------------------------------------------------------

const Segments& Core::open(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens,
                           const Segments& low) {
    expect_layer(layer);
    expect(keys, layer * layout_.experts, (layer + 1) * layout_.experts);
    if (counts.size() != keys.size()) throw Broken("as many counts as experts");
    layer_ = layer;
    const std::int64_t pairs = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    std::int64_t experts = layout_.experts;  // of which the pass picks
    if (!others_.empty() && pairs >= kSweepPairs && std::none_of(keys.begin(), keys.end(), [&](Key key) { return others_[key]; })) {
        const auto first = others_.begin() + layer * layout_.experts;
        experts = std::count(first, first + layout_.experts, std::uint8_t{0});
    }
    sweeps_ = pairs >= kSweepPairs * experts && static_cast<double>(keys.size()) >= kSweepShare * static_cast<double>(experts);
    for (Key key : keys) ++uses_[key];
    into_segments(keys, needed_);
    if (!low.empty())
        for (Segment& s : needed_)
            if (std::find(low.begin(), low.end(), s) != low.end()) s += layout_.keys();
    drop_stale(layer, needed_);
    order_->routed(layer, keys, counts, tokens);
    return needed_;
}

// Victims that are neither of the pass nor kept.
Segments Core::victims(std::int64_t slot_class, std::int64_t count, const Segments& mine, const Segments& kept) {
    Segments found;
    {
        const Kept out_of_reach(*this, mine, kept);
        found = order_->victims(slot_class, count, evictable_.data());
    }
    const auto lacking = count - static_cast<std::int64_t>(found.size());
    if (lacking <= 0 || !flights_.count()) return found;
    // copies in flight for other layers
    may_.assign(states_.size(), 0);
    flights_.each([&](const Flight& f) { may_[f.segment] = !pins_[f.segment]; });
    for (const Segments* list : {&mine, &kept})
        for (Segment s : *list) may_[s] = 0;
    bool any = false;
    flights_.each([&](const Flight& f) { any |= may_[f.segment] != 0; });
    if (any) {
        const Segments more = order_->victims(slot_class, lacking, may_.data());
        found.insert(found.end(), more.begin(), more.end());
    }
    return found;
}

const Plan& Core::plan(const Segments& here, const Segments& keep) {
    expect(here, 0, layout_.segments());
    expect(keep, 0, layout_.segments());
    given_ = done_ = 0;
    late_ = false;
    plan_.run.clear();
    plan_.loads.clear();
    missing_.clear();
    for (Segment s : here)
        if (state(s) == State::resident) plan_.run.push_back(s);
    plan_.resident = static_cast<std::int64_t>(plan_.run.size());
    plan_.arriving = 0;
    if (plan_.run.size() == here.size()) return plan_;
    for (Segment s : here)
        if (state(s) == State::loading) plan_.run.push_back(s);
    plan_.arriving = static_cast<std::int64_t>(plan_.run.size()) - plan_.resident;
    for (Segment s : here)
        if (state(s) == State::absent) plan_.run.push_back(s), missing_.push_back(s);
    if (missing_.empty()) return plan_;
    if (free_.size() == 1) {
        plan_class(0, plan_.run, missing_, keep, plan_.loads);
    } else {
        for (std::size_t i = 0; i < plan_.run.size(); ++i) place_[plan_.run[i]] = static_cast<std::int32_t>(i);
        std::int64_t several = 0;
        for (Segment s : missing_) classes_[class_of(s)] = 0;
        for (Segment first : missing_) {
            const std::int64_t c = class_of(first);
            if (std::exchange(classes_[c], std::uint8_t{1})) continue;
            ++several;
            class_run_.clear();
            class_missing_.clear();
            for (Segment s : plan_.run)
                if (class_of(s) == c) class_run_.push_back(s);
            for (Segment s : missing_)
                if (class_of(s) == c) class_missing_.push_back(s);
            const std::size_t begun = plan_.loads.size();
            plan_class(c, class_run_, class_missing_, keep, plan_.loads);
            for (std::size_t i = begun; i < plan_.loads.size(); ++i)
                if (plan_.loads[i].after)
                    plan_.loads[i].after = place_[class_run_[static_cast<std::size_t>(plan_.loads[i].after - 1)]] + 1;
        }
        if (several > 1)
            std::stable_sort(plan_.loads.begin(), plan_.loads.end(), [&](const Load& a, const Load& b) {
                return a.after != b.after ? a.after < b.after : place_[a.segment] < place_[b.segment];
            });
    }
    for (const Load& l : plan_.loads) late_ |= l.after > 0;
    return plan_;
}

void Core::plan_class(std::int64_t slot_class, const Segments& run, const Segments& missing, const Segments& keep,
                      std::vector<Load>& loads) {
    const auto free = std::min(free_of(slot_class), static_cast<std::int64_t>(missing.size()));
    const auto lacking = static_cast<std::int64_t>(missing.size()) - free;
    for (std::int64_t i = 0; i < free; ++i) loads.push_back({missing[i], -1, 0});
    if (!lacking) return;
    Segments out = victims(slot_class, lacking, run, keep);
    if (static_cast<std::int64_t>(out.size()) == lacking) {
        for (std::int64_t i = 0; i < lacking; ++i) loads.push_back({missing[free + i], out[i], 0});
        return;
    }
    // What is kept gives way only where the layer has nothing of its own to take turns with.
    std::vector<std::uint8_t> kept(states_.size());
    for (Segment s : keep) kept[s] = 1;
    const std::size_t first = run.size() - missing.size();
    std::vector<std::int64_t> turns;
    for (std::size_t i = 0; i < run.size(); ++i)
        if (i >= first || !kept[run[i]]) turns.push_back(static_cast<std::int64_t>(i));
    if (!keep.empty() && run[turns[0]] == missing[free + static_cast<std::int64_t>(out.size())]) {
        const Segments more = victims(slot_class, lacking - static_cast<std::int64_t>(out.size()), run, out);
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
    enum : std::uint8_t { there = 1, lacking = 2, brought = 4, late = 8 };
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
    if (vacated_[layer_]) {
        for (std::size_t i = here; i < size; ++i)
            if (plan_.run[i] < keys && vacant_[plan_.run[i]]) c.bytes_premature += bytes_of(plan_.run[i]);
        std::fill_n(vacant_.begin() + base, experts, std::uint8_t{0});
        vacated_[layer_] = 0;
    }
    const auto flags = [&](std::size_t i) -> std::uint8_t& { return flags_[plan_.run[i] % keys - base]; };
    for (std::size_t i = 0; i < size; ++i) flags(i) |= i < resident ? there : lacking;
    if (layout_.split) {
        for (std::size_t i = 0; i < resident; ++i) c.top_hits += plan_.run[i] < keys && flags(i) & lacking;
    } else {
        c.hits += plan_.resident;
        c.misses += static_cast<std::int64_t>(size - resident);
        if (layout_.parts > 1)
            for (std::size_t i = 0; i < size; ++i)
                if (plan_.run[i] >= keys) ++(i < resident ? c.low_bit_hits : c.low_bit_misses);
    }
    for (std::size_t i = 0; i < resident; ++i)
        if (take_pending(plan_.run[i], &SourceCounts::hits)) flags(i) |= brought, ++governor_.used;
    for (std::size_t i = 0; i < here; ++i) pin(plan_.run[i]);
    for (std::size_t i = resident; i < here; ++i) {
        if (flight(plan_.run[i]).cause != Cause::prefetch) continue;
        take_pending(plan_.run[i], &SourceCounts::late);
        ++governor_.used;
        flags(i) |= late;
    }
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint8_t found = std::exchange(flags(i), std::uint8_t{0});  // of an expert once
        if (layout_.split && found) ++(found & lacking ? c.misses : c.hits);
        c.prefetched_hits += (found & brought) && !(found & lacking);
        c.late_prefetches += (found & late) != 0;
    }
    if (decode_only) {
        totals_.decode_hits += c.hits - hits;
        totals_.decode_misses += c.misses - misses;
    }
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
        const Flight& f = flight(plan_.run[i]);
        // loads of another cut come after demand, too
        if (f.cause != Cause::prefetch && !(layout_.split && f.cause == Cause::migration)) continue;
        if (log) log->push_back({'^', f.segment, f.slot});
        link_->promote(f.ticket);
    }
}

void Core::load() {
    expect_open();
    issue(0);
}

void Core::issue(std::int64_t after) {
    loads_.clear();
    leaving_.clear();
    for (const Load& l : plan_.loads)
        if (l.after == after) {
            loads_.push_back(l.segment);
            if (l.victim >= 0) leaving_.push_back(l.victim);
        }
    if (loads_.empty()) return;
    if (!leaving_.empty()) evict(leaving_, layer_);
    const auto& copies = reserve(loads_, Cause::demand);
    for (Segment s : loads_) pin(s);
    if (decode_only)
        for (Segment s : loads_) of(layer_).bytes_demanded_decode += bytes_of(s);
    submit(copies, true);
}

void Core::ran(std::int64_t first, std::int64_t stop) {
    ran_.assign(plan_.run.begin() + first, plan_.run.begin() + stop);
    for (Segment s : ran_) unpin(s);
    order_->used(ran_);
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
            if (loading(plan_.run[i])) land_needed(plan_.run[i], layer_);
    } else {
        if (loading(plan_.run[first])) land_needed(plan_.run[first], layer_);
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
    sweeps_ = false;
}

void Core::abandon() noexcept {
    for (std::size_t i = 0; i < pins_.size(); ++i)
        if (pins_[i]) pins_[i] = 0, evictable_[i] = states_[i] == static_cast<std::uint8_t>(State::resident);
    layer_ = -1;
    sweeps_ = false;
}

// -- ahead ----------------------------------------------------------------------------------------------------------

std::int64_t Core::prefetch(const Segments& keys, const Segments& keep, std::uint8_t source, bool urgent) {
    const std::int64_t whole = layout_.keys();
    if (source == kForgotten) throw std::invalid_argument("too many sources of prefetches");
    for (const Segments* list : {&keys, &keep}) expect(*list, 0, layout_.split ? whole : layout_.segments());
    wanted_.clear();
    for (Segment s : keys)
        if (layout_.split || layout_.parts == 1 || s < whole || state(s - whole) == State::absent) wanted_.push_back(s);
    absent_.clear();
    if (layout_.split) {
        for (Key key : wanted_)
            for (Segment s : {key, key + whole})
                if (has(s) && state(s) == State::absent) absent_.push_back(s);
    } else {
        for (Segment s : wanted_)
            if (state(s) == State::absent) absent_.push_back(s);
    }
    if (absent_.empty()) return 0;
    kept_.assign(keep.begin(), keep.end());
    if (layout_.parts > 1) {  // with an expert its bottom, or its replica, stays
        const std::size_t count = kept_.size();
        for (std::size_t i = 0; i < count; ++i)
            if (kept_[i] < whole) kept_.push_back(kept_[i] + whole);
        for (Segment s : wanted_)
            if (s < whole) kept_.push_back(s + whole);
    }
    const Kept out_of_reach(*this, wanted_, kept_);
    const Segments& fit = make_room(absent_, evictable_.data());
    const std::vector<Copy>& copies = reserve(fit, Cause::prefetch);
    sources_[source].queued += static_cast<std::int64_t>(fit.size());
    for (Segment s : fit) pending_[s] = source;
    submit(copies, urgent);
    return static_cast<std::int64_t>(fit.size());
}

void Core::owns(const Segments& keys) {
    expect(keys, 0, layout_.keys());
    others_.assign(static_cast<std::size_t>(layout_.keys()), 1);
    for (Key key : keys) others_[key] = 0;
}

bool Core::stream(std::uint8_t source) {
    if (!sweeps_) return false;
    if (late_ || layer_ + 1 == layout_.layers) return true;  // the first: its own experts have to take turns
    Segments next;
    for (Key key = (layer_ + 1) * layout_.experts; key < (layer_ + 2) * layout_.experts; ++key)
        if (others_.empty() || !others_[key]) next.push_back(key);
    prefetch(next, {}, source, true);
    return true;
}

void Core::finish_prefetch(const Segments& keys, std::int64_t layer) {
    expect_layer(layer);
    for (Segment s : segments_of(keys)) {
        if (!loading(s)) continue;
        await(flight(s), layer, false);
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
        if (s < layout_.keys()) vacant_[s] = vacated_[layer_of(s)] = 1;
    of(layer).vacated += static_cast<std::int64_t>(leaving.size());
}

std::string Core::check() const {
    std::vector<std::uint8_t> taken(static_cast<std::size_t>(slots_));
    for (std::size_t c = 0; c < free_.size(); ++c)
        for (Slot slot : free_[c]) {
            if (slot < first_of_[c] || slot >= first_of_[c] + layout_.slots[c]) return "a free slot is of another class";
            if (std::exchange(taken[slot], std::uint8_t{1})) return "a slot is free twice";
        }
    std::size_t under_way = 0;
    for (std::size_t s = 0; s < states_.size(); ++s) {
        const bool held = states_[s] != 0;
        if (held != (slot_[s] >= 0)) return "a segment's slot says otherwise than its state: " + std::to_string(s);
        if (held && std::exchange(taken[slot_[s]], std::uint8_t{1})) return "a slot is shared: " + std::to_string(slot_[s]);
        if (evictable_[s] != (states_[s] == 2 && !pins_[s])) return "a segment is wrongly evictable: " + std::to_string(s);
        if (pins_[s] < 0 || (pins_[s] && !held)) return "an absent segment is pinned: " + std::to_string(s);
        if (pending_[s] && !held) return "an unused prefetch is not held: " + std::to_string(s);
        under_way += states_[s] == 1;
    }
    if (std::count(taken.begin(), taken.end(), 1) != static_cast<std::ptrdiff_t>(taken.size())) return "a slot is lost";
    if (under_way != flights_.count()) return "loads under way are not the loading segments";
    return "";
}

}  // namespace tiermoe::core
