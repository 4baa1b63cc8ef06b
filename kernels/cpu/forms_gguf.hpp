// Decoders of GGUF's blocks, in one instruction set: see forms_body.hpp, which includes this. A weight is a number of few
// bits times a scale, which is exact in float32, whatever the order of the factors; some types subtract a minimum.
#include "grids.hpp"

namespace tiermoe {
namespace {

template <int Bytes>
struct Alone {  // a block is a unit
    static constexpr From kFrom = From::unit;
    static constexpr bool kPaired = false;
    static constexpr int kBytes = Bytes;
    static constexpr int kScales = 1;
    using State = Nothing;
};

template <int Bytes, int Scales>
struct Blocks {  // eight units in a block; one scale for a unit, or one for each half
    static constexpr From kFrom = From::block;
    static constexpr bool kPaired = false;
    static constexpr int kBlock = Bytes;
    static constexpr int kBytes = Bytes / 8;
    static constexpr int kScales = Scales;
    struct State {
        State(const float* scales, const float*) {
            for (int i = 0; i < Scales; ++i) scale[i] = V::set(scales[i]);
        }
        V::F half(int i) const { return scale[i * (Scales - 1)]; }
        V::F scale[Scales];
    };
};

template <int Scales>
struct WithMinimum {
    WithMinimum(const float* scales, const float* minima) {
        for (int i = 0; i < Scales; ++i) map[i] = {V::set(scales[i]), V::set(minima[i])};
    }
    const TimesLess& half(int i) const { return map[i * (Scales - 1)]; }
    TimesLess map[Scales];
};

template <typename T>
inline T word(const std::uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(value));
    return value;
}

// Four bits of the fifth ones and of the low ones, the first sixteen weights in low halves.
inline void fives(const std::uint8_t* fifth, const std::uint8_t* low, V::F* w) {
    const V::B four = V::bytes(low);
    for (int i = 0; i < 2; ++i) {
        const V::B high = V::field(V::bytes(kSpread[fifth[2 * i]], kSpread[fifth[2 * i + 1]]), 0, 16);
        w[i] = V::from_u8(V::with(V::field(four, 4 * i, 15), high, 0));
    }
}

// --- blocks of 32 ------------------------------------------------------------------------------------------

struct Q8_0 : Alone<34> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        const V::F scale = V::set(V::half(at));
        for (int i = 0; i < 2; ++i) w[i] = V::mul(V::from_i8(V::bytes(at + 2 + i * kLanes)), scale);
    }
};

struct Q4_0 : Alone<18> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        Halves<Four::plain, LessTimes>(LessTimes{V::set(V::half(at)), V::set(8.0f)}).unit(at + 2, w);
    }
};

struct Q4_1 : Alone<20> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        Halves<Four::plain, TimesLess>(TimesLess{V::set(V::half(at)), V::set(-V::half(at + 2))}).unit(at + 4, w);
    }
};

struct Q5_0 : Alone<22> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        const LessTimes map{V::set(V::half(at)), V::set(16.0f)};
        fives(at + 2, at + 6, w);
        for (int i = 0; i < 2; ++i) w[i] = map(w[i]);
    }
};

struct Q5_1 : Alone<24> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        const TimesLess map{V::set(V::half(at)), V::set(-V::half(at + 2))};
        fives(at + 4, at + 8, w);
        for (int i = 0; i < 2; ++i) w[i] = map(w[i]);
    }
};

struct Iq4Nl : Alone<18> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        Halves<Four::iq4, Times>(Times{V::set(V::half(at))}).unit(at + 2, w);
    }
};

struct Mxfp4Gguf : Alone<17> {
    TIERMOE_INLINE static void unit(const State&, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + kBytes * u;
        const std::uint32_t bits = *at ? static_cast<std::uint32_t>(*at) << 23 : 0x00400000u;  // 2^-127 is subnormal
        float scale;
        std::memcpy(&scale, &bits, sizeof(scale));
        Halves<Four::e2m1, Times>(Times{V::set(scale)}).unit(at + 1, w);
    }
};

// --- blocks of 256: K ----------------------------------------------------------------------------------------

// Two bits of unit u: each 32 bytes hold four units.
inline V::B two_bits(const std::uint8_t* codes, int u, int half) {
    return V::field(V::bytes(codes + u / 4 * 32 + 16 * half), u % 4 * 2, 3);
}

struct Q2K : Blocks<84, 2> {
    using State = WithMinimum<2>;
    static void scales(const std::uint8_t* block, float* scale, float* minimum) {
        const V::B both = V::bytes(block);
        V::store(scale, V::mul(V::from_u8(V::field(both, 0, 15)), V::set(V::half(block + 80))));
        V::store(minimum, V::mul(V::from_u8(V::field(both, 4, 15)), V::set(V::half(block + 82))));
    }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* codes = row + u / 8 * kBlock + 16;
        for (int i = 0; i < 2; ++i) w[i] = state.half(i)(V::from_u8(two_bits(codes, static_cast<int>(u % 8), i)));
    }
};

