#include "dense.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "exponential.hpp"

#if !defined(TIERMOE_NO_CLONES) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define TIERMOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TIERMOE_CLONES
#endif
#define INLINED __attribute__((always_inline)) inline

namespace tiermoe {
namespace {

constexpr int kLanes = 16;
constexpr std::int64_t kAhead = 16384;  // bytes between what is read and what is prefetched
constexpr std::int64_t kThreadedBytes = 1 << 19;  // weights from which a product is worth more threads
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef std::uint16_t Half __attribute__((vector_size(kLanes * sizeof(std::uint16_t)), aligned(2), may_alias));
typedef std::uint32_t Word __attribute__((vector_size(kLanes * sizeof(std::uint32_t)), aligned(4), may_alias));

INLINED Vec as_floats(const Word& bits) {
    Vec out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}
INLINED Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
INLINED Vec load(const std::uint16_t* p) {
    return as_floats(__builtin_convertvector(*reinterpret_cast<const Half*>(p), Word) << 16);
}
INLINED void store(float* p, const Vec& v) { *reinterpret_cast<Vec*>(p) = v; }

INLINED float widen(float v) { return v; }
INLINED float widen(std::uint16_t v) {
    const std::uint32_t bits = static_cast<std::uint32_t>(v) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}

INLINED std::uint16_t narrow(float v) {  // to the nearest, ties to even; keeps NaN
    std::uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(4), may_alias));

INLINED Four quarters(const Vec& v) {
    Four part[4];
    std::memcpy(part, &v, sizeof(part));
    return (part[0] + part[1]) + (part[2] + part[3]);
}

INLINED float sum_lanes(const Vec& v) {
    const Four q = quarters(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

// The sums of the lanes of four vectors, each as `sum_lanes` has it.
INLINED Four sums_of(const Vec& v0, const Vec& v1, const Vec& v2, const Vec& v3) {
    const Four a = quarters(v0), b = quarters(v1), c = quarters(v2), d = quarters(v3);
    const Four one = Four{a[0], a[1], b[0], b[1]} + Four{a[2], a[3], b[2], b[3]};
    const Four two = Four{c[0], c[1], d[0], d[1]} + Four{c[2], c[3], d[2], d[3]};
    return Four{one[0], one[2], two[0], two[2]} + Four{one[1], one[3], two[1], two[3]};
}

// --- products ------------------------------------------------------------------------------------------------

// out[r][n..n+N) = x[r] . w[n..n+N). One row reads weight after weight as they are stored, and prefetches:
// else it waits for memory at each page.
template <class T, int R, int N>
INLINED void dots(const float* x, const T* w, std::int64_t k, float* out, std::int64_t out_stride, const float* bias) {
    constexpr int kTogether = R == 1 ? 1 : N;
    constexpr std::int64_t kElement = sizeof(T);
    Vec sum[N][R] = {};
    const std::int64_t whole = k / kLanes * kLanes, ahead = kAhead / kElement;
#pragma GCC unroll 4
    for (int from = 0; from < N; from += kTogether)
        for (std::int64_t i = 0; i < whole; i += kLanes) {
            if (R == 1) __builtin_prefetch(w + from * k + i + ahead, 0, 2);
            Vec v[R];
            for (int r = 0; r < R; ++r) v[r] = load(x + r * k + i);
            for (int n = from; n < from + kTogether; ++n) {
                const Vec weight = load(w + n * k + i);
                for (int r = 0; r < R; ++r) sum[n][r] += weight * v[r];
            }
        }
    for (int r = 0; r < R; ++r) {
        float total[N];
        if (N == 4) {
            const Four found = sums_of(sum[0][r], sum[1 % N][r], sum[2 % N][r], sum[3 % N][r]);
            std::memcpy(total, &found, sizeof(total));
        } else {
            for (int n = 0; n < N; ++n) total[n] = sum_lanes(sum[n][r]);
        }
        for (int n = 0; n < N; ++n) {
            for (std::int64_t i = whole; i < k; ++i) total[n] += widen(w[n * k + i]) * x[r * k + i];
            out[r * out_stride + n] = bias ? total[n] + bias[n] : total[n];
        }
    }
}

template <class T, int N>
INLINED void dot_rows(const float* x, std::int64_t rows, const T* w, std::int64_t k, float* out, std::int64_t stride,
                      const float* bias) {
    std::int64_t r = 0;
    for (; r + 4 <= rows; r += 4) dots<T, 4, N>(x + r * k, w, k, out + r * stride, stride, bias);
    switch (rows - r) {
        case 3: dots<T, 3, N>(x + r * k, w, k, out + r * stride, stride, bias); break;
        case 2: dots<T, 2, N>(x + r * k, w, k, out + r * stride, stride, bias); break;
        case 1: dots<T, 1, N>(x + r * k, w, k, out + r * stride, stride, bias); break;
        default: break;
    }
}

template <class T>
INLINED void product(const float* x, std::int64_t rows, const T* w, std::int64_t k, std::int64_t n, float* out,
                     std::int64_t stride, const float* bias) {
    std::int64_t j = 0;
    for (; j + 4 <= n; j += 4) dot_rows<T, 4>(x, rows, w + j * k, k, out + j, stride, bias ? bias + j : nullptr);
    for (; j < n; ++j) dot_rows<T, 1>(x, rows, w + j * k, k, out + j, stride, bias ? bias + j : nullptr);
}

TIERMOE_CLONES void product_f32(const float* x, std::int64_t rows, const float* w, std::int64_t k, std::int64_t n,
                                float* out, std::int64_t stride, const float* bias) {
    product(x, rows, w, k, n, out, stride, bias);
}

TIERMOE_CLONES void product_bf16(const float* x, std::int64_t rows, const std::uint16_t* w, std::int64_t k,
                                 std::int64_t n, float* out, std::int64_t stride, const float* bias) {
    product(x, rows, w, k, n, out, stride, bias);
}

TIERMOE_CLONES void round_all(float* v, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) v[i] = widen(narrow(v[i]));
}

// --- elementwise ---------------------------------------------------------------------------------------------

struct Spread {  // element i of the result takes element i / div % mod
    std::int64_t div, mod;
};

template <class F>
INLINED void each_pair(const float* a, Spread sa, const float* b, Spread sb, float* out, std::int64_t n, F f) {
    const bool whole_a = sa.div == 1 && sa.mod >= n, whole_b = sb.div == 1 && sb.mod >= n;
    if (whole_a && whole_b) {
        for (std::int64_t i = 0; i < n; ++i) out[i] = f(a[i], b[i]);
    } else if (whole_a && sb.mod == 1) {
        const float one = b[0];
        for (std::int64_t i = 0; i < n; ++i) out[i] = f(a[i], one);
    } else if (whole_a && sb.div == 1) {
        for (std::int64_t at = 0; at < n; at += sb.mod)
            for (std::int64_t i = 0; i < sb.mod; ++i) out[at + i] = f(a[at + i], b[i]);
    } else if (whole_a && sb.div * sb.mod >= n) {
        for (std::int64_t at = 0; at < n; at += sb.div) {
            const float one = b[at / sb.div];
            for (std::int64_t i = 0; i < sb.div; ++i) out[at + i] = f(a[at + i], one);
        }
    } else {
        for (std::int64_t i = 0; i < n; ++i) out[i] = f(a[i / sa.div % sa.mod], b[i / sb.div % sb.mod]);
    }
}

TIERMOE_CLONES void binary(BinaryKind kind, const float* a, Spread sa, const float* b, Spread sb, float* out,
                           std::int64_t n) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    switch (kind) {
        case BinaryKind::add: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x + y; }); break;
        case BinaryKind::sub: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x - y; }); break;
        case BinaryKind::mul: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x * y; }); break;
        case BinaryKind::div: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x / y; }); break;
        case BinaryKind::maximum: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x > y || x != x ? x : y; }); break;
        case BinaryKind::minimum: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x < y || x != x ? x : y; }); break;
        case BinaryKind::gt: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x > y ? 1.0f : 0.0f; }); break;
        case BinaryKind::ge: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x >= y ? 1.0f : 0.0f; }); break;
        case BinaryKind::lt: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x < y ? 1.0f : 0.0f; }); break;
        case BinaryKind::le: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x <= y ? 1.0f : 0.0f; }); break;
        case BinaryKind::eq: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x == y ? 1.0f : 0.0f; }); break;
        case BinaryKind::ne: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return x != y ? 1.0f : 0.0f; }); break;
        case BinaryKind::mask: each_pair(a, sa, b, sb, out, n, [](float x, float y) { return y != 0.0f ? kLowest : x; }); break;
    }
}

