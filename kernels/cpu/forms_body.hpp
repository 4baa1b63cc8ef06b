// Published forms in one instruction set. Included once by each forms_<set>.cpp, after lanes_<set>.hpp and
//   kTile, kRows   outputs and rows whose sums are kept in registers
// Here: floats and FP8, whose weights become float32. forms_codes.hpp: all others, which are integers.
#include <algorithm>
#include <utility>

#include "forms.hpp"

#define TIERMOE_INLINE __attribute__((always_inline))  // sums must stay in registers

namespace tiermoe {
namespace {

// --- scales ------------------------------------------------------------------------------------------------

// What a scale or a zero point is, times a factor.
template <typename T>
struct Widened {
    static constexpr std::int64_t kSize = sizeof(T);
    V::F factor;
    V::F operator()(const void* at) const { return V::mul(V::load_as(static_cast<const T*>(at)), factor); }
};

struct Power {
    static constexpr std::int64_t kSize = 1;
    V::F factor;
    V::F operator()(const void* at) const { return V::mul(V::from_e8m0(V::bytes(at)), factor); }
};

struct Two {  // levels of scales; 2^8 of V::from_e4m3 comes back first, which is exact
    static constexpr std::int64_t kSize = 1;
    V::F factor, whole;
    bool divides;
    V::F operator()(const void* at) const {
        const V::F scale = V::mul(V::from_e4m3(V::bytes(at)), V::set(256.0f));
        return V::mul(divides ? V::div(scale, whole) : V::mul(scale, whole), factor);
    }
};

// Fills `count` floats, in steps of sixteen, from the elements after the first `skip`.
template <typename Load>
inline void widen(const std::uint8_t* from, std::int64_t skip, std::int64_t count, float* to, const Load& load) {
    from += skip * Load::kSize;
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) V::store(to + i, load(from + i * Load::kSize));
    if (i < count) {
        alignas(64) std::uint8_t rest[kLanes * 4] = {};
        std::memcpy(rest, from + i * Load::kSize, static_cast<std::size_t>((count - i) * Load::kSize));
        V::store(to + i, load(rest));
    }
}

inline void group_scales(const FormMatrix& m, std::int64_t output, float* scales) {
    const std::int64_t groups = m.groups(), skip = output / m.block * groups;
    const bool halves = m.kind == FormKind::mxfp4 || m.kind == FormKind::nvfp4;  // kE2m1 is twice what it stands for
    const V::F factor = V::set(m.kind == FormKind::fp8 ? 256.0f : halves ? 0.5f : 1.0f);
    switch (m.scale_type) {
        case ScaleType::none: break;
        case ScaleType::f32: widen(m.scale, skip, groups, scales, Widened<float>{factor}); break;
        case ScaleType::f16: widen(m.scale, skip, groups, scales, Widened<Half>{factor}); break;
        case ScaleType::bf16: widen(m.scale, skip, groups, scales, Widened<Bfloat>{factor}); break;
        case ScaleType::e8m0: widen(m.scale, skip, groups, scales, Power{factor}); break;
        case ScaleType::e4m3: widen(m.scale, skip, groups, scales, Two{factor, V::set(*m.global_scale), m.divides}); break;
    }
}

// --- products of floats --------------------------------------------------------------------------------------

// A decoder D turns 32 weights, a unit, into two vectors: unit(scale of the unit's group, row, u, w), of kBytes.
template <typename T>
struct Plain {
    static constexpr int kBytes = kUnit * sizeof(T);
    TIERMOE_INLINE static void unit(V::F, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const T* at = reinterpret_cast<const T*>(row) + u * kUnit;
        w[0] = V::load_as(at);
        w[1] = V::load_as(at + kLanes);
    }
};

struct Fp8 {  // 2^8 of the scale: see V::from_e4m3
    static constexpr int kBytes = 32;
    TIERMOE_INLINE static void unit(V::F scale, const std::uint8_t* row, std::int64_t u, V::F* w) {
        for (int i = 0; i < 2; ++i) w[i] = V::mul(V::from_e4m3(V::bytes(row + u * kUnit + i * kLanes)), scale);
    }
};

struct Row {
    const std::uint8_t* at;
    const float* scale;  // of each group
};

struct Units {
    std::int64_t whole, span;  // of a row, and of a group
};

// use(m, u, scale, row, at) for all whole units u of M rows: unit `at` of `row`
template <int... M, typename F>
TIERMOE_INLINE inline void for_units(std::integer_sequence<int, M...>, const Units& units, const Row* rows, F&& use) {
    std::int64_t u = 0;
    for (std::int64_t group = 0; u < units.whole; ++group) {
        const std::int64_t end = units.whole - u < units.span ? units.whole : u + units.span;
        const V::F scale[] = {V::set(rows[M].scale[group])...};
        for (; u < end; ++u) (use(M, u, scale[M], rows[M].at, u), ...);
    }
}

// Every sum adds the units in their order, first half before second: the same bits from registers and from a buffer.
template <class D, int M, int R>
inline void products(const Units& units, const Row* rows, const float* const* x, int outputs, float* out,
                     std::int64_t stride) {
    V::F sum[M][R];
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) sum[m][r] = V::zero();
    const auto use = [&](int m, std::int64_t u, V::F scale, const std::uint8_t* row, std::int64_t at) TIERMOE_INLINE {
        prefetch(row + at * D::kBytes);
        V::F w[2];
        D::unit(scale, row, at, w);
        for (int i = 0; i < 2; ++i)
            for (int r = 0; r < R; ++r) sum[m][r] = V::fma(w[i], V::load(x[r] + u * kUnit + i * kLanes), sum[m][r]);
    };
    for_units(std::make_integer_sequence<int, M>(), units, rows, use);
    for (int m = 0; m < outputs; ++m)
        for (int r = 0; r < R; ++r) out[r * stride + m] = sum_lanes(sum[m][r]);
}