struct Q3K : Blocks<110, 2> {  // bit u of the first 32 bytes is the third bit of its place in unit u
    static void scales(const std::uint8_t* block, float* scale, float*) {
        const std::uint8_t* q = block + 96;  // the low four bits of sixteen, then the high two
        const float whole = V::half(block + 108);
        for (int i = 0; i < 16; ++i) {
            const int low = q[i % 8] >> (i / 8 * 4) & 15, high = q[8 + i % 4] >> (i / 4 * 2) & 3;
            scale[i] = whole * static_cast<float>((low | high << 4) - 32);
        }
    }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* block = row + u / 8 * kBlock;
        const int at = static_cast<int>(u % 8);
        for (int i = 0; i < 2; ++i) {
            const V::B third = V::field(V::bytes(block + 16 * i), at, 1);
            const V::F code = V::from_u8(V::with(two_bits(block + 32, at, i), third, 2));
            w[i] = V::mul(V::sub(code, V::set(4.0f)), state.half(i));
        }
    }
};

// Eight scales and minima of six bits of Q4_K and Q5_K, packed in twelve bytes.
inline void k_scales(const std::uint8_t* block, float* scales, float* minima) {
    const float scale = V::half(block), minimum = V::half(block + 2);
    const std::uint8_t* q = block + 4;
    for (int i = 0; i < 4; ++i) {
        scales[i] = scale * static_cast<float>(q[i] & 63);
        scales[4 + i] = scale * static_cast<float>((q[8 + i] & 15) | (q[i] >> 2 & 48));
        minima[i] = minimum * static_cast<float>(q[4 + i] & 63);
        minima[4 + i] = minimum * static_cast<float>(q[8 + i] >> 4 | (q[4 + i] >> 2 & 48));
    }
}

struct Q4K : Blocks<144, 1> {  // each 32 bytes hold two units
    struct State {
        State(const float* scale, const float* zero) : found(TimesLess{V::set(*scale), V::set(*zero)}) {}
        V::Lookup<Four::plain, TimesLess> found;
    };
    static void scales(const std::uint8_t* block, float* scale, float* minimum) { k_scales(block, scale, minimum); }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* at = row + u / 8 * kBlock + 16 + u % 8 / 2 * 32;
        for (int i = 0; i < 2; ++i) w[i] = u % 2 ? state.found.high(at + 16 * i) : state.found.low(at + 16 * i);
    }
};

struct Q5K : Blocks<176, 1> {  // bit u of a byte of qh is the fifth bit of its place in unit u
    using State = WithMinimum<1>;
    static void scales(const std::uint8_t* block, float* scale, float* minimum) { k_scales(block, scale, minimum); }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t *fifth = row + u / 8 * kBlock + 16, *at = fifth + 32 + u % 8 / 2 * 32;
        for (int i = 0; i < 2; ++i) {
            const V::B low = V::field(V::bytes(at + 16 * i), u % 2 * 4, 15);
            const V::B high = V::field(V::bytes(fifth + 16 * i), static_cast<int>(u % 8), 1);
            w[i] = state.half(i)(V::from_u8(V::with(low, high, 4)));
        }
    }
};

struct Q6K : Blocks<210, 2> {  // half a block has 64 bytes of low bits and 32 of high ones for four units
    static void scales(const std::uint8_t* block, float* scale, float*) {
        V::store(scale, V::mul(V::from_i8(V::bytes(block + 192)), V::set(V::half(block + 208))));
    }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* block = row + u / 8 * kBlock;
        const int half = static_cast<int>(u % 8 / 4), part = static_cast<int>(u % 4);
        const std::uint8_t* low = block + 64 * half + part % 2 * 32;
        for (int i = 0; i < 2; ++i) {
            const V::B four = V::field(V::bytes(low + 16 * i), part / 2 * 4, 15);
            const V::B two = two_bits(block + 128, static_cast<int>(u % 8), i);
            w[i] = V::mul(V::sub(V::from_u8(V::with(four, two, 4)), V::set(32.0f)), state.half(i));
        }
    }
};

// --- blocks of 256: IQ ---------------------------------------------------------------------------------------

struct Iq4Xs : Blocks<136, 1> {
    struct State : Halves<Four::iq4, Times> {
        State(const float* scale, const float*) : Halves(Times{V::set(*scale)}) {}
    };
    static void scales(const std::uint8_t* block, float* scale, float*) {
        const float whole = V::half(block);
        const int high = word<std::uint16_t>(block + 2);
        for (int u = 0; u < 8; ++u) {
            const int low = block[4 + u / 2] >> (u % 2 * 4) & 15;
            scale[u] = whole * static_cast<float>((low | (high >> (2 * u) & 3) << 4) - 32);
        }
    }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        state.unit(row + u / 8 * kBlock + 8 + u % 8 * 16, w);
    }
};

