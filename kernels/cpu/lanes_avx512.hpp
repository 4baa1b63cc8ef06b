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

    // Bytes: sixteen of them.
    using B = __m128i;
    static B bytes(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
    static B bytes(std::uint64_t first, std::uint64_t second) {
        return _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
    }
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
    static float half(const void* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof(bits));
        return _cvtsh_ss(bits);
    }

    // Sixteen float16 numbers, `stride` bytes apart.
    static F strided_halves(const std::uint8_t* at, int stride) {
        return _mm512_cvtph_ps(_mm256_set_m128i(eight_words(at + 8 * stride, stride), eight_words(at, stride)));
    }

    // Codes: 64 bytes; a lane has four of them. Words: half of them, as 32 integers of sixteen bits.
    using C = __m512i;
    using W = __m512i;
    static C codes(const void* at) { return _mm512_loadu_si512(at); }
    static C codes(const std::uint64_t* at) {
        return _mm512_set_epi64(number(at[7]), number(at[6]), number(at[5]), number(at[4]), number(at[3]), number(at[2]),
                                number(at[1]), number(at[0]));
    }
    static C quarters(const std::uint8_t* at, int stride) {  // sixteen bytes of four blocks
        C c = _mm512_castsi128_si512(bytes(at));
        c = _mm512_inserti32x4(c, bytes(at + stride), 1);
        c = _mm512_inserti32x4(c, bytes(at + 2 * stride), 2);
        return _mm512_inserti32x4(c, bytes(at + 3 * stride), 3);
    }
    template <int Shift, int Mask>
    static C field(C c) {
        return _mm512_and_si512(_mm512_srli_epi16(c, Shift), _mm512_set1_epi8(Mask));
    }
    template <int First, int Second, int Mask>
    static C fields(const void* at) {  // of the same 32 bytes
        const C twice = _mm512_broadcast_i64x4(half_of(at));
        const C shifts = _mm512_inserti64x4(_mm512_set1_epi16(First), _mm256_set1_epi16(Second), 1);
        return _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi8(Mask));
    }
    template <int Shift>
    static C with(C low, C high) {
        return _mm512_or_si512(low, _mm512_slli_epi16(high, Shift));
    }
    static C plus_bits(C c, std::uint64_t bits, int value) {  // where a bit is set
        return _mm512_mask_add_epi8(c, bits, c, _mm512_set1_epi8(static_cast<char>(value)));
    }
    static C minus_bits(C c, std::uint64_t bits) {  // negated where a bit is set
        return _mm512_mask_sub_epi8(c, bits, _mm512_setzero_si512(), c);
    }
    static C lookup(const std::int8_t* table, C c) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes(table)), c);
    }
    template <bool Signed>
    static W even(C c) {
        return Signed ? _mm512_srai_epi16(_mm512_slli_epi16(c, 8), 8) : _mm512_and_si512(c, _mm512_set1_epi16(255));
    }
    template <bool Signed>
    static W odd(C c) {
        return Signed ? _mm512_srai_epi16(c, 8) : _mm512_srli_epi16(c, 8);
    }
    static W words(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
    static W words(F two_in_each_lane) { return _mm512_castps_si512(two_in_each_lane); }
    static W load_words(const std::int16_t* at) { return _mm512_loadu_si512(at); }
    static void store_words(std::int16_t* at, W w) { _mm512_storeu_si512(at, w); }
    static W less(W a, W b) { return _mm512_sub_epi16(a, b); }
    // The sums of the products of two words.
    static I products(W w, const std::int16_t* x) { return _mm512_madd_epi16(w, load_words(x)); }
    static I add_products(I sum, W w, const std::int16_t* x) { return _mm512_dpwssd_epi32(sum, w, load_words(x)); }
    static F fused(F a, F b, F c) { return fma(a, b, c); }
    // Lane i gets at[places[i]], of eight numbers.
    static F spread(const float* at, const std::int32_t* places) {
        return _mm512_permutexvar_ps(_mm512_load_si512(places), _mm512_castps256_ps512(_mm256_loadu_ps(at)));
    }

   private:
    static __m128i eight_words(const std::uint8_t* at, int stride) {
        const auto word = [&](int i) {
            std::int16_t bits;
            std::memcpy(&bits, at + i * stride, sizeof(bits));
            return bits;
        };
        return _mm_setr_epi16(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
    }
    static __m256i half_of(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
    static long long number(std::uint64_t bits) { return static_cast<long long>(bits); }
};

inline bool processor_has_it() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

}  // namespace
}  // namespace tiermoe

#include "lanes.hpp"
