// Published forms in one instruction set. Included once by each forms_<set>.cpp, after lanes_<set>.hpp and
//   kTile, kRows   outputs and rows whose sums are kept in registers
//
// A decoder D turns 32 weights, a unit, into two vectors:
//   kFrom                where its scales are; in blocks, scales(block, scale, zero) fills those of kBlock bytes
//   State(scale, zero)   what the units of a group share; scale and zero are those of the group
//   unit(state, row, u, w)
//   kBytes, kScales      of a unit, on average over a block
//   kPaired              the vectors are the even and the odd inputs of the unit, else its first and last sixteen
#include "forms.hpp"

#define TIERMOE_INLINE __attribute__((always_inline))  // sums must stay in registers

namespace tiermoe {
namespace {

enum class From { unit, part, block };  // unit() reads scales itself; they are a part of the matrix; in 256 weights

struct Nothing {
    Nothing(const float*, const float*) {}
};

template <typename T>
struct Plain {
    static constexpr From kFrom = From::unit;
    static constexpr bool kPaired = false;
    static constexpr int kBytes = kUnit * sizeof(T);
    static constexpr int kScales = 1;
    using State = Nothing;
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const T* at = reinterpret_cast<const T*>(row) + u * kUnit;
        w[0] = V::load_as(at);
        w[1] = V::load_as(at + kLanes);
    }
};

struct Scale {
    Scale(const float* scale, const float*) : scale(V::set(*scale)) {}
    V::F scale;
};

struct Fp8 {
    static constexpr From kFrom = From::part;
    static constexpr bool kPaired = false;
    static constexpr int kBytes = 32;
    static constexpr int kScales = 1;
    using State = Scale;  // 2^8 of the scale: see V::from_e4m3
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        for (int i = 0; i < 2; ++i)
            w[i] = V::mul(V::from_e4m3(V::bytes(row + u * kUnit + i * kLanes)), state.scale);
    }
};

struct Times {
    V::F scale;
    V::F operator()(V::F value) const { return V::mul(value, scale); }
};

struct LessTimes {
    V::F scale, zero;
    V::F operator()(V::F code) const { return V::mul(V::sub(code, zero), scale); }
};

struct TimesLess {  // exact before the subtraction: eleven bits times six times five
    V::F scale, minimum;
    V::F operator()(V::F code) const { return V::fma(code, scale, V::sub(V::zero(), minimum)); }
};

template <Four Codes, class Map>
struct Halves {
    explicit Halves(Map map) : found(map) {}
    V::Lookup<Codes, Map> found;
    TIERMOE_INLINE void unit(const std::uint8_t* at, V::F* w) const {
        w[0] = found.low(at);
        w[1] = found.high(at);
    }
};

struct Mxfp4 {
    static constexpr From kFrom = From::part;
    static constexpr bool kPaired = true;
    static constexpr int kBytes = 16;
    static constexpr int kScales = 1;
    struct State : Halves<Four::e2m1, Times> {
        State(const float* scale, const float*) : Halves(Times{V::set(*scale)}) {}
    };
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        state.unit(row + kBytes * u, w);
    }
};

struct Nvfp4 {  // two scales a unit; eight even and eight odd inputs of each
    static constexpr From kFrom = From::part;
    static constexpr bool kPaired = true;
    static constexpr int kBytes = 16;
    static constexpr int kScales = 2;
    struct State : Halves<Four::e2m1, Times> {
        State(const float* scale, const float*) : Halves(Times{V::set(1.0f)}), scales(V::halves(scale[0], scale[1])) {}
        V::F scales;
    };
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        state.unit(row + 16 * u, w);
        for (int i = 0; i < 2; ++i) w[i] = V::mul(w[i], state.scales);
    }
};

struct Int4 {
    static constexpr From kFrom = From::part;
    static constexpr bool kPaired = true;
    static constexpr int kBytes = 16;
    static constexpr int kScales = 1;
    struct State : Halves<Four::plain, LessTimes> {
        State(const float* scale, const float* zero) : Halves(LessTimes{V::set(*scale), V::set(*zero)}) {}
    };
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        state.unit(row + kBytes * u, w);
    }
};

struct Int8 {
    static constexpr From kFrom = From::part;
    static constexpr bool kPaired = false;
    static constexpr int kBytes = 32;
    static constexpr int kScales = 1;
    struct State {
        State(const float* scale, const float* zero) : map{V::set(*scale), V::set(*zero)} {}
        LessTimes map;
    };
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        for (int i = 0; i < 2; ++i) w[i] = state.map(V::from_u8(V::bytes(row + u * kUnit + i * kLanes)));
    }
};

}  // namespace
}  // namespace tiermoe

#include "forms_gguf.hpp"

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

struct ZeroPoint {
    static constexpr std::int64_t kSize = 1;
    V::F operator()(const void* at) const { return V::from_u8(V::bytes(at)); }
};

