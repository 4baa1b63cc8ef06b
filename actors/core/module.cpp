// tiermoe.actors.core._core: the core and its links for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../../kernels/cpu/table.hpp"
#include "bindings.hpp"
#include "core.hpp"
#include "disk_link.hpp"
#include "python.hpp"
#include "thread_link.hpp"
#include "virtual_link.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T, typename V>
Array<T> view(V& values, nb::handle owner) {
    return Array<T>(values.data(), {values.size()}, owner);
}

Layout layout(std::int64_t layers, std::int64_t experts, std::int64_t parts, std::vector<std::int64_t> class_of,
              std::vector<std::int64_t> slots, std::vector<std::int64_t> units, std::vector<std::int64_t> bytes, bool split,
              std::int64_t most, std::vector<std::int64_t> first_unit) {
    Layout made;
    made.layers = layers, made.experts = experts, made.parts = parts;
    made.class_of = std::move(class_of), made.slots = std::move(slots), made.units = std::move(units);
    made.bytes = std::move(bytes);
    made.split = split;
    made.most = most;
    made.first_unit = std::move(first_unit);
    return made;
}

// The classes of Python that stand for the core's errors (`errors`).
PyObject *broken_class, *no_slot_class, *failure_class, *store_class;

void translate(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const Broken& e) {
        PyErr_SetString(broken_class, e.what());
    } catch (const NoSlot& e) {
        PyErr_SetString(no_slot_class, e.what());
    } catch (const Closed& e) {
        PyErr_SetObject(failure_class, nb::make_tuple(e.what(), "start a new worker").ptr());
    } catch (const ReadFailed& e) {
        PyErr_SetObject(store_class, nb::make_tuple(e.what(), e.remedy).ptr());
    } catch (const CopyFailed& e) {
        PyErr_SetObject(failure_class, nb::make_tuple(e.what(), "run again, and report it if it stays").ptr());
    }
}

struct AskedLog {
    std::vector<Core::Asked> asked;
};
struct Watched {
    std::vector<Seen> seen;
};

}  // namespace
}  // namespace tiermoe::core

