// tiermoe.actors.core._core: the core and its links for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core.hpp"
#include "orders.hpp"
#include "thread_link.hpp"
#include "virtual_link.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

// The core runs without the interpreter's lock; what calls Python takes it.

// An `EvictionPolicy` of Python.
class PythonOrder : public Order {
  public:
    explicit PythonOrder(nb::object policy) : policy_(std::move(policy)), segments_(0) {}
    void admitted(Segment s) override {
        nb::gil_scoped_acquire lock;
        policy_.attr("admitted")(s);
    }
    void removed(Segment s) override {
        nb::gil_scoped_acquire lock;
        policy_.attr("removed")(s);
    }
    void used(const Segments& segments) override {
        nb::gil_scoped_acquire lock;
        policy_.attr("used")(segments);
    }
    void routed(std::int64_t, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        nb::gil_scoped_acquire lock;
        policy_.attr("routed")(keys, counts, tokens);
    }
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        if (count <= 0) return {};
        nb::gil_scoped_acquire lock;
        const nb::bytes mask(reinterpret_cast<const char*>(allowed), static_cast<std::size_t>(segments_));
        return nb::cast<Segments>(policy_.attr("of_class")(slot_class).attr("victims")(count, mask.attr("__getitem__")));
    }
    std::int64_t& segments() { return segments_; }

  private:
    nb::object policy_;
    std::int64_t segments_;
};

// A link of Python: copies from other nodes, casts, a GPU's streams. Its methods are those of `Link`; a copy is a tuple of
// its fields, an ending a number.
class PythonLink : public Link {
  public:
    explicit PythonLink(nb::object of) : of_(std::move(of)) {}
    bool submit(const std::vector<Copy>& copies, bool urgent) override {
        nb::gil_scoped_acquire lock;
        nb::list given;
        for (const Copy& c : copies)
            given.append(nb::make_tuple(c.ticket, c.segment, c.slot, c.generation, c.bytes, static_cast<int>(c.cause), c.after, c.back));
        return nb::cast<bool>(of_.attr("submit")(given, urgent));
    }
    void promote(Ticket t) override { call<void>("promote", t); }
    bool cancel(Ticket t) override { return call<bool>("cancel", t); }
    double moved(Ticket t) override { return call<double>("moved", t); }
    void poll() override { call<void>("poll"); }
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

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T, typename V>
Array<T> view(V& values, nb::handle owner) {
    return Array<T>(values.data(), {values.size()}, owner);
}

Layout layout(std::int64_t layers, std::int64_t experts, std::int64_t parts, std::vector<std::int64_t> class_of,
              std::vector<std::int64_t> slots, std::vector<std::int64_t> units, std::vector<std::int64_t> bytes, bool split) {
    Layout made;
    made.layers = layers, made.experts = experts, made.parts = parts;
    made.class_of = std::move(class_of), made.slots = std::move(slots), made.units = std::move(units);
    made.bytes = std::move(bytes);
    made.split = split;
    return made;
}

struct AskedLog {
    std::vector<Core::Asked> asked;
};

// What a capsule of this name holds. Throws nb::type_error: it is another.
void* named(const nb::capsule& of, const char* name) {
    if (!of.name() || std::string(of.name()) != name) throw nb::type_error("it is another kind of object");
    return of.data();
}

}  // namespace
}  // namespace tiermoe::core

