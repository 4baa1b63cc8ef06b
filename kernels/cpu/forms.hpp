// Expert FFN on weights in their published forms (kernels/forms.py), [outputs, inputs] as an nn.Linear has them:
//   y = down . (act(gate . x) * (up . x))
// Floats and FP8: every weight is decoded in registers to the float32 number that `MatrixForm.dequantize` gives, to the
// bit, and multiplied in float32. All other forms: inputs are rounded to sixteen bits, and integers are multiplied; see
// forms_codes.hpp. An output is one dot product in a fixed order, so results depend neither on threads, nor on the other
// rows and experts of a call.
#pragma once

#include <cstdint>
#include <vector>

#include "neuron_ffn.hpp"

namespace tiermoe {

enum class FormKind : int {
    f32 = 0, f16 = 1, bf16 = 2, fp8 = 3, mxfp4 = 4, nvfp4 = 5, int4 = 6, int8 = 7,
    // GGUF's, in the order of kGgufBlocks and of BLOCKS in forms.py
    q8_0 = 8, q4_0 = 9, q4_1 = 10, q5_0 = 11, q5_1 = 12, iq4_nl = 13, mxfp4_gguf = 14, q2_k = 15, q3_k = 16, q4_k = 17,
    q5_k = 18, q6_k = 19, iq1_s = 20, iq1_m = 21, iq2_xxs = 22, iq2_xs = 23, iq2_s = 24, iq3_xxs = 25, iq3_s = 26,
    iq4_xs = 27, tq1_0 = 28, tq2_0 = 29
};
enum class ScaleType : int { none = 0, f32 = 1, f16 = 2, bf16 = 3, e8m0 = 4, e4m3 = 5 };

struct GgufBlock {
    int weights, bytes;
};
constexpr GgufBlock kGgufBlocks[] = {
    {32, 34}, {32, 18}, {32, 20}, {32, 22}, {32, 24}, {32, 18}, {32, 17}, {256, 84}, {256, 110}, {256, 144}, {256, 176},
    {256, 210}, {256, 50}, {256, 56}, {256, 66}, {256, 74}, {256, 82}, {256, 98}, {256, 110}, {256, 136}, {256, 54},
    {256, 66},
};
constexpr GgufBlock gguf_block(FormKind kind) { return kGgufBlocks[static_cast<int>(kind) - static_cast<int>(FormKind::q8_0)]; }

constexpr int kUnit = 32;        // weights of floats that are decoded together
constexpr int kStep = 128;       // the same of integers
constexpr int kMostSlots = 8;    // scales of a step
constexpr int kFormOutputs = 32; // of one job

// A matrix and the addresses of its parts; null where the form has no such part.
struct FormMatrix {
    FormKind kind;
    ScaleType scale_type;
    bool divides;                     // the global scale divides
    std::int64_t outputs, inputs;
    std::int64_t group, block;        // inputs and outputs that share a scale, at least 1
    const std::uint8_t* weight;       // [outputs, row_bytes]
    const std::uint8_t* scale;        // [ceil(outputs / block), ceil(inputs / group)]
    const std::uint8_t* zero;         // [outputs, ceil(inputs / group)]; null: half of the range
    const float* global_scale;        // [1]
    const std::int32_t* order;        // [inputs]: column k of the codes is input order[k]

    std::int64_t groups() const { return (inputs + group - 1) / group; }
    std::int64_t padded() const { return (inputs + kUnit - 1) / kUnit * kUnit; }
    std::int64_t steps() const { return (inputs + kStep - 1) / kStep; }
    // Whether the products are those of integers: of all but floats, FP8, and groups that share no 32 weights.
    bool integers() const {
        return kind >= FormKind::mxfp4 && ((kind != FormKind::int4 && kind != FormKind::int8) || group % kUnit == 0 || group >= inputs);
    }
    // Floats of an arranged row of inputs: integers of sixteen bits, and scales and sums; or floats.
    std::int64_t arranged() const { return integers() ? steps() * (kStep / 2 + 2 * kMostSlots) + 32 : padded(); }
    std::int64_t row_bytes() const;
    bool fits() const;  // whether kind, types and sizes go together
};

// One expert. Neuron j has the rows gate_first + gate_step * j of `gate`, and likewise of `up`; both may be one matrix,
// whose biases [outputs] lie at `gate_up_bias`.
struct FormExpert {
    FormMatrix gate, up, down;
    std::int64_t gate_first, gate_step, up_first, up_step;
    Element bias_type;
    const void *gate_up_bias, *down_bias;  // or null
};

struct FormLayer {
    std::vector<FormExpert> experts;
    std::int64_t hidden, neurons;
};

// As packed_ffn. Throws std::invalid_argument where `order` of a matrix names an input that is not there.
void form_ffn(Threads& threads, int set, const FormLayer& layer, Activation activation, const Batch& batch);

// out [rows, outputs] = x [rows, inputs] times the transposed matrix. Throws as form_ffn.
void form_linear(Threads& threads, int set, const FormMatrix& matrix, const float* x, std::int64_t rows, float* out);

// --- what the instruction sets implement -------------------------------------------------------------------

// out[r * stride + k] = row (first + step * k) of the matrix . x[r], for k below count.
struct FormJob {
    const FormMatrix* matrix;
    std::int64_t first, step, count;
    int rows;
    float* const* x;  // [rows] of [arranged()]
    float* out;
    std::int64_t stride;
    float* scratch;  // form_scratch(matrix) floats, aligned to 64
};

constexpr int kFormTile = 4;  // outputs that share a read of the inputs, at most
inline std::int64_t form_scratch(const FormMatrix& matrix) {
    return kFormTile * (3 * kStep * matrix.steps() + 64);  // weights, scales and zero points
}

struct FormKernels {
    const char* name;
    void (*dots)(const FormJob&);
    // Makes a row what the form's products take; false: `order` names what is not there.
    bool (*arrange)(const FormMatrix&, const float* x, float* arranged);
    void (*activate)(const float* gate, const float* up, std::int64_t size, Activation, float* h);
};

const FormKernels& portable_forms();
const FormKernels* avx2_forms();    // null where the compiler or the processor has none
const FormKernels* avx512_forms();  // the same

}  // namespace tiermoe
