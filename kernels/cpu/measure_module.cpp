// What `tiermoe bench kernel` compares the kernels with: this machine's read bandwidth.
#include <cstdint>
#include <cstring>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

// Reads every byte once, as fast as one thread can; the value depends on all of them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(TIERMOE_NO_CLONES)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
std::uint64_t read_bytes(const void* data, std::int64_t bytes) {
    const char* at = static_cast<const char*>(data);
    std::uint64_t sum[32] = {};
    std::int64_t i = 0;
    for (; i + 256 <= bytes; i += 256)
        for (int k = 0; k < 32; ++k) {
            std::uint64_t word;
            std::memcpy(&word, at + i + 8 * k, sizeof(word));
            sum[k] += word;
        }
    std::uint64_t total = 0;
    for (; i < bytes; ++i) total += static_cast<unsigned char>(at[i]);
    for (std::uint64_t part : sum) total += part;
    return total;
}

}  // namespace

void bind_measure(nb::module_& m) {
    m.def("read_bytes", [](std::uintptr_t address, std::int64_t size) {
        if (size < 0) refuse("a size is out of range", size);
        const nb::gil_scoped_release free;
        return read_bytes(at<const void>(address), size);
    }, "address"_a, "size"_a, "Reads a buffer once, as fast as one thread can.");
}

}  // namespace tiermoe::bindings
