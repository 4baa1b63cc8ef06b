// One job of fit.hpp for an instruction set: the including file chooses the target and kVectorBytes. Lanes are outputs:
// all 16 of a tile, or a part of them.

namespace tiermoe {
namespace {

using Lanes = float __attribute__((vector_size(kVectorBytes)));
using Codes = std::int32_t __attribute__((vector_size(kVectorBytes)));

constexpr int kPart = kVectorBytes / 4, kParts = kTileOutputs / kPart;
constexpr int kMostInputs = 128;  // of a group

inline Lanes all(float v) { return Lanes{} + v; }
inline Lanes lesser(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }

// Rounded to whole numbers, half to even; for values within 2^22.
inline Lanes whole(Lanes v) { return (v + 12582912.0f) - 12582912.0f; }

// Rounded to float16, as float; 65536 for what is infinite there.
inline Lanes rounded_half(Lanes v) {
    const Codes bits = (Codes)v;
    const Lanes normal = (Lanes)((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff);
    const Lanes tiny = (v + 0.75f) - 0.75f;  // the spacing of subnormals is that of floats in [0.5, 1)
    const Lanes size = (Lanes)(bits & 0x7fffffff);
    return size < 6.103515625e-05f ? tiny : normal;
}

// The bits of a value of `rounded_half`.
inline std::uint16_t half_bits(float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    const std::uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x47800000) return static_cast<std::uint16_t>(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (size < 0x38800000) return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::fabs(v) * 16777216.0f));
    return static_cast<std::uint16_t>(sign | ((size - 0x38000000) >> 13));
}

inline float value_of(float v) { return v; }
inline float value_of(Bfloat v) {
    const std::uint32_t bits = static_cast<std::uint32_t>(v.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}
inline float value_of(Half v) {
    const std::uint32_t shifted = static_cast<std::uint32_t>(v.bits & 0x7fff) << 13;
    float out;
    std::memcpy(&out, &shifted, sizeof(out));
    out *= 0x1p112f;  // the exponent's other bias; exact for subnormals
    std::uint32_t bits;
    std::memcpy(&bits, &out, sizeof(bits));
    if ((v.bits & 0x7c00) == 0x7c00) bits = 0x7f800000 | shifted;
    bits |= static_cast<std::uint32_t>(v.bits & 0x8000) << 16;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}

// A group's weights w [n], and what all widths share. Means are by importance, whose sum is 1; null: alike.
struct Group {
    Lanes w[kMostInputs], centred[kMostInputs];
    Lanes low, high, mean, rest, power;  // rest: mean of centred, which rounding leaves; power: of its squares
    const float* importance = nullptr;
    int n;

    float share(int j) const { return importance ? importance[j] : 1.0f / static_cast<float>(n); }

    void summarise() {
        mean = rest = power = Lanes{};
        low = high = w[0];
        for (int j = 0; j < n; ++j) {
            mean += share(j) * w[j];
            low = lesser(low, w[j]);
            high = greater(high, w[j]);
        }
        for (int j = 0; j < n; ++j) {
            centred[j] = w[j] - mean;
            rest += share(j) * centred[j];
            power += share(j) * centred[j] * centred[j];
        }
    }
};

struct Line {
    Lanes scale, offset;
};

inline Lanes inverse(Lanes scale) { return scale > 0.0f ? 1.0f / scale : Lanes{}; }

inline Lanes nearest(Lanes w, Lanes inverted, Lanes shift, float most) {
    return lesser(greater(whole(w * inverted + shift), Lanes{}), all(most));
}

template <int B>
struct Search;
template <>
struct Search<1> {
    static constexpr float clips[] = {0.8f, 0.6f, 0.5f, 0.4f, 0.3f};
    static constexpr int turns = 5;
};
template <>
struct Search<2> {
    static constexpr float clips[] = {1.0f, 0.9f, 0.8f, 0.7f, 0.6f, 0.5f};
    static constexpr int turns = 4;
};
template <>
struct Search<3> {
    static constexpr float clips[] = {1.0f, 0.95f, 0.9f, 0.8f, 0.7f};
    static constexpr int turns = 3;
};
template <>
struct Search<4> {
    static constexpr float clips[] = {1.0f, 0.95f, 0.9f, 0.8f};
    static constexpr int turns = 3;
};

template <int B, bool kAlike>
Line fit_line(const Group& group) {
    constexpr float most = (1 << B) - 1;
    const Lanes offset0 = rounded_half(group.low);
    Line best = {rounded_half((group.high - offset0) / most), offset0};
    if constexpr (B <= 4) {
        Lanes least = all(std::numeric_limits<float>::infinity());
        // Lets `line` compete, and makes it the least squares line of its own codes.
        const auto turn = [&](Line& line) {
            line = {rounded_half(line.scale), rounded_half(line.offset)};
            const Lanes inverted = inverse(line.scale), from = line.offset - group.mean;
            const Lanes shift = -from * inverted;
            Lanes c1 = {}, c2 = {}, cw = {};
            for (int j = 0; j < group.n; ++j) {
                const Lanes c = nearest(group.centred[j], inverted, shift, most);
                const Lanes weighed = kAlike ? c : c * group.importance[j];
                c1 += weighed;
                c2 += weighed * c;
                cw += weighed * group.centred[j];
            }
            if constexpr (kAlike) {
                const float share = 1.0f / static_cast<float>(group.n);
                c1 *= share;
                c2 *= share;
                cw *= share;
            }
            // mean of (w - scale c - from)^2
            const Lanes error = group.power + line.scale * (line.scale * c2 - 2.0f * (cw - from * c1)) +
                                from * (from - 2.0f * group.rest);
            const Codes better = error < least;
            least = better ? error : least;
            best.scale = better ? line.scale : best.scale;
            best.offset = better ? line.offset : best.offset;
            const Lanes variance = c2 - c1 * c1, slope = (cw - c1 * group.rest) / variance;
            const Codes usable = (variance > 1e-6f) & (slope > 0.0f);
            line.scale = usable ? slope : line.scale;
            line.offset = usable ? group.mean + group.rest - slope * c1 : line.offset;
        };
        Line range = best;
        turn(range);
        for (const float clip : Search<B>::clips) {
            const Lanes from = group.mean + clip * (group.low - group.mean);
            Line line = {(group.mean + clip * (group.high - group.mean) - from) / most, from};
            for (int i = 0; i < Search<B>::turns; ++i) turn(line);
        }
    }
    return best;
}

inline void store(std::uint8_t* at, Codes v) { std::memcpy(at, &v, sizeof(v)); }

// The codes of 32 inputs -> its lanes of B vectors of 64 bytes, see kernels/pack.py.
template <int B>
void pack_tile(const Codes* c, std::uint8_t* out) {
    Codes v[8];
    for (int k = 0; k < 8; ++k) v[k] = c[4 * k] | c[4 * k + 1] << 8 | c[4 * k + 2] << 16 | c[4 * k + 3] << 24;
    if constexpr (B == 3) {
        store(out, v[0] | v[1] << 3 | (v[6] & 0x03030303) << 6);
        store(out + 64, v[2] | v[3] << 3 | (v[7] & 0x03030303) << 6);
        store(out + 128, v[4] | v[5] << 3 | ((v[6] >> 2) & 0x01010101) << 6 | ((v[7] >> 2) & 0x01010101) << 7);
    } else {
        constexpr int kFields = 8 / B;
        for (int i = 0; i < B; ++i) {
            Codes packed = v[i * kFields];
            for (int field = 1; field < kFields; ++field) packed |= v[i * kFields + field] << (field * B);
            store(out + 64 * i, packed);
        }
    }
}

// Fits a group and writes its lanes of `units` tiles, `tile_step` bytes apart, and of scales before offsets. Adds the
// squared errors: of each output to `by_output`, or of each input to by_input[j * 3].
template <int B>
void write_group(const Group& group, int units, std::uint8_t* tiles, std::int64_t tile_step, std::uint16_t* affine,
                 Lanes* by_output, float* by_input) {
    constexpr float most = (1 << B) - 1;
    const Line line = fit_line<B, true>(group);
    const Lanes inverted = inverse(line.scale), shift = -line.offset * inverted;
    Codes codes[kMostInputs];
    for (int j = 0; j < group.n; ++j) {
        const Lanes c = nearest(group.w[j], inverted, shift, most);
        const Lanes miss = group.w[j] - line.scale * c - line.offset, error = miss * miss;
        codes[j] = __builtin_convertvector(c, Codes);
        if (by_output) *by_output += error;
        if (by_input) {
            float sum = 0.0f;
            for (int lane = 0; lane < kPart; ++lane) sum += error[lane];
            by_input[j * 3] += sum;
        }
    }
    for (int j = group.n; j < units * kTileInputs; ++j) codes[j] = Codes{};
    for (int u = 0; u < units; ++u) pack_tile<B>(codes + u * kTileInputs, tiles + u * tile_step);
    for (int lane = 0; lane < kPart; ++lane) {
        affine[lane] = half_bits(line.scale[lane]);
        affine[kTileOutputs + lane] = half_bits(line.offset[lane]);
    }
}

void write_group(int bits, const Group& group, int units, std::uint8_t* tiles, std::int64_t tile_step,
                 std::uint16_t* affine, Lanes* by_output, float* by_input) {
    switch (bits) {
        case 1: return write_group<1>(group, units, tiles, tile_step, affine, by_output, by_input);
        case 2: return write_group<2>(group, units, tiles, tile_step, affine, by_output, by_input);
        case 3: return write_group<3>(group, units, tiles, tile_step, affine, by_output, by_input);
        case 4: return write_group<4>(group, units, tiles, tile_step, affine, by_output, by_input);
        default: return write_group<8>(group, units, tiles, tile_step, affine, by_output, by_input);
    }
}

inline std::int64_t covering(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

// 16 neurons of gate or up: inputs are consecutive in memory, outputs 2 H apart.
template <typename T>
void fit_half(const FitLayer& layer, std::int64_t expert, std::int64_t block, int matrix, int half, Group& group) {
    const std::int64_t hidden = layer.full.hidden, neurons = layer.full.neurons;
    const std::int64_t blocks = covering(neurons, kBlockNeurons), tiles = covering(hidden, kTileInputs);
    const std::int64_t groups = covering(hidden, layer.group), first = block * kBlockNeurons + half * kTileOutputs;
    const int outputs = static_cast<int>(std::clamp<std::int64_t>(neurons - first, 0, kTileOutputs));
    const T* weights = static_cast<const T*>(layer.full.gate_up) + ((expert * neurons + first) * 2 + matrix) * hidden;
    Lanes errors[kParts][kMostWidths] = {}, power[kParts] = {};
    for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t start = g * layer.group;
        group.n = static_cast<int>(std::min<std::int64_t>(layer.group, hidden - start));
        alignas(64) float w[kMostInputs][kTileOutputs] = {};
        for (int o = 0; o < outputs; ++o)
            for (int j = 0; j < group.n; ++j) w[j][o] = value_of(weights[o * 2 * hidden + start + j]);
        for (int part = 0; part < kParts; ++part) {
            for (int j = 0; j < group.n; ++j) {
                std::memcpy(&group.w[j], w[j] + part * kPart, sizeof(Lanes));
                power[part] += group.w[j] * group.w[j];
            }
            group.summarise();
            for (int i = 0; i < layer.count; ++i) {
                const FitWidth& to = layer.widths[i];
                const std::int64_t tile_bytes = 64 * to.bits, unit = start / kTileInputs, row = expert * blocks + block;
                std::uint8_t* codes = to.gate_up + (((row * tiles + unit) * 2 + matrix) * 2 + half) * tile_bytes;
                std::uint16_t* affine =
                    to.gate_up_scales + (((row * groups + g) * 2 + matrix) * 2 + half) * 2 * kTileOutputs;
                write_group(to.bits, group, static_cast<int>(covering(group.n, kTileInputs)),
                            codes + part * kVectorBytes, 4 * tile_bytes, affine + part * kPart, &errors[part][i], nullptr);
            }
        }
    }
    for (int o = 0; o < outputs; ++o) {
        const std::int64_t at = (expert * neurons + first + o) * 3 + matrix;
        layer.powers[at] = power[o / kPart][o % kPart];
        for (int i = 0; i < layer.count; ++i) layer.widths[i].errors[at] = errors[o / kPart][i][o % kPart];
    }
}

// A group of neurons of down: they are its inputs, and its outputs are consecutive in memory.
template <typename T>
void fit_down(const FitLayer& layer, std::int64_t expert, std::int64_t g, Group& group) {
    const std::int64_t hidden = layer.full.hidden, neurons = layer.full.neurons, start = g * layer.group;
    const std::int64_t groups = covering(neurons, layer.group), columns = covering(hidden, kTileOutputs);
    const int units = layer.group / kTileInputs;
    group.n = static_cast<int>(std::min<std::int64_t>(layer.group, neurons - start));
    const T* weights = static_cast<const T*>(layer.full.down) + (expert * neurons + start) * hidden;
    const std::int64_t row = (expert * neurons + start) * 3 + 2;
    for (int j = 0; j < group.n; ++j) {
        layer.powers[row + j * 3] = 0.0f;
        for (int i = 0; i < layer.count; ++i) layer.widths[i].errors[row + j * 3] = 0.0f;
    }
    for (std::int64_t column = 0; column < columns; ++column) {
        const std::int64_t first = column * kTileOutputs;
        const int outputs = static_cast<int>(std::min<std::int64_t>(kTileOutputs, hidden - first));
        alignas(64) float w[kMostInputs][kTileOutputs] = {};
        for (int j = 0; j < group.n; ++j) {
            float power = 0.0f;
            for (int o = 0; o < outputs; ++o) {
                w[j][o] = value_of(weights[j * hidden + first + o]);
                power += w[j][o] * w[j][o];
            }
            layer.powers[row + j * 3] += power;
        }
        for (int part = 0; part < kParts; ++part) {
            for (int j = 0; j < group.n; ++j) std::memcpy(&group.w[j], w[j] + part * kPart, sizeof(Lanes));
            group.summarise();
            for (int i = 0; i < layer.count; ++i) {
                const FitWidth& to = layer.widths[i];
                const std::int64_t tile_bytes = 64 * to.bits, tile = (expert * groups + g) * columns + column;
                write_group(to.bits, group, units, to.down + tile * units * tile_bytes + part * kVectorBytes, tile_bytes,
                            to.down_scales + tile * 2 * kTileOutputs + part * kPart, nullptr, to.errors + row);
            }
        }
    }
}

template <typename T>
void fit(const FitLayer& layer, std::int64_t job) {
    const std::int64_t blocks = covering(layer.full.neurons, kBlockNeurons);
    const std::int64_t each = blocks + covering(layer.full.neurons, layer.group);
    const std::int64_t expert = job / each, part = job % each;
    Group group;
    if (part >= blocks) return fit_down<T>(layer, expert, part - blocks, group);
    for (int matrix = 0; matrix < 2; ++matrix)
        for (int half = 0; half < 2; ++half) fit_half<T>(layer, expert, part, matrix, half, group);
}

// Outputs `first` and on of a block, as many as there are lanes.
template <int B>
void gptq_part(const GptqBlock& block, std::int64_t first) {
    constexpr float most = (1 << B) - 1;
    const std::size_t bytes = static_cast<std::size_t>(std::min<std::int64_t>(kPart, block.outputs - first)) * 4;
    const auto put = [&](float* to, Lanes v) { std::memcpy(to + first, &v, bytes); };
    Group group;
    float importance[kMostInputs], sum = 0.0f;
    group.n = block.inputs;
    group.importance = importance;
    for (int j = 0; j < group.n; ++j) {
        sum += importance[j] = block.pivots[j];
        group.w[j] = Lanes{};
        std::memcpy(&group.w[j], block.left + j * block.outputs + first, bytes);
    }
    for (int j = 0; j < group.n; ++j) importance[j] /= sum;
    group.summarise();
    const Line line = fit_line<B, false>(group);
    const Lanes inverted = inverse(line.scale), shift = -line.offset * inverted;
    for (int i = 0; i < group.n; ++i) {
        const float* row = block.factor + i * block.stride;
        Lanes given = {};
        std::memcpy(&given, block.weights + i * block.outputs + first, bytes);
        const Lanes c = nearest(group.w[i], inverted, shift, most), value = line.scale * c + line.offset;
        const Lanes rest = given - value;
        put(block.codes + i * block.outputs, c);
        put(block.rest + i * block.outputs, rest);
        put(block.left + i * block.outputs, (group.w[i] - value) * block.pivots[i]);
        for (int j = i + 1; j < group.n; ++j) group.w[j] += row[j] * rest;
    }
    put(block.scales, line.scale);
    put(block.offsets, line.offset);
}

void gptq(const GptqBlock& block, std::int64_t job) {
    for (int part = 0; part < kParts; ++part) {
        const std::int64_t first = job * kTileOutputs + part * kPart;
        if (first >= block.outputs) return;
        switch (block.bits) {
            case 1: gptq_part<1>(block, first); break;
            case 2: gptq_part<2>(block, first); break;
            case 3: gptq_part<3>(block, first); break;
            case 4: gptq_part<4>(block, first); break;
            default: gptq_part<8>(block, first);
        }
    }
}

void fit(const FitLayer& layer, std::int64_t job) {
    switch (layer.full.element) {
        case Element::f32: return fit<float>(layer, job);
        case Element::f16: return fit<Half>(layer, job);
        default: return fit<Bfloat>(layer, job);
    }
}

}  // namespace
}  // namespace tiermoe
