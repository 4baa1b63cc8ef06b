// Sixteen lanes of AVX2, for the file that includes this: neuron_avx2.cpp, forms_avx2.cpp.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c")

namespace tiermoe {
namespace {

struct Half {
    std::uint16_t bits;
};
struct Bfloat {
    std::uint16_t bits;
};

enum class Four { plain, e2m1, iq4 };  // what four bits stand for: themselves, float4, or the sizes of IQ4_NL

struct V {
    struct F {
        __m256 a, b;
    };
    struct I {
        __m256i half[2];
    };
    static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
    static F load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
    static void store(float* at, F f) {
        _mm256_storeu_ps(at, f.a);
        _mm256_storeu_ps(at + 8, f.b);
    }
    static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
    static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
    static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
    static F to_float(I x) { return {_mm256_cvtepi32_ps(x.half[0]), _mm256_cvtepi32_ps(x.half[1])}; }
    static F load_f16(const std::uint16_t* at) {
        const auto* halves = reinterpret_cast<const __m128i*>(at);
        return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    }
    static F load_as(const float* at) { return load(at); }
    static F load_as(const Half* at) { return load_f16(&at->bits); }
    static F load_as(const Bfloat* at) { return {widen(at), widen(at + 8)}; }

    // Bytes: sixteen of them, and fields of them.
    using B = __m128i;
    static B bytes(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
    static B bytes(std::uint64_t first, std::uint64_t second) {
        return _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
    }
    static B field(B b, int shift, int mask) {  // shifts in 16 bits: what crosses a byte is masked away
        return _mm_and_si128(_mm_srl_epi16(b, _mm_cvtsi32_si128(shift)), _mm_set1_epi8(static_cast<char>(mask)));
    }
    static B with(B low, B high, int shift) { return _mm_or_si128(low, _mm_sll_epi16(high, _mm_cvtsi32_si128(shift))); }
    static F from_u8(B b) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(upper(b)))};
    }
    static F from_i8(B b) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(upper(b)))};
    }
    // A byte of e4m3, moved to where float16 has sign, exponent and fraction, is worth 2^-8 of its value.
    static F from_e4m3(B b) {
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(b), 7);
        const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbfff)));
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    }
    static F from_e8m0(B b) { return {power(b), power(upper(b))}; }
    static F halves(float first, float second) { return {_mm256_set1_ps(first), _mm256_set1_ps(second)}; }
    static float half(const void* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof(bits));
        return _cvtsh_ss(bits);
    }

    // The low and the high halves of sixteen bytes, mapped: Map takes what the codes stand for to weights.
    template <Four Codes, class Map>
    struct Lookup {
        explicit Lookup(Map map) : map(map) {}
        F low(const void* at) const { return map(value(field(bytes(at), 0, 15))); }
        F high(const void* at) const { return map(value(field(bytes(at), 4, 15))); }
        static F value(B codes) {
            if constexpr (Codes == Four::plain) return from_u8(codes);
            if constexpr (Codes == Four::iq4)
                return from_i8(_mm_shuffle_epi8(
                    _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), codes));
            const __m128i upper_bytes =  // of e2m1 as float16, whose lower bytes are zero
                _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3e,
                              -0x3c, -0x3a);
            const __m128i found = _mm_shuffle_epi8(upper_bytes, codes), none = _mm_setzero_si128();
            return {_mm256_cvtph_ps(_mm_unpacklo_epi8(none, found)), _mm256_cvtph_ps(_mm_unpackhi_epi8(none, found))};
        }
        Map map;
    };

   private:
    static B upper(B b) { return _mm_srli_si128(b, 8); }
    static __m256 power(B b) {  // 2^-127 is subnormal
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(b), 23);
        return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));
    }
    static __m256 widen(const Bfloat* at) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
};

inline bool processor_has_it() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace
}  // namespace tiermoe

#include "lanes.hpp"
