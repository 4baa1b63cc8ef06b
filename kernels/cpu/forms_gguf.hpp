// Decoders of GGUF's blocks, in one instruction set: see forms_codes.hpp, which includes this. A scale is a number of few
// bits times a float16, which is exact in float32, whatever the order of the factors; some types add an offset.
#include "grids.hpp"

namespace tiermoe {
namespace {

template <typename T>
inline T word(const std::uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(value));
    return value;
}

// --- blocks of 32: four of them are decoded together --------------------------------------------------------

template <Layout L, int Bytes>
struct Alone : Code<L, 4, 4 * Bytes> {
    static void scales(const FormMatrix& m, std::int64_t, const std::uint8_t* row, float* scale, float*, float*) {
        strided_halves(row, Bytes, m.inputs / kUnit, scale);
    }
};

template <int Bytes>
struct AloneWithOffset : Code<Layout::halves, 4, 4 * Bytes> {
    static constexpr bool kOffset = true;
    static void scales(const FormMatrix& m, std::int64_t, const std::uint8_t* row, float* scale, float* offset, float*) {
        strided_halves(row, Bytes, m.inputs / kUnit, scale);
        strided_halves(row + 2, Bytes, m.inputs / kUnit, offset);
    }
};

struct Q8_0 : Alone<Layout::halves, 34> {
    static constexpr bool kSigned = true;
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        for (int k = 0; k < 2; ++k) c[k] = V::quarters(at + 2 + 16 * k, 34);
    }
};

struct Q4_0 : Alone<Layout::halves, 18> {
    static constexpr int kZero = 8;
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        low_and_high(V::quarters(at + 2, 18), c);
    }
};

struct Q4_1 : AloneWithOffset<20> {
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        low_and_high(V::quarters(at + 4, 20), c);
    }
};

// Codes of five bits: the low four of four blocks at `low`, and the fifth ones of 32 weights at `fifth`.
TIERMOE_INLINE inline void five_bits(const std::uint8_t* fifth, const std::uint8_t* low, int stride, V::C* c) {
    low_and_high(V::quarters(low, stride), c);
    std::uint64_t first = 0, last = 0;
    for (int u = 0; u < 4; ++u) {
        const std::uint64_t bits = word<std::uint32_t>(fifth + u * stride);
        first |= (bits & 0xffff) << (16 * u);
        last |= bits >> 16 << (16 * u);
    }
    c[0] = V::plus_bits(c[0], first, 16);
    c[1] = V::plus_bits(c[1], last, 16);
}

struct Q5_0 : Alone<Layout::halves, 22> {
    static constexpr int kZero = 16;
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        five_bits(at + 2, at + 6, 22, c);
    }
};

struct Q5_1 : AloneWithOffset<24> {
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        five_bits(at + 4, at + 8, 24, c);
    }
};

struct Iq4Nl : Alone<Layout::halves, 18> {
    static constexpr bool kSigned = true;
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        look_up(kIq4, V::quarters(at + 2, 18), c);
    }
};

struct Mxfp4Gguf : Code<Layout::halves, 4, 4 * 17> {
    static constexpr bool kSigned = true;
    static void scales(const FormMatrix& m, std::int64_t, const std::uint8_t* row, float* scale, float*, float*) {
        for (std::int64_t u = 0; u < m.inputs / kUnit; u += kLanes) {
            std::uint8_t powers[kLanes] = {};
            for (std::int64_t i = 0; i < kLanes && u + i < m.inputs / kUnit; ++i) powers[i] = row[17 * (u + i)];
            V::store(scale + u, V::mul(V::from_e8m0(V::bytes(powers)), V::set(0.5f)));
        }
    }
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        look_up(kE2m1, V::quarters(at + 1, 17), c);
    }
};

// --- blocks of 256: two halves -------------------------------------------------------------------------------

// D::block(block, scale, offset) fills the scales of a block.
template <Layout L, int Slots, int Bytes>
struct Blocks : Code<L, Slots, Bytes, 2> {};

template <class D>
inline void block_scales(const FormMatrix& m, const std::uint8_t* row, float* scale, float* offset) {
    for (std::int64_t block = 0; block < m.inputs / 256; ++block, row += D::kBytes, scale += 2 * D::kSlots)
        D::block(row, scale, offset + block * 2 * D::kSlots);
}

