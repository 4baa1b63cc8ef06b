// Copies on a thread of their own, at a stated rate (kernels/cpu/link.hpp): the stand-in for a GPU's copy engine.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "../../kernels/cpu/link.hpp"
#include "core.hpp"

namespace tiermoe::core {

// Where the bytes of segments lie, on the host and in slots.
struct Places {
    struct Target {  // one tensor of the pool: of the slot at position p it begins at base + p * stride
        char* base;
        std::int64_t stride;
    };
    struct Source {
        const char* at;
        std::int64_t count;  // bytes, or elements where they are widened
        bool widen;          // bfloat16 to float
    };
    std::vector<std::vector<Target>> homes;  // of each form: the tensors of a slot
    std::vector<std::int32_t> home_of;       // [segments]
    std::vector<std::int64_t> position;      // [slots]: of a slot in its tensors, in their unit
    std::vector<Source> sources;             // [segments, tensors]
    std::int64_t tensors = 0;                // of a segment, at most
};

class ThreadLink : public Link {
  public:
    ThreadLink(double bytes_per_s, double latency_s) : link_(bytes_per_s, latency_s) {}

    // Before the first copy, and whenever none is under way.
    void place(Places places);

    bool submit(const std::vector<Copy>& copies, bool urgent) override;
    void promote(Ticket ticket) override { link_.promote(copies_.at(ticket)); }
    bool cancel(Ticket ticket) override { return link_.cancel(copies_.at(ticket)); }
    Ending ending(Ticket ticket) override;
    bool join(Ticket ticket, std::int64_t) override { return wait(ticket), true; }
    bool overtake(Ticket ticket) override { return wait(ticket), true; }
    void wait(Ticket ticket) override { link_.wait(*copies_.at(ticket)); }
    bool times(Ticket ticket, Times& found) override;
    double now_s() override { return tiermoe::now_s(); }
    void forget(Ticket ticket) override;
    std::int64_t pending() override { return link_.pending(); }
    void close() override { link_.close(); }

  private:
    std::shared_ptr<tiermoe::Copy> made(const Copy& copy, bool urgent);

    tiermoe::Link link_;
    Places places_;
    std::unordered_map<Ticket, std::shared_ptr<tiermoe::Copy>> copies_;
    std::unordered_map<Ticket, double> back_share_;  // of copies with a copy back: its share of the bytes
    std::int64_t room_ = 0;                          // bytes of the largest segment
    std::vector<char> scratch_;                      // where experts go that are copied back; nobody reads them
};

}  // namespace tiermoe::core
