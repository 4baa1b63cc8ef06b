// Copies from pinned memory on two streams of a GPU, enqueued by the forward's own thread:
//
//     demand      every copy at once, a batch back to back after one wait for the slots' last use
//     prefetch    at most `ahead_bytes` at a time, behind the demand under way, a large expert in parts; the rest waits
//                 here, where demand overtakes it, and is enqueued whenever the core asks something
//
// A copy engine takes copies in the order of enqueueing, whatever the streams' priorities, so `ahead_bytes` bounds both a
// demand load's wait and the work left for the link while the host is away. A wrong prefetch costs only what is enqueued.
//
// The host never waits for a copy on a forward's way: `join` has the compute's stream wait for the copy's event. Events
// around that wait, read later, show what the compute waited.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core.hpp"
#include "driver.hpp"
#include "places.hpp"

namespace tiermoe::core {

class StreamLink : public Link {
  public:
    using Handle = Driver::Handle;
    struct Calls {  // of Python; each takes the interpreter's lock
        std::function<std::uintptr_t()> compute;  // the compute's present stream, ordered behind its earlier ones
        // Enqueue a copy that the driver cannot make: elements [first, first + count) of a tensor of a segment, which its
        // slot has in another type.
        std::function<void(bool urgent, Segment, Slot, std::int64_t tensor, std::int64_t first, std::int64_t count)> cast;
        std::function<std::uintptr_t(std::int64_t bytes)> pinned;  // host memory that lives as long as the link
    };
    // What is enqueued and not known to have ended: a whole expert, or some pieces of a prefetch.
    struct Enqueued {
        Segment segment;
        std::int64_t bytes;
    };

    // other: makes the copies of segments without a source in `Places`, which the host waits for; null: there are none.
    // Waits for the GPU once. Throws std::runtime_error: the driver refuses.
    StreamLink(const Driver& driver, Handle demand, Handle prefetch, std::int64_t ahead_bytes, Calls calls,
               std::shared_ptr<Link> other);

    ~StreamLink() override;

    // Before the first copy, and whenever none is under way.
    void place(Places places) { places_ = std::move(places); }
    // Of prefetches enqueued at a time; larger experts than `part` go in parts of that size.
    void ahead(std::int64_t bytes, std::int64_t part) { ahead_bytes_ = bytes, part_bytes_ = part; }

    bool submit(const std::vector<Copy>& copies, bool urgent) override;
    void promote(Ticket ticket) override;
    bool cancel(Ticket ticket) override;
    double moved(Ticket ticket) override;
    void poll() override;
    void look() override;
    [[noreturn]] void fail(Ticket ticket, std::int64_t layer) override;
    Ending ending(Ticket ticket) override;
    bool join(Ticket ticket, std::int64_t layer) override;
    bool overtake(Ticket ticket) override;
    bool waits() const override { return other_ != nullptr; }
    void wait(Ticket ticket) override;
    Mark mark() override;
    bool times(Ticket ticket, Times& found) override;
    void late(std::vector<Late>& found) override;
    double now_s() override;
    void forget(Ticket ticket) override;
    // As of the last look; from any thread.
    std::int64_t pending() override;
    // Drops what waits, and waits for what is enqueued. Safe to call twice.
    void close() override;

    std::vector<Segment> waiting() const;  // of which not all is enqueued
    std::vector<Enqueued> enqueued(bool urgent) const;

