// Sixteen lanes of AVX-512, for the file that includes this: neuron_avx512.cpp, forms_avx512.cpp.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // its headers make undefined vectors on purpose
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

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
    using F = __m512;
    using I = __m512i;
    static F zero() { return _mm512_setzero_ps(); }
    static F set(float v) { return _mm512_set1_ps(v); }
    static F load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, F f) { _mm512_storeu_ps(at, f); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static F load_f16(const std::uint16_t* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static F load_as(const float* at) { return load(at); }
    static F load_as(const Half* at) { return load_f16(&at->bits); }
    static F load_as(const Bfloat* at) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }

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
    static F from_u8(B b) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b)); }
    static F from_i8(B b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }
    // A byte of e4m3, moved to where float16 has sign, exponent and fraction, is worth 2^-8 of its value.
    static F from_e4m3(B b) {
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(b), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbfff))));
    }
    static F from_e8m0(B b) {  // 2^-127 is subnormal
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(b), 23);
        return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
    }
    static F halves(float first, float second) { return _mm512_mask_blend_ps(0xff00, set(first), set(second)); }
    static float half(const void* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof(bits));
        return _cvtsh_ss(bits);
    }

    // The low and the high halves of sixteen bytes, mapped: Map takes what the codes stand for to weights.
    template <Four Codes, class Map>
    struct Lookup {
        explicit Lookup(Map map)
            : table(map(Codes == Four::e2m1
                            ? _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6)
                        : Codes == Four::iq4
                            ? _mm512_setr_ps(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
                            : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))) {}
        F low(const void* at) const { return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes(at)), table); }
        F high(const void* at) const {
            return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes(at)), 4), table);
        }
        F table;  // a permutation reads the low four bits alone
    };
};

inline bool processor_has_it() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

}  // namespace
}  // namespace tiermoe

#include "lanes.hpp"
