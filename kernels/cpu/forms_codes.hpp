// Products with weights that are small integers times a scale: see forms_body.hpp, which includes this.
//
// A row of inputs is rounded to integers of sixteen bits, 32 at a time, whose scale is a power of two: the error of an
// input is at most 2^-15 of the largest of its 32, and an input of eight bits, as bfloat16 has, that is not below 2^-7 of
// that is exact. Sums of at most eight products are integers; every instruction set then multiplies them with the scales,
// and adds, in the same order: all give the same bits.
//
// No sum is beyond 32 bits: a weight's integer is at most 255 in size (int8 with zero points; 128 in GGUF), an input's
// at most 2^15, and a lane adds eight of them: 2^26.
//
// A decoder D turns 128 weights, a step, into two vectors of 64 bytes:
//   kSteps, kBytes   steps of a block, and its bytes
//   codes<h>(block, c)   the bytes of step h of a block
//   kSigned, kZero   the bytes are signed; what is subtracted from them
//   kZeros           instead, each scale has an integer that is subtracted
//   kLayout          the input of a byte: Layout
//   kSlots           scales of a step, 4 or 8; scales(matrix, output, row, scale, other, room) fills those of a row
//   kOffset          `other` are numbers that are added to the weights of each scale; else the zero points
namespace tiermoe {
namespace {

enum class Layout {
    plain,    // byte by byte
    crossed,  // the first vector has weights 0 to 31 and 64 to 95
    halves,   // the first vector has the first half of each 32
    paired    // the first vector has the even ones of each 32
};

// The weight of byte `at` of vector k.
constexpr int weight_of(Layout layout, int k, int at) {
    switch (layout) {
        case Layout::plain: return 64 * k + at;
        case Layout::crossed: return at / 32 * 64 + 32 * k + at % 32;
        case Layout::halves: return at / 16 * 32 + 16 * k + at % 16;
        default: return at / 16 * 32 + at % 16 * 2 + k;
    }
}

template <Layout L, int Slots, int Bytes, int Steps = 1>
struct Code {
    static constexpr Layout kLayout = L;
    static constexpr int kSlots = Slots, kBytes = Bytes, kSteps = Steps, kZero = 0;
    static constexpr bool kSigned = false, kZeros = false, kOffset = false;
};

// Of each lane of vector k, its scale.
template <Layout L, int Slots, int K>
struct Places {
    constexpr Places() {
        for (int lane = 0; lane < kLanes; ++lane) at[lane] = weight_of(L, K, 4 * lane) * Slots / kStep;
    }
    alignas(64) std::int32_t at[kLanes]{};
};
template <Layout L, int Slots, int K>
constexpr Places<L, Slots, K> kPlaces;

template <class D>
constexpr const std::int32_t* places_of(int k) {
    return k ? kPlaces<D::kLayout, D::kSlots, 1>.at : kPlaces<D::kLayout, D::kSlots, 0>.at;
}

template <class D>
constexpr bool have_same_scales() {  // the two vectors, lane by lane
    for (int lane = 0; lane < kLanes; ++lane)
        if (places_of<D>(0)[lane] != places_of<D>(1)[lane]) return false;
    return true;
}

constexpr std::int8_t kE2m1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice what they are
constexpr std::int8_t kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

TIERMOE_INLINE inline void low_and_high(V::C both, V::C* c) {
    c[0] = V::field<0, 15>(both);
    c[1] = V::field<4, 15>(both);
}

TIERMOE_INLINE inline void two_bits(const std::uint8_t* at, V::C* c) {  // 32 bytes
    c[0] = V::fields<0, 2, 3>(at);
    c[1] = V::fields<4, 6, 3>(at);
}

TIERMOE_INLINE inline void look_up(const std::int8_t* table, V::C both, V::C* c) {
    low_and_high(both, c);
    for (int k = 0; k < 2; ++k) c[k] = V::lookup(table, c[k]);
}

// `count` float16 numbers, `stride` bytes apart.
inline void strided_halves(const std::uint8_t* from, int stride, std::int64_t count, float* to) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) V::store(to + i, V::strided_halves(from + i * stride, stride));
    for (; i < count; ++i) to[i] = V::half(from + i * stride);
}