template <class F>
INLINED void each(const float* a, float* out, std::int64_t n, F f) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = f(a[i]);
}

TIERMOE_CLONES void unary(UnaryKind kind, const float* a, float* out, std::int64_t n, float s, float t) {
    switch (kind) {
        case UnaryKind::copy: std::memcpy(out, a, static_cast<std::size_t>(n) * sizeof(float)); break;
        case UnaryKind::neg: each(a, out, n, [](float x) { return -x; }); break;
        case UnaryKind::rsqrt: each(a, out, n, [](float x) { return 1.0f / std::sqrt(x); }); break;
        case UnaryKind::sqrt: each(a, out, n, [](float x) { return std::sqrt(x); }); break;
        case UnaryKind::exp: each(a, out, n, [](float x) { return std::exp(x); }); break;
        case UnaryKind::log: each(a, out, n, [](float x) { return std::log(x); }); break;
        case UnaryKind::sigmoid: each(a, out, n, [](float x) { return 1.0f / (1.0f + exponential(-x)); }); break;
        case UnaryKind::silu: each(a, out, n, [](float x) { return x / (1.0f + exponential(-x)); }); break;
        case UnaryKind::gelu:
            each(a, out, n, [](float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); });
            break;
        case UnaryKind::gelu_tanh:
            each(a, out, n, [](float x) {
                return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
            });
            break;
        case UnaryKind::tanh: each(a, out, n, [](float x) { return std::tanh(x); }); break;
        case UnaryKind::relu: each(a, out, n, [](float x) { return x < 0.0f ? 0.0f : x; }); break;
        case UnaryKind::abs: each(a, out, n, [](float x) { return std::fabs(x); }); break;
        case UnaryKind::cos: each(a, out, n, [](float x) { return std::cos(x); }); break;
        case UnaryKind::sin: each(a, out, n, [](float x) { return std::sin(x); }); break;
        case UnaryKind::reciprocal: each(a, out, n, [](float x) { return 1.0f / x; }); break;
        case UnaryKind::power: each(a, out, n, [s](float x) { return std::pow(x, s); }); break;
        case UnaryKind::square: each(a, out, n, [](float x) { return x * x; }); break;
        case UnaryKind::softplus:  // f: beta, threshold
            each(a, out, n, [s, t](float x) { return x * s > t ? x : std::log1p(std::exp(x * s)) / s; });
            break;
        case UnaryKind::clamp: each(a, out, n, [s, t](float x) { return x < s ? s : x > t ? t : x; }); break;
        case UnaryKind::scale: each(a, out, n, [s](float x) { return x * s; }); break;
        case UnaryKind::shift: each(a, out, n, [s](float x) { return x + s; }); break;
        case UnaryKind::logical_not: each(a, out, n, [](float x) { return x == 0.0f ? 1.0f : 0.0f; }); break;
        case UnaryKind::fill: for (std::int64_t i = 0; i < n; ++i) out[i] = s; break;
        case UnaryKind::gt: each(a, out, n, [s](float x) { return x > s ? 1.0f : 0.0f; }); break;
        case UnaryKind::ge: each(a, out, n, [s](float x) { return x >= s ? 1.0f : 0.0f; }); break;
        case UnaryKind::lt: each(a, out, n, [s](float x) { return x < s ? 1.0f : 0.0f; }); break;
        case UnaryKind::le: each(a, out, n, [s](float x) { return x <= s ? 1.0f : 0.0f; }); break;
        case UnaryKind::eq: each(a, out, n, [s](float x) { return x == s ? 1.0f : 0.0f; }); break;
        case UnaryKind::ne: each(a, out, n, [s](float x) { return x != s ? 1.0f : 0.0f; }); break;
    }
}