struct Q2K : Blocks<Layout::plain, 8, 84> {  // each 32 bytes hold four times 32 weights
    static constexpr bool kOffset = true;
    static void block(const std::uint8_t* block, float* scale, float* offset) {
        const std::uint64_t q[] = {word<std::uint64_t>(block), word<std::uint64_t>(block + 8)};
        constexpr std::uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
        V::store(scale, V::mul(V::from_u8(V::bytes(q[0] & kLow, q[1] & kLow)), V::set(V::half(block + 80))));
        V::store(offset, V::mul(V::from_u8(V::bytes(q[0] >> 4 & kLow, q[1] >> 4 & kLow)), V::set(-V::half(block + 82))));
    }
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        two_bits(block + 16 + 32 * Half, c);
    }
};

struct Q3K : Blocks<Layout::plain, 8, 110> {  // bit u of the first 32 bytes is the third bit of weights 32 u and on
    static constexpr int kZero = 4;
    static void block(const std::uint8_t* block, float* scale, float*) {  // the low four bits of sixteen, then the high two
        const std::uint64_t low = word<std::uint64_t>(block + 96), high = word<std::uint32_t>(block + 104);
        constexpr std::uint64_t kLow = 0x0f0f0f0f0f0f0f0f, kTwo = 0x0303030303030303;
        const std::uint64_t upper = high | high >> 2 << 32;  // what crosses a byte is masked away
        const V::B q = V::bytes((low & kLow) | (upper & kTwo) << 4, (low >> 4 & kLow) | (upper >> 4 & kTwo) << 4);
        V::store(scale, V::mul(V::sub(V::from_u8(q), V::set(32.0f)), V::set(V::half(block + 108))));
    }
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        two_bits(block + 32 + 32 * Half, c);
        c[0] = V::with<2>(c[0], V::fields<4 * Half, 4 * Half + 1, 1>(block));
        c[1] = V::with<2>(c[1], V::fields<4 * Half + 2, 4 * Half + 3, 1>(block));
    }
};

template <int Bytes>
struct SixBits : Blocks<Layout::crossed, 4, Bytes> {  // eight scales and offsets of six bits, packed in twelve bytes
    static constexpr bool kOffset = true;
    static void block(const std::uint8_t* block, float* scale, float* offset) {
        const std::uint32_t a = word<std::uint32_t>(block + 4), b = word<std::uint32_t>(block + 8);
        const std::uint32_t c = word<std::uint32_t>(block + 12);
        constexpr std::uint32_t kSix = 0x3f3f3f3f, kLow = 0x0f0f0f0f, kTwo = 0x30303030;
        const std::uint64_t first = (a & kSix) | std::uint64_t{(c & kLow) | (a >> 2 & kTwo)} << 32;
        const std::uint64_t second = (b & kSix) | std::uint64_t{(c >> 4 & kLow) | (b >> 2 & kTwo)} << 32;
        alignas(64) float both[kLanes];
        V::store(both, V::from_u8(V::bytes(first, second)));
        const float whole = V::half(block), less = -V::half(block + 2);
        for (int i = 0; i < 8; ++i) {
            scale[i] = both[i] * whole;
            offset[i] = both[8 + i] * less;
        }
    }
};

struct Q4K : SixBits<144> {
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        low_and_high(V::codes(block + 16 + 64 * Half), c);
    }
};

struct Q5K : SixBits<176> {  // bit u of the first 32 bytes is the fifth bit of weights 32 u and on
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        low_and_high(V::codes(block + 48 + 64 * Half), c);
        c[0] = V::with<4>(c[0], V::fields<4 * Half, 4 * Half + 2, 1>(block + 16));
        c[1] = V::with<4>(c[1], V::fields<4 * Half + 1, 4 * Half + 3, 1>(block + 16));
    }
};

struct Q6K : Blocks<Layout::plain, 8, 210> {  // half a block has 64 bytes of low bits and 32 of high ones
    static constexpr int kZero = 32;
    static void block(const std::uint8_t* block, float* scale, float*) {
        V::store(scale, V::mul(V::from_i8(V::bytes(block + 192)), V::set(V::half(block + 208))));
    }
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        V::C high[2];
        low_and_high(V::codes(block + 64 * Half), c);
        two_bits(block + 128 + 32 * Half, high);
        for (int k = 0; k < 2; ++k) c[k] = V::with<4>(c[k], high[k]);
    }
};

// --- blocks of 256: IQ ---------------------------------------------------------------------------------------

