// A link that copies at a stated rate, on a thread of its own that never takes the interpreter's lock: the stand-in for
// a GPU's copy engine, which costs the forward nothing but the memory traffic.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tiermoe {

double now_s();  // of CLOCK_MONOTONIC
double cpu_s();  // of the thread

// `count` elements from `source` to `target`: bytes as they are, or bfloat16 widened to float.
struct Piece {
    enum class Kind { bytes, widen_bfloat16 };
    void* target;
    const void* source;
    std::int64_t count;
    Kind kind;

    std::int64_t bytes_written() const { return kind == Kind::bytes ? count : 4 * count; }
};

struct Copy {
    std::vector<Piece> pieces;
    bool prefetch = false;
    double asked_s = 0.0, start_s = 0.0, end_s = 0.0, link_s = 0.0;  // of CLOCK_MONOTONIC
    enum State : int { queued, started, done, cancelled };
    std::atomic<int> state{queued};
};

class Link {
   public:
    // bytes_per_s 0: as fast as memory. Throws std::system_error when the thread cannot be started.
    Link(double bytes_per_s, double latency_s);
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Queue copies in this order, demand before prefetch. False once closed: they are cancelled.
    bool submit(const std::vector<std::shared_ptr<Copy>>& copies);
    // A queued prefetch goes behind the demand copies; nothing if it has started.
    void promote(const std::shared_ptr<Copy>& copy);
    // Drop a copy that has not started. False if it has.
    bool cancel(const std::shared_ptr<Copy>& copy);
    // Until the copy is done or cancelled.
    void wait(const Copy& copy);
    // Queued or under way.
    std::int64_t pending();
    // Ends after the copy under way; queued ones are cancelled. Safe to call twice.
    void close();

   private:
    void run();
    void await_work(std::unique_lock<std::mutex>& lock);
    void copy(Copy& copy);
    void notice(bool disturbed);
    bool crowded() const { return now_s() < crowded_until_s_.load(std::memory_order_relaxed); }

    const double bytes_per_s_, latency_s_;
    double free_s_ = 0.0;  // when the link is free again
    std::mutex mutex_;
    std::condition_variable wake_, ended_;
    std::deque<std::shared_ptr<Copy>> demand_, prefetch_;
    bool busy_ = false, idle_ = false, closed_ = false;
    int waiting_ = 0;
    std::atomic<int> asker_{-1};  // the core of who asked last
    std::atomic<double> crowded_until_s_{0.0};
    int noticed_ = 0, disturbed_ = 0;  // copies of this window, and those of them that were disturbed
    std::thread thread_;
};

}  // namespace tiermoe