INLINED float total(const float* a, std::int64_t n) {
    Vec sum = {};
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) sum += load(a + i);
    float found = sum_lanes(sum);
    for (; i < n; ++i) found += a[i];
    return found;
}

INLINED float largest(const float* a, std::int64_t n) {
    float found = a[0];
    for (std::int64_t i = 1; i < n; ++i) found = a[i] > found ? a[i] : found;
    return found;
}

TIERMOE_CLONES void reduce(ReduceKind kind, const float* a, std::int64_t inner, float* out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i, a += inner) {
        if (kind == ReduceKind::maximum) {
            out[i] = largest(a, inner);
        } else if (kind == ReduceKind::minimum) {
            out[i] = *std::min_element(a, a + inner);
        } else {
            const float sum = total(a, inner);
            out[i] = kind == ReduceKind::sum ? sum : sum / static_cast<float>(inner);
        }
    }
}

// v = e^(v - shift); returns the sum
INLINED float exponentials(float* v, std::int64_t n, float shift) {
    for (std::int64_t i = 0; i < n; ++i) v[i] = v[i] - shift < -87.0f ? 0.0f : exponential(v[i] - shift);
    return total(v, n);
}

TIERMOE_CLONES void softmax(const float* a, std::int64_t inner, float* out, std::int64_t n) {
    for (std::int64_t at = 0; at < n; at += inner) {
        const float most = largest(a + at, inner);
        for (std::int64_t i = 0; i < inner; ++i) out[at + i] = a[at + i];
        const float sum = exponentials(out + at, inner, most);
        for (std::int64_t i = 0; i < inner; ++i) out[at + i] /= sum;
    }
}

// kind 0: layer norm, with weight and bias; kind 1: root mean square, with weight. Either may be null.
TIERMOE_CLONES void norm(int kind, const float* a, std::int64_t inner, const float* weight, const float* bias, float eps,
                         float* out, std::int64_t n) {
    const float count = static_cast<float>(inner);
    for (std::int64_t at = 0; at < n; at += inner) {
        const float mean = kind == 0 ? total(a + at, inner) / count : 0.0f;
        for (std::int64_t i = 0; i < inner; ++i) out[at + i] = (a[at + i] - mean) * (a[at + i] - mean);
        const float scale = 1.0f / std::sqrt(total(out + at, inner) / count + eps);
        for (std::int64_t i = 0; i < inner; ++i) {
            float v = (a[at + i] - mean) * scale;
            if (weight) v *= weight[i];
            if (bias) v += bias[i];
            out[at + i] = v;
        }
    }
}

// The k largest of n in descending order, of equal ones the first; `taken` has n entries.
void topk(const float* a, std::int64_t n, std::int64_t k, float* values, float* indices, std::vector<float>& taken) {
    taken.assign(a, a + n);
    for (std::int64_t i = 0; i < k; ++i) {
        std::int64_t best = -1;
        for (std::int64_t j = 0; j < n; ++j) {
            const float v = taken[static_cast<std::size_t>(j)];
            if (v == v && (best < 0 || v > taken[static_cast<std::size_t>(best)])) best = j;
        }
        best = best < 0 ? i : best;  // only NaN is left
        if (values) values[i] = a[best];
        if (indices) indices[i] = static_cast<float>(best);
        taken[static_cast<std::size_t>(best)] = std::numeric_limits<float>::quiet_NaN();
    }
}

INLINED std::int64_t index(float v, std::int64_t n) {
    return v >= 0.0f && v < static_cast<float>(n) ? static_cast<std::int64_t>(v) : 0;
}

// --- attention -----------------------------------------------------------------------------------------------

// A head's row of 8 bits: `width` numbers, padding to 4 bytes, and their scale. As `engine.serving.kv_rows` has them.
typedef std::int8_t Small __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef std::uint8_t Byte __attribute__((vector_size(kLanes), aligned(1), may_alias));

constexpr std::int64_t coded_width(std::int64_t width) { return (width + 3) / 4 * 4 + 4; }

std::uint32_t bits_of(float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    return bits;
}

// e4m3 of a number of at most 448, to the nearest, ties to even
std::uint8_t to_e4m3(float v) {
    std::uint32_t bits = bits_of(v);
    const std::uint32_t sign = bits & 0x80000000u;
    bits ^= sign;
    if (bits < 121u << 23) {  // below the least normal number: an addition rounds it to its 9 steps
        float found;
        std::memcpy(&found, &bits, sizeof(found));
        float step;
        const std::uint32_t base = 141u << 23;
        std::memcpy(&step, &base, sizeof(step));
        bits = bits_of(found + step) - base;
    } else {
        bits = (bits - (120u << 23) + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
    }
    return static_cast<std::uint8_t>(bits | sign >> 24);
}

void encode(const float* v, std::int64_t width, bool fp8, std::uint8_t* out) {
    float most = 0.0f;
    for (std::int64_t i = 0; i < width; ++i) most = std::max(most, std::fabs(v[i]));
    const float scale = most / (fp8 ? 448.0f : 127.0f);
    for (std::int64_t i = 0; i < width; ++i) {
        const float found = scale > 0.0f ? v[i] / scale : 0.0f;
        out[i] = fp8 ? to_e4m3(found) : static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(found)));
    }
    std::memset(out + width, 0, static_cast<std::size_t>(coded_width(width) - 4 - width));
    std::memcpy(out + coded_width(width) - 4, &scale, sizeof(scale));
}