struct Two {  // levels of scales; 2^8 of V::from_e4m3 comes back first, which is exact
    static constexpr std::int64_t kSize = 1;
    V::F whole;
    bool divides;
    V::F operator()(const void* at) const {
        const V::F scale = V::mul(V::from_e4m3(V::bytes(at)), V::set(256.0f));
        return divides ? V::div(scale, whole) : V::mul(scale, whole);
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

inline void group_scales(const FormMatrix& m, std::int64_t output, float* scales, float* zeros) {
    const std::int64_t groups = m.groups(), skip = output / m.block * groups;
    const V::F factor = V::set(m.kind == FormKind::fp8 ? 256.0f : 1.0f);
    switch (m.scale_type) {
        case ScaleType::none: break;
        case ScaleType::f32: widen(m.scale, skip, groups, scales, Widened<float>{factor}); break;
        case ScaleType::f16: widen(m.scale, skip, groups, scales, Widened<Half>{factor}); break;
        case ScaleType::bf16: widen(m.scale, skip, groups, scales, Widened<Bfloat>{factor}); break;
        case ScaleType::e8m0: widen(m.scale, skip, groups, scales, Power{factor}); break;
        case ScaleType::e4m3: widen(m.scale, skip, groups, scales, Two{V::set(*m.global_scale), m.divides}); break;
    }
    if (m.zero)
        widen(m.zero, output * groups, groups, zeros, ZeroPoint());
    else if (m.kind == FormKind::int4 || m.kind == FormKind::int8)
        for (std::int64_t g = 0; g < groups; ++g) zeros[g] = m.kind == FormKind::int4 ? 8.0f : 128.0f;
}

// --- products ----------------------------------------------------------------------------------------------

struct Row {
    const std::uint8_t* at;
    const float *scale, *zero;
};

struct Units {
    std::int64_t whole, span;  // of a row, and of a group
    int scales;                // of a group, or of a unit that has several groups
};

// use(m, u, state, row, at) for all whole units u of M rows: unit `at` of `row`
template <class D, int... M, typename F>
TIERMOE_INLINE inline void for_units(std::integer_sequence<int, M...>, const Units& units, const Row* rows, F&& use) {
    std::int64_t u = 0;
    for (std::int64_t group = 0; u < units.whole; group += units.scales) {
        const std::int64_t end = units.whole - u < units.span ? units.whole : u + units.span;
        const typename D::State state[] = {typename D::State(rows[M].scale + group, rows[M].zero + group)...};
        for (; u < end; ++u) (use(M, u, state[M], rows[M].at, u), ...);
    }
}

// Every sum adds the units in their order, first half before second: the same bits from registers and from a buffer.
template <class D, int M, int R>
inline void products(const Units& units, const Row* rows, const float* const* x, int outputs, float* out,
                     std::int64_t stride) {
    V::F sum[M][R];
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) sum[m][r] = V::zero();
    const auto use = [&](int m, std::int64_t u, const auto& state, const std::uint8_t* row,
                         std::int64_t at) TIERMOE_INLINE {
        prefetch(row + at * D::kBytes);
        V::F w[2];
        D::unit(state, row, at, w);
        for (int i = 0; i < 2; ++i)
            for (int r = 0; r < R; ++r) sum[m][r] = V::fma(w[i], V::load(x[r] + u * kUnit + i * kLanes), sum[m][r]);
    };
    for_units<D>(std::make_integer_sequence<int, M>(), units, rows, use);
    for (int m = 0; m < outputs; ++m)
        for (int r = 0; r < R; ++r) out[r * stride + m] = sum_lanes(sum[m][r]);
}

// The weights of a row, arranged. Its last `rest` bytes are less than a unit, and are filled up with zeros.
template <class D>
inline void decode(const Units& units, const Row& row, std::int64_t rest, float* w) {
    const auto use = [&](int, std::int64_t u, const auto& state, const std::uint8_t* from,
                         std::int64_t at) TIERMOE_INLINE {
        prefetch(from + at * D::kBytes);
        V::F unit[2];
        D::unit(state, from, at, unit);
        for (int i = 0; i < 2; ++i) V::store(w + u * kUnit + i * kLanes, unit[i]);
    };
    for_units<D>(std::make_integer_sequence<int, 1>(), units, &row, use);
    if (!rest) return;
    alignas(64) std::uint8_t last[kUnit * 4] = {};
    std::memcpy(last, row.at + units.whole * D::kBytes, static_cast<std::size_t>(rest));
    const std::int64_t group = units.whole / units.span * units.scales;
    use(0, units.whole, typename D::State(row.scale + group, row.zero + group), last, 0);
}

// The same where units do not fill a group: codes first, then the scale of each.
template <class D>
inline void decode_oddly(const FormMatrix& m, const Row& row, std::int64_t rest, float* w) {
    const float one = 1.0f, nothing = 0.0f;
    const std::int64_t whole = m.inputs / kUnit;
    Row codes = row;
    codes.scale = &one;
    codes.zero = &nothing;
    decode<D>({whole, whole + 1, 1}, codes, rest, w);
    const bool zeros = m.kind == FormKind::int4 || m.kind == FormKind::int8;
    for (std::int64_t i = 0; i < m.padded(); ++i) {
        const std::int64_t lane = i % kUnit, place = lane < kLanes ? 2 * lane : 2 * (lane - kLanes) + 1;
        const std::int64_t input = D::kPaired ? i - lane + place : i, g = input < m.inputs ? input / m.group : 0;
        w[i] = (w[i] - (zeros ? row.zero[g] : 0.0f)) * row.scale[g];
    }
}

// The products of decoded rows.
template <int M>
__attribute__((noinline)) void buffered(const Row* rows, int outputs, const FormJob& job, float* out) {
    const Units units = {job.matrix->padded() / kUnit, 1, 0};
    row_blocks<kRows>(job.rows, 0, [&](auto block, int r) {
        products<Plain<float>, M, decltype(block)::value>(units, rows, job.x + r, outputs, out + r * job.stride,
                                                          job.stride);
    });
}

// Some outputs from `k` on, the last repeated: few rows multiply what registers decode, more rows a buffer that is
// decoded once.
template <class D, int M>
void tile(const FormJob& job, std::int64_t k) {
    const int outputs = static_cast<int>(job.count - k < M ? job.count - k : M);
    const FormMatrix& m = *job.matrix;
    const std::int64_t padded = m.padded(), bytes = m.row_bytes(), room = padded + kUnit;
    constexpr bool kGrouped = D::kFrom == From::part && D::kScales == 1;
    const bool one_group = kGrouped && m.group >= m.inputs, odd = kGrouped && !one_group && m.group % kUnit != 0;
    const Units units = {m.inputs / kUnit, one_group ? padded : kGrouped && !odd ? m.group / kUnit : 1, D::kScales};
    const std::int64_t rest = m.inputs % kUnit ? bytes - units.whole * D::kBytes : 0;
    float *weights = job.scratch, *scales = weights + kFormTile * padded, *zeros = scales + kFormTile * room;
    Row rows[M];
    for (int i = 0; i < M; ++i, scales += room, zeros += room) {
        const std::int64_t output = job.first + job.step * (k + (i < outputs ? i : outputs - 1));
        rows[i].at = m.weight + output * bytes;
        rows[i].scale = scales;
        rows[i].zero = zeros;
        if constexpr (D::kFrom == From::part) group_scales(m, output, scales, zeros);
        if constexpr (D::kFrom == From::block)
            for (std::int64_t block = 0; block < m.inputs / 256; ++block)
                D::scales(rows[i].at + block * D::kBlock, scales + block * 8 * D::kScales, zeros + block * 8 * D::kScales);
    }
    float* out = job.out + k;
    if (job.rows <= kRows && !odd && !rest) {
        row_blocks<kRows>(job.rows, 0, [&](auto block, int r) {
            products<D, M, decltype(block)::value>(units, rows, job.x + r, outputs, out + r * job.stride, job.stride);
        });
        return;
    }
    for (int i = 0; i < M; ++i) {
        float* w = weights + i * padded;
        if constexpr (kGrouped)
            if (odd) decode_oddly<D>(m, rows[i], rest, w);
        if (!odd) decode<D>(units, rows[i], rest, w);
        rows[i] = {reinterpret_cast<const std::uint8_t*>(w), w, w};
    }
    buffered<M>(rows, outputs, job, out);
}

template <class D>
void outputs(const FormJob& job) {
    for (std::int64_t k = 0; k < job.count; k += kTile) tile<D, kTile>(job, k);
}

// Calls f with the decoder of a kind.
template <typename F>
inline void with_decoder(FormKind kind, F&& f) {
    switch (kind) {
        case FormKind::f32: return f(Plain<float>());
        case FormKind::f16: return f(Plain<Half>());
        case FormKind::bf16: return f(Plain<Bfloat>());
        case FormKind::fp8: return f(Fp8());
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
    }
}

void dots(const FormJob& job) {
    with_decoder(job.matrix->kind, [&](auto decoder) { outputs<decltype(decoder)>(job); });
}

bool arrange(const FormMatrix& m, const float* x, float* arranged) {
    bool paired = false;
    with_decoder(m.kind, [&](auto decoder) { paired = decltype(decoder)::kPaired; });
    const std::int64_t padded = m.padded();
    if (!m.order && !paired) {
        std::memcpy(arranged, x, static_cast<std::size_t>(m.inputs) * sizeof(float));
        std::memset(arranged + m.inputs, 0, static_cast<std::size_t>(padded - m.inputs) * sizeof(float));
        return true;
    }
    for (std::int64_t u = 0; u < padded; u += kUnit) {
        float unit[kUnit] = {};
        const int count = static_cast<int>(m.inputs - u < kUnit ? m.inputs - u : kUnit);
        for (int i = 0; i < count; ++i) {
            const std::int64_t from = m.order ? m.order[u + i] : u + i;
            if (from < 0 || from >= m.inputs) return false;
            unit[i] = x[from];
        }
        for (int i = 0; i < kLanes; ++i) {
            arranged[u + i] = paired ? unit[2 * i] : unit[i];
            arranged[u + kLanes + i] = paired ? unit[2 * i + 1] : unit[kLanes + i];
        }
    }
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
