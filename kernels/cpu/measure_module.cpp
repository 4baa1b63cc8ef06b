// What `tiermoe bench kernel` compares the kernels with: this machine's read bandwidth, and another library's dot products
// called from a loop that costs nothing beside them.
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

// ggml's ggml_vec_dot_t
using VecDot = void (*)(int n, float* s, std::size_t bs, const void* x, std::size_t bx, const void* y, std::size_t by,
                        int nrc);

}  // namespace

void bind_measure(nb::module_& m) {
    m.def("read_bytes", [](std::uintptr_t address, std::int64_t size) {
        if (size < 0) refuse("a size is out of range", size);
        const nb::gil_scoped_release free;
        return read_bytes(at<const void>(address), size);
    }, "address"_a, "size"_a, "Reads a buffer once, as fast as one thread can.");
    m.def("dot_rows", [](std::uintptr_t function, int n, std::int64_t rows, std::uintptr_t matrix, std::int64_t row_bytes,
                         std::uintptr_t y, std::uintptr_t out) {
        check_product({rows, row_bytes}), check_product({n});
        const auto dot = reinterpret_cast<VecDot>(function);
        const nb::gil_scoped_release free;
        for (std::int64_t i = 0; i < rows; ++i)
            dot(n, at<float>(out) + i, 0, at<const char>(matrix) + i * row_bytes, 0, at<const void>(y), 0, 1);
    }, "function"_a, "n"_a, "rows"_a, "matrix"_a, "row_bytes"_a, "y"_a, "out"_a,
          "out[i] = function(row i of matrix, y), with ggml's `ggml_vec_dot_t`; for the benchmark alone.");
}

}  // namespace tiermoe::bindings