INLINED Word rounded_bits(const Vec& v) {  // to bfloat16, of finite numbers
    Word bits;
    std::memcpy(&bits, &v, sizeof(bits));
    return (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
}

INLINED void decode(const std::uint8_t* row, std::int64_t width, bool fp8, bool round, float* out) {
    float scale;
    std::memcpy(&scale, row + coded_width(width) - 4, sizeof(scale));
    constexpr float kExponent = 0x1p120f;  // from e4m3's bias to float's
    std::uint8_t tail[kLanes] = {};
    for (std::int64_t i = 0; i < width; i += kLanes) {
        const bool whole = i + kLanes <= width;
        const std::uint8_t* from = row + i;
        if (!whole) {
            std::memcpy(tail, from, static_cast<std::size_t>(width - i));
            from = tail;
        }
        Vec found;
        if (fp8) {
            const Word bits = __builtin_convertvector(*reinterpret_cast<const Byte*>(from), Word);
            found = as_floats((bits & 0x80u) << 24 | (bits & 0x7fu) << 20) * kExponent * scale;
        } else {
            found = __builtin_convertvector(*reinterpret_cast<const Small*>(from), Vec) * scale;
        }
        if (round) found = as_floats(rounded_bits(found));
        if (whole)
            store(out + i, found);
        else
            std::memcpy(out + i, &found, static_cast<std::size_t>(width - i) * sizeof(float));
    }
}

TIERMOE_CLONES void decode_row(const std::uint8_t* row, std::int64_t width, bool fp8, bool round, float* out) {
    decode(row, width, fp8, round, out);
}

struct Head {  // one key-value head of one sequence
    const float* queries;      // [rows, all heads, width], at this group of heads
    const float *new_keys, *new_values;  // [rows, key-value heads, width], at this head
    float* out;
    const float* sinks;  // of the group of heads; null: none
    const std::int64_t* read;
    std::int64_t rows, keys, group, width, value_width, query_stride, key_stride, value_stride, out_stride;
    std::int64_t window;
    float scale, softcap;
};

template <class T>
INLINED float dot(const float* q, const T* k, std::int64_t n) {
    Vec sum = {};
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) sum += load(q + i) * load(k + i);
    float found = sum_lanes(sum);
    for (; i < n; ++i) found += q[i] * widen(k[i]);
    return found;
}

template <class T>
INLINED void four_dots(const float* q, const T* const* k, std::int64_t n, float scale, float* out) {
    Vec sum[4] = {};
    const std::int64_t whole = n / kLanes * kLanes;
    for (std::int64_t i = 0; i < whole; i += kLanes) {
        const Vec v = load(q + i);
        for (int r = 0; r < 4; ++r) sum[r] += v * load(k[r] + i);
    }
    const Four found = sums_of(sum[0], sum[1], sum[2], sum[3]);
    for (int r = 0; r < 4; ++r) {
        float total = found[r];
        for (std::int64_t i = whole; i < n; ++i) total += q[i] * widen(k[r][i]);
        out[r] = total * scale;
    }
}

template <class T>
INLINED void add_scaled(const T* v, float weight, float* out, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(out + i) + load(v + i) * weight);
    for (; i < n; ++i) out[i] += weight * widen(v[i]);
}

// Rows of a cache as numbers that a product reads, by their place; `slot`: which of four that are there at once.
template <class T>
struct PlainRows {
    const T* first;
    std::int64_t stride;
    const T* at(std::int64_t place, int) const { return first + place * stride; }
};

struct CodedRows {
    const std::uint8_t* first;
    std::int64_t stride, width;
    bool fp8, round;
    float* decoded;  // of four rows
    const float* at(std::int64_t place, int slot) const {
        decode(first + place * stride, width, fp8, round, decoded + slot * width);
        return decoded + slot * width;
    }
};

// scores: group * keys floats
template <class Rows>
INLINED void attend_head(const Head& h, const Rows& keys, const Rows& values, float* scores) {
    const std::int64_t past = h.keys - h.rows;
    for (std::int64_t r = 0; r < h.rows; ++r) {
        const std::int64_t stop = past + r + 1;
        const std::int64_t start = h.window && stop > h.window ? stop - h.window : 0;
        const float* q = h.queries + r * h.query_stride;
        std::int64_t j = start;
        for (; j + 4 <= std::min(past, stop); j += 4) {
            decltype(keys.at(0, 0)) rows[4];
            for (int n = 0; n < 4; ++n) rows[n] = keys.at(h.read[j + n], n);
            for (std::int64_t g = 0; g < h.group; ++g)
                four_dots(q + g * h.width, rows, h.width, h.scale, scores + g * h.keys + j);
        }
        for (; j < std::min(past, stop); ++j) {
            const auto* key = keys.at(h.read[j], 0);
            for (std::int64_t g = 0; g < h.group; ++g)
                scores[g * h.keys + j] = dot(q + g * h.width, key, h.width) * h.scale;
        }
        for (; j < stop; ++j)
            for (std::int64_t g = 0; g < h.group; ++g)
                scores[g * h.keys + j] = dot(q + g * h.width, h.new_keys + (j - past) * h.key_stride, h.width) * h.scale;
        float* out = h.out + r * h.out_stride;
        std::memset(out, 0, static_cast<std::size_t>(h.group * h.value_width) * sizeof(float));
        for (std::int64_t g = 0; g < h.group; ++g) {
            float* s = scores + g * h.keys;
            if (h.softcap != 0.0f)
                for (std::int64_t j = start; j < stop; ++j) s[j] = std::tanh(s[j] / h.softcap) * h.softcap;
            float most = largest(s + start, stop - start);
            if (h.sinks && h.sinks[g] > most) most = h.sinks[g];
            float sum = exponentials(s + start, stop - start, most);
            if (h.sinks) sum += std::exp(h.sinks[g] - most);
            for (std::int64_t j = start; j < stop; ++j) s[j] /= sum;
        }
        for (j = start; j < std::min(past, stop); ++j) {
            const auto* value = values.at(h.read[j], 0);
            for (std::int64_t g = 0; g < h.group; ++g)
                add_scaled(value, scores[g * h.keys + j], out + g * h.value_width, h.value_width);
        }
        for (; j < stop; ++j)
            for (std::int64_t g = 0; g < h.group; ++g)
                add_scaled(h.new_values + (j - past) * h.value_stride, scores[g * h.keys + j], out + g * h.value_width,
                           h.value_width);
    }
}

