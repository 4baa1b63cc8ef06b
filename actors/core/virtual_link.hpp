// A link on a virtual clock: copies take stated seconds, one at a time, demand before prefetch.
#pragma once

#include <deque>
#include <functional>
#include <unordered_map>

#include "core.hpp"

namespace tiermoe::core {

struct Clock {
    double now_s = 0.0;
};

using CopySeconds = std::function<double(std::int64_t)>;  // of so many bytes

// Every question first brings the state up to the clock.
class VirtualLink : public Link {
  public:
    // late_s: from a copy's end until who waits for it goes on.
    VirtualLink(Clock& clock, CopySeconds copy_s, double late_s)
        : clock_(clock), copy_s_(std::move(copy_s)), late_s_(late_s) {}

    bool submit(const std::vector<Copy>& copies, bool urgent) override;
    void promote(Ticket ticket) override;
    bool cancel(Ticket ticket) override;
    Ending ending(Ticket ticket) override;
    bool join(Ticket ticket, std::int64_t) override { return wait(ticket), true; }
    bool overtake(Ticket ticket) override { return wait(ticket), true; }
    void wait(Ticket ticket) override;
    bool times(Ticket ticket, Times& found) override;
    double now_s() override { return clock_.now_s; }
    void forget(Ticket ticket) override { jobs_.erase(ticket); }
    std::int64_t pending() override {
        return static_cast<std::int64_t>(demand_.size() + prefetch_.size()) + (current_ != 0);
    }
    void close() override;

    // When the copy under way ends; below 0: the link is idle.
    double busy_until();
    // Seconds for which copies have been under way, up to now.
    double busy_s();
    // Kernels run that take so long without a copy beside them, and go at `share` of their speed beside one.
    void compute(double seconds, double share);
    std::int64_t submitted_bytes() const { return submitted_bytes_; }

  private:
    // Moves the bytes of a copy that ends. False: it failed.
    virtual bool carry(const Copy&) { return true; }

    struct Job {
        double submitted_s;
        Copy copy;
        Ending ending = Ending::under_way;
        Times times{};
    };

    void catch_up();
    void start();
    bool leave(Ticket ticket);
    double seconds(std::int64_t bytes);

    Clock& clock_;
    CopySeconds copy_s_;
    const double late_s_;
    std::unordered_map<std::int64_t, double> known_s_;
    std::unordered_map<Ticket, Job> jobs_;
    std::deque<Ticket> demand_, prefetch_;
    Ticket current_ = 0;  // 0: nothing is queued either
    double start_s_ = 0.0, end_s_ = 0.0, free_s_ = 0.0;  // of the current copy; when the one before ended
    double copied_s_ = 0.0;                              // of copies that have ended
    std::int64_t submitted_bytes_ = 0;
    bool closed_ = false;
};

}  // namespace tiermoe::core
