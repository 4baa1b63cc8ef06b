// Runs published forms on exact-size heap buffers of every kind and odd shapes, with every instruction set of this
// processor. Weights that a single 1 among the inputs reads must agree bit by bit, and so must sums of integers; sums of
// floats closely; 1 and 3 threads bit by bit. Then the same on random bytes, whose values mean nothing. Exit 0: all agree. With an argument it reads past a
// buffer instead, to show that the sanitizer would say so.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "forms.hpp"

namespace {

using namespace tiermoe;

template <typename T>
std::unique_ptr<T[]> buffer(std::int64_t size) {  // exactly as many elements: a vector may reserve more
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]());
}

std::uint32_t state = 1;
std::uint32_t random_bits() {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}
float uniform() { return static_cast<float>(random_bits()) / 8388608.0f - 1.0f; }
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

int sets() { return 1 + (avx2_forms() != nullptr) + (avx512_forms() != nullptr); }

struct Case {
    FormKind kind;
    ScaleType scale_type;
    std::int64_t outputs, inputs, group, block;
    bool zeros, order, divides;
};

// A matrix on buffers of its own; `wild`: random bytes.
struct Matrix {
    Matrix(const Case& c, bool wild) {
        matrix = {c.kind, c.scale_type, c.divides, c.outputs, c.inputs, c.group, c.block,
                  nullptr, nullptr, nullptr, nullptr, nullptr};
        const std::int64_t bytes = c.outputs * matrix.row_bytes();
        const std::int64_t scales = ceil_div(c.outputs, c.block) * matrix.groups();
        weight = buffer<std::uint8_t>(bytes);
        for (std::int64_t i = 0; i < bytes; ++i) weight[i] = static_cast<std::uint8_t>(random_bits());
        if (!wild) tame(c, bytes);
        matrix.weight = weight.get();
        if (c.scale_type != ScaleType::none) {
            const std::int64_t size = c.scale_type == ScaleType::f32 ? 4 : c.scale_type < ScaleType::e8m0 ? 2 : 1;
            scale = buffer<std::uint8_t>(scales * size);
            for (std::int64_t i = 0; i < scales * size; ++i) scale[i] = static_cast<std::uint8_t>(random_bits());
            if (!wild)
                for (std::int64_t i = 0; i < scales; ++i) {
                    // the highest byte: an exponent of about 1
                    scale[i * size + size - 1] = c.scale_type == ScaleType::e8m0 ? 126
                                                 : c.scale_type == ScaleType::e4m3 ? 40 + random_bits() % 32 : 0x3c;
                }
            matrix.scale = scale.get();
        }
        if (c.zeros) {
            zero = buffer<std::uint8_t>(c.outputs * matrix.groups());
            for (std::int64_t i = 0; i < c.outputs * matrix.groups(); ++i) zero[i] = random_bits() % 16;
            matrix.zero = zero.get();
        }
        if (c.kind == FormKind::nvfp4) {
            whole = buffer<float>(1);
            whole[0] = 3.0f;
            matrix.global_scale = whole.get();
        }
        if (c.order) {
            order = buffer<std::int32_t>(c.inputs);
            for (std::int64_t i = 0; i < c.inputs; ++i) order[i] = static_cast<std::int32_t>(c.inputs - 1 - i);
            matrix.order = order.get();
        }
    }

    // Exponents of about 1 where a weight or a block has them.
    void tame(const Case& c, std::int64_t bytes) {
        const std::int64_t block = c.kind < FormKind::q8_0 ? 1 : gguf_block(c.kind).bytes;
        for (std::int64_t i = 0; i < bytes; ++i) {
            if (c.kind == FormKind::f32 && i % 4 == 3) weight[i] = weight[i] & 0x80 | 0x3e;
            if ((c.kind == FormKind::f16 || c.kind == FormKind::bf16) && i % 2) weight[i] = weight[i] & 0x80 | 0x38;
            if (c.kind == FormKind::fp8 && (weight[i] & 127) == 127) weight[i] = 0;
            if (c.kind >= FormKind::q8_0) weight[i] = of_block(c.kind, static_cast<int>(i % block), weight[i]);
        }
    }