TIERMOE_CLONES void attend_f32(const Head& h, const PlainRows<float>& keys, const PlainRows<float>& values, float* scores) {
    attend_head(h, keys, values, scores);
}

TIERMOE_CLONES void attend_bf16(const Head& h, const PlainRows<std::uint16_t>& keys, const PlainRows<std::uint16_t>& values,
                                float* scores) {
    attend_head(h, keys, values, scores);
}

TIERMOE_CLONES void attend_coded(const Head& h, const CodedRows& keys, const CodedRows& values, float* scores) {
    attend_head(h, keys, values, scores);
}

void write_row(void* rows, std::int64_t stride, CacheKind kind, std::int64_t at, const float* v, std::int64_t n) {
    if (kind == CacheKind::f32) {
        std::memcpy(static_cast<float*>(rows) + at * stride, v, static_cast<std::size_t>(n) * sizeof(float));
        return;
    }
    std::uint16_t* to = static_cast<std::uint16_t*>(rows) + at * stride;
    for (std::int64_t i = 0; i < n; ++i) to[i] = narrow(v[i]);
}

void move_in(DenseType type, const void* from, std::int64_t n, float* out) {
    if (type == DenseType::f32) std::memcpy(out, from, static_cast<std::size_t>(n) * sizeof(float));
    for (std::int64_t i = 0; i < n; ++i) {
        if (type == DenseType::bf16) out[i] = widen(static_cast<const std::uint16_t*>(from)[i]);
        if (type == DenseType::i64) out[i] = static_cast<float>(static_cast<const std::int64_t*>(from)[i]);
        if (type == DenseType::i32) out[i] = static_cast<float>(static_cast<const std::int32_t*>(from)[i]);
    }
}

void move_out(DenseType type, const float* a, std::int64_t n, void* to) {
    if (type == DenseType::f32) std::memcpy(to, a, static_cast<std::size_t>(n) * sizeof(float));
    for (std::int64_t i = 0; i < n; ++i) {
        if (type == DenseType::bf16) static_cast<std::uint16_t*>(to)[i] = narrow(a[i]);
        if (type == DenseType::i64) static_cast<std::int64_t*>(to)[i] = static_cast<std::int64_t>(a[i]);
        if (type == DenseType::i32) static_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(a[i]);
    }
}

[[noreturn]] void bad(const char* what, std::int64_t number) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(number));
}

}  // namespace

// --- the program ---------------------------------------------------------------------------------------------

DenseProgram::DenseProgram(std::vector<DenseStep> steps, std::vector<std::int64_t> segments,
                           std::vector<FormMatrix> matrices, std::int64_t arena_floats, std::int64_t max_rows,
                           std::int64_t layers, std::int64_t groups, int threads)
    : steps_(std::move(steps)), segments_(std::move(segments)), matrices_(std::move(matrices)),
      arena_floats_(arena_floats), max_rows_(max_rows), group_count_(static_cast<std::size_t>(groups)), caches_(static_cast<std::size_t>(layers)),
      scores_(static_cast<std::size_t>(threads)), decoded_(static_cast<std::size_t>(threads)) {
    if (max_rows_ < 1 || max_rows_ > 1024) bad("the rows are not in 1..1024", max_rows_);
    if (arena_floats_ < 0 || arena_floats_ > 1ll << 32) bad("the arena is out of range", arena_floats_);
    std::int64_t from = 0;
    for (const std::int64_t end : segments_) {
        if (end < from || end > static_cast<std::int64_t>(steps_.size())) bad("a segment ends out of range", end);
        std::int64_t io = 0, bytes = 0;
        for (; from < end; ++from) {
            const DenseStep& step = steps_[static_cast<std::size_t>(from)];
            check(step);
            if (step.code == DenseCode::load || step.code == DenseCode::store) io = std::max(io, step.p[0] + 1);
            if (step.code == DenseCode::linear) bytes += product_bytes(step);
        }
        io_.push_back(io);
        bytes_.push_back(bytes);
    }
    arena_store_.reset(new float[static_cast<std::size_t>(arena_floats_ * max_rows_) + kLanes]());
    arena_.p = arena_store_.get();
    while (reinterpret_cast<std::uintptr_t>(arena_.p) % 64) ++arena_.p;
    if (threads > 1) threads_ = std::make_unique<Threads>(threads, std::vector<int>());
}

void DenseProgram::check_operand(const DenseOperand& o, std::int64_t width, bool optional) const {
    if (o.at < 0 && !o.constant) {
        if (!optional) bad("an operand is missing; width", o.width);
        return;
    }
    if (o.width < 1 || o.width > 1 << 24) bad("a width is out of range", o.width);
    if (o.at >= 0 && o.at + o.width > arena_floats_) bad("an operand is out of the arena", o.at);
    if (width >= 0 && o.width != width) bad("an operand has another width", o.width);
}

