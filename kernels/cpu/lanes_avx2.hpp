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

    // Bytes: sixteen of them.
    using B = __m128i;
    static B bytes(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
    static B bytes(std::uint64_t first, std::uint64_t second) {
        return _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
    }
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
    static float half(const void* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, sizeof(bits));
        return _cvtsh_ss(bits);
    }

    // Sixteen float16 numbers, `stride` bytes apart.
    static F strided_halves(const std::uint8_t* at, int stride) {
        return {_mm256_cvtph_ps(eight_words(at, stride)), _mm256_cvtph_ps(eight_words(at + 8 * stride, stride))};
    }

    // Codes: 64 bytes; a lane has four of them. Words: half of them, as 32 integers of sixteen bits.
    using C = I;
    using W = I;
    static C codes(const void* at) { return {half_of(at), half_of(static_cast<const std::uint8_t*>(at) + 32)}; }
    static C codes(const std::uint64_t* at) {
        return {_mm256_set_epi64x(number(at[3]), number(at[2]), number(at[1]), number(at[0])),
                _mm256_set_epi64x(number(at[7]), number(at[6]), number(at[5]), number(at[4]))};
    }
    static C quarters(const std::uint8_t* at, int stride) {  // sixteen bytes of four blocks
        return {_mm256_set_m128i(bytes(at + stride), bytes(at)), _mm256_set_m128i(bytes(at + 3 * stride), bytes(at + 2 * stride))};
    }
    template <int Shift, int Mask>
    static C field(C c) {
        return {part<Shift, Mask>(c.half[0]), part<Shift, Mask>(c.half[1])};
    }
    template <int First, int Second, int Mask>
    static C fields(const void* at) {  // of the same 32 bytes
        return {part<First, Mask>(half_of(at)), part<Second, Mask>(half_of(at))};
    }
    template <int Shift>
    static C with(C low, C high) {
        return each(low, high, [](__m256i a, __m256i b) { return _mm256_or_si256(a, _mm256_slli_epi16(b, Shift)); });
    }
    static C plus_bits(C c, std::uint64_t bits, int value) {  // where a bit is set
        const __m256i more = _mm256_set1_epi8(static_cast<char>(value));
        return each(c, spread_bits(bits), [&](__m256i a, __m256i set) { return _mm256_add_epi8(a, _mm256_and_si256(set, more)); });
    }
    static C minus_bits(C c, std::uint64_t bits) {  // negated where a bit is set
        return each(c, spread_bits(bits), [](__m256i a, __m256i set) { return _mm256_sub_epi8(_mm256_xor_si256(a, set), set); });
    }
    static C lookup(const std::int8_t* table, C c) {
        const __m256i twice = _mm256_broadcastsi128_si256(bytes(table));
        return {_mm256_shuffle_epi8(twice, c.half[0]), _mm256_shuffle_epi8(twice, c.half[1])};
    }
    template <bool Signed>
    static W even(C c) {
        for (__m256i& h : c.half)
            h = Signed ? _mm256_srai_epi16(_mm256_slli_epi16(h, 8), 8) : _mm256_and_si256(h, _mm256_set1_epi16(255));
        return c;
    }
    template <bool Signed>
    static W odd(C c) {
        for (__m256i& h : c.half) h = Signed ? _mm256_srai_epi16(h, 8) : _mm256_srli_epi16(h, 8);
        return c;
    }
    static W words(int value) { return {_mm256_set1_epi16(static_cast<short>(value)), _mm256_set1_epi16(static_cast<short>(value))}; }
    static W words(F two_in_each_lane) { return {_mm256_castps_si256(two_in_each_lane.a), _mm256_castps_si256(two_in_each_lane.b)}; }
    static W load_words(const std::int16_t* at) { return codes(at); }
    static void store_words(std::int16_t* at, W w) {
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + 16 * i), w.half[i]);
    }
    static W less(W x, W y) {
        return each(x, y, [](__m256i a, __m256i b) { return _mm256_sub_epi16(a, b); });
    }
    // The sums of the products of two words.
    static I products(W w, const std::int16_t* x) {
        return each(w, load_words(x), [](__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); });
    }
    static I add_products(I sum, W w, const std::int16_t* x) {
        return each(sum, products(w, x), [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
    }
    static F fused(F a, F b, F c) { return fma(a, b, c); }
    // Lane i gets at[places[i]], of eight numbers.
    static F spread(const float* at, const std::int32_t* places) {
        const __m256 eight = _mm256_loadu_ps(at);
        return {_mm256_permutevar8x32_ps(eight, half_of(places)), _mm256_permutevar8x32_ps(eight, half_of(places + 8))};
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
    template <int Shift, int Mask>
    static __m256i part(__m256i v) {
        return _mm256_and_si256(_mm256_srli_epi16(v, Shift), _mm256_set1_epi8(Mask));
    }
    static C spread_bits(std::uint64_t bits) {  // a byte of ones for each bit that is set
        const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i own = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
        C c;
        for (int i = 0; i < 2; ++i) {
            const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits >> (32 * i))), places);
            c.half[i] = _mm256_cmpeq_epi8(_mm256_and_si256(all, own), own);
        }
        return c;
    }
    template <typename Op>
    static I each(I x, I y, Op op) {
        return {op(x.half[0], y.half[0]), op(x.half[1], y.half[1])};
    }
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
