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

// read_bytes(address, size) -> int
PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    const void* data = address<const void>(args[0]);
    const long long size = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (size < 0) {
        refuse("a size is out of range", size);
        return nullptr;
    }
    std::uint64_t sum = 0;
    Py_BEGIN_ALLOW_THREADS;
    sum = read_bytes(data, size);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(sum);
}

// ggml's ggml_vec_dot_t
using VecDot = void (*)(int n, float* s, std::size_t bs, const void* x, std::size_t bx, const void* y, std::size_t by,
                        int nrc);

// dot_rows(function, n, rows, matrix, row_bytes, y, out): out[i] = function(row i of matrix, y)
PyObject* dot_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 7)) return nullptr;
    const auto function = reinterpret_cast<VecDot>(PyLong_AsVoidPtr(args[0]));
    const int n = static_cast<int>(PyLong_AsLong(args[1]));
    const long long rows = PyLong_AsLongLong(args[2]);
    const char* matrix = address<const char>(args[3]);
    const long long row_bytes = PyLong_AsLongLong(args[4]);
    const void* y = address<const void>(args[5]);
    float* out = address<float>(args[6]);
    if (PyErr_Occurred() || !check_product({rows, row_bytes}) || !check_product({n})) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    for (long long i = 0; i < rows; ++i) function(n, out + i, 0, matrix + i * row_bytes, 0, y, 0, 1);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef measure_methods[] = {
    {"read_bytes", fast(read), METH_FASTCALL, "Read a buffer once, for its bandwidth."},
    {"dot_rows", fast(dot_rows), METH_FASTCALL, "Call ggml's dot product for each row of a matrix."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
