// A driver whose calls take no time and wait for nothing, in a GPU's place: for what the host does beside one, and for
// checks of a link by sanitizers. One of a process.
#pragma once

#include <cstdint>
#include <cstring>

#include "driver.hpp"

namespace tiermoe::core {

struct Instant {
    // The compute's stream; any other address is one that copies.
    static inline void* const compute = reinterpret_cast<void*>(std::uintptr_t{1});
    static inline bool works = true;  // copies are made
    // An event of a copy is done when the host has seen the end of compute that was enqueued after it; else at once.
    static inline bool late = false;

    struct Event {
        bool compute;
        std::uint64_t serial;
    };
    static Event recorded(bool of_compute) { return {of_compute, ++enqueued}; }
    static bool done(const Event& event) {
        if (event.compute || !late) synchronize(event);
        return event.serial <= seen;
    }
    static void synchronize(const Event& event) {
        if (event.serial > seen) seen = event.serial;
    }
    static void settle() { seen = enqueued; }

    static Driver driver() {
        return {
            nullptr,
            [](Handle) { return 0; },
            [](std::uint64_t to, const void* from, std::size_t bytes, Handle) { return moved(reinterpret_cast<void*>(to), from, bytes); },
            [](void* to, std::uint64_t from, std::size_t bytes, Handle) { return moved(to, reinterpret_cast<const void*>(from), bytes); },
            [](Handle* event, unsigned) { return *event = new Event{}, 0; },
            [](Handle event) { return delete static_cast<Event*>(event), 0; },
            [](Handle event, Handle stream) { return *static_cast<Event*>(event) = recorded(stream == compute), 0; },
            [](Handle, Handle, unsigned) { return 0; },
            [](Handle event) { return done(*static_cast<Event*>(event)) ? 0 : Driver::kNotReady; },
            [](Handle event) { return synchronize(*static_cast<Event*>(event)), 0; },
            [](float* milliseconds, Handle, Handle) { return *milliseconds = 0.0f, 0; },
            [](int, const char** text) { return *text = "no call of this driver fails", 0; },
        };
    }

  private:
    using Handle = Driver::Handle;
    static inline std::uint64_t enqueued = 0, seen = 0;  // events

    static int moved(void* to, const void* from, std::size_t bytes) {
        if (works) std::memcpy(to, from, bytes);
        return 0;
    }
};

}  // namespace tiermoe::core
