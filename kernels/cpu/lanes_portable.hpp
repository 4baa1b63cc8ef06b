// Sixteen lanes in plain C++, for the file that includes this: neuron_portable.cpp, forms_portable.cpp.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tiermoe {
namespace {

struct Half {
    std::uint16_t bits;
};
struct Bfloat {
    std::uint16_t bits;
};

inline float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline float half_to_float(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest >= 0x0400u) return from_bits(sign | ((rest << 13) + 0x38000000u));
    return from_bits(sign | 0x3f800000u) * static_cast<float>(rest) * 5.9604644775390625e-8f;  // subnormal: 2^-24
}

struct V {
    struct F {
        float lane[16];
    };
    struct I {
        std::int32_t lane[16];
    };
    static F zero() { return {}; }
    static F set(float v) {
        F f;
        for (float& lane : f.lane) lane = v;
        return f;
    }
    static F load(const float* at) {
        F f;
        std::memcpy(f.lane, at, sizeof(f.lane));
        return f;
    }
    static void store(float* at, const F& f) { std::memcpy(at, f.lane, sizeof(f.lane)); }
    static F sub(const F& a, const F& b) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = a.lane[i] - b.lane[i];
        return f;
    }
    static F div(const F& a, const F& b) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = a.lane[i] / b.lane[i];
        return f;
    }
    static F mul(const F& a, const F& b) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = a.lane[i] * b.lane[i];
        return f;
    }
    static F add(const F& a, const F& b) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = a.lane[i] + b.lane[i];
        return f;
    }
    static F fma(const F& a, const F& b, const F& c) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
        return f;
    }
    static F to_float(const I& a) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = static_cast<float>(a.lane[i]);
        return f;
    }
    static F load_f16(const std::uint16_t* at) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = half_to_float(at[i]);
        return f;
    }
    static F load_as(const float* at) { return load(at); }
    static F load_as(const Half* at) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = half_to_float(at[i].bits);
        return f;
    }
    static F load_as(const Bfloat* at) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = from_bits(static_cast<std::uint32_t>(at[i].bits) << 16);
        return f;
    }

    // Bytes: sixteen of them.
    struct B {
        std::uint8_t lane[16];
    };
    static B bytes(const void* at) {
        B b;
        std::memcpy(b.lane, at, sizeof(b.lane));
        return b;
    }
    static B bytes(std::uint64_t first, std::uint64_t second) {
        B b;
        std::memcpy(b.lane, &first, sizeof(first));
        std::memcpy(b.lane + 8, &second, sizeof(second));
        return b;
    }
    static F from_u8(const B& b) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = b.lane[i];
        return f;
    }
    static F from_i8(const B& b) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = static_cast<std::int8_t>(b.lane[i]);
        return f;
    }
    // A byte of e4m3, moved to where float16 has sign, exponent and fraction, is worth 2^-8 of its value.
    static F from_e4m3(const B& b) {
        F f;
        for (int i = 0; i < 16; ++i)
            f.lane[i] = half_to_float(static_cast<std::uint16_t>((b.lane[i] & 128) << 8 | (b.lane[i] & 127) << 7));
        return f;
    }
    static F from_e8m0(const B& b) {  // 2^-127 is subnormal
        F f;
        for (int i = 0; i < 16; ++i)
            f.lane[i] = from_bits(b.lane[i] ? static_cast<std::uint32_t>(b.lane[i]) << 23 : 0x00400000u);
        return f;
    }
    static float half(const void* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof(bits));
        return half_to_float(bits);
    }

    // Sixteen float16 numbers, `stride` bytes apart.
    static F strided_halves(const std::uint8_t* at, int stride) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = half(at + i * stride);
        return f;
    }

    // Codes: 64 bytes; a lane has four of them. Words: half of them, as 32 integers of sixteen bits.
    struct C {
        std::uint8_t lane[64];
    };
    struct W {
        std::int16_t lane[32];
    };
    static C codes(const void* at) {
        C c;
        std::memcpy(c.lane, at, sizeof(c.lane));
        return c;
    }
    static C codes(const std::uint64_t* at) { return codes(static_cast<const void*>(at)); }
    static C quarters(const std::uint8_t* at, int stride) {  // sixteen bytes of four blocks
        C c;
        for (int i = 0; i < 4; ++i) std::memcpy(c.lane + 16 * i, at + i * stride, 16);
        return c;
    }
    template <int Shift, int Mask>
    static C field(C c) {
        for (std::uint8_t& lane : c.lane) lane = static_cast<std::uint8_t>(lane >> Shift & Mask);
        return c;
    }
    template <int First, int Second, int Mask>
    static C fields(const void* at) {  // of the same 32 bytes
        C c;
        for (int i = 0; i < 64; ++i) {
            const std::uint8_t byte = static_cast<const std::uint8_t*>(at)[i % 32];
            c.lane[i] = static_cast<std::uint8_t>(byte >> (i < 32 ? First : Second) & Mask);
        }
        return c;
    }
    template <int Shift>
    static C with(C low, const C& high) {
        for (int i = 0; i < 64; ++i) low.lane[i] = static_cast<std::uint8_t>(low.lane[i] | high.lane[i] << Shift);
        return low;
    }
    static C plus_bits(C c, std::uint64_t bits, int value) {  // where a bit is set
        for (int i = 0; i < 64; ++i)
            if (bits >> i & 1) c.lane[i] = static_cast<std::uint8_t>(c.lane[i] + value);
        return c;
    }
    static C minus_bits(C c, std::uint64_t bits) {  // negated where a bit is set
        for (int i = 0; i < 64; ++i)
            if (bits >> i & 1) c.lane[i] = static_cast<std::uint8_t>(-c.lane[i]);
        return c;
    }
    static C lookup(const std::int8_t* table, C c) {
        for (std::uint8_t& lane : c.lane) lane = static_cast<std::uint8_t>(table[lane]);
        return c;
    }
    template <bool Signed>
    static W even(const C& c) {
        return every_second<Signed>(c, 0);
    }
    template <bool Signed>
    static W odd(const C& c) {
        return every_second<Signed>(c, 1);
    }
    template <bool Signed>
    static W every_second(const C& c, int first) {
        W w;
        for (int i = 0; i < 32; ++i) {
            const std::uint8_t byte = c.lane[2 * i + first];
            w.lane[i] = Signed ? static_cast<std::int8_t>(byte) : byte;
        }
        return w;
    }
    static W words(int value) {
        W w;
        for (std::int16_t& lane : w.lane) lane = static_cast<std::int16_t>(value);
        return w;
    }
    static W words(const F& two_in_each_lane) {
        W w;
        std::memcpy(w.lane, two_in_each_lane.lane, sizeof(w.lane));
        return w;
    }
    static W load_words(const std::int16_t* at) {
        W w;
        std::memcpy(w.lane, at, sizeof(w.lane));
        return w;
    }
    static void store_words(std::int16_t* at, const W& w) { std::memcpy(at, w.lane, sizeof(w.lane)); }
    static W less(W a, const W& b) {
        for (int i = 0; i < 32; ++i) a.lane[i] = static_cast<std::int16_t>(a.lane[i] - b.lane[i]);
        return a;
    }
    // The sums of the products of two words.
    static I products(const W& w, const std::int16_t* x) { return add_products({}, w, x); }
    static I add_products(I sum, const W& w, const std::int16_t* x) {
        for (int i = 0; i < 16; ++i) sum.lane[i] += w.lane[2 * i] * x[2 * i] + w.lane[2 * i + 1] * x[2 * i + 1];
        return sum;
    }
    static F fused(const F& a, const F& b, const F& c) {  // rounds once, as those of AVX do, where `fma` need not
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
        return f;
    }
    // Lane i gets at[places[i]], of eight numbers.
    static F spread(const float* at, const std::int32_t* places) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = at[places[i]];
        return f;
    }
};

}  // namespace
}  // namespace tiermoe

#include "lanes.hpp"