NB_MODULE(_core, m) {
    using namespace tiermoe::core;
    m.doc() = "Decides and accounts for the expert memory of one device (actors/core/core.hpp).";
    nb::exception<Broken>(m, "Broken", PyExc_AssertionError);
    nb::exception<NoSlot>(m, "NoSlot", PyExc_ValueError);
    nb::exception<CopyFailed>(m, "CopyFailed", PyExc_RuntimeError);

    nb::class_<Clock>(m, "Clock")
        .def(nb::init<>())
        .def_rw("now_s", &Clock::now_s)
        .def("__call__", [](const Clock& c) { return c.now_s; })
        .def("advance", [](Clock& c, double seconds) { c.now_s += seconds; }, "seconds"_a);
    nb::class_<Link>(m, "Link").def("close", &Link::close).def_prop_ro("pending", &Link::pending);
    nb::class_<VirtualLink, Link>(m, "VirtualLink")
        .def(nb::init<Clock&, std::function<double(std::int64_t)>, double>(), nb::keep_alive<1, 2>(), "clock"_a, "copy_s"_a,
             "late_s"_a)
        .def("busy_until", &VirtualLink::busy_until)
        .def_prop_ro("submitted_bytes", &VirtualLink::submitted_bytes);
    nb::class_<PythonLink, Link>(m, "PythonLink").def(nb::init<nb::object>(), "of"_a);
    nb::class_<ThreadLink, Link>(m, "ThreadLink")
        .def(nb::init<double, double>(), "bytes_per_s"_a, "latency_s"_a)
        .def("place", [](ThreadLink& link, std::vector<std::vector<std::pair<std::uintptr_t, std::int64_t>>> homes,
                         std::vector<std::int32_t> home_of, std::vector<std::int64_t> position,
                         std::vector<std::tuple<std::uintptr_t, std::int64_t, bool>> sources, std::int64_t tensors) {
            Places places;
            for (const auto& home : homes) {
                places.homes.emplace_back();
                for (const auto& [base, stride] : home) places.homes.back().push_back({reinterpret_cast<char*>(base), stride});
            }
            places.home_of = std::move(home_of), places.position = std::move(position), places.tensors = tensors;
            for (const auto& [at, count, widen] : sources)
                places.sources.push_back({reinterpret_cast<const char*>(at), count, widen});
            link.place(std::move(places));
        }, "homes"_a, "home_of"_a, "position"_a, "sources"_a, "tensors"_a);
    nb::class_<Order>(m, "Order");
    nb::class_<PythonOrder, Order>(m, "PythonOrder")
        .def(nb::init<nb::object>(), "policy"_a)
        .def("sized", [](PythonOrder& o, std::int64_t segments) { o.segments() = segments; }, "segments"_a);
    nb::class_<WholeOrder, Order>(m, "WholeOrder")
        .def("__init__", [](WholeOrder* made, nb::capsule of) {
            new (made) WholeOrder(*static_cast<tiermoe::Order*>(named(of, "tiermoe.kernels.Order")));
        }, nb::keep_alive<1, 2>(), "order"_a);
    nb::class_<TopsAndBottoms, Order>(m, "TopsAndBottoms")
        .def("__init__", [](TopsAndBottoms* made, nb::capsule of) {
            new (made) TopsAndBottoms(*static_cast<tiermoe::SplitOrder*>(named(of, "tiermoe.kernels.SplitOrder")));
        }, nb::keep_alive<1, 2>(), "order"_a);
    nb::class_<Layout>(m, "Layout")
        .def("__init__", [](Layout* made, std::int64_t layers, std::int64_t experts, std::int64_t parts,
                            std::vector<std::int64_t> class_of, std::vector<std::int64_t> slots,
                            std::vector<std::int64_t> units, std::vector<std::int64_t> bytes, bool split) {
            new (made) Layout(layout(layers, experts, parts, std::move(class_of), std::move(slots), std::move(units), std::move(bytes), split));
        }, "layers"_a, "experts"_a, "parts"_a, "class_of"_a, "slots"_a, "units"_a, "bytes"_a, "split"_a);
    nb::class_<Governor>(m, "Governor")
        .def_rw("min_useful", &Governor::min_useful).def_rw("window", &Governor::window).def_rw("rest", &Governor::rest)
        .def("allows", &Governor::allows).def("pause", &Governor::pause, "layers"_a)
        .def_prop_ro("always", [](const Governor& g) { return g.min_useful <= 0; })
        .def_prop_ro("resting", [](const Governor& g) { return g.resting > 0; });
#define F(name) .def_ro(#name, &LayerCounts::name)
    nb::class_<LayerCounts>(m, "LayerCounts")
        F(hits) F(misses) F(prefetched_hits) F(top_hits) F(low_bit_hits) F(low_bit_misses) F(late_prefetches) F(forwards)
        F(waves) F(bytes_loaded_demand) F(bytes_loaded_prefetch) F(bytes_loaded_migration) F(bytes_loaded_low_bit)
        F(bytes_demanded_decode) F(failed_prefetches) F(bytes_wasted) F(vacated) F(bytes_premature) F(bytes_written_back)
        F(writebacks) F(blocked_io_s) F(writeback_link_s) F(writeback_blocked_s) F(total_io_s) F(link_s);
#undef F
    nb::class_<SourceCounts>(m, "SourceCounts")
        .def_ro("queued", &SourceCounts::queued).def_ro("hits", &SourceCounts::hits).def_ro("late", &SourceCounts::late)
        .def_ro("wasted", &SourceCounts::wasted).def_ro("cancelled", &SourceCounts::cancelled);
    nb::class_<Load>(m, "Load").def_ro("segment", &Load::segment).def_ro("victim", &Load::victim).def_ro("after", &Load::after);
    nb::class_<Plan>(m, "Plan")
        .def_ro("run", &Plan::run).def_ro("resident", &Plan::resident).def_ro("arriving", &Plan::arriving)
        .def_ro("loads", &Plan::loads);
    nb::class_<Core>(m, "Core")
        .def(nb::init<const Layout&, std::shared_ptr<Link>, std::shared_ptr<Order>, bool>(), "layout"_a, "link"_a, "order"_a,
             "writeback"_a)
        .def_rw("decode_only", &Core::decode_only)
        .def_prop_ro("governor", &Core::governor, nb::rv_policy::reference_internal)
        .def_prop_ro("states", [](nb::handle_t<Core> self) { return view<std::uint8_t>(nb::cast<Core&>(self).states(), self); })
        .def_prop_ro("evictable", [](nb::handle_t<Core> self) { return view<std::uint8_t>(nb::cast<Core&>(self).evictable(), self); })
        .def_prop_ro("slots", [](nb::handle_t<Core> self) { return view<std::int32_t>(nb::cast<Core&>(self).slots(), self); })
        .def_prop_ro("pins", [](nb::handle_t<Core> self) { return view<std::int32_t>(nb::cast<Core&>(self).pins(), self); })
        .def_prop_ro("uses", [](nb::handle_t<Core> self) { return view<std::int64_t>(nb::cast<Core&>(self).uses(), self); })
        .def_prop_ro("took_s", [](nb::handle_t<Core> self) { return view<double>(nb::cast<Core&>(self).took_s(), self); })
        .def_prop_ro("emptied", &Core::emptied)
        .def_prop_ro("free_slots", &Core::free_slots)
        .def_prop_ro("bytes_preloaded", &Core::bytes_preloaded)
        .def_prop_ro("under_way", &Core::under_way)
        .def_prop_ro("plan_now", &Core::present, nb::rv_policy::reference_internal)
        .def("state", [](const Core& c, Segment s) { return static_cast<int>(c.state(s)); }, "segment"_a)
        .def("free_of", &Core::free_of, "slot_class"_a)
        .def("counts", [](Core& c, std::int64_t layer) { return c.counts().at(static_cast<std::size_t>(layer)); }, "layer"_a)
        .def("source", [](Core& c, std::int64_t number) { return c.sources().at(static_cast<std::size_t>(number)); }, "number"_a)
        .def("reset_counts", &Core::reset_counts)
        .def("segments", &Core::segments_of, "keys"_a)
        .def("divide", &Core::divide, "layout"_a, "fill"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("migrate", &Core::migrate, "keys"_a, "keep_others"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("preload", &Core::preload, "keys"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("flush", &Core::flush, nb::call_guard<nb::gil_scoped_release>())
        .def("arrive", &Core::arrive, nb::call_guard<nb::gil_scoped_release>())
        .def("drop_stale", &Core::drop_stale, "layer"_a, "needed"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("open", &Core::open, "layer"_a, "keys"_a, "counts"_a, "tokens"_a, "low"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("plan", [](Core& c, const Segments& here, const Segments& keep) {
            const Plan& p = [&]() -> const Plan& {
                nb::gil_scoped_release unlocked;
                return c.plan(here, keep);
            }();
            return nb::make_tuple(p.run, p.resident, p.arriving, p.loads.size());
        }, "here"_a, "keep"_a)
        .def("begin", &Core::begin, nb::call_guard<nb::gil_scoped_release>())
        .def("load", &Core::load, nb::call_guard<nb::gil_scoped_release>())
        .def("next", &Core::next, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Core::close)
        .def("abandon", &Core::abandon)
        .def("prefetch", &Core::prefetch, "keys"_a, "keep"_a, "source"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("finish_prefetch", &Core::finish_prefetch, "keys"_a, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("vacate", &Core::vacate, "slots"_a, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("leave", &Core::leave, "victims"_a, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("check", &Core::check)
        .def("log_to", [](Core& c, std::shared_ptr<AskedLog> log) {
            c.log = std::shared_ptr<std::vector<Core::Asked>>(log, &log->asked);
        }, "log"_a);
    nb::class_<AskedLog>(m, "AskedLog").def(nb::init<>()).def("take", [](AskedLog& log) {
        nb::list found;
        for (const auto& a : log.asked) found.append(nb::make_tuple(std::string(1, a.what), a.segment, a.slot));
        log.asked.clear();
        return found;
    });
}
