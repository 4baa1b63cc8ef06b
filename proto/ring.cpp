#include "ring.hpp"

#ifdef __linux__

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "cores.hpp"

namespace tiermoe {
namespace {

constexpr std::uint64_t WORD = 8;                      // records start at multiples of it
constexpr std::uint64_t CHUNK = 128 * 1024;            // published at once, so that both sides copy at the same time
constexpr std::int64_t POLITE = 5000;                  // ns of spinning, after which others may have the core
constexpr std::int64_t LONGEST_PARK = 100 * 1000000;   // ns; then `closed` is looked at again
constexpr std::int64_t NAP = 50000;                    // ns between two looks of who dozes

std::int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the waiters are in two processes.
int park(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t ns) {
    ns = std::min(ns, LONGEST_PARK);
    timespec wait{ns / 1000000000, ns % 1000000000};
    long rc = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &wait, nullptr, 0);
    return rc == -1 ? errno : 0;
}

void wake(std::atomic<std::uint32_t>& word) {
    word.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// After publishing: the fence orders our store before the look at `parked`, as the waiter orders its store of `parked`
// before its last look at our position. So either we see that it parks, or it sees what we published.
void wake_if_parked(std::atomic<std::uint32_t>& parked, std::atomic<std::uint32_t>& word) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (parked.load(std::memory_order_relaxed) != 0) wake(word);
}

// Until ready() or closed: spin, doze, then park.
template <typename Ready>
Status await(RingHeader& header, std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& parked,
             std::int64_t timeout, std::int64_t spin, Ready ready, std::int64_t doze = 0) {
    if (ready()) return Status::ok;
    if (header.closed.load(std::memory_order_acquire) != 0) return ready() ? Status::ok : Status::closed;
    if (timeout <= 0) return Status::timeout;
    const std::int64_t begin = now_ns();
    const std::int64_t spin_until = begin + std::min(spin, timeout);
    while (spin > 0) {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return Status::ok;
            relax();
        }
        const std::int64_t now = now_ns();
        if (now >= spin_until) break;
        if (now >= begin + POLITE) sched_yield();
    }
    const std::int64_t doze_until = std::min(doze, begin + timeout);
    while (now_ns() < doze_until && header.closed.load(std::memory_order_acquire) == 0) {
        const timespec nap{0, NAP};
        nanosleep(&nap, nullptr);
        if (ready()) return Status::ok;
    }
    for (;;) {
        const std::int64_t left = begin + timeout - now_ns();
        const std::uint32_t seen = word.load(std::memory_order_seq_cst);
        parked.store(1, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        Status status = Status::timeout;
        bool again = false;
        if (ready())
            status = Status::ok;
        else if (header.closed.load(std::memory_order_seq_cst) != 0)
            status = ready() ? Status::ok : Status::closed;
        else if (left > 0)
            again = true;
        const int error = again ? park(word, seen, left) : 0;
        parked.store(0, std::memory_order_relaxed);
        if (!again) return status;
        if (error == EINTR) return ready() ? Status::ok : Status::interrupted;
    }
}

void copy_in(const Ring& ring, std::uint64_t position, const unsigned char* from, std::uint64_t size) {
    const std::uint64_t at = position & (ring.capacity - 1);
    const std::uint64_t first = std::min(size, ring.capacity - at);
    std::memcpy(ring.bytes + at, from, first);
    std::memcpy(ring.bytes, from + first, size - first);
}

void copy_out(const Ring& ring, std::uint64_t position, unsigned char* into, std::uint64_t size) {
    const std::uint64_t at = position & (ring.capacity - 1);
    const std::uint64_t first = std::min(size, ring.capacity - at);
    std::memcpy(into, ring.bytes + at, first);
    std::memcpy(into + first, ring.bytes, size - first);
}

std::uint64_t padded(std::uint64_t size) { return (size + WORD - 1) / WORD * WORD; }

// In the middle of a record a signal does not end the wait: half a record is worth nothing.
template <typename Ready>
Status await_in_record(RingHeader& header, std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& parked,
                       const Patience& patience, Ready ready) {
    const std::int64_t until = now_ns() + patience.stall;
    for (;;) {
        const Status status = await(header, word, parked, until - now_ns(), patience.spin, ready);
        if (status != Status::interrupted) return status == Status::timeout ? Status::stalled : status;
    }
}

}  // namespace