    // A byte of a block: the upper byte of a float16 scale, or what stands for it, is about 2^-6.
    static std::uint8_t of_block(FormKind kind, int at, std::uint8_t byte) {
        switch (kind) {
            case FormKind::mxfp4_gguf: return at == 0 ? 126 : byte;
            case FormKind::q4_1:
            case FormKind::q5_1:
            case FormKind::q4_k:
            case FormKind::q5_k: return at == 1 || at == 3 ? 0x24 : byte;
            case FormKind::q2_k: return at == 81 || at == 83 ? 0x24 : byte;
            case FormKind::q3_k: return at == 109 ? 0x24 : byte;
            case FormKind::q6_k: return at == 209 ? 0x24 : byte;
            case FormKind::tq1_0: return at == 53 ? 0x24 : byte;
            case FormKind::tq2_0: return at == 65 ? 0x24 : byte;
            case FormKind::iq1_m: return at == 53 ? byte & 15 | 0x40 : at == 55 ? byte & 15 | 0x20 : byte;
            default: return at == 1 ? 0x24 : byte;
        }
    }

    FormMatrix matrix;
    std::unique_ptr<std::uint8_t[]> weight, scale, zero;
    std::unique_ptr<float[]> whole;
    std::unique_ptr<std::int32_t[]> order;
};

bool check(Threads& one, Threads& three, const Case& c) {
    const Matrix tame(c, false), wild(c, true);
    if (!tame.matrix.fits()) return false;
    for (const std::int64_t rows : {1, 3, 4, 9, 65}) {
        const auto x = buffer<float>(rows * c.inputs), out = buffer<float>(rows * c.outputs);
        std::vector<float> first;
        for (int hot = 0; hot < 2; ++hot) {
            for (std::int64_t i = 0; i < rows * c.inputs; ++i) x[i] = hot ? 0.0f : uniform();
            for (std::int64_t r = 0; hot && r < rows; ++r) x[r * c.inputs + r * 31 % c.inputs] = 1.0f;
            for (int set = 0; set < sets(); ++set) {
                form_linear(one, set, tame.matrix, x.get(), rows, out.get());
                const std::vector<float> found(out.get(), out.get() + rows * c.outputs);
                form_linear(three, set, tame.matrix, x.get(), rows, out.get());
                if (std::memcmp(found.data(), out.get(), found.size() * sizeof(float)) != 0) return false;
                if (set == 0) first = found;
                for (std::size_t i = 0; i < found.size(); ++i) {
                    const float off = std::fabs(found[i] - first[i]);
                    if (!(hot || tame.matrix.integers() ? off == 0 : off <= 1e-3f * (1 + std::fabs(first[i])))) return false;
                }
                form_linear(one, set, wild.matrix, x.get(), rows, out.get());
            }
        }
    }
    return true;
}

