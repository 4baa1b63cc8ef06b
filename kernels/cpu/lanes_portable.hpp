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

enum class Four { plain, e2m1, iq4 };  // what four bits stand for: themselves, float4, or the sizes of IQ4_NL

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

    // Bytes: sixteen of them, and fields of them.
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
    static B field(const B& b, int shift, int mask) {
        B f;
        for (int i = 0; i < 16; ++i) f.lane[i] = static_cast<std::uint8_t>(b.lane[i] >> shift & mask);
        return f;
    }
    static B with(const B& low, const B& high, int shift) {
        B b;
        for (int i = 0; i < 16; ++i) b.lane[i] = static_cast<std::uint8_t>(low.lane[i] | high.lane[i] << shift);
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
    static F halves(float first, float second) {
        F f;
        for (int i = 0; i < 16; ++i) f.lane[i] = i < 8 ? first : second;
        return f;
    }
    static float half(const void* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof(bits));
        return half_to_float(bits);
    }

    // The low and the high halves of sixteen bytes, mapped: Map takes what the codes stand for to weights.
    template <Four Codes, class Map>
    struct Lookup {
        explicit Lookup(Map map)
            : table(map(Codes == Four::e2m1  ? F{{0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6}}
                        : Codes == Four::iq4 ? F{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}}
                                             : F{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}})) {}
        F low(const void* at) const { return found(bytes(at), 0); }
        F high(const void* at) const { return found(bytes(at), 4); }
        F found(const B& b, int shift) const {
            F f;
            for (int i = 0; i < 16; ++i) f.lane[i] = table.lane[b.lane[i] >> shift & 15];
            return f;
        }
        F table;
    };
};

}  // namespace
}  // namespace tiermoe

#include "lanes.hpp"