// --- parts ---------------------------------------------------------------------------------------------------

template <Layout L, int Slots, int Bytes>
struct Parted : Code<L, Slots, Bytes> {
    static constexpr std::int64_t kEach = kStep / Slots;  // weights of a scale
    static void scales(const FormMatrix& m, std::int64_t output, const std::uint8_t*, float* scale, float*, float* room) {
        if (m.group == kEach) return group_scales(m, output, scale);
        group_scales(m, output, room);
        spread_groups(m, scale, [&](std::int64_t group) { return room[group]; });
    }
    template <typename F>
    static void spread_groups(const FormMatrix& m, float* to, F&& value) {
        std::int64_t slot = 0;
        for (std::int64_t group = 0; group < m.groups(); ++group) {
            const std::int64_t end = (group + 1) * m.group < m.inputs ? (group + 1) * m.group : m.inputs;
            for (const float v = value(group); slot * kEach < end; ++slot) to[slot] = v;
        }
    }
};

template <Layout L, int Bytes, int Zero>
struct WithZeros : Parted<L, 4, Bytes> {  // each zero point as two words
    static constexpr bool kZeros = true;
    static void scales(const FormMatrix& m, std::int64_t output, const std::uint8_t* row, float* scale, float* zero, float* room) {
        Parted<L, 4, Bytes>::scales(m, output, row, scale, zero, room);
        const auto words = [](std::uint32_t value) {
            const std::uint32_t both = value << 16 | value;
            float bits;
            std::memcpy(&bits, &both, sizeof(bits));
            return bits;
        };
        if (!m.zero) return std::fill(zero, zero + m.steps() * 4, words(Zero));
        const std::uint8_t* own = m.zero + output * m.groups();
        Parted<L, 4, Bytes>::spread_groups(m, zero, [&](std::int64_t group) { return words(own[group]); });
    }
};

struct Mxfp4 : Parted<Layout::paired, 4, 64> {
    static constexpr bool kSigned = true;
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        look_up(kE2m1, V::codes(at), c);
    }
};

struct Nvfp4 : Parted<Layout::paired, 8, 64> {
    static constexpr bool kSigned = true;
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        look_up(kE2m1, V::codes(at), c);
    }
};

struct Int4 : WithZeros<Layout::paired, 64, 8> {
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        low_and_high(V::codes(at), c);
    }
};

struct Int8 : WithZeros<Layout::halves, 128, 128> {
    template <int>
    TIERMOE_INLINE static void codes(const std::uint8_t* at, V::C* c) {
        for (int k = 0; k < 2; ++k) c[k] = V::quarters(at + 16 * k, 32);
    }
};

}  // namespace
}  // namespace tiermoe

#include "forms_gguf.hpp"

