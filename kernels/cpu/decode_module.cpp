// Python bindings around a decode step: the inputs of the next step, the likeliest tokens of the last. Memory is given by
// address: the caller keeps it alive. Short, so the interpreter lock is kept.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bindings.hpp"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(TIERMOE_NO_CLONES)
#define TIERMOE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TIERMOE_CLONES
#endif

namespace tiermoe::bindings {
namespace {

constexpr std::int64_t kLanes = 64;

// int64 words, as actors/engine/serving/repeat.py writes them
struct DecodeGroup {
    std::int64_t window;        // keys that a row sees; 0: all
    std::int64_t sentinel;      // stands for the new row in `read`, where there is a window
    std::int64_t at, columns;   // the new rows' column of `slots`
    std::int64_t* slots;        // [rows, columns]: of each request's rows in the cache, in order
    std::int64_t* read;         // [rows * columns]
    std::int64_t* write;        // [rows]
    std::int32_t* starts;       // [rows + 1]
    void* mask;                 // [rows, read so far] of `mask_bytes` each, or null
    std::int64_t mask_bytes;
    std::int64_t lowest;        // the bits of what a row does not see
};

struct DecodeInputs {
    std::int64_t rows;
    std::int32_t* ids;
    std::int32_t* positions;
    std::int64_t groups;
    DecodeGroup group[1];
};

template <typename T>
void fill_mask(T* mask, std::int64_t rows, const std::int32_t* starts, T lowest) {
    const std::int64_t keys = starts[rows];
    std::fill_n(mask, rows * keys, lowest);
    for (std::int64_t row = 0; row < rows; ++row)
        std::fill(mask + row * keys + starts[row], mask + row * keys + starts[row + 1], T{0});
}

// The longest of the requests' reads, or -1 where the group has no room for one more step.
std::int64_t next_of(DecodeGroup& group, std::int64_t rows, const std::int32_t* positions) {
    const std::int64_t column = group.at;
    if (column >= group.columns) return -1;
    std::int64_t size = 0, longest = 0;
    group.starts[0] = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        std::int64_t length = positions[row] + 1;
        if (group.window) length = std::min(length, group.window);
        if (length < 1 || length > column + 1) return -1;
        std::int64_t* slots = group.slots + row * group.columns;
        slots[column] = ++group.write[row];
        std::memcpy(group.read + size, slots + column + 1 - length, static_cast<std::size_t>(length) * sizeof *slots);
        size += length;
        if (group.window) group.read[size - 1] = group.sentinel;
        group.starts[row + 1] = static_cast<std::int32_t>(size);
        longest = std::max(longest, length);
    }
    if (group.mask && rows > 1) {  // one request sees all of it
        if (group.mask_bytes == 4)
            fill_mask(static_cast<std::int32_t*>(group.mask), rows, group.starts, static_cast<std::int32_t>(group.lowest));
        else
            fill_mask(static_cast<std::int16_t*>(group.mask), rows, group.starts, static_cast<std::int16_t>(group.lowest));
    }
    group.at = column + 1;
    return longest;
}

// decode_next(inputs, tokens: list[int]) -> list[(keys read, the most of one request)], of each group
PyObject* decode_next(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    DecodeInputs* inputs = address<DecodeInputs>(args[0]);
    if (!PyList_Check(args[1]) || !inputs || PyList_GET_SIZE(args[1]) != inputs->rows) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "give a list of one token for each row");
        return nullptr;
    }
    for (std::int64_t row = 0; row < inputs->rows; ++row) {
        inputs->ids[row] = static_cast<std::int32_t>(PyLong_AsLong(PyList_GET_ITEM(args[1], row)));
        ++inputs->positions[row];
    }
    if (PyErr_Occurred()) return nullptr;
    PyObject* found = PyList_New(static_cast<Py_ssize_t>(inputs->groups));
    for (std::int64_t i = 0; found && i < inputs->groups; ++i) {
        DecodeGroup& group = inputs->group[i];
        const std::int64_t longest = next_of(group, inputs->rows, inputs->positions);
        if (longest < 0) {
            refuse("no room for a step in the column", group.at);
            Py_CLEAR(found);
            break;
        }
        PyObject* sizes = Py_BuildValue("(iL)", static_cast<int>(group.starts[inputs->rows]), longest);
        if (!sizes) Py_CLEAR(found);
        else PyList_SET_ITEM(found, static_cast<Py_ssize_t>(i), sizes);
    }
    return found;
}

// The first of the largest; a NaN is larger than any number, as for torch.
TIERMOE_CLONES std::int64_t argmax_of(const float* scores, std::int64_t width) {
    float most[kLanes];
    std::int32_t odd[kLanes] = {};
    std::fill_n(most, kLanes, scores[0]);
    std::int64_t at = 0;
    for (; at + kLanes <= width; at += kLanes)
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
            const float score = scores[at + lane];
            most[lane] = score > most[lane] ? score : most[lane];
            odd[lane] |= score != score;
        }
    bool nan = false;
    float largest = scores[0];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        largest = most[lane] > largest ? most[lane] : largest;
        nan |= odd[lane] != 0;
    }
    for (; at < width; ++at) {
        largest = scores[at] > largest ? scores[at] : largest;
        nan |= scores[at] != scores[at];
    }
    for (at = 0; at < width; ++at)
        if (nan ? scores[at] != scores[at] : scores[at] == largest) return at;
    return 0;
}

// argmax_rows(scores, rows, width) -> list[int]; scores are float32 [rows, width]
PyObject* argmax_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    const float* scores = address<const float>(args[0]);
    const long long rows = PyLong_AsLongLong(args[1]), width = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    if (rows < 0 || width < 1) {
        refuse("a size is out of range", rows < 0 ? rows : width);
        return nullptr;
    }
    if (!check_product({rows, width})) return nullptr;
    PyObject* found = PyList_New(static_cast<Py_ssize_t>(rows));
    for (long long row = 0; found && row < rows; ++row) {
        PyObject* token = PyLong_FromLongLong(argmax_of(scores + row * width, width));
        if (!token) Py_CLEAR(found);
        else PyList_SET_ITEM(found, static_cast<Py_ssize_t>(row), token);
    }
    return found;
}

}  // namespace

PyMethodDef decode_methods[] = {
    {"decode_next", fast(decode_next), METH_FASTCALL, "The inputs of the next decode step of the same requests."},
    {"argmax_rows", fast(argmax_rows), METH_FASTCALL, "The place of each row's largest number."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
