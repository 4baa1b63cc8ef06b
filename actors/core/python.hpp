// What the core calls in Python: orders of eviction and links. The core runs without the interpreter's lock; what is here
// takes it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <unordered_map>
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
    PythonOrder(nb::object policy, std::int64_t segments) : policy_(std::move(policy)), segments_(segments) {}
    void admitted(Segment s) override { note({What::admitted, {s}, {}, 0}); }
    void removed(Segment s) override { note({What::removed, {s}, {}, 0}); }
    void used(const Segments& segments) override { note({What::used, segments, {}, 0}); }
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        note({What::routed, keys, counts, tokens});
        if (events_.size() < kMostEvents) return;  // between passes: an error of the policy leaves nothing half done
        nb::gil_scoped_acquire lock;
        tell();
    }
    Segments victims(std::int64_t, std::int64_t count, const std::uint8_t* allowed) override {
        if (count <= 0) return {};
        nb::gil_scoped_acquire lock;
        tell();
        const nb::bytes mask(reinterpret_cast<const char*>(allowed), static_cast<std::size_t>(segments_));
        auto found = nb::cast<Segments>(policy_.attr("victims")(count, mask.attr("__getitem__")));
        for (Segment s : found)
            if (s < 0 || s >= segments_) throw nb::index_error("a policy evicts an expert that there is not");
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
    const std::int64_t segments_;  // of the cache
    std::vector<Event> events_;
};

// A link of Python (`actors.engine.cache.links.QueueLink`): copies from other nodes, and of what is not pinned. It tells what
// has ended since it told last, all tickets in one call, so that asking about one takes no lock.
class PythonLink : public Link {
  public:
    explicit PythonLink(nb::object of) : of_(std::move(of)) {}
    bool submit(const std::vector<Copy>& copies, bool urgent) override {
        nb::gil_scoped_acquire lock;
        nb::list given;
        for (const Copy& c : copies)
            given.append(nb::make_tuple(c.ticket, c.segment, c.slot, c.bytes, static_cast<int>(c.cause), c.back));
        return nb::cast<bool>(of_.attr("submit")(given, urgent));
    }
    void promote(Ticket t) override {
        if (!ended_.count(t)) call<void>("promote", t);
    }
    bool cancel(Ticket t) override {
        if (ended_.count(t)) return false;
        nb::gil_scoped_acquire lock;
        const nb::object share = of_.attr("cancel")(t);
        if (share.is_none()) return false;
        ended_[t] = {Ending::cancelled, false, {}, nb::cast<double>(share)};
        return true;
    }
    double moved(Ticket t) override {
        const auto found = ended_.find(t);
        return found == ended_.end() ? 0.0 : found->second.moved;
    }
    void poll() override { tell("poll"); }
    void look() override { tell("look"); }
    void fail(Ticket t, std::int64_t layer) override {
        call<void>("fail", t, layer);
        throw Broken("a link of Python raises the error of a failed copy");
    }
    Ending ending(Ticket t) override {
        const auto found = ended_.find(t);
        return found == ended_.end() ? Ending::under_way : found->second.how;
    }
    bool join(Ticket t, std::int64_t layer) override { return tell("join", t, layer); }
    bool overtake(Ticket t) override { return tell("overtake", t); }
    void wait(Ticket t) override {
        if (!ended_.count(t)) tell("wait", t);
    }
    Mark mark() override { return call<Mark>("mark"); }
    bool times(Ticket t, Times& times) override {
        const auto found = ended_.find(t);
        if (found == ended_.end() || !found->second.known) return false;
        times = found->second.times;
        return true;
    }
    double now_s() override { return call<double>("now_s"); }
    void forget(Ticket t) override {
        if (ending(t) == Ending::failed) call<void>("forget", t);
        ended_.erase(t);
    }
    std::int64_t pending() override { return call<std::int64_t>("pending"); }
    void close() override { call<void>("close"); }

  private:
    struct Ended {
        Ending how;
        bool known;  // its times
        Times times;
        double moved;
    };

    template <typename T, typename... Args>
    T call(const char* name, Args... args) {
        nb::gil_scoped_acquire lock;
        const nb::object found = of_.attr(name)(args...);
        if constexpr (!std::is_void_v<T>) return nb::cast<T>(found);
    }
    // Calls what gives (whether the host has waited, [(ticket, ending, times or None)]).
    template <typename... Args>
    bool tell(const char* name, Args... args) {
        nb::gil_scoped_acquire lock;
        const auto found = nb::cast<nb::tuple>(of_.attr(name)(args...));
        for (const nb::handle one : nb::cast<nb::object>(found[1])) {
            const nb::tuple told = nb::cast<nb::tuple>(one);
            Ended& ended = ended_[nb::cast<Ticket>(told[0])];
            ended = {static_cast<Ending>(nb::cast<int>(told[1])), !told[2].is_none(), {}, 0.0};
            if (!ended.known) continue;
            const auto [start_s, end_s, link_s, back_s] = nb::cast<std::tuple<double, double, double, double>>(told[2]);
            ended.times = {start_s, end_s, link_s, back_s};
        }
        return nb::cast<bool>(found[0]);
    }
    nb::object of_;
    std::unordered_map<Ticket, Ended> ended_;  // told, and not forgotten
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
