// Which core a thread helps on.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

namespace tiermoe {

// Where the calling thread runs; below 0: unknown.
inline int own_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// The calling thread, which helps another, leaves that one's core if both are on it and it may run elsewhere: the kernel
// lets a helper that wakes take the core of who woke it, and a forward then waits for its helper.
inline void leave_core(int busy) {
#if defined(__linux__)
    static thread_local cpu_set_t may;  // run on, when it was asked first
    static thread_local const bool known = sched_getaffinity(0, sizeof(may), &may) == 0;
    if (!known || busy < 0 || busy >= CPU_SETSIZE || busy != own_core()) return;
    cpu_set_t others = may;
    CPU_CLR(busy, &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof(others), &others);
#endif
}

}  // namespace tiermoe