Status ring_write(const Ring& ring, const Piece* pieces, std::size_t count, const Patience& patience) {
    RingHeader& header = *ring.header;
    if (header.closed.load(std::memory_order_acquire) != 0) return Status::closed;
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < count; ++i) length += pieces[i].size;
    const std::uint64_t total = WORD + padded(length);
    std::uint64_t head = header.head.load(std::memory_order_relaxed);
    std::uint64_t free = 0;
    bool corrupt = false;
    const auto has_free = [&](std::uint64_t wanted) {
        const std::uint64_t used = head - header.tail.load(std::memory_order_acquire);
        corrupt = used > ring.capacity || used % WORD != 0 || head % WORD != 0;
        free = corrupt ? 0 : ring.capacity - used;
        return corrupt || free >= wanted;
    };
    const std::uint64_t enough = total <= ring.capacity ? total : ring.capacity / 2;
    Status status = await(header, header.space_futex, header.producer_parked, patience.timeout, patience.spin,
                          [&] { return has_free(enough); });
    if (status != Status::ok) return status;
    if (corrupt) return Status::corrupt;
    header.producer_core.store(static_cast<std::uint32_t>(own_core() + 1), std::memory_order_relaxed);

    const auto publish = [&](std::uint64_t position) {
        head = position;
        header.head.store(head, std::memory_order_release);
        wake_if_parked(header.consumer_parked, header.data_futex);
    };
    std::uint64_t at = head + WORD;  // written up to here, published up to head
    copy_in(ring, head, reinterpret_cast<const unsigned char*>(&length), WORD);
    free -= WORD;
    for (std::size_t i = 0; i < count; ++i) {
        const auto* data = static_cast<const unsigned char*>(pieces[i].data);
        std::uint64_t left = pieces[i].size;
        while (left > 0) {
            if (free == 0 || at - head >= CHUNK) {
                publish(at / WORD * WORD);  // whole words: the rest of a word follows with what comes next
                const std::uint64_t unpublished = at - head;
                status = await_in_record(header, header.space_futex, header.producer_parked, patience,
                                         [&] { return has_free(unpublished + WORD); });
                if (status != Status::ok) return status;
                if (corrupt) return Status::corrupt;
                free -= unpublished;
            }
            const std::uint64_t size = std::min({left, free, CHUNK});
            copy_in(ring, at, data, size);
            data += size;
            at += size;
            left -= size;
            free -= size;
        }
    }
    // `free` was a multiple of a word at every check, so the padding of the last word fits too
    publish(padded(at));
    return Status::ok;
}

Status ring_wait(const Ring& ring, std::uint64_t max_bytes, const Patience& patience, Announced* record) {
    RingHeader& header = *ring.header;
    const std::uint64_t tail = header.tail.load(std::memory_order_relaxed);
    std::uint64_t filled = 0;
    const Status status = await(header, header.data_futex, header.consumer_parked, patience.timeout, patience.spin, [&] {
        filled = header.head.load(std::memory_order_acquire) - tail;
        return filled != 0;
    }, patience.doze);
    if (status != Status::ok) return status;
    if (filled > ring.capacity || filled < WORD || tail % WORD != 0) return Status::corrupt;
    copy_out(ring, tail, reinterpret_cast<unsigned char*>(&record->length), WORD);
    if (record->length > max_bytes) return Status::corrupt;
    record->whole = filled >= WORD + padded(record->length);
    return Status::ok;
}

Status ring_take(const Ring& ring, std::uint64_t length, unsigned char* into, const Patience& patience) {
    RingHeader& header = *ring.header;
    if (patience.helps) leave_core(static_cast<int>(header.producer_core.load(std::memory_order_relaxed)) - 1);
    std::uint64_t tail = header.tail.load(std::memory_order_relaxed) + WORD;
    std::uint64_t left = padded(length);
    std::uint64_t wanted = length;
    if (left == 0) header.tail.store(tail, std::memory_order_release);
    while (left > 0) {
        std::uint64_t filled = 0;
        const Status status = await_in_record(header, header.data_futex, header.consumer_parked, patience, [&] {
            filled = header.head.load(std::memory_order_acquire) - tail;
            return filled != 0;
        });
        if (status != Status::ok) return status;
        if (filled > ring.capacity || filled % WORD != 0) return Status::corrupt;
        const std::uint64_t size = std::min({left, filled, CHUNK});
        const std::uint64_t useful = std::min(size, wanted);
        copy_out(ring, tail, into, useful);
        into += useful;
        wanted -= useful;
        left -= size;
        tail += size;
        header.tail.store(tail, std::memory_order_release);
        if (left > 0) wake_if_parked(header.producer_parked, header.space_futex);
    }
    wake_if_parked(header.producer_parked, header.space_futex);
    return Status::ok;
}

void ring_close(const Ring& ring) {
    ring.header->closed.store(1, std::memory_order_seq_cst);
    wake(ring.header->data_futex);
    wake(ring.header->space_futex);
}

}  // namespace tiermoe

#endif  // __linux__