// Weights of a grid with signs: D::eights(block, u, sizes, signs) finds eight at a time, as bytes.
template <class D, int Bytes, int Scales>
struct Signed : Blocks<Bytes, Scales> {
    TIERMOE_INLINE static void unit(const typename Blocks<Bytes, Scales>::State& state, const std::uint8_t* row,
                                    std::int64_t u, V::F* w) {
        std::uint64_t sizes[4], signs[4];
        D::eights(row + u / 8 * Bytes, static_cast<int>(u % 8), sizes, signs);
        for (int i = 0; i < 4; ++i)  // no size is 0, so no byte carries into the next
            sizes[i] = (sizes[i] ^ signs[i]) + (signs[i] & 0x0101010101010101u);
        for (int i = 0; i < 2; ++i)
            w[i] = V::mul(V::from_i8(V::bytes(sizes[2 * i], sizes[2 * i + 1])), state.half(i));
    }
};

// Sixteen scales of four bits, of which half is added, times `factor`.
inline void half_steps(const std::uint8_t* at, float factor, float* scale) {
    for (int i = 0; i < 16; ++i) scale[i] = factor * (0.5f + static_cast<float>(at[i / 2] >> (i % 2 * 4) & 15));
}

// The signs of four eights in seven bits each, and a scale in the upper four bits of a word.
inline void even_signs(std::uint32_t bits, std::uint64_t* signs) {
    for (int k = 0; k < 4; ++k) signs[k] = kSpreadEven[bits >> (7 * k) & 127];
}

struct Iq2Xxs : Signed<Iq2Xxs, 66, 1> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * 0.25f * (0.5f + static_cast<float>(word<std::uint32_t>(block + 6 + 8 * u) >> 28));
    }
    TIERMOE_INLINE static void eights(const std::uint8_t* block, int u, std::uint64_t* sizes, std::uint64_t* signs) {
        const std::uint8_t* at = block + 2 + 8 * u;
        for (int k = 0; k < 4; ++k) sizes[k] = kIq2Xxs[at[k]];
        even_signs(word<std::uint32_t>(at + 4), signs);
    }
};

struct Iq2Xs : Signed<Iq2Xs, 74, 2> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        half_steps(block + 66, V::half(block) * 0.25f, scale);
    }
    TIERMOE_INLINE static void eights(const std::uint8_t* block, int u, std::uint64_t* sizes, std::uint64_t* signs) {
        for (int k = 0; k < 4; ++k) {
            const int code = word<std::uint16_t>(block + 2 + 8 * u + 2 * k);
            sizes[k] = kIq2Xs[code & 511];
            signs[k] = kSpreadEven[code >> 9];
        }
    }
};

struct Iq2S : Signed<Iq2S, 82, 2> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        half_steps(block + 74, V::half(block) * 0.25f, scale);
    }
    TIERMOE_INLINE static void eights(const std::uint8_t* block, int u, std::uint64_t* sizes, std::uint64_t* signs) {
        const std::uint8_t* at = block + 2 + 4 * u;
        for (int k = 0; k < 4; ++k) {
            sizes[k] = kIq2S[at[k] | (block[66 + u] >> (2 * k) & 3) << 8];
            signs[k] = kSpread[at[32 + k]];
        }
    }
};

struct Iq3Xxs : Signed<Iq3Xxs, 98, 1> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * 0.5f * (0.5f + static_cast<float>(word<std::uint32_t>(block + 66 + 4 * u) >> 28));
    }
    TIERMOE_INLINE static void eights(const std::uint8_t* block, int u, std::uint64_t* sizes, std::uint64_t* signs) {
        const std::uint8_t* at = block + 2 + 8 * u;
        for (int k = 0; k < 4; ++k)
            sizes[k] = kIq3Xxs[at[2 * k]] | static_cast<std::uint64_t>(kIq3Xxs[at[2 * k + 1]]) << 32;
        even_signs(word<std::uint32_t>(block + 66 + 4 * u), signs);
    }
};

struct Iq3S : Signed<Iq3S, 110, 1> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * static_cast<float>(1 + 2 * (block[106 + u / 2] >> (u % 2 * 4) & 15));
    }
    TIERMOE_INLINE static void eights(const std::uint8_t* block, int u, std::uint64_t* sizes, std::uint64_t* signs) {
        const std::uint8_t* at = block + 2 + 8 * u;
        const int ninth = block[66 + u];
        for (int k = 0; k < 4; ++k) {
            const int first = at[2 * k] | (ninth >> (2 * k) & 1) << 8;
            const int second = at[2 * k + 1] | (ninth >> (2 * k + 1) & 1) << 8;
            sizes[k] = kIq3S[first] | static_cast<std::uint64_t>(kIq3S[second]) << 32;
            signs[k] = kSpread[block[74 + 4 * u + k]];
        }
    }
};

