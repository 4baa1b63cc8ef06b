// Copies on a thread of their own, at a stated rate (kernels/cpu/link.hpp): the stand-in for a GPU's copy engine.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "../../kernels/cpu/link.hpp"
#include "core.hpp"
#include "places.hpp"

namespace tiermoe::core {

class ThreadLink : public Link {
  public:
    ThreadLink(double bytes_per_s, double latency_s) : bytes_per_s_(bytes_per_s), link_(bytes_per_s, latency_s) {}

    // Before the first copy, and whenever none is under way.
    void place(Places places);

    bool submit(const std::vector<Copy>& copies, bool urgent) override;
    void promote(Ticket ticket) override { link_.promote(at(ticket).copy); }
    bool cancel(Ticket ticket) override { return link_.cancel(at(ticket).copy); }
    Ending ending(Ticket ticket) override;
    bool join(Ticket ticket, std::int64_t) override { return wait(ticket), true; }
    bool overtake(Ticket ticket) override { return wait(ticket), true; }
    void wait(Ticket ticket) override { link_.wait(*at(ticket).copy); }
    bool times(Ticket ticket, Times& found) override;
    double now_s() override { return tiermoe::now_s(); }
    void forget(Ticket ticket) override;
    std::int64_t pending() override { return link_.pending(); }
    void close() override { link_.close(); }
    // Busy for so long with a copy of nobody's, as a test wants it.
    void hold(double seconds);

  private:
    using Shared = std::shared_ptr<tiermoe::Copy>;
    struct Known {
        Shared copy;              // null: forgotten
        double back_share = 0.0;  // of its bytes, those copied back
    };
    Known& at(Ticket ticket) { return known_[ticket - first_]; }
    Known made(const Copy& copy, bool urgent);

    const double bytes_per_s_;
    tiermoe::Link link_;
    Places places_;
    std::deque<Known> known_;  // by ticket
    Ticket first_ = 1;         // of known_[0]
    std::vector<Shared> batch_, spare_;  // of one `submit`; whom nobody asks about any more
    std::int64_t room_ = 0;              // bytes of the largest segment
    std::vector<char> scratch_;          // where experts go that are copied back; nobody reads them
    Shared held_;                        // of `hold`, and its memory
    std::vector<char> memory_;
};

}  // namespace tiermoe::core
