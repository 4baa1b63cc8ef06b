// Plain C++: for processors without AVX2, and the arithmetic that the others are checked against.
#include <algorithm>

#include "fit.hpp"
#include "neuron_ffn.hpp"

#include "lanes_portable.hpp"

namespace tiermoe {
namespace {

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
