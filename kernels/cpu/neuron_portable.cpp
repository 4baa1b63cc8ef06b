// Plain C++: for processors without AVX2, and the arithmetic that the others are checked against.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fit.hpp"
#include "neuron_ffn.hpp"

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
};

constexpr int kBlock = 4;

// The eight vectors of a tile, one code a byte.
template <int B>
inline void decode(const std::uint8_t* p, std::uint8_t (*v)[64]) {
    for (int i = 0; i < 64; ++i) {
        if constexpr (B == 3) {
            const unsigned a = p[i], b = p[64 + i], c = p[128 + i];
            const unsigned codes[8] = {a & 7, a >> 3 & 7, b & 7, b >> 3 & 7, c & 7, c >> 3 & 7,
                                       a >> 6 | (c >> 6 & 1) << 2, b >> 6 | c >> 7 << 2};
            for (int k = 0; k < 8; ++k) v[k][i] = static_cast<std::uint8_t>(codes[k]);
        } else {
            constexpr int kFields = 8 / B;
            for (int k = 0; k < 8; ++k)
                v[k][i] = static_cast<std::uint8_t>(p[k / kFields * 64 + i] >> (k % kFields * B) & ((1 << B) - 1));
        }
    }
}

template <int B, int R, int M>
inline void dots(const std::uint8_t* codes, int tile_bytes, int unit_bytes, int units, const std::int8_t* const* q,
                 V::I (*sum)[R]) {
    for (int t = 0; t < M; ++t) {
        for (int r = 0; r < R; ++r) sum[t][r] = {};
        for (int u = 0; u < units; ++u) {
            std::uint8_t v[8][64];
            decode<B>(codes + u * unit_bytes + t * tile_bytes, v);
            for (int r = 0; r < R; ++r)
                for (int k = 0; k < 8; ++k) {
                    const std::int8_t* x = q[r] + u * kTileInputs + k * 4;
                    for (int lane = 0; lane < 16; ++lane)
                        for (int j = 0; j < 4; ++j) sum[t][r].lane[lane] += v[k][lane * 4 + j] * x[j];
                }
        }
    }
}

constexpr int kVectorBytes = 16;

}  // namespace
}  // namespace tiermoe

#include "fit_body.hpp"
#include "neuron_body.hpp"

namespace tiermoe {

const Kernels& portable_kernels() {
    static constexpr Kernels kernels = table("portable");
    return kernels;
}

}  // namespace tiermoe
