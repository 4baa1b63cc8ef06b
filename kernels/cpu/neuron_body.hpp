// The kernels of one instruction set. Included once by each neuron_<set>.cpp, after it has defined, in an unnamed
// namespace:
//   V          sixteen lanes: F (float), I (int32), and the few operations on them
//   kBlock     rows that share one decoding of a weight
//   dots<B, R, M>(codes, tile_bytes, unit_bytes, units, q, sum)   integer dot products of M tiles with R rows; exact
// Everything here is inlined into functions of the including file, and so compiled for its instruction set.

#include "neuron_ffn.hpp"

namespace tiermoe {
namespace {

constexpr int kGroupMax = 128;
constexpr float kTiny = 1e-30f;  // groups of inputs below it count as zero, or 127 / maximum might overflow

// One group of `size` inputs, filled up with zeros to a multiple of 32. A value that is not finite makes the scale NaN,
// and with it every output of the row.
inline void quantize_group(const float* x, int size, std::int8_t* q, float* affine) {
    std::uint32_t largest = 0;
    for (int i = 0; i < size; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7fffffffu;  // of the absolute value, which orders as the value does
        largest = bits > largest ? bits : largest;
    }
    float maximum;
    std::memcpy(&maximum, &largest, sizeof(maximum));
    const int padded = (size + kTileInputs - 1) / kTileInputs * kTileInputs;
    const bool finite = largest < 0x7f800000u;
    if (!finite || maximum < kTiny) {
        std::memset(q, 0, static_cast<std::size_t>(padded));
        affine[0] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        affine[1] = affine[0];
        return;
    }
    const float inverse = 127.0f / maximum;
    std::int32_t sum = 0;
    for (int i = 0; i < size; ++i) {
        const float shifted = x[i] * inverse + 12582912.0f;  // rounds to the nearest, ties to even
        std::int32_t bits;
        std::memcpy(&bits, &shifted, sizeof(bits));
        const std::int32_t value = bits - 0x4b400000;
        q[i] = static_cast<std::int8_t>(value);
        sum += value;
    }
    for (int i = size; i < padded; ++i) q[i] = 0;
    affine[0] = maximum * (1.0f / 127.0f);
    affine[1] = affine[0] * static_cast<float>(sum);
}

void quantize(const float* x, std::int64_t size, int group, std::int8_t* q, float* affine) {
    for (std::int64_t at = 0; at < size; at += group, affine += 2)
        quantize_group(x + at, static_cast<int>(size - at < group ? size - at : group), q + at, affine);
}

void add(const float* part, std::int64_t stride, int chunks, float weight, std::int64_t size, float* out) {
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        V::F sum = V::load(part + i);
        for (int c = 1; c < chunks; ++c) sum = V::add(sum, V::load(part + c * stride + i));
        V::store(out + i, V::fma(V::set(weight), sum, V::load(out + i)));
    }
    for (; i < size; ++i) {
        float sum = part[i];
        for (int c = 1; c < chunks; ++c) sum += part[c * stride + i];
        out[i] += weight * sum;
    }
}

// --- packed ------------------------------------------------------------------------------------------------

// y += scale * (affine[0] * dot) + offset * affine[1]
inline V::F apply(V::F y, V::I dot, V::F scale, V::F offset, const float* affine) {
    const V::F scaled = V::mul(V::to_float(dot), V::set(affine[0]));
    return V::fma(offset, V::set(affine[1]), V::fma(scale, scaled, y));
}

// A block of 32 neurons, R rows: h[r] = act(gate) * up. Its four tiles are gate and up of each half.
template <int B, int R>
inline void gate_up_block(const PackedJob& job, const std::uint8_t* codes, const std::uint16_t* scales,
                          const QuantizedRow* x, float (*h)[kGroupMax]) {
    constexpr int kTile = 64 * B, M = 4;
    V::F y[M][R];
    for (int t = 0; t < M; ++t)
        for (int r = 0; r < R; ++r) y[t][r] = V::zero();
    const std::int8_t* q[R];
    for (int r = 0; r < R; ++r) q[r] = x[r].q;
    const std::int64_t all_units = (job.hidden + kTileInputs - 1) / kTileInputs;
    const int group_units = job.group / kTileInputs;
    std::int64_t g = 0;
    for (std::int64_t unit = 0; unit < all_units; unit += group_units, ++g) {
        const int units = static_cast<int>(all_units - unit < group_units ? all_units - unit : group_units);
        V::I sum[M][R];
        dots<B, R, M>(codes, kTile, M * kTile, units, q, sum);
        for (int t = 0; t < M; ++t, scales += 2 * kLanes) {
            prefetch(scales);
            const V::F scale = V::load_f16(scales), offset = V::load_f16(scales + kLanes);
            for (int r = 0; r < R; ++r) y[t][r] = apply(y[t][r], sum[t][r], scale, offset, x[r].affine + 2 * g);
        }
        codes += units * M * kTile;
        for (int r = 0; r < R; ++r) q[r] += units * kTileInputs;
    }
    for (int half = 0; half < 2; ++half)
        for (int r = 0; r < R; ++r) {
            float gate[kLanes], up[kLanes];
            V::store(gate, y[half][r]);
            V::store(up, y[2 + half][r]);
            activate(gate, up, job.activation, h[r] + half * kLanes);
        }
}

// M tiles of columns, R rows: out[r] += down . h[r] over one group of neurons
template <int B, int R, int M>
inline void down_tiles(const std::uint8_t* codes, int tile_bytes, const std::uint16_t* scales, int units,
                       const QuantizedRow* h, float* const* out) {
    const std::int8_t* q[R];
    for (int r = 0; r < R; ++r) q[r] = h[r].q;
    V::I sum[M][R];
    dots<B, R, M>(codes, tile_bytes, 64 * B, units, q, sum);
    for (int t = 0; t < M; ++t, scales += 2 * kLanes) {
        prefetch(scales);
        const V::F scale = V::load_f16(scales), offset = V::load_f16(scales + kLanes);
        for (int r = 0; r < R; ++r) {
            float* at = out[r] + t * kLanes;
            V::store(at, apply(V::load(at), sum[t][r], scale, offset, h[r].affine));
        }
    }
}

template <int B>
void packed(const PackedJob& job) {
    const std::int64_t columns = (job.hidden + kTileOutputs - 1) / kTileOutputs, width = columns * kTileOutputs;
    const std::int64_t units = (job.hidden + kTileInputs - 1) / kTileInputs;
    const std::int64_t block_codes = units * 4 * 64 * B;
    const std::int64_t block_scales = (job.hidden + job.group - 1) / job.group * 8 * kLanes;
    const int tile_codes = job.group / kTileInputs * 64 * B;
    std::memset(job.out, 0, static_cast<std::size_t>(job.rows * width) * sizeof(float));

    alignas(64) float h[kItemRows][kGroupMax];
    alignas(64) std::int8_t q[kItemRows][kGroupMax];
    float affine[kItemRows][2];
    QuantizedRow quantized[kItemRows];
    float* out[kItemRows];
    for (int r = 0; r < job.rows; ++r) {
        quantized[r] = {q[r], affine[r]};
        out[r] = job.out + r * width;
    }
    const std::uint8_t *gate_up = job.gate_up, *down = job.down;
    const std::uint16_t *gate_up_scales = job.gate_up_scales, *down_scales = job.down_scales;
    for (std::int64_t done = 0; done < job.neurons; done += job.group) {
        const int neurons = static_cast<int>(job.neurons - done < job.group ? job.neurons - done : job.group);
        for (int n = 0; n < neurons; n += kBlockNeurons) {
            row_blocks<kBlock>(job.rows, 0, [&](auto block, int r) {
                gate_up_block<B, decltype(block)::value>(job, gate_up, gate_up_scales, job.x + r,
                                                         reinterpret_cast<float(*)[kGroupMax]>(&h[r][n]));
            });
            gate_up += block_codes;
            gate_up_scales += block_scales;
        }
        // Neurons that fill up the last tile have neither weights nor inputs: they come out as 0, and are left out here.
        for (int r = 0; r < job.rows; ++r) quantize_group(h[r], neurons, q[r], affine[r]);
        const int down_units = (neurons + kTileInputs - 1) / kTileInputs;
        std::int64_t c = 0;
        const auto down_of = [&](auto count) {
            constexpr int M = decltype(count)::value;
            row_blocks<kBlock>(job.rows, 0, [&](auto block, int r) {
                constexpr int R = decltype(block)::value;
                float* at[R];
                for (int i = 0; i < R; ++i) at[i] = out[r + i] + c * kTileOutputs;
                down_tiles<B, R, M>(down + c * tile_codes, tile_codes, down_scales + c * 2 * kLanes, down_units,
                                    quantized + r, at);
            });
            c += M;
        };
        while (c + 4 <= columns) down_of(std::integral_constant<int, 4>());
        while (c < columns) down_of(std::integral_constant<int, 1>());
        down += columns * tile_codes;
        down_scales += columns * 2 * kLanes;
    }
}

// --- full precision ----------------------------------------------------------------------------------------

constexpr int kNeurons = 8;  // neurons that share one read and write of the result rows

template <typename T>
inline V::F load_some(const T* at, std::int64_t count) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, at, static_cast<std::size_t>(count) * sizeof(T));
    return V::load_as(lanes);
}

