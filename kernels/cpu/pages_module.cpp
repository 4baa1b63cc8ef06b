// Mapped files whose pages cannot be read: the file was truncated, or its disk failed. Reading such a page raises SIGBUS,
// in whatever thread copies or computes. Here it is replaced by a page of zeros and its file remembered, so that the
// process lives and can say which file it was; nothing computed after that may leave the process.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

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

void install() {
    static bool installed = false;
    if (installed) return;
    page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &before) != 0) throw std::system_error(errno, std::generic_category(), "a handler of SIGBUS");
    installed = true;
}

int guard_pages(std::uintptr_t begin, std::int64_t size) {
    if (size < 1 || begin > UINTPTR_MAX - static_cast<std::uintptr_t>(size)) refuse("a size is out of range", size);
    const std::lock_guard<std::mutex> lock(changing);
    install();
    int place = 0;
    while (place < used && (ranges[place].end != 0 || place == bad_file)) ++place;
    if (place == kFiles) refuse("too many mapped files", kFiles);
    ranges[place].begin = begin;
    ranges[place].end = begin + static_cast<std::uintptr_t>(size);
    if (place == used) ++used;
    return place;
}

void release_pages(std::int64_t place) {
    if (place < 0 || place >= used) refuse("there is no such file", place);
    const std::lock_guard<std::mutex> lock(changing);
    ranges[place].end = 0;
}

std::optional<std::pair<int, std::int64_t>> bad_page() {
    const int file = bad_file;
    if (file < 0) return std::nullopt;
    return std::pair(file, bad_offset.load());
}

}  // namespace

void bind_pages(nb::module_& m) {
    m.def("guard_pages", &guard_pages, "address"_a, "size"_a,
          "Survive bad pages of a mapped file; the file's number. Raises ValueError: too many files; OSError: no handler.");
    m.def("release_pages", &release_pages, "file"_a,
          "The file is about to be unmapped. Raises ValueError: there is no such file.");
    m.def("bad_page", &bad_page, "The file and the offset of the first page that could not be read.");
}

}  // namespace tiermoe::bindings