namespace tiermoe {
namespace {

// --- inputs --------------------------------------------------------------------------------------------------

// A row of inputs as integers, in the order of a form's vectors: of each step the even and the odd bytes of the first,
// then of the second; and of each scale of a weight, that of its inputs, and their sum.
struct Integers {
    Integers(float* arranged, std::int64_t steps)
        : words(reinterpret_cast<std::int16_t*>(arranged)), scales(arranged + steps * kStep / 2),
          sums(scales + steps * kMostSlots + kLanes) {}
    std::int16_t* words;
    float *scales, *sums;
};

// 32 inputs -> integers; their scale, NaN where an input is not finite.
inline float quantize(const float* x, std::int16_t* q) {
    std::int32_t largest = 0;
    for (int i = 0; i < kUnit; ++i) {
        std::int32_t bits;
        std::memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    std::int32_t exponent = largest >> 23;
    if (exponent == 255) {
        std::memset(q, 0, kUnit * sizeof(*q));
        return std::numeric_limits<float>::quiet_NaN();
    }
    exponent = exponent < 16 ? 16 : exponent;  // what is below 2^-111 gets fewer bits
    const std::int32_t up_bits = (254 + 14 - exponent) << 23, down_bits = (exponent - 14) << 23;
    float up, down;
    std::memcpy(&up, &up_bits, sizeof(up));
    std::memcpy(&down, &down_bits, sizeof(down));
    for (int i = 0; i < kUnit; ++i) {
        const float rounded = x[i] * up + 12582912.0f;  // 3 * 2^22: its last bit is worth 1
        std::int32_t bits;
        std::memcpy(&bits, &rounded, sizeof(bits));
        bits -= 0x4b400000;
        q[i] = static_cast<std::int16_t>(bits > 32767 ? 32767 : bits < -32767 ? -32767 : bits);
    }
    return down;
}

template <Layout L>
struct Order {
    constexpr Order() {
        for (int i = 0; i < kStep; ++i) at[i] = static_cast<std::uint8_t>(weight_of(L, i / 64, i % 32 * 2 + i / 32 % 2));
    }
    std::uint8_t at[kStep]{};
};
template <Layout L>
constexpr Order<L> kOrder;

// False: `order` names what is not there.
template <class D>
bool arrange_integers(const FormMatrix& m, const float* x, float* arranged) {
    const Integers to(arranged, m.steps());
    constexpr int kEach = kStep / D::kSlots;
    for (std::int64_t step = 0; step < m.steps(); ++step) {
        float some[kStep] = {}, scale[kStep / kUnit];
        std::int16_t q[kStep];
        const std::int64_t at = step * kStep, count = m.inputs - at < kStep ? m.inputs - at : kStep;
        if (!m.order) std::memcpy(some, x + at, static_cast<std::size_t>(count) * sizeof(float));
        for (std::int64_t i = 0; m.order && i < count; ++i) {
            if (m.order[at + i] < 0 || m.order[at + i] >= m.inputs) return false;
            some[i] = x[m.order[at + i]];
        }
        for (int u = 0; u < kStep / kUnit; ++u) scale[u] = quantize(some + u * kUnit, q + u * kUnit);
        for (int i = 0; i < kStep; ++i) to.words[at + i] = q[kOrder<D::kLayout>.at[i]];
        for (int slot = 0; slot < D::kSlots; ++slot) {
            std::int32_t sum = 0;
            for (int i = 0; i < kEach; ++i) sum += q[slot * kEach + i];
            to.scales[step * D::kSlots + slot] = scale[slot * kEach / kUnit];
            to.sums[step * D::kSlots + slot] = scale[slot * kEach / kUnit] * static_cast<float>(sum);
        }
    }
    for (int i = 0; i < kLanes; ++i) to.scales[m.steps() * D::kSlots + i] = to.sums[m.steps() * D::kSlots + i] = 0.0f;
    return true;
}

// --- products ------------------------------------------------------------------------------------------------

// The words of one step: the even and the odd bytes of the first vector, then of the second.
template <class D, int Half>
TIERMOE_INLINE inline void step_words(const std::uint8_t* block, const float* other, V::W* w) {
    V::C c[2];
    D::template codes<Half>(block, c);
    for (int k = 0; k < 2; ++k) {
        w[2 * k] = V::even<D::kSigned>(c[k]);
        w[2 * k + 1] = V::odd<D::kSigned>(c[k]);
    }
    if constexpr (D::kZeros || D::kZero != 0) {
        V::W zero = V::words(D::kZero);
        for (int k = 0; k < 4; ++k) {
            if constexpr (D::kZeros)
                if (k == 0 || (k == 2 && !have_same_scales<D>())) zero = V::words(V::spread(other, places_of<D>(k / 2)));
            w[k] = V::less(w[k], zero);
        }
    }
}

// Where the scales of a step's lanes are, of each vector.
struct LanePlaces {
    const std::int32_t *first, *second;
};

// sum + the products of a step. `scale`: of its weights times its inputs; Same: both vectors have the same lane by lane.
template <bool Same>
TIERMOE_INLINE inline V::F add_step(const V::W* w, const std::int16_t* x, const float* scale, LanePlaces places, V::F sum) {
    const V::I first = V::add_products(V::products(w[0], x), w[1], x + 32);
    if constexpr (Same) {
        const V::I both = V::add_products(V::add_products(first, w[2], x + 64), w[3], x + 96);
        return V::fused(V::to_float(both), V::spread(scale, places.first), sum);
    } else {
        const V::I second = V::add_products(V::products(w[2], x + 64), w[3], x + 96);
        sum = V::fused(V::to_float(first), V::spread(scale, places.first), sum);
        return V::fused(V::to_float(second), V::spread(scale, places.second), sum);
    }
}

// use(h, step, bytes of the block) for all steps of a row, whose last block may be a part of one.
template <class D, typename F>
TIERMOE_INLINE inline void for_steps(const FormMatrix& m, const std::uint8_t* row, F&& use) {
    const std::int64_t whole = m.inputs / (kStep * D::kSteps), rest = m.row_bytes() - whole * D::kBytes;
    for (std::int64_t block = 0; block < whole; ++block) {
        const std::uint8_t* at = row + block * D::kBytes;
        for (int line = 0; line < D::kBytes; line += 64) prefetch(at + line);
        use(std::integral_constant<int, 0>(), block * D::kSteps, at);
        if constexpr (D::kSteps == 2) use(std::integral_constant<int, 1>(), block * D::kSteps + 1, at);
    }
    if (!rest) return;
    std::uint8_t last[D::kBytes] = {};
    std::memcpy(last, row + whole * D::kBytes, static_cast<std::size_t>(rest));
    use(std::integral_constant<int, 0>(), whole, last);
}

// The scales of a row of weights times those of a row of inputs; the sum of what offsets add.
inline V::F scale_inputs(const Integers& x, const float* scale, const float* offset, std::int64_t slots, float* scaled) {
    V::F sum = V::zero();
    for (std::int64_t at = 0; at < slots; at += kLanes) {
        V::store(scaled + at, V::mul(V::load(scale + at), V::load(x.scales + at)));
        if (offset) sum = V::fused(V::load(offset + at), V::load(x.sums + at), sum);
    }
    return sum;
}

// f(0) to f(N - 1), unrolled: what they index stays in registers.
template <typename F, int... I>
TIERMOE_INLINE inline void each(std::integer_sequence<int, I...>, F&& f) {
    (f(I), ...);
}

// An output as several rows share it; `offset`: null, or those of its scales.
struct Stored {
    const std::int16_t* words;  // of all steps
    const float *scale, *offset;
};

// `scaled`: room for the scales of M times R sums.
template <bool Same, int M, int R>
inline void stored_products(std::int64_t steps, int slots, LanePlaces places, const Stored* outputs, float* const* x,
                            float* scaled, int count, float* out, std::int64_t stride) {
    const std::int64_t room = steps * slots + kLanes;
    V::F sum[M][R];
    const std::int16_t* words[R];
    for (int r = 0; r < R; ++r) {
        const Integers given(x[r], steps);
        words[r] = given.words;
        for (int i = 0; i < M; ++i)
            sum[i][r] = scale_inputs(given, outputs[i].scale, outputs[i].offset, steps * slots, scaled + (i * R + r) * room);
    }
    for (std::int64_t step = 0; step < steps; ++step)
        each(std::make_integer_sequence<int, M>(), [&](int i) TIERMOE_INLINE {
            V::W w[4];
            for (int k = 0; k < 4; ++k) w[k] = V::load_words(outputs[i].words + step * kStep + 32 * k);
            each(std::make_integer_sequence<int, R>(), [&](int r) TIERMOE_INLINE {
                const float* scale = scaled + (i * R + r) * room + step * slots;
                sum[i][r] = add_step<Same>(w, words[r] + step * kStep, scale, places, sum[i][r]);
            });
        });
    for (int i = 0; i < count; ++i)
        for (int r = 0; r < R; ++r) out[r * stride + i] = sum_lanes(sum[i][r]);
}

template <bool Same>
__attribute__((noinline)) void stored_tile(const FormJob& job, int slots, LanePlaces places, const Stored* outputs,
                                           float* scaled, int count, float* out) {
    row_blocks<kRows>(job.rows, 0, [&](auto block, int r) {
        stored_products<Same, kTile, decltype(block)::value>(job.matrix->steps(), slots, places, outputs, job.x + r, scaled,
                                                             count, out + r * job.stride, job.stride);
    });
}

// Few rows multiply what registers decode; more rows the words of some outputs, which are stored.
template <class D>
void code_outputs(const FormJob& job) {
    const FormMatrix& m = *job.matrix;
    const std::int64_t steps = m.steps(), slots = steps * D::kSlots, room = slots + kLanes;
    constexpr LanePlaces kAt = {places_of<D>(0), places_of<D>(1)};
    constexpr bool kSame = have_same_scales<D>();
    float* scaled = job.scratch + kTile * (2 * room + steps * kStep / 2);
    Stored outputs[kTile];
    for (std::int64_t k = 0; k < job.count; ++k) {
        const int place = static_cast<int>(k % kTile);
        float *scale = job.scratch + place * (2 * room + steps * kStep / 2), *other = scale + room;
        auto* words = reinterpret_cast<std::int16_t*>(other + room);
        const std::int64_t output = job.first + job.step * k;
        const std::uint8_t* row = m.weight + output * m.row_bytes();
        std::fill(scale + slots - D::kSlots, scale + room, 0.0f);
        std::fill(other + slots - D::kSlots, other + room, 0.0f);
        if constexpr (D::kSteps == 2)
            block_scales<D>(m, row, scale, other);
        else
            D::scales(m, output, row, scale, other, other + room);
        const float* offset = D::kOffset ? other : nullptr;
        if (job.rows <= kRows) {
            row_blocks<kRows>(job.rows, 0, [&](auto block, int first) {
                constexpr int R = decltype(block)::value;
                V::F sum[R];
                const std::int16_t* x[R];
                for (int r = 0; r < R; ++r) {
                    const Integers given(job.x[first + r], steps);
                    x[r] = given.words;
                    sum[r] = scale_inputs(given, scale, offset, slots, scaled + r * room);
                }
                for_steps<D>(m, row, [&](auto half, std::int64_t step, const std::uint8_t* bytes) TIERMOE_INLINE {
                    V::W w[4];
                    step_words<D, decltype(half)::value>(bytes, other + step * D::kSlots, w);
                    each(std::make_integer_sequence<int, R>(), [&](int r) TIERMOE_INLINE {
                        const float* own = scaled + r * room + step * D::kSlots;
                        sum[r] = add_step<kSame>(w, x[r] + step * kStep, own, kAt, sum[r]);
                    });
                });
                for (int r = 0; r < R; ++r) job.out[(first + r) * job.stride + k] = sum_lanes(sum[r]);
            });
            continue;
        }
        for_steps<D>(m, row, [&](auto half, std::int64_t step, const std::uint8_t* bytes) TIERMOE_INLINE {
            V::W w[4];
            step_words<D, decltype(half)::value>(bytes, other + step * D::kSlots, w);
            for (int n = 0; n < 4; ++n) V::store_words(words + step * kStep + 32 * n, w[n]);
        });
        outputs[place] = {words, scale, offset};
        if (place + 1 < kTile && k + 1 < job.count) continue;
        for (int i = place + 1; i < kTile; ++i) outputs[i] = outputs[place];
        stored_tile<kSame>(job, D::kSlots, kAt, outputs, scaled, place + 1, job.out + k - place);
    }
}

}  // namespace
}  // namespace tiermoe