// gate[r], up[r] = dot products of one neuron with R rows
template <typename T, int R>
inline void full_dots(const T* gate_row, std::int64_t width, const float* const* x, float (*gate)[kLanes],
                      float (*up)[kLanes], int n) {
    const T* up_row = gate_row + width;
    V::F gate_sum[R], up_sum[R];
    for (int r = 0; r < R; ++r) gate_sum[r] = up_sum[r] = V::zero();
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        prefetch(gate_row + i);
        prefetch(up_row + i);
        const V::F g = V::load_as(gate_row + i), u = V::load_as(up_row + i);
        for (int r = 0; r < R; ++r) {
            const V::F v = V::load(x[r] + i);
            gate_sum[r] = V::fma(g, v, gate_sum[r]);
            up_sum[r] = V::fma(u, v, up_sum[r]);
        }
    }
    if (i < width) {
        const V::F g = load_some(gate_row + i, width - i), u = load_some(up_row + i, width - i);
        for (int r = 0; r < R; ++r) {
            const V::F v = load_some(x[r] + i, width - i);
            gate_sum[r] = V::fma(g, v, gate_sum[r]);
            up_sum[r] = V::fma(u, v, up_sum[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        gate[r][n] = sum_lanes(gate_sum[r]);
        up[r][n] = sum_lanes(up_sum[r]);
    }
}

// out[r] += sum over `neurons` of h[r][n] * down_row(n)
template <typename T, int R>
inline void full_scatter(const T* rows, int neurons, std::int64_t width, float (*h)[kLanes], float* const* out) {
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        V::F sum[R];
        for (int r = 0; r < R; ++r) sum[r] = V::load(out[r] + i);
        for (int n = 0; n < neurons; ++n) {
            const V::F d = V::load_as(rows + n * width + i);
            for (int r = 0; r < R; ++r) sum[r] = V::fma(d, V::set(h[r][n]), sum[r]);
        }
        for (int r = 0; r < R; ++r) V::store(out[r] + i, sum[r]);
    }
    if (i < width) {
        V::F sum[R];
        for (int r = 0; r < R; ++r) sum[r] = V::load(out[r] + i);
        for (int n = 0; n < neurons; ++n) {
            const V::F d = load_some(rows + n * width + i, width - i);
            for (int r = 0; r < R; ++r) sum[r] = V::fma(d, V::set(h[r][n]), sum[r]);
        }
        for (int r = 0; r < R; ++r) V::store(out[r] + i, sum[r]);
    }
}

template <typename T>
void full(const FullJob& job) {
    const std::int64_t width = job.hidden, padded = (width + kLanes - 1) / kLanes * kLanes;
    std::memset(job.out, 0, static_cast<std::size_t>(job.rows * padded) * sizeof(float));
    const T* gate_up = static_cast<const T*>(job.gate_up);
    const T* down = static_cast<const T*>(job.down);
    for (std::int64_t j = 0; j < job.neurons; j += kNeurons) {
        const int neurons = static_cast<int>(job.neurons - j < kNeurons ? job.neurons - j : kNeurons);
        row_blocks<4>(job.rows, 0, [&](auto block, int first) {
            constexpr int R = decltype(block)::value;
            float gate[R][kLanes] = {}, up[R][kLanes] = {}, h[R][kLanes];
            for (int n = 0; n < neurons; ++n)
                full_dots<T, R>(gate_up + (j + n) * 2 * width, width, job.x + first, gate, up, n);
            float* out[R];
            for (int r = 0; r < R; ++r) {
                activate(gate[r], up[r], job.activation, h[r]);
                out[r] = job.out + (first + r) * padded;
            }
            full_scatter<T, R>(down + j * width, neurons, width, h, out);
        });
    }
}

constexpr Kernels table(const char* name) {
    return {name,
            {nullptr, packed<1>, packed<2>, packed<3>, packed<4>, nullptr, nullptr, nullptr, packed<8>},
            {full<float>, full<Half>, full<Bfloat>},
            quantize,
            add,
            fit,
            gptq};
}

}  // namespace
}  // namespace tiermoe
