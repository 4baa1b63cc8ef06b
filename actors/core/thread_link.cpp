#include "thread_link.hpp"

#include <algorithm>

namespace tiermoe::core {
void ThreadLink::place(Places places) {
    places_ = std::move(places);
    room_ = 0;
    for (std::size_t s = 0; s < places_.home_of.size(); ++s) {
        std::int64_t bytes = 0;
        for (std::size_t i = 0; i < places_.homes[places_.home_of[s]].size(); ++i)
            bytes += places_.sources[s * places_.tensors + i].slot_bytes();
        room_ = std::max(room_, bytes);
    }
}

ThreadLink::Known ThreadLink::made(const Copy& copy, bool urgent) {
    using Kind = Piece::Kind;
    Known known;
    // the last of the spare ones is free unless the thread has not let go of it yet
    if (!spare_.empty() && spare_.back().use_count() == 1) {
        known.copy = std::move(spare_.back());
        spare_.pop_back();
        known.copy->pieces.clear();
        known.copy->state = tiermoe::Copy::queued;
    } else {
        known.copy = std::make_shared<tiermoe::Copy>();
    }
    const Shared& found = known.copy;
    found->prefetch = !urgent;
    const auto& home = places_.homes[places_.home_of[copy.segment]];
    const auto* sources = places_.sources.data() + copy.segment * places_.tensors;
    const std::int64_t at = places_.position[copy.slot];
    std::int64_t up = 0, back = 0;
    if (copy.back) {
        if (static_cast<std::int64_t>(scratch_.size()) < room_) scratch_.resize(static_cast<std::size_t>(room_));
        char* to = scratch_.data();
        for (std::size_t i = 0; i < home.size(); ++i) {
            const std::int64_t bytes = sources[i].slot_bytes();
            found->pieces.push_back({to, home[i].base + at * home[i].stride, bytes, Kind::bytes});
            to += bytes;
            back += bytes;
        }
    }
    for (std::size_t i = 0; i < home.size(); ++i) {
        const auto& source = sources[i];
        found->pieces.push_back({home[i].base + at * home[i].stride, source.at, source.count,
                                 source.cast ? Kind::widen_bfloat16 : Kind::bytes});
        up += source.bytes();
    }
    if (copy.back) known.back_share = static_cast<double>(back) / static_cast<double>(back + up);
    return known;
}

bool ThreadLink::submit(const std::vector<Copy>& copies, bool urgent) {
    batch_.clear();
    for (const Copy& copy : copies) {
        if (known_.empty()) first_ = copy.ticket;
        while (first_ + known_.size() < copy.ticket) known_.emplace_back();  // tickets are given in order
        known_.push_back(made(copy, urgent));
        batch_.push_back(known_.back().copy);
    }
    const bool open = link_.submit(batch_);
    batch_.clear();
    return open;
}

Ending ThreadLink::ending(Ticket ticket) {
    switch (at(ticket).copy->state) {
        case tiermoe::Copy::done: return Ending::copied;
        case tiermoe::Copy::cancelled: return Ending::cancelled;
        default: return Ending::under_way;
    }
}

bool ThreadLink::times(Ticket ticket, Times& found) {
    const Known& known = at(ticket);
    const tiermoe::Copy& copy = *known.copy;
    found = {copy.start_s, copy.end_s, copy.link_s, copy.link_s * known.back_share};
    return true;
}

void ThreadLink::forget(Ticket ticket) {
    constexpr std::size_t most = 64;
    if (spare_.size() < most) spare_.push_back(std::move(at(ticket).copy));
    at(ticket).copy = nullptr;
    for (; !known_.empty() && !known_.front().copy; ++first_) known_.pop_front();
}

void ThreadLink::hold(double seconds) {
    memory_.resize(static_cast<std::size_t>(seconds * bytes_per_s_));
    held_ = std::make_shared<tiermoe::Copy>();
    held_->pieces.push_back({memory_.data(), memory_.data(), static_cast<std::int64_t>(memory_.size()), Piece::Kind::bytes});
    link_.submit({held_});
}

}  // namespace tiermoe::core
