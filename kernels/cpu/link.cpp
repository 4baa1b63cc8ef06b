#include "link.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <sys/prctl.h>
#include <sys/resource.h>
#endif

#include "cores.hpp"
#include "threads.hpp"

// The loader picks the widest version that the processor has; TIERMOE_NO_CLONES: see expert_ffn.cpp.
#if !defined(TIERMOE_NO_CLONES) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define TIERMOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TIERMOE_CLONES
#endif

namespace tiermoe {

double now_s() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

double cpu_s() {
    timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

namespace {

// Seconds. To be woken takes a virtual machine tens of microseconds, longer than many copies. So who waits looks by
// itself for kSpin; the copying thread for kBrief, then with naps of kNap until kLook (without naps it takes a core
// from the matcher), and it ends a sleep kWake early to look. Neither yields: on a busy machine who yields comes back
// milliseconds later.
constexpr double kSpin = 200e-6, kBrief = 20e-6, kNap = 15e-6, kLook = 4e-3, kWake = 60e-6;

// Where processes wait for cores, as those of several stand-ins on one machine do, who looks takes the core that the
// others wait for: four GPUs on two cores served half as much. So nobody looks for kCrowded seconds once kDisturbed of
// kWindow copies were disturbed: their thread lost its core, or woke kLate seconds late.
constexpr double kCrowded = 2.0, kLate = 100e-6;
constexpr int kWindow = 32, kDisturbed = 4;

void nap(double seconds) {
    timespec span;
    span.tv_sec = static_cast<time_t>(seconds);
    span.tv_nsec = static_cast<long>(1e9 * (seconds - static_cast<double>(span.tv_sec)));
    nanosleep(&span, nullptr);
}

void sleep_until(double end_s, double wake_s) {
    for (double left_s = end_s - now_s(); left_s > 0; left_s = end_s - now_s())
        left_s > wake_s ? nap(left_s - wake_s) : relax();
}

// How often the calling thread lost its core while it was ready to run.
std::int64_t preemptions() {
#if defined(__linux__)
    rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nivcsw;
#else
    return 0;
#endif
}

// bfloat16 is the upper half of a float.
TIERMOE_CLONES void widen(const std::uint16_t* from, std::uint32_t* to, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::uint32_t>(from[i]) << 16;
}

}  // namespace

Link::Link(double bytes_per_s, double latency_s) : bytes_per_s_(bytes_per_s), latency_s_(latency_s) {
    thread_ = std::thread([this] { run(); });
}

Link::~Link() { close(); }

bool Link::submit(const std::vector<std::shared_ptr<Copy>>& copies) {
    const double asked_s = now_s();
    asker_.store(own_core(), std::memory_order_relaxed);
    bool wake;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closed_) {
            for (const auto& copy : copies) copy->state = Copy::cancelled;
            return false;
        }
        for (const auto& copy : copies) {
            copy->asked_s = asked_s;
            (copy->prefetch ? prefetch_ : demand_).push_back(copy);
        }
        wake = idle_;  // a busy thread looks at the queues by itself: waking it costs the forward a system call
    }
    if (wake) wake_.notify_one();
    return true;
}

void Link::promote(const std::shared_ptr<Copy>& copy) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find(prefetch_.begin(), prefetch_.end(), copy);
    if (found == prefetch_.end()) return;
    prefetch_.erase(found);
    demand_.push_back(copy);
}

bool Link::cancel(const std::shared_ptr<Copy>& copy) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (copy->state != Copy::queued) return copy->state == Copy::cancelled;
    for (auto* queue : {&demand_, &prefetch_})
        queue->erase(std::remove(queue->begin(), queue->end(), copy), queue->end());
    copy->state = Copy::cancelled;
    ended_.notify_all();
    return true;
}

void Link::wait(const Copy& copy) {
    for (const double end_s = now_s() + (crowded() ? 0.0 : kSpin); now_s() < end_s; relax())
        if (copy.state >= Copy::done) return;
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    ended_.wait(lock, [&] { return copy.state >= Copy::done; });
    --waiting_;
}

std::int64_t Link::pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<std::int64_t>(demand_.size() + prefetch_.size()) + busy_;
}

void Link::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        for (auto* queue : {&demand_, &prefetch_}) {
            for (const auto& copy : *queue) copy->state = Copy::cancelled;
            queue->clear();
        }
    }
    wake_.notify_all();
    ended_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Link::run() {
#if defined(__linux__)
    prctl(PR_SET_TIMERSLACK, 1);  // nanoseconds; the default of 50 us would be added to every copy
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        await_work(lock);
        if (closed_) return;
        auto& queue = demand_.empty() ? prefetch_ : demand_;
        const std::shared_ptr<Copy> next = queue.front();
        queue.pop_front();
        next->state = Copy::started;
        busy_ = true;
        lock.unlock();
        leave_core(asker_.load(std::memory_order_relaxed));
        copy(*next);
        lock.lock();
        busy_ = false;
        next->state = Copy::done;
        if (waiting_) ended_.notify_all();
    }
}

// To wake this thread costs the forward a system call: it sleeps for good only where nothing has come for kLook.
void Link::await_work(std::unique_lock<std::mutex>& lock) {
    const auto anything = [this] { return closed_ || !demand_.empty() || !prefetch_.empty(); };
    const double begin_s = now_s(), look_s = crowded() ? 0.0 : kLook;
    for (double looked_s = 0.0; !anything() && looked_s < look_s; looked_s = now_s() - begin_s) {
        lock.unlock();
        looked_s < kBrief ? relax() : nap(kNap);
        lock.lock();
    }
    idle_ = true;
    wake_.wait(lock, anything);
    idle_ = false;
}

// Copies follow each other without a gap where one was asked for before the link was free, however late this thread
// woke: lateness of the machine is not added up.
void Link::copy(Copy& copy) {
    const std::int64_t before = preemptions();
    copy.start_s = std::max(copy.asked_s, free_s_);
    copy.link_s = latency_s_;
    for (const Piece& piece : copy.pieces) {
        if (piece.kind == Piece::Kind::bytes)
            std::memcpy(piece.target, piece.source, static_cast<std::size_t>(piece.count));
        else
            widen(static_cast<const std::uint16_t*>(piece.source), static_cast<std::uint32_t*>(piece.target),
                  piece.count);
        if (bytes_per_s_ > 0) copy.link_s += static_cast<double>(piece.bytes_written()) / bytes_per_s_;
    }
    copy.end_s = std::max(copy.start_s + copy.link_s, now_s());
    free_s_ = copy.end_s;
    const bool slept = now_s() < copy.end_s;
    sleep_until(copy.end_s, crowded() ? 0.0 : kWake);
    notice(preemptions() != before || (slept && now_s() > copy.end_s + kLate));
}

void Link::notice(bool disturbed) {
    if (crowded()) return;
    disturbed_ += disturbed;
    if (disturbed_ >= kDisturbed) crowded_until_s_.store(now_s() + kCrowded, std::memory_order_relaxed);
    if (++noticed_ >= kWindow || disturbed_ >= kDisturbed) noticed_ = disturbed_ = 0;
}

}  // namespace tiermoe