// The weights of a row. Its last `rest` bytes are less than a unit, and are filled up with zeros.
template <class D>
inline void decode(const Units& units, const Row& row, std::int64_t rest, float* w) {
    const auto use = [&](int, std::int64_t u, V::F scale, const std::uint8_t* from, std::int64_t at) TIERMOE_INLINE {
        prefetch(from + at * D::kBytes);
        V::F unit[2];
        D::unit(scale, from, at, unit);
        for (int i = 0; i < 2; ++i) V::store(w + u * kUnit + i * kLanes, unit[i]);
    };
    for_units(std::make_integer_sequence<int, 1>(), units, &row, use);
    if (!rest) return;
    alignas(64) std::uint8_t last[kUnit * 4] = {};
    std::memcpy(last, row.at + units.whole * D::kBytes, static_cast<std::size_t>(rest));
    use(0, units.whole, V::set(row.scale[units.whole / units.span]), last, 0);
}

// Codes of `int`, where a unit has parts of several groups.
struct Odd {
    static constexpr int kBytes = 1;
};

inline void decode_codes(const FormMatrix& m, const std::uint8_t* row, const std::uint8_t* zeros, float* w) {
    const bool eight = m.kind == FormKind::int8;
    for (std::int64_t i = 0; i < m.inputs; ++i) {
        const int code = eight ? row[i] : row[i / 2] >> (i % 2 * 4) & 15;
        w[i] = static_cast<float>(code - (zeros ? zeros[i / m.group] : eight ? 128 : 8));
    }
    std::fill(w + m.inputs, w + m.padded(), 0.0f);
}

// The products of decoded rows.
template <int M>
__attribute__((noinline)) void buffered(const Row* rows, int outputs, const FormJob& job, float* out) {
    const std::int64_t units = job.matrix->padded() / kUnit;
    row_blocks<kRows>(job.rows, 0, [&](auto block, int r) {
        products<Plain<float>, M, decltype(block)::value>({units, units}, rows, job.x + r, outputs, out + r * job.stride,
                                                          job.stride);
    });
}

// Some outputs from `k` on, the last repeated: few rows multiply what registers decode, more rows a buffer that is
// decoded once.
template <class D, int M>
void tile(const FormJob& job, std::int64_t k) {
    const int outputs = static_cast<int>(job.count - k < M ? job.count - k : M);
    const FormMatrix& m = *job.matrix;
    constexpr bool kCodes = std::is_same_v<D, Odd>, kGrouped = kCodes || std::is_same_v<D, Fp8>;
    const std::int64_t padded = m.padded(), room = padded + kUnit;
    const bool one_group = !kGrouped || m.group >= m.inputs, odd = !one_group && m.group % kUnit != 0;
    const Units units = {m.inputs / kUnit, one_group || odd ? padded : m.group / kUnit};
    const std::int64_t rest = m.inputs % kUnit ? m.row_bytes() - units.whole * D::kBytes : 0;
    float *weights = job.scratch, *scales = weights + kFormTile * padded;
    const float one = 1.0f;
    Row rows[M];
    for (int i = 0; i < M; ++i) {
        const std::int64_t output = job.first + job.step * (k + (i < outputs ? i : outputs - 1));
        rows[i] = {m.weight + output * m.row_bytes(), kGrouped ? scales + i * room : &one};
        if constexpr (kGrouped) group_scales(m, output, scales + i * room);
        if constexpr (kCodes)
            decode_codes(m, rows[i].at, m.zero ? m.zero + output * m.groups() : nullptr, weights + i * padded);
    }
    float* out = job.out + k;
    if constexpr (!kCodes)
        if (job.rows <= kRows && !odd && !rest) {
            row_blocks<kRows>(job.rows, 0, [&](auto block, int r) {
                products<D, M, decltype(block)::value>(units, rows, job.x + r, outputs, out + r * job.stride, job.stride);
            });
            return;
        }
    for (int i = 0; i < M; ++i) {
        float* w = weights + i * padded;
        if constexpr (!kCodes) decode<D>(units, odd ? Row{rows[i].at, &one} : rows[i], rest, w);
        for (std::int64_t at = 0; odd && at < m.inputs; ++at) w[at] *= rows[i].scale[at / m.group];
        rows[i] = {reinterpret_cast<const std::uint8_t*>(w), &one};
    }
    buffered<M>(rows, outputs, job, out);
}

}  // namespace
}  // namespace tiermoe

