#include "loads.hpp"

#include <algorithm>
#include <utility>

namespace tiermoe {

Loads::Loads(Link* link, const SlotArrays& arrays, std::int64_t experts, std::vector<ExpertPart> parts, Layout layout,
             const Counts* counts, Order* order)
    : link_(link), arrays_(arrays), experts_(experts), parts_(std::move(parts)), layout_(std::move(layout)),
      counts_(counts), order_(order), landed_(whole() / experts) {}

void Loads::divide(const SlotArrays& arrays, Layout layout) {
    arrays_ = arrays;
    layout_ = std::move(layout);
}

std::int64_t Loads::evictable() const {
    std::int64_t count = 0;
    for (std::int64_t key = 0; key < arrays_.keys; ++key) count += arrays_.evictable[key];
    return count;
}

void Loads::pin(std::int64_t key) {
    ++arrays_.pins[key];
    arrays_.evictable[key] = 0;
}

void Loads::unpin(std::int64_t key) {
    if (!--arrays_.pins[key]) arrays_.evictable[key] = state(key) == SlotState::resident;
}

bool Loads::start(const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims, bool prefetch) {
    for (std::int64_t victim : victims) {
        drop(victim);
        if (order_) order_->removed(victim);
        if (counts_) counts_->left(victim);
    }
    std::vector<std::shared_ptr<Copy>> copies;
    for (std::int64_t key : keys) {
        const std::int64_t slot_class = class_of(key), expert = key % whole();
        const std::int64_t first_slot = split() ? layout_.class_first[slot_class] : 0;
        const std::int32_t slot = arrays_.free[first_slot + --arrays_.counts[1 + slot_class]];
        const std::int64_t begin = split() ? layout_.begin[key] : 0;
        ++arrays_.generation[slot];
        arrays_.states[key] = static_cast<std::uint8_t>(SlotState::loading);
        arrays_.slot[key] = slot;
        if (order_) order_->admitted(key);
        auto copy = std::make_shared<Copy>();
        copy->prefetch = prefetch;
        for (const ExpertPart& part : parts_)
            copy->pieces.push_back({part.target + first_unit(slot) * part.target_unit,
                                    part.sources[expert / experts_] + expert % experts_ * part.source_stride +
                                        begin * part.source_unit,
                                    units(key) * part.count, part.kind});
        flights_.push_back({key, prefetch, copy});
        copies.push_back(std::move(copy));
    }
    return copies.empty() || link_->submit(copies);
}

std::int64_t Loads::absent(std::int64_t first, std::int64_t stop) const {
    return std::count(arrays_.states + first, arrays_.states + stop, std::uint8_t{0});
}

std::int64_t Loads::prefetch(const std::vector<std::int64_t>& wanted, const std::vector<std::int64_t>& nearer,
                             std::uint8_t source) {
    std::vector<std::int64_t> fit, out;
    for (std::int64_t key : wanted)
        if (state(key) == SlotState::absent) fit.push_back(key);
    const std::int64_t lacking = static_cast<std::int64_t>(fit.size()) - free_slots();
    if (lacking > 0) {
        may_.assign(arrays_.evictable, arrays_.evictable + arrays_.keys);
        for (const auto* kept : {&wanted, &nearer})
            for (std::int64_t key : *kept) may_[key] = 0;
        out = order_->first(lacking, may_.data());
        fit.resize(static_cast<std::size_t>(free_slots()) + out.size());
    }
    const bool open = start(fit, out, true);
    for (std::int64_t key : fit) counts_->pending[key] = source;
    counts_->outcomes[source * Counts::kOutcomes + Counts::queued] += static_cast<std::int64_t>(fit.size());
    return open ? static_cast<std::int64_t>(fit.size()) : -1;
}

bool Loads::land_ended(std::int64_t layer) {
    for (const Flight& flight : flights_)
        if (flight.copy->state == Copy::cancelled) return false;
    const auto ended = [&](const Flight& flight) {
        if (flight.copy->state != Copy::done) return false;
        publish(flight, layer);
        return true;
    };
    flights_.erase(std::remove_if(flights_.begin(), flights_.end(), ended), flights_.end());
    return true;
}

void Loads::drop_stale(std::int64_t layer, const std::int64_t* counts) {
    const auto stale = [&](const Flight& flight) {
        if (layer_of(flight.key) != layer || !flight.prefetch || counts[flight.key % experts_]) return false;
        if (!link_->cancel(flight.copy)) return false;
        drop(flight.key);
        if (counts_) counts_->dropped(flight.key);
        if (order_)
            order_->removed(flight.key);
        else
            dropped_.push_back(flight.key);
        return true;
    };
    flights_.erase(std::remove_if(flights_.begin(), flights_.end(), stale), flights_.end());
}

const Flight* Loads::flight(std::int64_t key) const {
    for (const Flight& flight : flights_)
        if (flight.key == key) return &flight;
    return nullptr;
}

double Loads::await(const Copy& copy) {
    if (copy.state >= Copy::done) return 0.0;
    const double start_s = now_s();
    link_->wait(copy);
    return now_s() - start_s;
}

bool Loads::land(std::int64_t key, std::int64_t layer) {
    const auto found = std::find_if(flights_.begin(), flights_.end(), [&](const Flight& f) { return f.key == key; });
    if (found->copy->state == Copy::cancelled) return false;
    publish(*found, layer);
    flights_.erase(found);
    return true;
}

void Loads::drop(std::int64_t key) {
    const std::int64_t slot_class = class_of(key), first_slot = split() ? layout_.class_first[slot_class] : 0;
    arrays_.free[first_slot + arrays_.counts[1 + slot_class]++] = arrays_.slot[key];
    arrays_.slot[key] = -1;
    arrays_.states[key] = arrays_.evictable[key] = 0;
    std::int64_t free = 0;
    for (std::int64_t i = 0; i < classes(); ++i) free += free_slots(i);
    arrays_.counts[0] += free == arrays_.slots;
}

void Loads::publish(const Flight& flight, std::int64_t layer) {
    arrays_.states[flight.key] = static_cast<std::uint8_t>(SlotState::resident);
    arrays_.evictable[flight.key] = !pinned(flight.key);
    Landed& landed = landed_[layer_of(flight.key)];
    (flight.prefetch ? landed.prefetches : landed.demands) += units(flight.key);
    landed.io_s += flight.copy->end_s - flight.copy->start_s;
    landed.link_s += flight.copy->link_s;
    if (layer_of(flight.key) == layer) landed.path_s += flight.copy->link_s;
}

}  // namespace tiermoe
