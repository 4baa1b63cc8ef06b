// In the place of a GPU's driver, for what the host does beside a GPU (`instant_gpu.py`, which compiles this): a launch that
// does nothing, except that a kernel copies, or reads what the host asked of a layer.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace {

// A number of a kernel in a GPU's place: 0 none, 1 float32, 2 bfloat16, 3 float16.
float number_at(const void* of, unsigned kind, std::int64_t i) {
    if (kind == 1) return static_cast<const float*>(of)[i];
    const std::uint32_t half = static_cast<const std::uint16_t*>(of)[i];
    std::uint32_t bits = half << 16;
    if (kind == 3) {
        const std::uint32_t exponent = half >> 10 & 31, rest = (half & 1023) << 13, sign = (half & 0x8000) << 16;
        if (exponent == 0) {  // zero, or too small for its format's usual numbers
            const float small = std::ldexp(static_cast<float>(half & 1023), -24);
            return sign ? -small : small;
        }
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | rest;
    }
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

template <unsigned kind>
float dot(const float* x, const char* w, std::size_t width) {
    constexpr std::size_t lanes = 16;
    float sums[lanes] = {}, sum = 0;
    std::size_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        float found[lanes];
        for (std::size_t j = 0; j < lanes; ++j) found[j] = number_at(w, kind, static_cast<std::int64_t>(i + j));
        for (std::size_t j = 0; j < lanes; ++j) sums[j] += x[i + j] * found[j];
    }
    for (; i < width; ++i) sum += x[i] * number_at(w, kind, static_cast<std::int64_t>(i));
    for (const float lane : sums) sum += lane;
    return sum;
}

// Scores of inputs that stay where they are, so that a router's product, which is a GPU's work, is computed once.
struct Remembered {
    bool on = false;
    std::map<std::tuple<const void*, const void*, std::size_t>, std::vector<float>> scores;  // by hidden, router, rows
} remembered;

// `_read` of tables.py on the host. kinds: of wide, hidden, router, bias, next_router and next_bias, two bits each.
void read_on_host(unsigned kinds, void** parameters) {
    const auto at = [&](std::size_t i) {
        void* found;
        std::memcpy(&found, parameters[i], sizeof found);
        return found;
    };
    const auto count = [&](std::size_t i) {
        std::int32_t found;
        std::memcpy(&found, parameters[i], sizeof found);
        return static_cast<std::size_t>(found);
    };
    const auto kind = [&](unsigned i) { return kinds >> 2 * i & 3; };
    auto* const to = static_cast<char*>(at(0));
    for (std::size_t n = 0; n < 3; ++n)
        if (count(10 + n)) std::memcpy(to + 4 * count(14 + n), at(1 + n), 4 * count(10 + n));
    auto* const wide = reinterpret_cast<float*>(to) + count(17);
    for (std::size_t i = 0; i < count(13); ++i) wide[i] = number_at(at(4), kind(0), static_cast<std::int64_t>(i));
    const std::size_t rows = count(19), width = count(26);
    std::vector<float> x(width);
    for (unsigned n = 0; n < 2; ++n) {
        const unsigned router = kind(2 + 2 * n);
        const std::size_t outputs = count(20 + n), item = router == 1 ? 4 : 2;
        auto* const scores = reinterpret_cast<float*>(to) + count(22 + n);
        std::vector<float>* kept = remembered.on && outputs ? &remembered.scores[{at(5), at(6 + 2 * n), rows}] : nullptr;
        if (kept && !kept->empty()) {
            std::memcpy(scores, kept->data(), kept->size() * sizeof(float));
            continue;
        }
        for (std::size_t row = 0; row < (outputs ? rows : 0); ++row) {
            for (std::size_t i = 0; i < width; ++i) x[i] = number_at(at(5), kind(1), static_cast<std::int64_t>(row * width + i));
            for (std::size_t e = 0; e < outputs; ++e) {
                const char* w = static_cast<const char*>(at(6 + 2 * n)) + item * width * e;
                float sum = router == 1 ? dot<1>(x.data(), w, width) : router == 2 ? dot<2>(x.data(), w, width) : dot<3>(x.data(), w, width);
                if (count(24 + n)) sum += number_at(at(7 + 2 * n), kind(3 + 2 * n), static_cast<std::int64_t>(e));
                scores[row * outputs + e] = sum;
            }
        }
        if (kept) kept->assign(scores, scores + rows * outputs);
    }
}

// In a driver's place, for what the host does beside a GPU: launches nothing, except that a `function` of 1 to 8 is the
// kernel (source, target, count) that copies items of so many bytes, and from kReads on `_read`, of types as above.
constexpr std::uintptr_t kReads = 16;

long launched = 0;

}  // namespace

extern "C" int launch_nothing(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void** parameters,
                   void**) {
    const auto which = reinterpret_cast<std::uintptr_t>(function);
    ++launched;
    if (which >= kReads) {
        read_on_host(static_cast<unsigned>(which - kReads), parameters);
    } else if (which > 0 && which <= 8) {
        void *source, *target;
        std::int32_t count;
        std::memcpy(&source, parameters[0], sizeof source);
        std::memcpy(&target, parameters[1], sizeof target);
        std::memcpy(&count, parameters[2], sizeof count);
        std::memcpy(target, source, which * static_cast<std::size_t>(count));
    }
    return 0;
}

// Whether it computes the scores of an input and a router once, as long as both stay where they are.
extern "C" void remember(int on) {
    if ((on != 0) != remembered.on) remembered = {on != 0, {}};
}

// How many launches there were since it was asked last.
extern "C" long launches() { return std::exchange(launched, 0); }