#include "forms_codes.hpp"

namespace tiermoe {
namespace {

// Calls f with the decoder of a matrix of integers.
template <typename F>
inline void with_codes(FormKind kind, F&& f) {
    switch (kind) {
        case FormKind::mxfp4: return f(Mxfp4());
        case FormKind::nvfp4: return f(Nvfp4());
        case FormKind::int4: return f(Int4());
        case FormKind::int8: return f(Int8());
        case FormKind::q8_0: return f(Q8_0());
        case FormKind::q4_0: return f(Q4_0());
        case FormKind::q4_1: return f(Q4_1());
        case FormKind::q5_0: return f(Q5_0());
        case FormKind::q5_1: return f(Q5_1());
        case FormKind::iq4_nl: return f(Iq4Nl());
        case FormKind::mxfp4_gguf: return f(Mxfp4Gguf());
        case FormKind::q2_k: return f(Q2K());
        case FormKind::q3_k: return f(Q3K());
        case FormKind::q4_k: return f(Q4K());
        case FormKind::q5_k: return f(Q5K());
        case FormKind::q6_k: return f(Q6K());
        case FormKind::iq1_s: return f(Iq1S());
        case FormKind::iq1_m: return f(Iq1M());
        case FormKind::iq2_xxs: return f(Iq2Xxs());
        case FormKind::iq2_xs: return f(Iq2Xs());
        case FormKind::iq2_s: return f(Iq2S());
        case FormKind::iq3_xxs: return f(Iq3Xxs());
        case FormKind::iq3_s: return f(Iq3S());
        case FormKind::iq4_xs: return f(Iq4Xs());
        case FormKind::tq1_0: return f(Tq1());
        case FormKind::tq2_0: return f(Tq2());
        default: return;
    }
}

// The same of floats, of FP8, and of integers of which no 32 share a scale.
template <typename F>
inline void with_floats(FormKind kind, F&& f) {
    switch (kind) {
        case FormKind::f32: return f(Plain<float>());
        case FormKind::f16: return f(Plain<Half>());
        case FormKind::bf16: return f(Plain<Bfloat>());
        case FormKind::fp8: return f(Fp8());
        default: return f(Odd());
    }
}

void dots(const FormJob& job) {
    if (job.matrix->integers())
        return with_codes(job.matrix->kind, [&](auto decoder) { code_outputs<decltype(decoder)>(job); });
    with_floats(job.matrix->kind, [&](auto decoder) {
        for (std::int64_t k = 0; k < job.count; k += kTile) tile<decltype(decoder), kTile>(job, k);
    });
}

bool arrange(const FormMatrix& m, const float* x, float* arranged) {
    bool in_order = true;
    if (m.integers()) {
        with_codes(m.kind, [&](auto decoder) { in_order = arrange_integers<decltype(decoder)>(m, x, arranged); });
        return in_order;
    }
    if (!m.order) std::memcpy(arranged, x, static_cast<std::size_t>(m.inputs) * sizeof(float));
    for (std::int64_t i = 0; m.order && i < m.inputs; ++i) {
        if (m.order[i] < 0 || m.order[i] >= m.inputs) return false;
        arranged[i] = x[m.order[i]];
    }
    std::memset(arranged + m.inputs, 0, static_cast<std::size_t>(m.padded() - m.inputs) * sizeof(float));
    return true;
}

void activate_all(const float* gate, const float* up, std::int64_t size, Activation activation, float* h) {
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) activate(gate + i, up + i, activation, h + i);
    if (i < size) {
        float rest[3][kLanes] = {};
        std::memcpy(rest[0], gate + i, static_cast<std::size_t>(size - i) * sizeof(float));
        std::memcpy(rest[1], up + i, static_cast<std::size_t>(size - i) * sizeof(float));
        activate(rest[0], rest[1], activation, rest[2]);
        std::memcpy(h + i, rest[2], static_cast<std::size_t>(size - i) * sizeof(float));
    }
}

constexpr FormKernels form_table(const char* name) { return {name, dots, arrange, activate_all}; }

}  // namespace
}  // namespace tiermoe