void DenseProgram::check(const DenseStep& s) const {
    const auto inner = [&](std::int64_t n, std::int64_t width) {
        if (n < 1 || width % n) bad("the last axis does not divide the width", n);
    };
    const std::int64_t n = s.out.width;
    if (s.code != DenseCode::store) check_operand(s.out, -1, false);
    if (s.code != DenseCode::store && s.out.at < 0) bad("a result is constant", s.out.at);
    if (s.code != DenseCode::load && !(s.code == DenseCode::unary && s.kind == static_cast<int>(UnaryKind::fill)))
        check_operand(s.a, -1, false);
    switch (s.code) {
        case DenseCode::linear:
            check_operand(s.c, n, true);
            if (s.kind == 2) {
                if (s.p[0] < 0 || s.p[0] >= static_cast<std::int64_t>(matrices_.size())) bad("there is no such matrix", s.p[0]);
                const FormMatrix& matrix = matrices_[static_cast<std::size_t>(s.p[0])];
                if (matrix.inputs != s.a.width || matrix.outputs != n) bad("a matrix has another width", matrix.outputs);
            } else if (!s.p[0]) {
                bad("a product has no weight", 0);
            }
            break;
        case DenseCode::binary:
            check_operand(s.b, -1, false);
            for (int i = 0; i < 4; ++i)
                if (s.p[i] < 1) bad("a spread is out of range", s.p[i]);
            for (int i = 0; i < 4; i += 2)
                if (n % s.p[i] || (s.p[i + 1] < n && n % s.p[i + 1])) bad("a spread does not divide the width", s.p[i]);
            if (std::min(s.p[1], (n - 1) / s.p[0] + 1) > s.a.width) bad("an operand is too narrow", s.a.width);
            if (std::min(s.p[3], (n - 1) / s.p[2] + 1) > s.b.width) bad("an operand is too narrow", s.b.width);
            break;
        case DenseCode::unary:
            if (s.kind != static_cast<int>(UnaryKind::fill)) check_operand(s.a, n, false);
            break;
        case DenseCode::reduce: inner(s.p[0], s.a.width); check_operand(s.a, n * s.p[0], false); break;
        case DenseCode::softmax: inner(s.p[0], n); check_operand(s.a, n, false); break;
        case DenseCode::norm:
            inner(s.p[0], n);
            check_operand(s.a, n, false);
            check_operand(s.b, s.p[0], true);
            check_operand(s.c, s.p[0], true);
            if (s.b.at >= 0 || s.c.at >= 0) bad("a norm's weight is not constant", s.b.at);
            break;
        case DenseCode::topk:  // out: values, b: indices
            inner(s.p[0], s.a.width);
            if (s.p[1] < 1 || s.p[1] > s.p[0]) bad("k is out of range", s.p[1]);
            check_operand(s.out, s.a.width / s.p[0] * s.p[1], false);
            check_operand(s.b, s.out.width, false);
            if (s.b.at < 0) bad("a result is constant", s.b.at);
            break;
        case DenseCode::gather:  // a [outer, p0], b: indices [outer, p1]
            inner(s.p[0], s.a.width);
            inner(s.p[1], n);
            check_operand(s.b, n, false);
            if (n / s.p[1] != s.a.width / s.p[0]) bad("a gather has other rows", n);
            break;
        case DenseCode::scatter:  // a [outer, p0], b: indices [outer, p1], c: what to put there, or f[0]
            inner(s.p[0], n);
            check_operand(s.a, n, false);
            inner(s.p[1], s.b.width);
            check_operand(s.b, n / s.p[0] * s.p[1], false);
            check_operand(s.c, s.b.width, true);
            break;
        case DenseCode::copy: {  // p: to at, from at, sizes 3, from strides 3; out is filled from `to at` on
            std::int64_t count = 1, last = s.p[1];
            for (int d = 0; d < 3; ++d) {
                if (s.p[2 + d] < 1 || s.p[5 + d] < 0) bad("a copy is out of range", s.p[2 + d]);
                count *= s.p[2 + d];
                last += (s.p[2 + d] - 1) * s.p[5 + d];
            }
            if (s.p[0] < 0 || s.p[1] < 0 || s.p[8] < 1) bad("a copy is out of range", s.p[0]);
            if (s.p[0] + (s.p[2] * s.p[3] - 1) * s.p[8] + s.p[4] > n) bad("a copy ends out of range", n);
            if (last >= s.a.width) bad("a copy reads out of range", last);
            break;
        }
        case DenseCode::select: check_operand(s.a, n, false); check_operand(s.b, n, false); check_operand(s.c, n, false); break;
        case DenseCode::attend: {
            const std::int64_t heads = s.p[0], kv = s.p[1], width = s.p[2], value = s.p[3];
            if (heads < 1 || kv < 1 || heads % kv || width < 1 || value < 1) bad("attention has no such heads", heads);
            check_operand(s.a, heads * width, false);
            check_operand(s.b, kv * width, false);
            check_operand(s.c, kv * value, false);
            check_operand(s.out, heads * value, false);
            if (s.a.at < 0 || s.b.at < 0 || s.c.at < 0) bad("attention on a constant", s.a.at);
            if (s.p[4] < 0 || s.p[4] >= static_cast<std::int64_t>(group_count_)) bad("there is no such group", s.p[4]);
            if (s.p[5] < 0 || s.p[5] >= static_cast<std::int64_t>(caches_.size())) bad("there is no such layer", s.p[5]);
            break;
        }
        case DenseCode::load:
        case DenseCode::store:
            if (s.p[0] < 0 || s.p[0] > 64) bad("there is no such address", s.p[0]);
            if (s.kind < 0 || s.kind > static_cast<int>(DenseType::i32)) bad("there is no such type", s.kind);
            break;
        default: bad("there is no such step", static_cast<std::int64_t>(s.code));
    }
}

void DenseProgram::bind(std::int64_t layer, const DenseCache& cache) {
    if (layer < 0 || layer >= layers()) bad("there is no such layer", layer);
    caches_[static_cast<std::size_t>(layer)] = cache;
}

void DenseProgram::begin(std::int64_t rows, std::int64_t sequences, const std::int32_t* cu_rows,
                         std::vector<DenseGroup> groups) {
    if (rows < 1 || rows > max_rows_) bad("the rows are out of range", rows);
    if (sequences < 1 || cu_rows[0] != 0 || cu_rows[sequences] != rows) bad("the sequences have other rows", sequences);
    if (groups.size() != group_count_) bad("there are other groups", static_cast<std::int64_t>(groups.size()));
    for (std::int64_t s = 0; s < sequences; ++s) {
        const std::int32_t own = cu_rows[s + 1] - cu_rows[s];
        if (own < 0) bad("a sequence ends before it starts", own);
        for (const DenseGroup& group : groups) {
            const std::int32_t keys = group.cu_keys[s + 1] - group.cu_keys[s];
            if (keys < own || (keys > own && !group.read)) bad("a sequence has fewer keys than rows", keys);
        }
    }
    rows_ = rows, sequences_ = sequences, cu_rows_ = cu_rows, current_ = std::move(groups);
}

