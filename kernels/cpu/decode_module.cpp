// Python bindings around a decode step: the inputs of the next step, the likeliest and the drawn tokens of the last. Memory is given by
// address: the caller keeps it alive. Short, so the interpreter lock is kept.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
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

// e^x of x up to 0, to 2 units of the last place: 2^n times a polynomial. Below -708 it is 0. Keeps NaN.
inline double exponential_of(double x) {
    const double within = x < -708.0 ? -708.0 : x;
    const double shifted = within * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52: the integer lands in the low bits
    const double n = shifted - 6755399441055744.0;
    const double r = (within - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    std::uint64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 52) + 0x3ff0000000000000u;
    double scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -708.0 ? 0.0 : p * scale;
}

TIERMOE_CLONES void weigh(const float* scores, std::int64_t width, double largest, double temperature, double* weights) {
    for (std::int64_t i = 0; i < width; ++i) weights[i] = exponential_of((scores[i] - largest) / temperature);
}

constexpr std::int64_t kBlock = 512, kSums = 16;

TIERMOE_CLONES double sum_of(const double* values, std::int64_t count) {
    double sums[kSums] = {}, total = 0.0;
    std::int64_t i = 0;
    for (; i + kSums <= count; i += kSums)
        for (std::int64_t lane = 0; lane < kSums; ++lane) sums[lane] += values[i + lane];
    for (double sum : sums) total += sum;
    for (; i < count; ++i) total += values[i];
    return total;
}

TIERMOE_CLONES double largest_of(const double* values, std::int64_t count) {
    double most[kSums] = {}, found = 0.0;
    std::int64_t i = 0;
    for (; i + kSums <= count; i += kSums)
        for (std::int64_t lane = 0; lane < kSums; ++lane) most[lane] = values[i + lane] > most[lane] ? values[i + lane] : most[lane];
    for (double value : most) found = std::max(found, value);
    for (; i < count; ++i) found = std::max(found, values[i]);
    return found;
}

// At most the count-th largest: that of the largest in each block.
double bound_of(const std::vector<double>& weights, std::int64_t count) {
    std::vector<double> most;
    const auto width = static_cast<std::int64_t>(weights.size());
    for (std::int64_t first = 0; first < width; first += kBlock)
        most.push_back(largest_of(weights.data() + first, std::min(kBlock, width - first)));
    if (count > static_cast<std::int64_t>(most.size())) return 0.0;
    std::nth_element(most.begin(), most.begin() + count - 1, most.end(), std::greater<>());
    return most[static_cast<std::size_t>(count - 1)];
}

// Weights of tokens that may not come become 0; the largest is 1. Of equal ones the first stay.
void cut(std::vector<double>& weights, double min_p, std::int64_t top_k, double top_p) {
    std::vector<double> head;
    const double least = top_k ? std::max(min_p, bound_of(weights, top_k)) : min_p;
    for (double weight : weights)
        if (weight >= least) head.push_back(weight);
    if (head.empty()) return;  // they are no numbers
    if (top_k && top_k < static_cast<std::int64_t>(head.size())) {
        std::nth_element(head.begin(), head.begin() + top_k - 1, head.end(), std::greater<>());
        head.resize(static_cast<std::size_t>(top_k));
    }
    if (top_p < 1.0) {  // the smallest head whose mass reaches top_p; all below `least` together have less than the rest
        const double total = sum_of(head.data(), static_cast<std::int64_t>(head.size()));
        const double lowest = (1.0 - top_p) * total / static_cast<double>(head.size());
        head.erase(std::remove_if(head.begin(), head.end(), [&](double weight) { return weight < lowest; }), head.end());
        std::sort(head.begin(), head.end(), std::greater<>());
        double mass = 0.0;
        for (std::size_t i = 0; i < head.size(); ++i)
            if ((mass += head[i]) >= top_p * total) head.resize(i + 1);
    }
    const double last = *std::min_element(head.begin(), head.end());
    std::int64_t equal = std::count(head.begin(), head.end(), last);
    for (double& weight : weights)
        if (weight < last || (weight == last && equal-- <= 0)) weight = 0.0;
}

