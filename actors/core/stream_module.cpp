// Bindings of a GPU's link.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "instant_driver.hpp"
#include "stream_link.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

// Calls Python with the interpreter's lock; its exception is a failure of the driver.
template <typename Result, typename... Given>
std::function<Result(Given...)> calling(nb::callable call) {
    return [call = nb::object(std::move(call))](Given... given) {
        nb::gil_scoped_acquire lock;
        try {
            const nb::object found = call(given...);
            if constexpr (!std::is_void_v<Result>) return nb::cast<Result>(found);
        } catch (const nb::python_error& error) {
            const nb::object said = nb::str(error.value());
            throw std::runtime_error(nb::cast<const char*>(said));
        }
    };
}

template <typename Call>
void take(Call*& call, const nb::dict& addresses, const char* name) {
    call = reinterpret_cast<Call*>(nb::cast<std::uintptr_t>(addresses[name]));
    if (!call) throw std::invalid_argument(std::string("a driver has no call ") + name);
}

#define TIERMOE_CALLS                                                                                                  \
    TIERMOE_CALL(enter) TIERMOE_CALL(up) TIERMOE_CALL(down) TIERMOE_CALL(create) TIERMOE_CALL(destroy)                     \
    TIERMOE_CALL(record) TIERMOE_CALL(wait) TIERMOE_CALL(query) TIERMOE_CALL(synchronize) TIERMOE_CALL(elapsed)            \
    TIERMOE_CALL(describe)

void make(Driver* made, std::uintptr_t context, const nb::dict& addresses) {
    new (made) Driver{};
    made->context = reinterpret_cast<Driver::Handle>(context);
#define TIERMOE_CALL(name) take(made->name, addresses, #name);
    TIERMOE_CALLS
#undef TIERMOE_CALL
}

nb::dict addresses(const Driver& driver) {
    nb::dict found;
#define TIERMOE_CALL(name) found[#name] = reinterpret_cast<std::uintptr_t>(driver.name);
    TIERMOE_CALLS
#undef TIERMOE_CALL
    return found;
}

}  // namespace

Places places(const Homes& homes, std::vector<std::int32_t> home_of, std::vector<std::int64_t> position,
              const Sources& sources, std::int64_t tensors) {
    Places made;
    for (const auto& home : homes) {
        made.homes.emplace_back();
        for (const auto& [base, stride] : home) made.homes.back().push_back({reinterpret_cast<char*>(base), stride});
    }
    made.home_of = std::move(home_of), made.position = std::move(position), made.tensors = tensors;
    for (const auto& [at, count, cast, item, slot_item] : sources)
        made.sources.push_back({reinterpret_cast<const char*>(at), count, cast, item, slot_item});
    return made;
}

void bind_streams(nb::module_& m) {
    nb::class_<Driver>(m, "Driver", "The calls of a GPU's driver that a link makes, by address (actors/core/driver.hpp).")
        .def("__init__", &make, "context"_a, "addresses"_a)
        .def_prop_ro("context", [](const Driver& driver) { return reinterpret_cast<std::uintptr_t>(driver.context); })
        .def("wait_for", [](const Driver& driver, std::uintptr_t event, double spin_s) {
            const auto handle = reinterpret_cast<Driver::Handle>(event);
            if (driver.happens(handle, spin_s)) return;
            int code;
            {
                nb::gil_scoped_release unlocked;
                code = driver.synchronize(handle);
            }
            driver.check(code);
        }, "event"_a, "spin_s"_a, "Make the host wait: poll, and only after `spin_s` give up the interpreter's lock.")
        .def_prop_ro("addresses", &addresses, "Of the calls, by the names that `__init__` takes.");
    nb::class_<StreamLink, Link>(m, "StreamLink")
        .def("__init__", [](StreamLink* made, const Driver& driver, std::uintptr_t demand, std::uintptr_t prefetch,
                            std::int64_t ahead_bytes, nb::callable compute, nb::callable cast, nb::callable pinned,
                            std::shared_ptr<Link> other) {
            new (made) StreamLink(driver, reinterpret_cast<void*>(demand), reinterpret_cast<void*>(prefetch), ahead_bytes,
                                  {calling<std::uintptr_t>(std::move(compute)),
                                   calling<void, bool, Segment, Slot, std::int64_t, std::int64_t, std::int64_t>(std::move(cast)),
                                   calling<std::uintptr_t, std::int64_t>(std::move(pinned))},
                                  std::move(other));
        }, "driver"_a, "demand"_a, "prefetch"_a, "ahead_bytes"_a, "compute"_a, "cast"_a, "pinned"_a, "other"_a.none())
        .def("place", [](StreamLink& link, const Homes& homes, std::vector<std::int32_t> home_of,
                         std::vector<std::int64_t> position, const Sources& sources, std::int64_t tensors) {
            link.place(places(homes, std::move(home_of), std::move(position), sources, tensors));
        }, "homes"_a, "home_of"_a, "position"_a, "sources"_a, "tensors"_a)
        .def("ahead", &StreamLink::ahead, "bytes"_a, "part"_a)
        .def("submit", [](StreamLink& link, std::uint64_t ticket, Segment segment, Slot slot, std::int64_t bytes) {
            return link.submit({{ticket, segment, slot, 0, bytes, Cause::demand, 0, false}}, true);
        }, "ticket"_a, "segment"_a, "slot"_a, "bytes"_a, "Queue a copy of nobody's, as a test wants it.")
        .def_prop_ro("waiting", &StreamLink::waiting, "Segments of which not all is enqueued.")
        .def("enqueued", [](const StreamLink& link, bool urgent) {
            nb::list found;
            for (const auto& one : link.enqueued(urgent)) found.append(nb::make_tuple(one.segment, one.bytes));
            return found;
        }, "urgent"_a, "Parts that are not known to have ended: (segment, bytes).");
    nb::class_<Instant>(m, "Instant", "A driver whose calls take no time, in a GPU's place (actors/core/instant_driver.hpp).")
        .def(nb::init<>())
        .def("driver", [](const Instant&) { return Instant::driver(); })
        .def_prop_ro("compute", [](const Instant&) { return reinterpret_cast<std::uintptr_t>(Instant::compute); })
        .def_prop_rw("works", [](const Instant&) { return Instant::works; }, [](Instant&, bool works) { Instant::works = works; })
        .def_prop_rw("late", [](const Instant&) { return Instant::late; }, [](Instant&, bool late) { Instant::late = late; })
        .def("settle", [](const Instant&) { Instant::settle(); })
        .def("event", [](const Instant&) { return Instant::Event{}; });
    nb::class_<Instant::Event>(m, "InstantEvent")
        .def("record", [](Instant::Event& event, bool compute) { event = Instant::recorded(compute); }, "compute"_a)
        .def("done", [](const Instant::Event& event) { return Instant::done(event); })
        .def("synchronize", [](const Instant::Event& event) { Instant::synchronize(event); });
}

}  // namespace tiermoe::core