struct Iq4Xs : Blocks<Layout::halves, 4, 136> {
    static constexpr bool kSigned = true;
    static void block(const std::uint8_t* block, float* scale, float*) {
        std::uint64_t low = word<std::uint32_t>(block + 4), high = word<std::uint16_t>(block + 2);
        low = (low | low << 16) & 0x0000ffff0000ffff;  // four bits, and two bits, to a byte each
        low = (low | low << 8) & 0x00ff00ff00ff00ff;
        low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
        high = (high | high << 24) & 0x000000ff000000ff;
        high = (high | high << 12) & 0x000f000f000f000f;
        high = (high | high << 6) & 0x0303030303030303;
        const V::F all = V::sub(V::from_u8(V::bytes(low | high << 4, 0)), V::set(32.0f));
        V::store(scale, V::mul(all, V::set(V::half(block))));  // eight, and as many that the next block replaces
    }
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        look_up(kIq4, V::codes(block + 8 + 64 * Half), c);
    }
};

// Weights of a grid with signs: D::eights(block, u, sizes) finds eight at a time of 32, as bytes, and returns their signs.
template <class D, int Bytes, int Scales>
struct Signed : Blocks<Layout::plain, 4 * Scales, Bytes> {
    static constexpr bool kSigned = true;
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        for (int k = 0; k < 2; ++k) {
            std::uint64_t sizes[8], signs[2];
            for (int i = 0; i < 2; ++i) signs[i] = D::eights(block, 4 * Half + 2 * k + i, sizes + 4 * i);
            c[k] = V::minus_bits(V::codes(sizes), signs[0] | signs[1] << 32);
        }
    }
};

// Sixteen scales of four bits, of which half is added, times `factor`.
inline void half_steps(const std::uint8_t* at, float factor, float* scale) {
    for (int i = 0; i < 16; ++i) scale[i] = factor * (0.5f + static_cast<float>(at[i / 2] >> (i % 2 * 4) & 15));
}

// The signs of four eights, of seven bits each in a word.
TIERMOE_INLINE inline std::uint32_t even_signs(std::uint32_t bits) {
    std::uint32_t signs = 0;
    for (int k = 0; k < 4; ++k) signs |= static_cast<std::uint32_t>(kEven[bits >> (7 * k) & 127]) << (8 * k);
    return signs;
}

struct Iq2Xxs : Signed<Iq2Xxs, 66, 1> {
    static void block(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * 0.25f * (0.5f + static_cast<float>(word<std::uint32_t>(block + 6 + 8 * u) >> 28));
    }
    TIERMOE_INLINE static std::uint32_t eights(const std::uint8_t* block, int u, std::uint64_t* sizes) {
        const std::uint8_t* at = block + 2 + 8 * u;
        for (int k = 0; k < 4; ++k) sizes[k] = kIq2Xxs[at[k]];
        return even_signs(word<std::uint32_t>(at + 4));
    }
};

struct Iq2Xs : Signed<Iq2Xs, 74, 2> {
    static void block(const std::uint8_t* block, float* scale, float*) {
        half_steps(block + 66, V::half(block) * 0.25f, scale);
    }
    TIERMOE_INLINE static std::uint32_t eights(const std::uint8_t* block, int u, std::uint64_t* sizes) {
        std::uint32_t signs = 0;
        for (int k = 0; k < 4; ++k) {
            const int code = word<std::uint16_t>(block + 2 + 8 * u + 2 * k);
            sizes[k] = kIq2Xs[code & 511];
            signs |= static_cast<std::uint32_t>(kEven[code >> 9]) << (8 * k);
        }
        return signs;
    }
};

struct Iq2S : Signed<Iq2S, 82, 2> {
    static void block(const std::uint8_t* block, float* scale, float*) {
        half_steps(block + 74, V::half(block) * 0.25f, scale);
    }
    TIERMOE_INLINE static std::uint32_t eights(const std::uint8_t* block, int u, std::uint64_t* sizes) {
        const std::uint8_t* at = block + 2 + 4 * u;
        for (int k = 0; k < 4; ++k) sizes[k] = kIq2S[at[k] | (block[66 + u] >> (2 * k) & 3) << 8];
        return word<std::uint32_t>(at + 32);
    }
};

