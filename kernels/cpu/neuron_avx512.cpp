// AVX-512 with VNNI: a tile's vector of 64 codes against four inputs of a row, broadcast, is one vpdpbusd.
#include <algorithm>

#include "fit.hpp"
#include "neuron_ffn.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include "lanes_avx512.hpp"

namespace tiermoe {
namespace {

constexpr int kBlock = 4;

inline __m512i load(const std::uint8_t* at) { return _mm512_loadu_si512(at); }

inline __m512i four(const std::int8_t* q) {
    std::int32_t value;
    std::memcpy(&value, q, sizeof(value));
    return _mm512_set1_epi32(value);
}

inline __m512i dot(__m512i sum, __m512i codes, __m512i x) { return _mm512_dpbusd_epi32(sum, codes, x); }

template <int Shift>
inline __m512i field(__m512i p, int mask) {  // shifts in 16 bits: what crosses a byte is masked away
    if constexpr (Shift == 0) return _mm512_and_si512(p, _mm512_set1_epi8(static_cast<char>(mask)));
    return _mm512_and_si512(_mm512_srli_epi16(p, Shift), _mm512_set1_epi8(static_cast<char>(mask)));
}

// The K-th vector of a tile, one code a byte: for several rows, which share the shifts.
template <int B, int K>
inline __m512i code(const std::uint8_t* at) {
    if constexpr (B == 3 && K >= 6) {
        constexpr int kBit = K == 6 ? 4 : 5;  // brings the third vector's bit 6 or 7 to bit 2
        return _mm512_or_si512(field<6>(load(at + 64 * (K - 6)), 3), field<kBit>(load(at + 128), 4));
    } else if constexpr (B == 3) {
        return field<K % 2 * 3>(load(at + K / 2 * 64), 7);
    } else if constexpr (B == 8) {
        return load(at + 64 * K);
    } else {
        constexpr int kFields = 8 / B;
        return field<K % kFields * B>(load(at + K / kFields * 64), (1 << B) - 1);
    }
}

inline __m512i stream(const std::uint8_t* at) {
    prefetch(at);
    return load(at);
}

// One row: fields stay where they are in their bytes, so each sum carries a power of two, which is shifted out of the
// sums once a group instead of out of every vector.
template <int B>
struct Sums;

template <>
struct Sums<8> {
    __m512i a, b;
    void tile(const std::uint8_t* at, const __m512i* x) {
        for (int k = 0; k < 8; k += 2) {
            a = dot(a, stream(at + 64 * k), x[k]);
            b = dot(b, stream(at + 64 * k + 64), x[k + 1]);
        }
    }
    __m512i total() const { return _mm512_add_epi32(a, b); }
};

template <>
struct Sums<4> {
    __m512i low, high;
    void tile(const std::uint8_t* at, const __m512i* x) {
        for (int k = 0; k < 4; ++k) {
            const __m512i p = stream(at + 64 * k);
            low = dot(low, field<0>(p, 0x0f), x[2 * k]);
            high = dot(high, field<0>(p, 0xf0), x[2 * k + 1]);
        }
    }
    __m512i total() const { return _mm512_add_epi32(low, _mm512_srai_epi32(high, 4)); }
};

template <>
struct Sums<3> {
    __m512i low, middle, top, bit6, bit7;
    void tile(const std::uint8_t* at, const __m512i* x) {
        const __m512i a = stream(at), b = stream(at + 64), c = stream(at + 128);
        low = dot(low, field<0>(a, 0x07), x[0]);
        middle = dot(middle, field<0>(a, 0x38), x[1]);
        low = dot(low, field<0>(b, 0x07), x[2]);
        middle = dot(middle, field<0>(b, 0x38), x[3]);
        low = dot(low, field<0>(c, 0x07), x[4]);
        middle = dot(middle, field<0>(c, 0x38), x[5]);
        top = dot(top, field<0>(a, 0xc0), x[6]);
        bit6 = dot(bit6, field<0>(c, 0x40), x[6]);
        top = dot(top, field<0>(b, 0xc0), x[7]);
        bit7 = dot(bit7, field<0>(c, 0x80), x[7]);
    }
    __m512i total() const {  // bits 6 and 7 of the third vector are worth four
        const __m512i fours = _mm512_add_epi32(_mm512_srai_epi32(bit6, 4), _mm512_srai_epi32(bit7, 5));
        const __m512i ones = _mm512_add_epi32(_mm512_srai_epi32(middle, 3), _mm512_srai_epi32(top, 6));
        return _mm512_add_epi32(_mm512_add_epi32(low, ones), fours);
    }
};

template <>
struct Sums<2> {
    __m512i s0, s1, s2, s3;
    void tile(const std::uint8_t* at, const __m512i* x) {
        for (int k = 0; k < 2; ++k, x += 4) {
            const __m512i p = stream(at + 64 * k);
            s0 = dot(s0, field<0>(p, 0x03), x[0]);
            s1 = dot(s1, field<0>(p, 0x0c), x[1]);
            s2 = dot(s2, field<0>(p, 0x30), x[2]);
            s3 = dot(s3, field<0>(p, 0xc0), x[3]);
        }
    }
    __m512i total() const {
        return _mm512_add_epi32(_mm512_add_epi32(s0, _mm512_srai_epi32(s1, 2)),
                                _mm512_add_epi32(_mm512_srai_epi32(s2, 4), _mm512_srai_epi32(s3, 6)));
    }
};

template <>
struct Sums<1> {  // one shift a tile, and four sums instead of eight to put together
    __m512i s0, s1, s2, s3;
    void tile(const std::uint8_t* at, const __m512i* x) {
        __m512i p = stream(at);
        for (int k = 0; k < 2; ++k, x += 4, p = _mm512_srli_epi16(p, 4)) {
            s0 = dot(s0, field<0>(p, 0x01), x[0]);
            s1 = dot(s1, field<0>(p, 0x02), x[1]);
            s2 = dot(s2, field<0>(p, 0x04), x[2]);
            s3 = dot(s3, field<0>(p, 0x08), x[3]);
        }
    }
    __m512i total() const {
        return _mm512_add_epi32(_mm512_add_epi32(s0, _mm512_srai_epi32(s1, 1)),
                                _mm512_add_epi32(_mm512_srai_epi32(s2, 2), _mm512_srai_epi32(s3, 3)));
    }
};

// Broadcasting four inputs takes as long as two loads, so all tiles share it.
template <int B, int R, int M, int K>
inline void dots_of(const std::uint8_t* tile, int tile_bytes, const std::int8_t* const* q, int at, V::I (*sum)[R]) {
    if constexpr (K < 8) {
        __m512i codes[M];
        for (int t = 0; t < M; ++t) codes[t] = code<B, K>(tile + t * tile_bytes);
        for (int r = 0; r < R; ++r) {
            const __m512i x = four(q[r] + at + 4 * K);
            for (int t = 0; t < M; ++t) sum[t][r] = dot(sum[t][r], codes[t], x);
        }
        dots_of<B, R, M, K + 1>(tile, tile_bytes, q, at, sum);
    }
}

template <int B, int R, int M>
inline void dots(const std::uint8_t* codes, int tile_bytes, int unit_bytes, int units, const std::int8_t* const* q,
                 V::I (*sum)[R]) {
    if constexpr (R == 1) {
        Sums<B> sums[M] = {};
        for (int u = 0; u < units; ++u) {
            const std::int8_t* x = q[0] + u * kTileInputs;
            const __m512i four_by_four[8] = {four(x),      four(x + 4),  four(x + 8),  four(x + 12),
                                             four(x + 16), four(x + 20), four(x + 24), four(x + 28)};
            for (int t = 0; t < M; ++t) sums[t].tile(codes + u * unit_bytes + t * tile_bytes, four_by_four);
        }
        for (int t = 0; t < M; ++t) sum[t][0] = sums[t].total();
    } else {
        for (int t = 0; t < M; ++t)
            for (int r = 0; r < R; ++r) sum[t][r] = _mm512_setzero_si512();
        for (int u = 0; u < units; ++u, codes += unit_bytes) {
            for (int t = 0; t < M; ++t)
                for (int line = 0; line < B; ++line) prefetch(codes + t * tile_bytes + 64 * line);
            dots_of<B, R, M, 0>(codes, tile_bytes, q, u * kTileInputs, sum);
        }
    }
}

constexpr int kVectorBytes = 64;

}  // namespace
}  // namespace tiermoe

#include "fit_body.hpp"
#include "neuron_body.hpp"

namespace tiermoe {

const Kernels* avx512_kernels() {
    static constexpr Kernels kernels = table("avx512");
    return processor_has_it() ? &kernels : nullptr;
}

}  // namespace tiermoe

#else

namespace tiermoe {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace tiermoe

#endif