NB_MODULE(_core, m) {
    using namespace tiermoe::core;
    m.doc() = "Decides and accounts for the expert memory of one device (actors/core/core.hpp).";
    broken_class = PyExc_AssertionError, no_slot_class = PyExc_ValueError, failure_class = store_class = PyExc_RuntimeError;
    nb::set_leak_warnings(false);  // at the interpreter's end a cache may still be there
    nb::register_exception_translator(translate);
    m.def("takes", [](nb::capsule of) { return of.name() && of.name() == tiermoe::kKernelTable; }, "kernels"_a,
          "Whether a table of kernels (`_cpu.table`) is of a build with these layouts.");
    m.def("errors", [](nb::object broken, nb::object no_slot, nb::object failure, nb::object store) {
        broken_class = broken.release().ptr(), no_slot_class = no_slot.release().ptr(), failure_class = failure.release().ptr();
        store_class = store.release().ptr();
    }, "broken"_a, "no_slot"_a, "failure"_a, "store"_a, "The classes of what the core raises; the last two take a remedy, too.");

    nb::class_<Clock>(m, "Clock")
        .def(nb::init<>())
        .def_rw("now_s", &Clock::now_s)
        .def("__call__", [](const Clock& c) { return c.now_s; })
        .def("advance", [](Clock& c, double seconds) { c.now_s += seconds; }, "seconds"_a);
    nb::class_<Link>(m, "Link")
        .def("close", &Link::close, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("pending", &Link::pending);
    nb::class_<VirtualLink, Link>(m, "VirtualLink")
        .def(nb::init<Clock&, CopySeconds, double>(), nb::keep_alive<1, 2>(), "clock"_a, "copy_s"_a, "late_s"_a)
        .def("busy_s", &VirtualLink::busy_s, "Seconds for which copies have been under way, up to now.")
        .def("compute", &VirtualLink::compute, "seconds"_a, "share"_a,
             "The clock moves to the end of kernels that take so long alone, and go at `share` of their speed beside copies.");
    nb::class_<CarryingLink, VirtualLink>(m, "CarryingLink")
        .def(nb::init<Clock&, CopySeconds, double, nb::object>(), nb::keep_alive<1, 2>(), "clock"_a, "copy_s"_a, "late_s"_a,
             "carrier"_a);
    nb::class_<PythonLink, Link>(m, "PythonLink").def(nb::init<nb::object>(), "of"_a);
    nb::class_<ThreadLink, Link>(m, "ThreadLink")
        .def(nb::init<double, double>(), "bytes_per_s"_a, "latency_s"_a)
        .def("place", [](ThreadLink& link, const Homes& homes, std::vector<std::int32_t> home_of,
                         std::vector<std::int64_t> position, const Sources& sources, std::int64_t tensors) {
            link.place(places(homes, std::move(home_of), std::move(position), sources, tensors));
        }, "homes"_a, "home_of"_a, "position"_a, "sources"_a, "tensors"_a)
        .def("hold", &ThreadLink::hold, "seconds"_a);
    nb::class_<DiskLink, Link>(m, "DiskLink", "Reads experts from files past the page cache (actors/core/disk_link.hpp).")
        .def("__init__", [](DiskLink* made, const std::vector<std::tuple<std::string, int, std::uintptr_t, std::int64_t>>& given,
                            int threads) {
            std::vector<DiskLink::File> files;
            for (const auto& [path, descriptor, at, bytes] : given)
                files.push_back({path, descriptor, reinterpret_cast<const char*>(at), bytes});
            new (made) DiskLink(files, threads);
        }, "files"_a, "threads"_a, "files: of each its path, an open descriptor, the address at which it is mapped, and its bytes.")
        .def("place", [](DiskLink& link, const Homes& homes, std::vector<std::int32_t> home_of,
                         std::vector<std::int64_t> position, const Sources& sources, std::int64_t tensors) {
            link.place(places(homes, std::move(home_of), std::move(position), sources, tensors));
        }, "homes"_a, "home_of"_a, "position"_a, "sources"_a, "tensors"_a)
        .def("measure", &DiskLink::measure, "bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Bytes per second of pieces at equal distances in all files.")
        .def_prop_ro("direct", &DiskLink::direct, "Whether all files are read past the page cache, as far as known.")
        .def_prop_ro("counts", [](const DiskLink& link) {
            const auto counts = link.counts();
            return nb::make_tuple(counts.read, counts.pieces, counts.longest_s);
        }, "Bytes read, in how many pieces, and the seconds of the longest.");
    bind_rules(m);
    bind_orders(m);
    nb::class_<Layout>(m, "Layout")
        .def("__init__", [](Layout* made, std::int64_t layers, std::int64_t experts, std::int64_t parts,
                            std::vector<std::int64_t> class_of, std::vector<std::int64_t> slots,
                            std::vector<std::int64_t> units, std::vector<std::int64_t> bytes, bool split, std::int64_t most,
                            std::vector<std::int64_t> first_unit) {
            new (made) Layout(layout(layers, experts, parts, std::move(class_of), std::move(slots), std::move(units),
                                     std::move(bytes), split, most, std::move(first_unit)));
        }, "layers"_a, "experts"_a, "parts"_a, "class_of"_a, "slots"_a, "units"_a, "bytes"_a, "split"_a, "most"_a = 0,
             "first_unit"_a = std::vector<std::int64_t>());
    nb::class_<Governor>(m, "Governor")
        .def("__init__", [](Governor* made, double min_useful, std::int64_t window, std::int64_t rest) {
            new (made) Governor{min_useful, window, rest};
        }, "min_useful"_a = 0.0, "window"_a = 128, "rest"_a = 512)
        .def("allows", &Governor::allows)
        .def("pause", &Governor::pause, "layers"_a)
        .def("used", [](Governor& g, std::int64_t count) { g.used += count; }, "count"_a = 1)
        .def("wasted", [](Governor& g, std::int64_t count) { g.wasted += count; }, "count"_a = 1)
        .def_prop_ro("outcomes", [](const Governor& g) { return std::pair(g.used, g.wasted); },
                     "Prefetches of the window that were used, and that were wasted.")
        .def_prop_ro("always", [](const Governor& g) { return g.min_useful <= 0; })
        .def_prop_ro("resting", [](const Governor& g) { return g.resting > 0; })
        .def_prop_ro("state", [](const Governor& g) { return std::make_tuple(g.used, g.wasted, g.resting); });
#define F(name) .def_ro(#name, &LayerCounts::name)
    nb::class_<LayerCounts>(m, "LayerCounts") TIERMOE_LAYER_COUNTS(F);
#undef F
#define F(name) .def_ro(#name, &Totals::name)
    nb::class_<Totals>(m, "Totals")
        F(decode_hits) F(decode_misses) F(decode_blocked_io_s) F(bytes_preloaded) F(substituted) F(dropped);
#undef F
    nb::class_<SourceCounts>(m, "SourceCounts")
        .def_ro("queued", &SourceCounts::queued).def_ro("hits", &SourceCounts::hits).def_ro("late", &SourceCounts::late)
        .def_ro("wasted", &SourceCounts::wasted).def_ro("cancelled", &SourceCounts::cancelled);
    // What may wait for a copy gives the interpreter's lock up.
    nb::class_<Core>(m, "Core")
        .def(nb::init<const Layout&, std::shared_ptr<Link>, std::shared_ptr<Order>, const Governor&, bool>(), "layout"_a,
             "link"_a, "order"_a, "governor"_a, "writeback"_a = false)
        .def_rw("decode_only", &Core::decode_only)
        .def_prop_ro("governor", &Core::governor, nb::rv_policy::reference_internal)
        .def_prop_ro("states", [](nb::handle_t<Core> self) { return view<std::uint8_t>(nb::cast<Core&>(self).states(), self); })
        .def_prop_ro("evictable", [](nb::handle_t<Core> self) { return view<std::uint8_t>(nb::cast<Core&>(self).evictable(), self); })
        .def_prop_ro("slots", [](nb::handle_t<Core> self) { return view<std::int32_t>(nb::cast<Core&>(self).slots(), self); })
        .def_prop_ro("pins", [](nb::handle_t<Core> self) { return view<std::int32_t>(nb::cast<Core&>(self).pins(), self); })
        .def_prop_ro("uses", [](nb::handle_t<Core> self) { return view<std::int64_t>(nb::cast<Core&>(self).uses(), self); })
        .def_prop_ro("emptied", &Core::emptied)
        .def_prop_ro("free_slots", &Core::free_slots)
        .def_prop_ro("totals", &Core::totals)
        .def_prop_ro("summed", &Core::summed)
        .def_prop_ro("resets", &Core::resets)
        .def("rerouted", &Core::rerouted, "substituted"_a, "dropped"_a)
        .def_prop_ro("under_way", &Core::under_way)
        .def("state", [](Core& c, Segment s) { return static_cast<int>(c.states().at(static_cast<std::size_t>(s))); },
             "segment"_a)
        .def("there", [](const Core& c, Segment first, Segment stop) {
            if (first < 0 || stop > c.layout().segments()) throw std::out_of_range("there are no such segments");
            return c.there(first, stop);
        }, "first"_a, "stop"_a, "Whether all of these are loading or resident.")
        .def("free_of", [](const Core& c, std::int64_t slot_class) {
            if (slot_class < 0 || slot_class >= static_cast<std::int64_t>(c.layout().slots.size()))
                throw std::out_of_range("there is no such slot class");
            return c.free_of(slot_class);
        }, "slot_class"_a)
        .def("counts", [](Core& c, std::int64_t layer) { return c.counts().at(static_cast<std::size_t>(layer)); }, "layer"_a)
        .def("source", [](Core& c, std::int64_t number) { return c.sources().at(static_cast<std::size_t>(number)); }, "number"_a)
        .def("reset_counts", &Core::reset_counts)
        .def("divide", &Core::divide, "layout"_a, "fill"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("fill", &Core::fill, "keys"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("migrate", &Core::migrate, "keys"_a, "keep_others"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("preload", &Core::preload, "keys"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("flush", &Core::flush, nb::call_guard<nb::gil_scoped_release>())
        .def("wait_all", &Core::wait_all, nb::call_guard<nb::gil_scoped_release>())
        .def("settle", &Core::settle, nb::call_guard<nb::gil_scoped_release>())
        .def("resize", [](Core& c, std::int64_t slots) {
            std::vector<Move> moves;
            {
                nb::gil_scoped_release unlocked;
                moves = c.resize(slots);
            }
            nb::list found;
            for (const Move& m : moves) found.append(nb::make_tuple(m.segment, m.from, m.to));
            return found;
        }, "slots"_a)
        .def("arrive", &Core::arrive, "layer"_a = -1)
        .def("drop_stale", &Core::drop_stale, "layer"_a, "needed"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("open", &Core::open, "layer"_a, "keys"_a, "counts"_a, "tokens"_a, "low"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("plan", [](Core& c, const Segments& here, const Segments& keep) {
            const Plan& p = c.plan(here, keep);
            nb::list loads;
            for (const Load& l : p.loads) loads.append(nb::make_tuple(l.segment, l.victim, l.after));
            return nb::make_tuple(p.run, p.resident, p.arriving, loads);
        }, "here"_a, "keep"_a)
        .def_prop_ro("planned", [](const Core& c) { return std::pair(c.present().run, c.present().resident); },
                     "Of the present pass: segments that run here in their order, and how many of these were resident.")
        .def("begin", &Core::begin)
        .def("load", &Core::load, nb::call_guard<nb::gil_scoped_release>())
        .def("next", &Core::next, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Core::close, "peer_blocked_s"_a = 0.0, "peer_link_s"_a = 0.0)
        .def("abandon", &Core::abandon)
        .def("prefetch", [](Core& c, const Segments& keys, const Segments& keep, std::uint8_t source) {
            return c.prefetch(keys, keep, source);
        }, "keys"_a, "keep"_a, "source"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("stream", &Core::stream, "source"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("may_sweep", &Core::may_sweep, "pairs"_a)
        .def("owns", &Core::owns, "keys"_a, "Of the experts that are this device's. Not called: all are.")
        .def("finish_prefetch", &Core::finish_prefetch, "keys"_a, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("vacate", &Core::vacate, "slots"_a, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("leave", &Core::leave, "victims"_a, "layer"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("settle_times", &Core::settle_times)
        .def("watch", [](Core& c, std::shared_ptr<Watched> seen) {
            c.seen = std::shared_ptr<std::vector<Seen>>(seen, &seen->seen);
        }, "seen"_a)
        .def("check", &Core::check)
        .def("log_to", [](Core& c, std::shared_ptr<AskedLog> log) {
            c.log = std::shared_ptr<std::vector<Core::Asked>>(log, &log->asked);
        }, "log"_a);
    nb::class_<Watched>(m, "Watched").def(nb::init<>()).def("take", [](Watched& watched) {
        nb::list found;
        for (const Seen& s : std::exchange(watched.seen, {}))
            found.append(nb::make_tuple(s.wait, s.layer, s.segment, static_cast<int>(s.cause), s.start_s, s.end_s, s.link_s));
        return found;
    });
    nb::class_<AskedLog>(m, "AskedLog").def(nb::init<>()).def("take", [](AskedLog& log) {
        nb::list found;
        for (const auto& a : log.asked) found.append(nb::make_tuple(std::string(1, a.what), a.segment, a.slot));
        log.asked.clear();
        return found;
    });
    tiermoe::bindings::bind_planner(m);
    tiermoe::bindings::bind_ranks(m);
    bind_placement(m);
    bind_cpu(m);
    bind_python_layer(m);
    bind_gpu(m);
    bind_maps(m);
    bind_routing(m);
    bind_streams(m);
    bind_virtual(m);
}
