// A single-producer single-consumer ring of records in memory that two processes share. Linux only.
//
// Layout: a header of RING_HEADER bytes, then `capacity` bytes (a power of two) that are used in a circle. Positions only
// grow; position modulo capacity is the place. A record is its length (8 bytes) and its bytes; records start at multiples
// of 8. A record may be longer than the ring: the producer publishes it in pieces while the consumer takes them out.
//
// Nothing in shared memory is trusted: the capacity comes from the caller, places are masked, and positions and lengths
// that make no sense end in Status::corrupt. The consumer never sees a record before its bytes are published.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tiermoe {

constexpr std::size_t RING_HEADER = 256;

struct RingHeader {
    alignas(64) std::atomic<std::uint64_t> head;           // written by the producer
    std::atomic<std::uint32_t> producer_core;              // where it runs, and 1; 0: unknown
    alignas(64) std::atomic<std::uint64_t> tail;           // written by the consumer
    alignas(64) std::atomic<std::uint32_t> data_futex;     // changes when there is data and the consumer is parked
    std::atomic<std::uint32_t> consumer_parked;
    alignas(64) std::atomic<std::uint32_t> space_futex;    // changes when there is space and the producer is parked
    std::atomic<std::uint32_t> producer_parked;
    std::atomic<std::uint32_t> closed;
};
static_assert(sizeof(RingHeader) == RING_HEADER, "the two sides must agree");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "atomics must work across processes");

enum class Status : int {
    ok = 0,
    timeout = 1,      // nothing was written or read
    closed = 2,       // by either side; a consumer first gets what was published before
    corrupt = 3,      // positions or a length that no honest peer writes
    stalled = 4,      // the peer stopped in the middle of a record
    interrupted = 5,  // by a signal while parked; nothing was written or read
};

struct Piece {
    const void* data;
    std::size_t size;
};

struct Ring {
    RingHeader* header;
    unsigned char* bytes;
    std::uint64_t capacity;
};

// Times in ns. timeout: until the first byte can move. stall: how long the peer may then keep it waiting. doze: the time
// (CLOCK_MONOTONIC) until which it looks again and again after spinning, so that the peer need not wake it. helps: who
// reads works for who writes, and leaves that one's core (`leave_core`).
struct Patience {
    std::int64_t timeout;
    std::int64_t spin;
    std::int64_t stall;
    std::int64_t doze = 0;
    bool helps = false;
};

// Write one record. Waits until it fits whole, or half of the ring is free where it is longer than that.
Status ring_write(const Ring& ring, const Piece* pieces, std::size_t count, const Patience& patience);

struct Announced {
    std::uint64_t length;  // what the record says it has
    bool whole;            // all of it is there: taking it does not wait
};

// Wait for a record. ring_take must follow.
Status ring_wait(const Ring& ring, std::uint64_t max_bytes, const Patience& patience, Announced* record);
// Copy the record that ring_wait announced, and free its place.
Status ring_take(const Ring& ring, std::uint64_t length, unsigned char* into, const Patience& patience);

// Nobody writes any more; wakes both sides.
void ring_close(const Ring& ring);

}  // namespace tiermoe
