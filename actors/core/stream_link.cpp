#include "stream_link.hpp"

#include <algorithm>

#include "../../kernels/cpu/link.hpp"

namespace tiermoe::core {
namespace {

// A driver gives milliseconds as float: over a second its steps are 0.06 us, over an hour 0.25 ms.
constexpr double kRenewS = 1.0;

// Seconds of a wait in which the awaited copy's slot was being copied back.
double writing_s(const Times& writing, double start_s, double end_s) {
    if (!writing.back_s) return 0.0;
    return std::max(0.0, std::min(end_s, writing.start_s + writing.back_s) - std::max(start_s, writing.start_s));
}

}  // namespace

StreamLink::StreamLink(const Driver& driver, Handle demand, Handle prefetch, std::int64_t ahead_bytes, Calls calls,
                       std::shared_ptr<Link> other)
    : driver_(driver), calls_(std::move(calls)), other_(std::move(other)), ahead_bytes_(ahead_bytes),
      part_bytes_(std::max<std::int64_t>(1, ahead_bytes / 2)),
      compute_(reinterpret_cast<Handle>(calls_.compute())), demand_{demand, true, {}}, prefetch_{prefetch, false, {}} {
    enter();
    anchor_ = timed_event();
    driver_.check(driver_.record(anchor_, demand));
    driver_.check(driver_.synchronize(anchor_));
    anchor_s_ = tiermoe::now_s();
}

StreamLink::~StreamLink() {
    for (Handle event : made_) driver_.destroy(event);  // whatever it says: the device may be gone
}

// -- as `Link` ------------------------------------------------------------------------------------------------------

bool StreamLink::submit(const std::vector<Copy>& copies, bool urgent) {
    others_batch_.clear();
    batch_.clear();
    for (const Copy& copy : copies) {
        const Places::Source* from = sources(copy);
        if (!from->at) {
            others_batch_.push_back(copy);
            continue;
        }
        const Shared& made = known_[copy.ticket] = std::make_shared<Moving>();
        made->copy = copy;
        made->cancelled = closed_;
        if (closed_) continue;
        made->after = mark_;
        for (std::size_t i = 0; i < home(copy).size(); ++i) made->bytes += from[i].bytes();
        if (urgent) {
            batch_.push_back({made, true});
        } else {
            made->place = waiting_.insert(waiting_.end(), made);
            made->waits = true;
            ++pending_;
        }
    }
    others_ += static_cast<std::int64_t>(others_batch_.size());
    if (!others_batch_.empty()) other_->submit(others_batch_, urgent);  // closed with this one
    if (closed_) return false;
    try {
        enter();
    } catch (const std::exception& error) {
        for (const Next& next : batch_) failed(demand_, *next.copy, error);
        return true;
    }
    if (urgent) enqueue(demand_, batch_);
    feed();
    return true;
}

// Enqueues the rest of a prefetch as demand.
void StreamLink::promote(Ticket ticket) {
    const auto found = known_.find(ticket);
    if (found == known_.end()) return other_->promote(ticket);
    enter();
    demand(found->second);
}

bool StreamLink::cancel(Ticket ticket) {
    Moving* copy = own(ticket);
    if (!copy) return other_->cancel(ticket);
    if (!copy->waits) return false;
    enter();
    unqueue(*copy);
    copy->cancelled = true;
    if (copy->begun) {
        std::int64_t sent = 0;
        for (std::size_t i = 0; i < copy->sent; ++i) sent += bytes_of(*copy, copy->pieces[i]);
        copy->moved = static_cast<double>(sent) / static_cast<double>(copy->bytes);
        if (copy->last) fence(*copy->last);
    }
    return true;
}

double StreamLink::moved(Ticket ticket) {
    const Moving* copy = own(ticket);
    return copy ? copy->moved : other_->moved(ticket);
}

void StreamLink::poll() {
    enter();
    compute_ = reinterpret_cast<Handle>(calls_.compute());
    feed();
    if (others_) other_->poll();
    settle(demand_);
    settle(prefetch_);
}

void StreamLink::look() {
    enter();
    if (others_) other_->look();
    settle(demand_);
    settle(prefetch_);
}

void StreamLink::fail(Ticket ticket, std::int64_t layer) {
    const Moving* copy = own(ticket);
    if (!copy) other_->fail(ticket, layer);
    throw CopyFailed("copying an expert of MoE layer " + std::to_string(layer) + " failed: " + copy->error);
}

Ending StreamLink::ending(Ticket ticket) {
    const Moving* copy = own(ticket);
    if (!copy) return other_->ending(ticket);
    if (copy->cancelled) return Ending::cancelled;
    if (copy->failed) return Ending::failed;
    return copy->ended || (copy->joined && all_sent(*copy)) ? Ending::copied : Ending::under_way;
}

bool StreamLink::join(Ticket ticket, std::int64_t layer) {
    Moving* copy = own(ticket);
    if (!copy) return other_->join(ticket, layer);
    enter();
    const Shared& shared = known_[ticket];
    demand(shared);
    if (copy->last) {
        const Handle before = timed_event(), after = timed_event();
        driver_.check(driver_.record(before, compute_));
        driver_.check(driver_.wait(compute_, copy->last->end, 0));
        driver_.check(driver_.record(after, compute_));
        holds_.push_back({layer, shared, before, after});
    }
    copy->joined = true;  // only now: where the driver refuses, the compute does not wait
    return false;
}

bool StreamLink::overtake(Ticket ticket) {
    Moving* copy = own(ticket);
    if (!copy) return other_->overtake(ticket);
    enter();
    const bool waited = copy->last && fence(*copy->last);
    copy->joined = true;
    if (waited) look();  // others may have ended, too
    return waited;
}

// Makes the host wait; not for a forward's way.
void StreamLink::wait(Ticket ticket) {
    Moving* copy = own(ticket);
    if (!copy) return other_->wait(ticket);
    enter();
    demand(known_[ticket]);
    if (!copy->last) return;
    Lane& lane = *copy->last->lane;
    driver_.check(driver_.synchronize(copy->last->end));
    settle(lane);
}

// The newest mark covers all earlier ones, so a copy takes that which is there when it is submitted.
Mark StreamLink::mark() {
    enter();
    if (other_) {
        other_->mark();
        compute_ = reinterpret_cast<Handle>(calls_.compute());  // it may have followed the compute to a new stream
    }
    if (!mark_ || mark_.use_count() > 1) {  // else no copy waits for it: what was enqueued keeps its own record
        mark_ = Event(event(spare_marks_, Driver::kUntimed), [this](Handle given) { spare_marks_.push_back(given); });
    }
    driver_.check(driver_.record(mark_.get(), compute_));
    return ++marks_;
}

bool StreamLink::times(Ticket ticket, Times& found) { return own(ticket) ? false : other_->times(ticket, found); }

void StreamLink::late(std::vector<Late>& found) {
    enter();
    settle(demand_);
    settle(prefetch_);
    if (told_.size() > 1) std::stable_sort(told_.begin(), told_.end(), [](const Told& a, const Told& b) { return a.end_s < b.end_s; });
    for (const Told& t : told_) {
        const double start_s = std::min(std::max(t.start_s, link_free_s_), t.end_s);  // the two streams share one link
        link_free_s_ = std::max(link_free_s_, t.end_s);
        const double back_s = std::max(0.0, t.start_s + t.back_s - start_s);
        found.push_back({false, -1, t.segment, t.cause, {start_s, t.end_s, t.end_s - start_s, back_s}, 0.0});
    }
    told_.clear();
    while (!holds_.empty() && done(holds_.front().after)) {
        const Hold hold = std::move(holds_.front());
        holds_.pop_front();
        const double start_s = read(hold.before), end_s = read(hold.after);
        Moving& copy = *hold.copy;
        if (copy.last) settle(*copy.last->lane);  // it has ended by now: its times are read
        found.push_back({true, hold.layer, copy.copy.segment, copy.copy.cause, {start_s, end_s, 0.0, 0.0},
                         writing_s(copy.writing, start_s, end_s)});
    }
}

double StreamLink::now_s() { return tiermoe::now_s(); }

void StreamLink::forget(Ticket ticket) {
    if (known_.erase(ticket)) return;
    --others_;
    other_->forget(ticket);
}

std::int64_t StreamLink::pending() { return pending_ + (other_ ? other_->pending() : 0); }

void StreamLink::close() {
    if (closed_) return;
    closed_ = true;
    enter();
    while (!waiting_.empty()) {
        const Shared copy = waiting_.front();
        unqueue(*copy);
        copy->cancelled = true;
    }
    if (other_) other_->close();
    finish(demand_);
    finish(prefetch_);
}

std::vector<Segment> StreamLink::waiting() const {
    std::vector<Segment> found;
    for (const Shared& copy : waiting_) found.push_back(copy->copy.segment);
    return found;
}

std::vector<StreamLink::Enqueued> StreamLink::enqueued(bool urgent) const {
    std::vector<Enqueued> found;
    for (const Part& part : (urgent ? demand_ : prefetch_).under_way) found.push_back({part.copy->copy.segment, part.bytes});
    return found;
}

// -- copies and their pieces ----------------------------------------------------------------------------------------

StreamLink::Moving* StreamLink::own(Ticket ticket) const {
    const auto found = known_.find(ticket);
    return found == known_.end() ? nullptr : found->second.get();
}

char* StreamLink::target(const Copy& copy, std::int64_t tensor) const {
    const Places::Target& to = home(copy)[static_cast<std::size_t>(tensor)];
    return to.base + places_.position[copy.slot] * to.stride;
}

std::int64_t StreamLink::bytes_of(const Moving& copy, const Piece& piece) const {
    const Places::Source& from = sources(copy.copy)[piece.tensor];
    return from.cast ? piece.count * from.item : piece.count;
}

// Into pieces of at most `part_bytes_`.
void StreamLink::divide(Moving& copy) const {
    if (!copy.pieces.empty()) return;
    const Places::Source* from = sources(copy.copy);
    for (std::size_t i = 0; i < home(copy.copy).size(); ++i) {
        const std::int64_t step = std::max<std::int64_t>(1, from[i].cast ? part_bytes_ / from[i].item : part_bytes_);
        for (std::int64_t first = 0; first < from[i].count; first += step)
            copy.pieces.push_back({static_cast<std::int64_t>(i), first, std::min(step, from[i].count - first)});
    }
}

void StreamLink::move(Lane& lane, const Moving& copy, const Piece& piece) {
    const Places::Source& from = sources(copy.copy)[piece.tensor];
    if (from.cast)
        return calls_.cast(lane.urgent, copy.copy.segment, copy.copy.slot, piece.tensor, piece.first, piece.count);
    const auto to = reinterpret_cast<std::uint64_t>(target(copy.copy, piece.tensor)) + static_cast<std::uint64_t>(piece.first);
    driver_.check(driver_.up(to, from.at + piece.first, static_cast<std::size_t>(piece.count), lane.stream));
}

// Enqueues the next piece, or all that is left; returns its bytes.
std::int64_t StreamLink::move(Lane& lane, Moving& copy, bool whole) {
    copy.begun = true;
    if (copy.pieces.empty()) {
        const Places::Source* from = sources(copy.copy);
        for (std::size_t i = 0; i < home(copy.copy).size(); ++i)
            move(lane, copy, Piece{static_cast<std::int64_t>(i), 0, from[i].count});
        return copy.bytes;
    }
    std::int64_t bytes = 0;
    for (const std::size_t stop = whole ? copy.pieces.size() : copy.sent + 1; copy.sent < stop; ++copy.sent) {
        move(lane, copy, copy.pieces[copy.sent]);
        bytes += bytes_of(copy, copy.pieces[copy.sent]);
    }
    return bytes;
}

// The slot's content to memory that nobody reads: only the time counts.
void StreamLink::write_back(Lane& lane, const Copy& copy) {
    const Places::Source* from = sources(copy);
    std::int64_t need = 0;
    for (std::size_t i = 0; i < home(copy).size(); ++i) need = std::max(need, from[i].slot_bytes());
    if (lane.room < need) lane.scratch = reinterpret_cast<char*>(calls_.pinned(need)), lane.room = need;
    for (std::size_t i = 0; i < home(copy).size(); ++i)
        driver_.check(driver_.down(lane.scratch, reinterpret_cast<std::uint64_t>(target(copy, static_cast<std::int64_t>(i))),
                                   static_cast<std::size_t>(from[i].slot_bytes()), lane.stream));
}

// -- the two lanes --------------------------------------------------------------------------------------------------

void StreamLink::unqueue(Moving& copy) {
    waiting_.erase(copy.place);
    copy.waits = false;
    --pending_;
}

void StreamLink::demand(const Shared& copy) {
    if (!copy->waits) return;
    const Shared kept = copy;
    unqueue(*kept);
    try {
        if (kept->last) driver_.check(driver_.wait(demand_.stream, kept->last->end, 0));
    } catch (const std::exception& error) {
        return failed(demand_, *kept, error);
    }
    batch_.assign(1, {kept, true});
    enqueue(demand_, batch_);
    batch_.clear();
}

// Copies back to back, with one wait for each distinct last use of their slots.
void StreamLink::enqueue(Lane& lane, const std::vector<Next>& batch) {
    if (batch.empty()) return;
    Event after;
    Handle start = nullptr;  // of the first that is enqueued
    bool begins = true;
    for (const Next& next : batch) {
        Moving& copy = *next.copy;
        if (copy.failed) continue;
        Handle written = nullptr, end = nullptr;
        const bool first = !copy.begun;
        std::int64_t bytes = 0;
        try {
            if (first && copy.after && copy.after != after) {
                after = copy.after;
                driver_.check(driver_.wait(lane.stream, after.get(), 0));
            }
            if (begins) {
                if (!start) start = timed_event();
                driver_.check(driver_.record(start, lane.stream));
            }
            if (first && copy.copy.back) {
                write_back(lane, copy.copy);
                written = timed_event();
                driver_.check(driver_.record(written, lane.stream));
            }
            bytes = move(lane, copy, next.whole);
            end = timed_event();
            driver_.check(driver_.record(end, lane.stream));
        } catch (const std::exception& error) {
            failed(lane, copy, error);
            for (Handle event : {written, end})
                if (event) spare_.push_back(event);
            continue;
        }
        copy.after.reset();
        const bool final = copy.sent == copy.pieces.size();
        lane.under_way.push_back({next.copy, &lane, bytes, final, start, written, end});
        copy.last = &lane.under_way.back();
        lane.bytes += bytes;
        ++pending_;
        start = nullptr, begins = false;
    }
    if (start) spare_.push_back(start);
}

// Notes what has ended, and when, without waiting.
void StreamLink::settle(Lane& lane) {
    while (!lane.under_way.empty() && done(lane.under_way.front().end)) {
        Part& part = lane.under_way.front();
        Moving& copy = *part.copy;
        const double start_s = part.start ? read(part.start) : lane.end_s;
        const double back_s = part.written ? read(part.written) - start_s : 0.0;
        lane.end_s = read(part.end);
        lane.bytes -= part.bytes;
        if (part.written) copy.writing = {start_s, lane.end_s, lane.end_s - start_s, back_s};
        told_.push_back({copy.copy.segment, copy.copy.cause, start_s, lane.end_s, back_s});
        copy.ended |= part.final;
        if (copy.last == &part) copy.last = nullptr;
        lane.under_way.pop_front();
        --pending_;
    }
}

// The core drops a failed prefetch, and fails a forward that waits. The host waits for the stream: a part of the copy may
// be enqueued, and its slot is given away.
void StreamLink::failed(Lane& lane, Moving& copy, const std::exception& error) {
    copy.failed = copy.ended = true;
    copy.error = error.what();
    try {
        const Handle end = timed_event();
        driver_.check(driver_.record(end, lane.stream));
        driver_.check(driver_.synchronize(end));
        spare_.push_back(end);
    } catch (const std::exception&) {  // the device is lost: nothing will be written
    }
}

void StreamLink::finish(Lane& lane) {
    if (lane.under_way.empty()) return;
    driver_.check(driver_.synchronize(lane.under_way.back().end));
    settle(lane);
}

// Copies enqueued from now on come after this part. True: the host has waited.
bool StreamLink::fence(const Part& part) {
    const Lane& lane = part.lane == &demand_ ? prefetch_ : demand_;
    driver_.check(driver_.wait(lane.stream, part.end, 0));
    if (!other_) return false;
    driver_.check(driver_.synchronize(part.end));  // a thread's copy may be next, on a stream of its own
    return true;
}

// Enqueues prefetches while less than `ahead_bytes_` are under way.
void StreamLink::feed() {
    if (waiting_.empty()) return;
    settle(prefetch_);
    next_batch(ahead_bytes_ - prefetch_.bytes);
    if (batch_.empty()) return;
    if (!demand_.under_way.empty()) driver_.check(driver_.wait(prefetch_.stream, demand_.under_way.back().end, 0));
    enqueue(prefetch_, batch_);
    for (const Next& next : batch_) {
        Moving& copy = *next.copy;
        if (copy.waits && (copy.failed || all_sent(copy))) unqueue(copy);
    }
    batch_.clear();
}

// The next prefetches within `left` bytes: small experts whole, others in pieces. Where nothing is under way, one piece
// larger than `left` is allowed.
void StreamLink::next_batch(std::int64_t left) {
    batch_.clear();
    for (const Shared& copy : waiting_) {
        if (copy->bytes <= part_bytes_) {
            if (copy->bytes > left) return;
            batch_.push_back({copy, true});
            left -= copy->bytes;
            continue;
        }
        divide(*copy);
        for (std::size_t i = copy->sent; i < copy->pieces.size(); ++i) {
            const std::int64_t bytes = bytes_of(*copy, copy->pieces[i]);
            if (bytes > left && !(batch_.empty() && prefetch_.under_way.empty())) return;
            batch_.push_back({copy, false});
            left -= bytes;
        }
        if (left < 0) return;
    }
}

// -- events ---------------------------------------------------------------------------------------------------------

bool StreamLink::done(Handle event) const {
    const int code = driver_.query(event);
    if (code == Driver::kNotReady) return false;
    driver_.check(code);
    return true;
}

StreamLink::Handle StreamLink::event(std::vector<Handle>& spare, unsigned flags) {
    Handle found = nullptr;
    if (!spare.empty()) {
        found = spare.back();
        spare.pop_back();
    } else {
        driver_.check(driver_.create(&found, flags));
        made_.push_back(found);
    }
    return found;
}

// When a finished event happened, by its distance from an earlier one, the anchor. That moves on, so that distances stay
// short; the GPU's clock may drift from the host's.
double StreamLink::read(Handle event) {
    float milliseconds = 0.0f;
    driver_.check(driver_.elapsed(&milliseconds, anchor_, event));
    const double since_s = static_cast<double>(milliseconds) * 1e-3, at_s = anchor_s_ + since_s;
    if (since_s > kRenewS) std::swap(anchor_, event), anchor_s_ = at_s;
    spare_.push_back(event);
    return at_s;
}

}  // namespace tiermoe::core
