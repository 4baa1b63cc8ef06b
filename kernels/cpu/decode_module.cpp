// Python bindings around a decode step: the inputs of the next step, the likeliest tokens of the last. Memory is given by
// address: the caller keeps it alive. Short, so the interpreter lock is kept.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

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

// Of each group the keys read, and the most of one request.
std::vector<std::pair<std::int64_t, std::int64_t>> decode_next(std::uintptr_t address, const std::vector<std::int32_t>& tokens) {
    DecodeInputs* inputs = at<DecodeInputs>(address);
    if (!inputs || static_cast<std::int64_t>(tokens.size()) != inputs->rows)
        throw std::invalid_argument("give a list of one token for each row");
    std::copy(tokens.begin(), tokens.end(), inputs->ids);
    for (std::int64_t row = 0; row < inputs->rows; ++row) ++inputs->positions[row];
    std::vector<std::pair<std::int64_t, std::int64_t>> found;
    for (std::int64_t i = 0; i < inputs->groups; ++i) {
        DecodeGroup& group = inputs->group[i];
        const std::int64_t longest = next_of(group, inputs->rows, inputs->positions);
        if (longest < 0) refuse("no room for a step in the column", group.at);
        found.emplace_back(group.starts[inputs->rows], longest);
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

std::vector<std::int64_t> argmax_rows(std::uintptr_t scores, std::int64_t rows, std::int64_t width) {
    if (rows < 0 || width < 1) refuse("a size is out of range", rows < 0 ? rows : width);
    check_product({rows, width});
    std::vector<std::int64_t> found;
    for (std::int64_t row = 0; row < rows; ++row) found.push_back(argmax_of(at<const float>(scores) + row * width, width));
    return found;
}

}  // namespace

void bind_decode(nb::module_& m) {
    m.def("decode_next", &decode_next, "inputs"_a, "tokens"_a,
          "The inputs of the next decode step of the same requests: of each group the keys read, and the most of one request.\n\n"
          "Raises ValueError: not one token for each row, or no column is left.");
    m.def("argmax_rows", &argmax_rows, "scores"_a, "rows"_a, "width"_a,
          "The place of each row's largest number. scores: float32 [rows, width].");
}

}  // namespace tiermoe::bindings
