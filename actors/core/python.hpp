// What the core calls in Python: orders of eviction and links. The core runs without the interpreter's lock; what is here
// takes it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core.hpp"
#include "virtual_link.hpp"

namespace tiermoe::core {

namespace nb = nanobind;

// An `EvictionPolicy` of Python. It hears of events, in their order, before it is asked: a pass that needs no victim takes
// no lock.
class PythonOrder : public Order {
  public:
    explicit PythonOrder(nb::object policy) : policy_(std::move(policy)) {}
    void admitted(Segment s) override { note({What::admitted, {s}, {}, 0}); }
    void removed(Segment s) override { note({What::removed, {s}, {}, 0}); }
    void used(const Segments& segments) override { note({What::used, segments, {}, 0}); }
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        note({What::routed, keys, counts, tokens});
        if (events_.size() < kMostEvents) return;  // between passes: an error of the policy leaves nothing half done
        nb::gil_scoped_acquire lock;
        tell();
    }
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        if (count <= 0) return {};
        nb::gil_scoped_acquire lock;
        tell();
        const nb::bytes mask(reinterpret_cast<const char*>(allowed), static_cast<std::size_t>(segments));
        auto found = nb::cast<Segments>(policy_.attr("of_class")(slot_class).attr("victims")(count, mask.attr("__getitem__")));
        for (Segment s : found)
            if (s < 0 || s >= segments) throw nb::index_error("a policy evicts an expert that there is not");
        if (found.size() > static_cast<std::size_t>(count)) found.resize(static_cast<std::size_t>(count));
        return found;
    }
    // With the lock: the policy hears of what has happened.
    void tell() {
        std::vector<Event> events;
        events.swap(events_);
        for (const Event& e : events) switch (e.what) {
                case What::admitted: policy_.attr("admitted")(e.segments[0]); break;
                case What::removed: policy_.attr("removed")(e.segments[0]); break;
                case What::used: policy_.attr("used")(e.segments); break;
                case What::routed: policy_.attr("routed")(e.segments, e.counts, e.tokens);
            }
    }
    std::int64_t segments = 0;  // of the cache

  private:
    enum class What { admitted, removed, used, routed };
    struct Event {
        What what;
        Segments segments, counts;
        std::int64_t tokens;
    };
    static constexpr std::size_t kMostEvents = 1 << 12;

    void note(Event event) { events_.push_back(std::move(event)); }

    nb::object policy_;
    std::vector<Event> events_;
};

// A link of Python (`actors.engine.cache.links.QueueLink`): copies from other nodes, casts, a GPU's streams. A copy is a
// tuple of its fields, an ending a number.
class PythonLink : public Link {
  public:
    explicit PythonLink(nb::object of) : of_(std::move(of)) {}
    bool submit(const std::vector<Copy>& copies, bool urgent) override {
        nb::gil_scoped_acquire lock;
        nb::list given;
        for (const Copy& c : copies)
            given.append(nb::make_tuple(c.ticket, c.segment, c.slot, c.bytes, static_cast<int>(c.cause), c.after, c.back));
        return nb::cast<bool>(of_.attr("submit")(given, urgent));
    }
    void promote(Ticket t) override { call<void>("promote", t); }
    bool cancel(Ticket t) override { return call<bool>("cancel", t); }
    double moved(Ticket t) override { return call<double>("moved", t); }
    void poll() override { call<void>("poll"); }
    void fail(Ticket t, std::int64_t layer) override {
        call<void>("fail", t, layer);
        throw Broken("a link of Python raises the error of a failed copy");
    }
    Ending ending(Ticket t) override { return static_cast<Ending>(call<int>("ending", t)); }
    bool join(Ticket t, std::int64_t layer) override { return call<bool>("join", t, layer); }
    bool overtake(Ticket t) override { return call<bool>("overtake", t); }
    void wait(Ticket t) override { call<void>("wait", t); }
    Mark mark() override { return call<Mark>("mark"); }
    bool times(Ticket t, Times& found) override {
        nb::gil_scoped_acquire lock;
        const nb::object seen = of_.attr("times")(t);
        if (seen.is_none()) return false;
        const auto [start_s, end_s, link_s, back_s] = nb::cast<std::tuple<double, double, double, double>>(seen);
        found = {start_s, end_s, link_s, back_s};
        return true;
    }
    double now_s() override { return call<double>("now_s"); }
    void forget(Ticket t) override { call<void>("forget", t); }
    std::int64_t pending() override { return call<std::int64_t>("pending"); }
    void close() override { call<void>("close"); }

  private:
    template <typename T, typename... Args>
    T call(const char* name, Args... args) {
        nb::gil_scoped_acquire lock;
        const nb::object found = of_.attr(name)(args...);
        if constexpr (!std::is_void_v<T>) return nb::cast<T>(found);
    }
    nb::object of_;
};

// A virtual link whose bytes Python moves (`actors.engine.cache.links.Carrier`), at the moment at which a copy ends.
class CarryingLink : public VirtualLink {
  public:
    CarryingLink(Clock& clock, CopySeconds copy_s, double late_s, nb::object of)
        : VirtualLink(clock, std::move(copy_s), late_s), of_(std::move(of)) {}
    void fail(Ticket t, std::int64_t layer) override {
        nb::gil_scoped_acquire lock;
        of_.attr("fail")(t, layer);
        throw Broken("a carrier raises the error of a failed copy");
    }
    void forget(Ticket t) override {
        VirtualLink::forget(t);
        if (!failed_.erase(t)) return;
        nb::gil_scoped_acquire lock;
        of_.attr("forget")(t);
    }

  private:
    bool carry(const Copy& copy) override {
        nb::gil_scoped_acquire lock;
        const bool carried = nb::cast<bool>(of_.attr("carry")(copy.ticket, copy.segment, copy.slot));
        if (!carried) failed_.insert(copy.ticket);
        return carried;
    }
    nb::object of_;
    std::unordered_set<Ticket> failed_;  // whose errors Python holds
};

}  // namespace tiermoe::core