struct Iq3Xxs : Signed<Iq3Xxs, 98, 1> {
    static void block(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * 0.5f * (0.5f + static_cast<float>(word<std::uint32_t>(block + 66 + 4 * u) >> 28));
    }
    TIERMOE_INLINE static std::uint32_t eights(const std::uint8_t* block, int u, std::uint64_t* sizes) {
        const std::uint8_t* at = block + 2 + 8 * u;
        for (int k = 0; k < 4; ++k)
            sizes[k] = kIq3Xxs[at[2 * k]] | static_cast<std::uint64_t>(kIq3Xxs[at[2 * k + 1]]) << 32;
        return even_signs(word<std::uint32_t>(block + 66 + 4 * u));
    }
};

struct Iq3S : Signed<Iq3S, 110, 1> {
    static void block(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * static_cast<float>(1 + 2 * (block[106 + u / 2] >> (u % 2 * 4) & 15));
    }
    TIERMOE_INLINE static std::uint32_t eights(const std::uint8_t* block, int u, std::uint64_t* sizes) {
        const std::uint8_t* at = block + 2 + 8 * u;
        const int ninth = block[66 + u];
        for (int k = 0; k < 4; ++k) {
            const int first = at[2 * k] | (ninth >> (2 * k) & 1) << 8;
            const int second = at[2 * k + 1] | (ninth >> (2 * k + 1) & 1) << 8;
            sizes[k] = kIq3S[first] | static_cast<std::uint64_t>(kIq3S[second]) << 32;
        }
        return word<std::uint32_t>(block + 74 + 4 * u);
    }
};

// Weights of -1, 0 or 1, and an eighth more or less for each eight of them: as bytes, 9 more than eight times that.
template <class D, int Bytes, int Scales>
struct Eighths : Blocks<Layout::plain, 4 * Scales, Bytes> {
    static constexpr int kZero = 9;
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        for (int k = 0; k < 2; ++k) {
            std::uint64_t found[8];
            for (int i = 0; i < 8; ++i) {
                const auto [code, less] = D::eight(block, 4 * Half + 2 * k + i / 4, i % 4);
                found[i] = kIq1S[code] + (less ? 0 : 0x0202020202020202u);
            }
            c[k] = V::codes(found);
        }
    }
};

struct CodeLess {
    int code;
    bool less;
};

struct Iq1S : Eighths<Iq1S, 50, 1> {
    static void block(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u)
            scale[u] = V::half(block) * 0.125f * static_cast<float>(2 * (block[35 + 2 * u] >> 4 & 7) + 1);
    }
    TIERMOE_INLINE static CodeLess eight(const std::uint8_t* block, int u, int k) {
        const int high = word<std::uint16_t>(block + 34 + 2 * u);
        return {block[2 + 4 * u + k] | (high >> (3 * k) & 7) << 8, (high & 0x8000) != 0};
    }
};

struct Iq1M : Eighths<Iq1M, 56, 2> {  // the upper four bits of four words make one float16
    static void block(const std::uint8_t* block, float* scale, float*) {
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

template <int Bytes>
struct Ternary : Blocks<Layout::plain, 4, Bytes> {  // one scale, at the end
    static constexpr int kZero = 1;
    static void block(const std::uint8_t* block, float* scale, float*) {
        for (int u = 0; u < 8; ++u) scale[u] = V::half(block + Bytes - 2);
    }
};

struct Tq1 : Ternary<54> {  // five weights a byte: digits of base 3 of a fraction, the first of 32 or 16 bytes first
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        std::uint8_t found[128];
        if constexpr (Half == 0) {
            for (int u = 0; u < 4; ++u) digits(block, 32, kPowers[u], found + 32 * u);
        } else {
            digits(block, 32, kPowers[4], found);
            for (int i = 0; i < 5; ++i) digits(block + 32, 16, kPowers[i], found + 32 + 16 * i);
            for (int i = 0; i < 4; ++i) digits(block + 48, 4, kPowers[i], found + 112 + 4 * i);
        }
        for (int k = 0; k < 2; ++k) c[k] = V::codes(found + 64 * k);
    }
    static constexpr int kPowers[] = {1, 3, 9, 27, 81};
    TIERMOE_INLINE static void digits(const std::uint8_t* from, int count, int power, std::uint8_t* to) {
        for (int i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(((from[i] * power & 255) * 3) >> 8);
    }
};

struct Tq2 : Ternary<66> {
    template <int Half>
    TIERMOE_INLINE static void codes(const std::uint8_t* block, V::C* c) {
        two_bits(block + 32 * Half, c);
    }
};

}  // namespace
}  // namespace tiermoe