// Experts with gate and up in one matrix, interleaved or not, and biases of each type.
bool experts(Threads& one, Threads& three, std::int64_t hidden, std::int64_t neurons) {
    const Case both = {FormKind::int4, ScaleType::f16, 2 * neurons, hidden, 24, 1, true, true, false};
    const Case back = {FormKind::bf16, ScaleType::none, hidden, neurons, neurons, 1, false, false, false};
    const Matrix gate_up(both, false), down(back, false);
    const auto bias = buffer<float>(2 * neurons + hidden);
    constexpr std::int64_t kRows = 70;
    const auto x = buffer<float>(kRows * hidden), out = buffer<float>(kRows * hidden), weights = buffer<float>(2 * kRows);
    const auto rows = buffer<std::int32_t>(2 * kRows);
    for (std::int64_t i = 0; i < kRows * hidden; ++i) x[i] = uniform();
    for (std::int64_t i = 0; i < 2 * kRows; ++i) {
        rows[i] = static_cast<std::int32_t>(i % kRows);
        weights[i] = uniform();
    }
    for (int interleaved = 0; interleaved < 2; ++interleaved)
        for (const Element type : {Element::f32, Element::f16, Element::bf16}) {
            FormExpert expert = {gate_up.matrix, gate_up.matrix, down.matrix, 0, 1 + interleaved, interleaved ? 1 : neurons,
                                 1 + interleaved, type, bias.get(), bias.get() + (type == Element::f32 ? 2 : 1) * neurons};
            const FormLayer layer = {{expert, expert}, hidden, neurons};
            for (int set = 0; set < sets(); ++set) {
                const Batch batch = {{{1, 0, kRows}, {0, kRows, kRows}, {0, kRows, kRows + 3}}, rows.get(), weights.get(),
                                     x.get(), kRows, out.get()};
                form_ffn(one, set, layer, Activation::gpt_oss, batch);
                const std::vector<float> found(out.get(), out.get() + kRows * hidden);
                form_ffn(three, set, layer, Activation::gpt_oss, batch);
                if (std::memcmp(found.data(), out.get(), found.size() * sizeof(float)) != 0) return false;
            }
        }
    gate_up.order[0] = static_cast<std::int32_t>(hidden);  // names what is not there
    try {
        form_linear(one, 0, gate_up.matrix, x.get(), 1, out.get());
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace

int main(int argc, char**) {
    Threads one(1, {}), three(3, {});
    if (argc > 1) {
        Case c = {FormKind::fp8, ScaleType::f32, 4, 64, 64, 1, false, false, false};
        const Matrix short_one(c, false);
        FormMatrix matrix = short_one.matrix;
        matrix.outputs = 5;
        const auto x = buffer<float>(64), out = buffer<float>(5);
        form_linear(one, 0, matrix, x.get(), 1, out.get());
        return 0;
    }
    std::vector<Case> cases;
    for (const std::int64_t inputs : {1, 17, 32, 70, 129})
        for (const std::int64_t outputs : {1, 7}) {
            for (const FormKind kind : {FormKind::f32, FormKind::f16, FormKind::bf16})
                cases.push_back({kind, ScaleType::none, outputs, inputs, inputs, 1, false, false, false});
            for (const ScaleType scale : {ScaleType::f32, ScaleType::f16, ScaleType::bf16, ScaleType::e8m0})
                for (const std::int64_t group : {24, 64, 200})
                    cases.push_back({FormKind::fp8, scale, outputs, inputs, group, 3, false, false, false});
            for (const FormKind kind : {FormKind::int4, FormKind::int8})
                for (const std::int64_t group : {16, 32, 200})
                    for (int flags = 0; flags < 4; ++flags)
                        cases.push_back({kind, ScaleType::f16, outputs, inputs, group, 1, flags % 2 == 1, flags > 1, false});
        }
    for (const std::int64_t outputs : {1, 7}) {
        for (const std::int64_t inputs : {16, 48, 256, 272})
            for (const bool divides : {false, true})
                cases.push_back({FormKind::nvfp4, ScaleType::e4m3, outputs, inputs, 16, 1, false, false, divides});
        for (const std::int64_t inputs : {32, 96, 544}) {
            cases.push_back({FormKind::mxfp4, ScaleType::e8m0, outputs, inputs, 32, 1, false, false, false});
        }
        for (FormKind kind = FormKind::q8_0; kind <= FormKind::tq2_0; kind = static_cast<FormKind>(static_cast<int>(kind) + 1))
            for (const std::int64_t blocks : {1, 3}) {
                const std::int64_t inputs = blocks * gguf_block(kind).weights;
                cases.push_back({kind, ScaleType::none, outputs, inputs, inputs, 1, false, false, false});
            }
    }
    for (const Case& c : cases)
        if (!check(one, three, c)) {
            std::fprintf(stderr, "wrong: kind %d, scale %d, %d x %d, group %d\n", static_cast<int>(c.kind),
                         static_cast<int>(c.scale_type), static_cast<int>(c.outputs), static_cast<int>(c.inputs),
                         static_cast<int>(c.group));
            return 1;
        }
    for (const std::int64_t hidden : {17, 64})
        if (!experts(one, three, hidden, 33)) {
            std::fprintf(stderr, "wrong: experts of hidden %d\n", static_cast<int>(hidden));
            return 1;
        }
    std::printf("checked %d matrices\n", static_cast<int>(cases.size()));
    return 0;
}