// Weights of -1, 0 or 1, and an eighth more or less for each eight of them: as bytes, 9 more than eight times that.
template <class D, int Bytes, int Scales>
struct Eighths : Blocks<Bytes, Scales> {
    TIERMOE_INLINE static void unit(const typename Blocks<Bytes, Scales>::State& state, const std::uint8_t* row,
                                    std::int64_t u, V::F* w) {
        std::uint64_t found[4];
        for (int k = 0; k < 4; ++k) {
            const auto [code, less] = D::eight(row + u / 8 * Bytes, static_cast<int>(u % 8), k);
            found[k] = kIq1S[code] + (less ? 0 : 0x0202020202020202u);
        }
        for (int i = 0; i < 2; ++i) {
            const V::F eighths = V::from_u8(V::bytes(found[2 * i], found[2 * i + 1]));
            w[i] = V::mul(V::sub(eighths, V::set(9.0f)), state.half(i));
        }
    }
};

struct CodeLess {
    int code;
    bool less;
};

struct Iq1S : Eighths<Iq1S, 50, 1> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * 0.125f * static_cast<float>(2 * (block[35 + 2 * u] >> 4 & 7) + 1);
    }
    TIERMOE_INLINE static CodeLess eight(const std::uint8_t* block, int u, int k) {
        const int high = word<std::uint16_t>(block + 34 + 2 * u);
        return {block[2 + 4 * u + k] | (high >> (3 * k) & 7) << 8, (high & 0x8000) != 0};
    }
};

struct Iq1M : Eighths<Iq1M, 56, 2> {  // the upper four bits of four words make one float16
    static void scales(const std::uint8_t* block, float* scale, float*) {
        const std::uint16_t bits = static_cast<std::uint16_t>(block[49] >> 4 | (block[51] & 0xf0) |
                                                              (block[53] & 0xf0) << 4 | (block[55] & 0xf0) << 8);
        const float whole = V::half(&bits) * 0.125f;
        for (int i = 0; i < 16; ++i) {
            const int own = word<std::uint16_t>(block + 48 + i / 4 * 2) >> (i % 4 * 3) & 7;
            scale[i] = whole * static_cast<float>(2 * own + 1);
        }
    }
    TIERMOE_INLINE static CodeLess eight(const std::uint8_t* block, int u, int k) {
        const int high = block[32 + 2 * u + k / 2] >> (k % 2 * 4);
        return {block[4 * u + k] | (high & 7) << 8, (high & 8) != 0};
    }
};

// --- blocks of 256: ternary ----------------------------------------------------------------------------------

struct Tq1 : Blocks<54, 1> {  // five weights a byte: digits of base 3 of a fraction, the first of 32 or 16 bytes first
    static void scales(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u) scale[u] = V::half(block + 52);
    }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* block = row + u / 8 * kBlock;
        const int at = static_cast<int>(u % 8);
        std::uint8_t codes[kUnit];
        if (at < 5)
            digits(block, 32, kPowers[at], codes);
        else
            digits(block + 32, 16, kPowers[2 * (at - 5)], codes);
        if (at == 5 || at == 6) digits(block + 32, 16, kPowers[2 * (at - 5) + 1], codes + 16);
        if (at == 7)
            for (int i = 0; i < 4; ++i) digits(block + 48, 4, kPowers[i], codes + 16 + 4 * i);
        for (int i = 0; i < 2; ++i)
            w[i] = V::mul(V::sub(V::from_u8(V::bytes(codes + 16 * i)), V::set(1.0f)), state.half(i));
    }
    static constexpr int kPowers[] = {1, 3, 9, 27, 81};
    TIERMOE_INLINE static void digits(const std::uint8_t* from, int count, int power, std::uint8_t* to) {
        for (int i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(((from[i] * power & 255) * 3) >> 8);
    }
};

struct Tq2 : Blocks<66, 1> {
    static void scales(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u) scale[u] = V::half(block + 64);
    }
    TIERMOE_INLINE static void unit(const State& state, const std::uint8_t* row, std::int64_t u, V::F* w) {
        const std::uint8_t* codes = row + u / 8 * kBlock;
        for (int i = 0; i < 2; ++i) {
            const V::F code = V::from_u8(two_bits(codes, static_cast<int>(u % 8), i));
            w[i] = V::mul(V::sub(code, V::set(1.0f)), state.half(i));
        }
    }
};

}  // namespace
}  // namespace tiermoe