std::int64_t DenseProgram::product_bytes(const DenseStep& s) const {
    if (s.kind != 2) return s.out.width * s.a.width * (s.kind == 1 ? 2 : 4);
    return s.out.width * matrices_[static_cast<std::size_t>(s.p[0])].row_bytes();
}

void DenseProgram::linear(const DenseStep& s) {
    const std::int64_t k = s.a.width, n = s.out.width;
    const float* bias = s.c.constant;
    const float* x = row(s.a, 0);
    float* out = row(s.out, 0);
    const bool shared = threads_ && product_bytes(s) >= kThreadedBytes;
    if (s.kind == 2) {
        constexpr int kBestSet = 0;
        form_linear(shared ? *threads_ : alone_, kBestSet, matrices_[static_cast<std::size_t>(s.p[0])], x, rows_, out);
        for (std::int64_t r = 0; bias && r < rows_; ++r)
            for (std::int64_t i = 0; i < n; ++i) out[r * n + i] += bias[i];
        return;
    }
    const auto part = [&](std::int64_t first, std::int64_t last) {
        const float* own = bias ? bias + first : nullptr;
        if (s.kind == 1)
            product_bf16(x, rows_, reinterpret_cast<const std::uint16_t*>(s.p[0]) + first * k, k, last - first,
                         out + first, n, own);
        else
            product_f32(x, rows_, reinterpret_cast<const float*>(s.p[0]) + first * k, k, last - first, out + first, n,
                        own);
    };
    if (!shared) return part(0, n);
    const std::int64_t jobs = threads_->count() * 2;
    const std::lock_guard<std::mutex> lock(threads_->busy());
    threads_->run(jobs, [&](std::int64_t job, int) {
        const std::int64_t each = (n / 4 + jobs - 1) / jobs * 4 + 4;
        const std::int64_t first = std::min(n, job * each), last = std::min(n, first + each);
        if (first < last) part(first, last);
    });
}

void DenseProgram::attend(const DenseStep& s) {
    const DenseGroup& group = current_[static_cast<std::size_t>(s.p[4])];
    const DenseCache& cache = caches_[static_cast<std::size_t>(s.p[5])];
    if (!cache.keys || !cache.values) bad("a layer has no cache", s.p[5]);
    const std::int64_t heads = s.p[0], kv = s.p[1], width = s.p[2], value = s.p[3], share = heads / kv;
    const bool fp8 = cache.kind == CacheKind::fp8, coded = fp8 || cache.kind == CacheKind::int8;
    if (coded) round_rows(s, cache);
    const auto job = [&](std::int64_t number, int thread) {
        const std::int64_t q = number / kv, g = number % kv, first = cu_rows_[q];
        Head h{};
        h.rows = cu_rows_[q + 1] - first;
        if (!h.rows) return;
        h.keys = group.cu_keys[q + 1] - group.cu_keys[q];
        h.read = group.read ? group.read + group.cu_keys[q] : nullptr;
        h.group = share, h.width = width, h.value_width = value, h.window = group.window;
        h.query_stride = heads * width, h.key_stride = kv * width, h.value_stride = kv * value;
        h.out_stride = heads * value;
        h.queries = row(s.a, first) + g * share * width;
        h.new_keys = (coded ? rounded_[0].data() + first * kv * width : row(s.b, first)) + g * width;
        h.new_values = (coded ? rounded_[1].data() + first * kv * value : row(s.c, first)) + g * value;
        h.out = row(s.out, first) + g * share * value;
        h.sinks = s.p[6] ? reinterpret_cast<const float*>(s.p[6]) + g * share : nullptr;
        h.scale = static_cast<float>(s.f[0]), h.softcap = static_cast<float>(s.f[1]);
        std::vector<float>& scores = scores_[static_cast<std::size_t>(thread)];
        if (scores.size() < static_cast<std::size_t>(share * h.keys))
            scores.resize(static_cast<std::size_t>(share * h.keys * 2));
        if (coded) {
            std::vector<float>& decoded = decoded_[static_cast<std::size_t>(thread)];
            decoded.resize(static_cast<std::size_t>(4 * width + value));
            const CodedRows keys{static_cast<const std::uint8_t*>(cache.keys) + g * coded_width(width), cache.key_stride,
                                 width, fp8, cache.round, decoded.data()};
            const CodedRows values{static_cast<const std::uint8_t*>(cache.values) + g * coded_width(value),
                                   cache.value_stride, value, fp8, cache.round, decoded.data() + 4 * width};
            attend_coded(h, keys, values, scores.data());
        } else if (cache.kind == CacheKind::bf16) {
            const auto* keys = static_cast<const std::uint16_t*>(cache.keys);
            const auto* values = static_cast<const std::uint16_t*>(cache.values);
            attend_bf16(h, {keys + g * width, cache.key_stride}, {values + g * value, cache.value_stride}, scores.data());
        } else {
            const auto *keys = static_cast<const float*>(cache.keys), *values = static_cast<const float*>(cache.values);
            attend_f32(h, {keys + g * width, cache.key_stride}, {values + g * value, cache.value_stride}, scores.data());
        }
    };
    const std::int64_t jobs = sequences_ * kv;
    const std::int64_t work = (group.cu_keys[sequences_] - group.cu_keys[0]) * kv * width;
    if (threads_ && work * 8 >= kThreadedBytes) {
        const std::lock_guard<std::mutex> lock(threads_->busy());
        threads_->run(jobs, job);
    } else {
        for (std::int64_t number = 0; number < jobs; ++number) job(number, 0);
    }
    for (std::int64_t r = 0; r < rows_; ++r) {  // last: a window's new rows take the place of old ones
        if (coded) {
            const std::int64_t of_keys = kv * coded_width(width), of_values = kv * coded_width(value);
            std::memcpy(static_cast<std::uint8_t*>(cache.keys) + group.write[r] * cache.key_stride,
                        coded_[0].data() + r * of_keys, static_cast<std::size_t>(of_keys));
            std::memcpy(static_cast<std::uint8_t*>(cache.values) + group.write[r] * cache.value_stride,
                        coded_[1].data() + r * of_values, static_cast<std::size_t>(of_values));
            continue;
        }
        write_row(cache.keys, cache.key_stride, cache.kind, group.write[r], row(s.b, r), s.b.width);
        write_row(cache.values, cache.value_stride, cache.kind, group.write[r], row(s.c, r), s.c.width);
    }
}