  private:
    struct Lane;
    struct Part;
    struct Moving;
    using Shared = std::shared_ptr<Moving>;
    using Event = std::shared_ptr<void>;  // returns to the spare ones with its last reference
    struct Piece {
        std::int64_t tensor, first, count;  // bytes, or elements that are cast
    };
    struct Moving {
        Copy copy;
        std::int64_t bytes = 0;     // of its source
        Event after;                // the slot's last use, until the first of it is enqueued
        std::vector<Piece> pieces;  // once it is divided
        std::size_t sent = 0;       // of the pieces
        Part* last = nullptr;       // enqueued last, while that has not ended
        bool waits = false, begun = false, ended = false, cancelled = false, failed = false, joined = false;
        double moved = 0.0;         // of a dropped one: the share that was enqueued
        Times writing;              // its first part, once that has ended and if it copied the slot back
        std::string error;
        std::list<Shared>::iterator place;  // among `waiting_`
    };
    // What one event marks the end of. start: when waiting ended; null: the part before ends there. written: the slot's
    // expert is copied back; null: it was not.
    struct Part {
        Shared copy;
        Lane* lane;
        std::int64_t bytes;
        bool final;
        Handle start, written, end;
    };
    struct Lane {
        Handle stream;
        bool urgent;
        std::deque<Part> under_way;
        std::int64_t bytes = 0;  // under way
        double end_s = 0.0;      // of the last one that has ended
        char* scratch = nullptr;  // where experts that are copied back go
        std::int64_t room = 0;
    };
    struct Next {  // whole: all that is left of it; else the next piece
        Shared copy;
        bool whole;
    };
    struct Told {
        Segment segment;
        Cause cause;
        double start_s, end_s, back_s;
    };
    struct Hold {
        std::int64_t layer;
        Shared copy;
        Handle before, after;
    };

    Moving* own(Ticket ticket) const;  // null: the other link has it
    const std::vector<Places::Target>& home(const Copy& copy) const { return places_.homes[places_.home_of[copy.segment]]; }
    const Places::Source* sources(const Copy& copy) const { return places_.sources.data() + copy.segment * places_.tensors; }
    char* target(const Copy& copy, std::int64_t tensor) const;
    void divide(Moving& copy) const;
    std::int64_t bytes_of(const Moving& copy, const Piece& piece) const;
    bool all_sent(const Moving& copy) const { return copy.begun && copy.sent == copy.pieces.size(); }
    void enter() const { driver_.check(driver_.enter(driver_.context)); }  // any thread may be a lead's or a shard's
    void demand(const Shared& copy);
    void enqueue(Lane& lane, const std::vector<Next>& batch);
    std::int64_t move(Lane& lane, Moving& copy, bool whole);
    void move(Lane& lane, const Moving& copy, const Piece& piece);
    void write_back(Lane& lane, const Copy& copy);
    void settle(Lane& lane);
    void failed(Lane& lane, Moving& copy, const std::exception& error);
    void finish(Lane& lane);
    bool fence(const Part& part);
    void feed();
    void next_batch(std::int64_t left);
    void unqueue(Moving& copy);
    bool done(Handle event) const;
    Handle event(std::vector<Handle>& spare, unsigned flags);
    Handle timed_event() { return event(spare_, Driver::kTimed); }  // to be recorded, and given to `read` once
    double read(Handle event);

    const Driver driver_;
    Calls calls_;
    const std::shared_ptr<Link> other_;
    std::int64_t others_ = 0;  // copies that the other link has, and nobody has forgotten
    std::int64_t ahead_bytes_, part_bytes_;
    Places places_;
    std::vector<Handle> made_, spare_, spare_marks_;  // events: all; before all that returns some there
    Handle compute_;
    Handle anchor_ = nullptr;  // an event, and when it happened
    double anchor_s_ = 0.0;
    Lane demand_, prefetch_;
    std::unordered_map<Ticket, Shared> known_;
    std::list<Shared> waiting_;  // prefetches of which not all is enqueued
    Event mark_;                 // the newest
    Mark marks_ = 0;
    std::deque<Hold> holds_;
    std::vector<Told> told_;  // ended, not yet `late`
    double link_free_s_ = 0.0;
    std::atomic<std::int64_t> pending_{0};
    bool closed_ = false;
    std::vector<Next> batch_;            // of one call, so that none allocates
    std::vector<Copy> others_batch_;
};

}  // namespace tiermoe::core