// NumPy's Generator(Philox(key=seed, counter=step)).random(): the first output of Philox4x64-10 (Salmon et al. 2011) of the
// counter's next number, in [0, 1).
double philox(std::uint64_t seed, std::uint64_t step) {
    std::uint64_t counter[4] = {step + 1, step + 1 == 0, 0, 0}, key[2] = {seed, 0};
    for (int round = 0; round < 10; ++round) {
        const unsigned __int128 first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * counter[0];
        const unsigned __int128 second = static_cast<unsigned __int128>(0xCA5A826395121157u) * counter[2];
        const auto high = [](unsigned __int128 product) { return static_cast<std::uint64_t>(product >> 64); };
        const std::uint64_t next[4] = {high(second) ^ counter[1] ^ key[0], static_cast<std::uint64_t>(second),
                                       high(first) ^ counter[3] ^ key[1], static_cast<std::uint64_t>(first)};
        std::copy(next, next + 4, counter);
        key[0] += 0x9E3779B97F4A7C15u, key[1] += 0xBB67AE8584CAA73Bu;
    }
    return static_cast<double>(counter[0] >> 11) * 0x1p-53;
}

// A row's token; uniform: in (0, 1]. -1: the scores have no finite largest one.
std::int64_t draw_row(
    const float* scores, std::int64_t width, double temperature, double min_p, std::int64_t top_k, double top_p, double uniform) {
    if (top_k < 0 || !(temperature > 0.0)) refuse("the temperature or top_k is out of range", top_k);
    thread_local std::vector<double> weights, sums;
    weights.resize(static_cast<std::size_t>(width));
    // the largest score becomes 0: no temperature overflows it
    weigh(scores, width, scores[argmax_of(scores, width)], temperature, weights.data());
    if (min_p > 0.0 || top_k || top_p < 1.0) cut(weights, min_p, top_k, top_p);
    sums.clear();
    double mass = 0.0;
    for (std::int64_t first = 0; first < width; first += kBlock) {
        sums.push_back(sum_of(weights.data() + first, std::min(kBlock, width - first)));
        mass += sums.back();
    }
    if (!std::isfinite(mass)) return -1;
    const double wanted = uniform * mass;
    double before = 0.0;
    std::int64_t found = -1;  // where rounding leaves a block short of what is wanted, its last token that may come
    for (std::size_t block = 0; block < sums.size(); before += sums[block++]) {
        if (before + sums[block] < wanted && block + 1 < sums.size()) continue;
        double reached = before;
        const std::int64_t first = static_cast<std::int64_t>(block) * kBlock;
        for (std::int64_t i = first; i < std::min(first + kBlock, width); ++i) {
            if (weights[i] > 0.0) found = i;
            if ((reached += weights[i]) >= wanted && found >= 0) return found;
        }
        if (found >= 0) return found;
    }
    return found;
}

using Drawn = std::tuple<std::int64_t, double, double, std::int64_t, double, std::uint64_t, std::uint64_t>;

std::vector<std::int64_t> draw_rows(std::uintptr_t scores, std::int64_t rows, std::int64_t width, const std::vector<Drawn>& asked) {
    if (rows < 0 || width < 1) refuse("a size is out of range", rows < 0 ? rows : width);
    check_product({rows, width});
    std::vector<std::int64_t> found;
    for (const auto& [row, temperature, min_p, top_k, top_p, seed, step] : asked) {
        if (row < 0 || row >= rows) refuse("there is no such row", row);
        const float* from = at<const float>(scores) + row * width;
        found.push_back(draw_row(from, width, temperature, min_p, top_k, top_p, 1.0 - philox(seed, step)));
    }
    return found;
}

}  // namespace

void bind_decode(nb::module_& m) {
    m.def("decode_next", &decode_next, "inputs"_a, "tokens"_a,
          "The inputs of the next decode step of the same requests: of each group the keys read, and the most of one request.\n\n"
          "Raises ValueError: not one token for each row, or no column is left.");
    m.def("argmax_rows", &argmax_rows, "scores"_a, "rows"_a, "width"_a,
          "The place of each row's largest number. scores: float32 [rows, width].");
    m.def("draw_rows", &draw_rows, "scores"_a, "rows"_a, "width"_a, "asked"_a,
          "A token of each row that is asked: (row, temperature, min_p, top_k or 0, top_p, seed, step). By temperature, then min-p,\n"
          "top-k and top-p, then inverse transform sampling of 1 - Philox(key=seed, counter=step), tokens in the order of their\n"
          "numbers; -1: the row has no finite largest score. scores: float32 [rows, width].");
}

}  // namespace tiermoe::bindings
