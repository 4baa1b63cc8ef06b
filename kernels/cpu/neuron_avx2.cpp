// AVX2: half a tile's vector against four inputs of a row is one vpmaddubsw, whose 16-bit sums hold a whole tile.
#include <algorithm>

#include "fit.hpp"
#include "neuron_ffn.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include "lanes_avx2.hpp"

namespace tiermoe {
namespace {

constexpr int kBlock = 4;

inline __m256i load(const std::uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

inline __m256i four(const std::int8_t* q) {
    std::int32_t value;
    std::memcpy(&value, q, sizeof(value));
    return _mm256_set1_epi32(value);
}

template <int Shift>
inline __m256i field(__m256i p, int mask) {  // shifts in 16 bits: what crosses a byte is masked away
    if constexpr (Shift == 0) return _mm256_and_si256(p, _mm256_set1_epi8(static_cast<char>(mask)));
    return _mm256_and_si256(_mm256_srli_epi16(p, Shift), _mm256_set1_epi8(static_cast<char>(mask)));
}

// Half of the eight vectors of a tile (eight outputs), one code a byte.
template <int B>
inline void decode(const std::uint8_t* at, __m256i* v) {
    if constexpr (B == 8) {
        for (int k = 0; k < 8; ++k) v[k] = load(at + 64 * k);
    } else if constexpr (B == 4) {
        for (int k = 0; k < 4; ++k) {
            const __m256i p = load(at + 64 * k);
            v[2 * k] = field<0>(p, 15);
            v[2 * k + 1] = field<4>(p, 15);
        }
    } else if constexpr (B == 3) {
        const __m256i a = load(at), b = load(at + 64), c = load(at + 128);
        v[0] = field<0>(a, 7);
        v[1] = field<3>(a, 7);
        v[2] = field<0>(b, 7);
        v[3] = field<3>(b, 7);
        v[4] = field<0>(c, 7);
        v[5] = field<3>(c, 7);
        v[6] = _mm256_or_si256(field<6>(a, 3), field<4>(c, 4));
        v[7] = _mm256_or_si256(field<6>(b, 3), field<5>(c, 4));
    } else if constexpr (B == 2) {
        for (int k = 0; k < 2; ++k) {
            const __m256i p = load(at + 64 * k);
            v[4 * k] = field<0>(p, 3);
            v[4 * k + 1] = field<2>(p, 3);
            v[4 * k + 2] = field<4>(p, 3);
            v[4 * k + 3] = field<6>(p, 3);
        }
    } else {
        const __m256i p = load(at);
        v[0] = field<0>(p, 1);
        v[1] = field<1>(p, 1);
        v[2] = field<2>(p, 1);
        v[3] = field<3>(p, 1);
        v[4] = field<4>(p, 1);
        v[5] = field<5>(p, 1);
        v[6] = field<6>(p, 1);
        v[7] = field<7>(p, 1);
    }
}

// sum + the dot product of a tile's half with its 32 inputs
template <int B>
inline __m256i tile_dot(__m256i sum, const __m256i* v, const std::int8_t* q) {
    if constexpr (B == 8) {
        // 2 * 255 * 127 does not fit in 16 bits: even and odd bytes apart, in products of 16 bits.
        const __m256i even = _mm256_set1_epi16(0x00ff);
        for (int k = 0; k < 8; ++k) {
            const __m256i x = four(q + 4 * k);
            const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(v[k], even), x_even));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(v[k], 8), x_odd));
        }
        return sum;
    } else {
        __m256i words = _mm256_setzero_si256();  // at most 8 * 2 * 15 * 127 = 30480
        for (int k = 0; k < 8; ++k) words = _mm256_add_epi16(words, _mm256_maddubs_epi16(v[k], four(q + 4 * k)));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
}

template <int B, int R, int M>
inline void dots(const std::uint8_t* codes, int tile_bytes, int unit_bytes, int units, const std::int8_t* const* q,
                 V::I (*sum)[R]) {
    for (int t = 0; t < M; ++t)
        for (int half = 0; half < 2; ++half) {
            __m256i total[R];
            for (int r = 0; r < R; ++r) total[r] = _mm256_setzero_si256();
            for (int u = 0; u < units; ++u) {
                const std::uint8_t* tile = codes + u * unit_bytes + t * tile_bytes + 32 * half;
                if (half == 0)
                    for (int line = 0; line < B; ++line) prefetch(tile + 64 * line);
                __m256i v[8];
                decode<B>(tile, v);
                for (int r = 0; r < R; ++r) total[r] = tile_dot<B>(total[r], v, q[r] + u * kTileInputs);
            }
            for (int r = 0; r < R; ++r) sum[t][r].half[half] = total[r];
        }
}

constexpr int kVectorBytes = 32;

}  // namespace
}  // namespace tiermoe

#include "fit_body.hpp"
#include "neuron_body.hpp"

namespace tiermoe {

const Kernels* avx2_kernels() {
    static constexpr Kernels kernels = table("avx2");
    return processor_has_it() ? &kernels : nullptr;
}

}  // namespace tiermoe

#else

namespace tiermoe {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace tiermoe

#endif
