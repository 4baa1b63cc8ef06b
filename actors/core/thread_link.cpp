#include "thread_link.hpp"

#include <algorithm>

namespace tiermoe::core {
namespace {

std::int64_t slot_bytes(const Places::Source& source) { return source.widen ? 4 * source.count : source.count; }

}  // namespace

void ThreadLink::place(Places places) {
    places_ = std::move(places);
    room_ = 0;
    for (std::size_t s = 0; s < places_.home_of.size(); ++s) {
        std::int64_t bytes = 0;
        for (std::size_t i = 0; i < places_.homes[places_.home_of[s]].size(); ++i)
            bytes += slot_bytes(places_.sources[s * places_.tensors + i]);
        room_ = std::max(room_, bytes);
    }
}

std::shared_ptr<tiermoe::Copy> ThreadLink::made(const Copy& copy, bool urgent) {
    using Kind = Piece::Kind;
    auto found = std::make_shared<tiermoe::Copy>();
    found->prefetch = !urgent;
    const auto& home = places_.homes[places_.home_of[copy.segment]];
    const auto* sources = places_.sources.data() + copy.segment * places_.tensors;
    const std::int64_t at = places_.position[copy.slot];
    std::int64_t up = 0, back = 0;
    if (copy.back) {
        if (static_cast<std::int64_t>(scratch_.size()) < room_) scratch_.resize(static_cast<std::size_t>(room_));
        char* to = scratch_.data();
        for (std::size_t i = 0; i < home.size(); ++i) {
            const std::int64_t bytes = slot_bytes(sources[i]);
            found->pieces.push_back({to, home[i].base + at * home[i].stride, bytes, Kind::bytes});
            to += bytes;
            back += bytes;
        }
    }
    for (std::size_t i = 0; i < home.size(); ++i) {
        const auto& source = sources[i];
        found->pieces.push_back({home[i].base + at * home[i].stride, source.at, source.count,
                                 source.widen ? Kind::widen_bfloat16 : Kind::bytes});
        up += source.widen ? 2 * source.count : source.count;
    }
    if (copy.back) back_share_[copy.ticket] = static_cast<double>(back) / static_cast<double>(back + up);
    return found;
}

bool ThreadLink::submit(const std::vector<Copy>& copies, bool urgent) {
    std::vector<std::shared_ptr<tiermoe::Copy>> made_now;
    for (const Copy& copy : copies) made_now.push_back(copies_[copy.ticket] = made(copy, urgent));
    return link_.submit(made_now);
}

Ending ThreadLink::ending(Ticket ticket) {
    switch (copies_.at(ticket)->state) {
        case tiermoe::Copy::done: return Ending::copied;
        case tiermoe::Copy::cancelled: return Ending::cancelled;
        default: return Ending::under_way;
    }
}

bool ThreadLink::times(Ticket ticket, Times& found) {
    const tiermoe::Copy& copy = *copies_.at(ticket);
    const auto share = back_share_.find(ticket);
    found = {copy.start_s, copy.end_s, copy.link_s, share == back_share_.end() ? 0.0 : copy.link_s * share->second};
    return true;
}

void ThreadLink::forget(Ticket ticket) {
    copies_.erase(ticket);
    back_share_.erase(ticket);
}

}  // namespace tiermoe::core