// The new rows as a later step will read them: what a row sees does not depend on how a prompt was divided.
void DenseProgram::round_rows(const DenseStep& s, const DenseCache& cache) {
    const bool fp8 = cache.kind == CacheKind::fp8;
    const DenseOperand* operands[] = {&s.b, &s.c};
    for (int which = 0; which < 2; ++which) {
        const std::int64_t kv = s.p[1], width = s.p[2 + which], coded = coded_width(width);
        coded_[which].resize(static_cast<std::size_t>(rows_ * kv * coded));
        rounded_[which].resize(static_cast<std::size_t>(rows_ * kv * width));
        for (std::int64_t r = 0; r < rows_; ++r)
            for (std::int64_t g = 0; g < kv; ++g) {
                std::uint8_t* to = coded_[which].data() + (r * kv + g) * coded;
                encode(row(*operands[which], r) + g * width, width, fp8, to);
                decode_row(to, width, fp8, cache.round, rounded_[which].data() + (r * kv + g) * width);
            }
    }
}

void DenseProgram::run(std::int64_t segment, const std::vector<void*>& io) {
    if (segment < 0 || segment >= segments()) bad("there is no such segment", segment);
    if (static_cast<std::int64_t>(io.size()) < io_count(segment)) bad("too few addresses", io_count(segment));
    if (!rows_) bad("no step has begun", segment);
    const std::size_t end = static_cast<std::size_t>(segments_[static_cast<std::size_t>(segment)]);
    std::vector<float>& taken = scores_[0];
    for (std::size_t i = segment ? static_cast<std::size_t>(segments_[static_cast<std::size_t>(segment - 1)]) : 0; i < end; ++i) {
        const DenseStep& s = steps_[i];
        if (s.code == DenseCode::linear) {
            linear(s);
        } else if (s.code == DenseCode::attend) {
            attend(s);
        } else {
            const std::int64_t n = s.out.width;
            for (std::int64_t r = 0; r < rows_; ++r) {
                const float* a = s.a.at < 0 ? s.a.constant : row(s.a, r);
                const float* b = s.b.at < 0 ? s.b.constant : row(s.b, r);
                const float* c = s.c.at < 0 ? s.c.constant : row(s.c, r);
                float* out = s.out.at < 0 ? nullptr : row(s.out, r);
                const std::int64_t *p = s.p;
                switch (s.code) {
                    case DenseCode::binary:
                        binary(static_cast<BinaryKind>(s.kind), a, {p[0], p[1]}, b, {p[2], p[3]}, out, n);
                        break;
                    case DenseCode::unary:
                        unary(static_cast<UnaryKind>(s.kind), a, out, n, static_cast<float>(s.f[0]),
                              static_cast<float>(s.f[1]));
                        break;
                    case DenseCode::reduce: reduce(static_cast<ReduceKind>(s.kind), a, p[0], out, n); break;
                    case DenseCode::softmax: softmax(a, p[0], out, n); break;
                    case DenseCode::norm: norm(s.kind, a, p[0], b, c, static_cast<float>(s.f[0]), out, n); break;
                    case DenseCode::topk:
                        for (std::int64_t at = 0, to = 0; at < s.a.width; at += p[0], to += p[1])
                            topk(a + at, p[0], p[1], out + to, row(s.b, r) + to, taken);
                        break;
                    case DenseCode::gather:
                        for (std::int64_t j = 0; j < n; ++j) out[j] = a[j / p[1] * p[0] + index(b[j], p[0])];
                        break;
                    case DenseCode::scatter:
                        std::memcpy(out, a, static_cast<std::size_t>(n) * sizeof(float));
                        for (std::int64_t j = 0; j < s.b.width; ++j)
                            out[j / p[1] * p[0] + index(b[j], p[0])] = c ? c[j] : static_cast<float>(s.f[0]);
                        break;
                    case DenseCode::copy: {
                        float* to = out + p[0];
                        for (std::int64_t x = 0; x < p[2]; ++x)
                            for (std::int64_t y = 0; y < p[3]; ++y, to += p[8]) {
                                const float* from = a + p[1] + x * p[5] + y * p[6];
                                for (std::int64_t z = 0; z < p[4]; ++z) to[z] = from[z * p[7]];
                            }
                        break;
                    }
                    case DenseCode::select:
                        for (std::int64_t j = 0; j < n; ++j) out[j] = a[j] != 0.0f ? b[j] : c[j];
                        break;
                    case DenseCode::load: {
                        static constexpr std::int64_t kBytes[] = {4, 2, 8, 4};
                        const char* from = static_cast<const char*>(io[static_cast<std::size_t>(p[0])]);
                        move_in(static_cast<DenseType>(s.kind), from + r * n * kBytes[s.kind], n, out);
                        break;
                    }
                    case DenseCode::store: {
                        static constexpr std::int64_t kBytes[] = {4, 2, 8, 4};
                        char* to = static_cast<char*>(io[static_cast<std::size_t>(p[0])]);
                        move_out(static_cast<DenseType>(s.kind), a, s.a.width, to + r * s.a.width * kBytes[s.kind]);
                        break;
                    }
                    default: break;
                }
            }
        }
        if (s.round)
            for (std::int64_t r = 0; r < rows_; ++r) round_all(row(s.out, r), s.out.width);
    }
}

void router_scores(const float* x, std::int64_t rows, const float* weight, std::int64_t width, std::int64_t outputs,
                   const float* bias, std::int64_t soft, float* out) {
    product_f32(x, rows, weight, width, outputs, out, outputs, bias);
    if (soft) softmax(out, soft, out, rows * outputs);
}

}  // namespace tiermoe
