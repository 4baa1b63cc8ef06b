// Mapped files whose pages cannot be read: the file was truncated, or its disk failed. Reading such a page raises SIGBUS,
// in whatever thread copies or computes. Here it is replaced by a page of zeros and its file remembered, so that the
// process lives and can say which file it was; nothing computed after that may leave the process.
#include <atomic>
#include <csignal>
#include <cstdint>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

constexpr int kFiles = 1 << 14;

struct Range {
    std::atomic<std::uintptr_t> begin{0}, end{0};  // end 0: the place is free
};

Range ranges[kFiles];
std::atomic<int> used{0};       // places below it may be taken
std::atomic<int> bad_file{-1};  // the first file that had a bad page; stays
std::atomic<std::int64_t> bad_offset{0};
std::mutex changing;
struct sigaction before;
std::uintptr_t page_bytes = 0;

// Only calls that a handler may make: atomics, mmap, sigaction.
void on_bus_error(int signal, siginfo_t* info, void*) {
    const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
    const int count = used.load(std::memory_order_acquire);
    for (int i = 0; i < count; ++i) {
        const std::uintptr_t end = ranges[i].end.load(std::memory_order_acquire);
        const std::uintptr_t begin = ranges[i].begin.load(std::memory_order_relaxed);
        if (at < begin || at >= end) continue;
        void* page = reinterpret_cast<void*>(at / page_bytes * page_bytes);
        if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
        int none = -1;
        if (bad_file.compare_exchange_strong(none, i)) bad_offset = static_cast<std::int64_t>(at - begin);
        return;  // the read is done again, on zeros
    }
    sigaction(signal, &before, nullptr);  // not ours: the read is done again under the former handler
}

bool install() {
    static bool installed = false;
    if (installed) return true;
    page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &before) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return false;
    }
    return installed = true;
}

// guard_pages(address, size) -> the number of the file
PyObject* guard_pages(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    const auto begin = reinterpret_cast<std::uintptr_t>(address<void>(args[0]));
    const long long size = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (size < 1 || begin > UINTPTR_MAX - static_cast<std::uintptr_t>(size)) {
        refuse("a size is out of range", size);
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(changing);
    if (!install()) return nullptr;
    int place = 0;
    while (place < used && (ranges[place].end != 0 || place == bad_file)) ++place;
    if (place == kFiles) {
        refuse("too many mapped files", kFiles);
        return nullptr;
    }
    ranges[place].begin = begin;
    ranges[place].end = begin + static_cast<std::uintptr_t>(size);
    if (place == used) ++used;
    return PyLong_FromLong(place);
}

// release_pages(number of the file)
PyObject* release_pages(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    const long place = PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return nullptr;
    if (place < 0 || place >= used) {
        refuse("there is no such file", place);
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(changing);
    ranges[place].end = 0;
    Py_RETURN_NONE;
}

// bad_page() -> (number of the file, offset of the first bad byte that was read) or None
PyObject* bad_page(PyObject*, PyObject* const*, Py_ssize_t count) {
    if (!expect(count, 0)) return nullptr;
    const int file = bad_file;
    if (file < 0) Py_RETURN_NONE;
    return Py_BuildValue("iL", file, static_cast<long long>(bad_offset));
}

}  // namespace

PyMethodDef page_methods[] = {
    {"guard_pages", fast(guard_pages), METH_FASTCALL, "Remember bad pages of a mapped file instead of ending."},
    {"release_pages", fast(release_pages), METH_FASTCALL, "The file is about to be unmapped."},
    {"bad_page", fast(bad_page), METH_FASTCALL, "The first bad page of a mapped file."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
