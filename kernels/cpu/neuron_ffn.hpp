// Expert FFN over chunks of neurons, on packed or on full-precision weights:
//   y = sum_j  act(x . gate_j) * (x . up_j) * down_j
// A chunk of neurons of one expert, for up to kItemRows rows, is one job: it makes its own partial sum [rows, H], and
// the partial sums are added in a fixed order. How an expert is cut depends on its shape alone, so results do not
// depend on the number of threads, and a single expert at one row keeps all threads busy.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "expert_ffn.hpp"
#include "threads.hpp"

namespace tiermoe {

constexpr int kItemRows = 64;  // rows of one expert that share one pass over its weights
constexpr int kTileOutputs = 16, kTileInputs = 32, kBlockNeurons = 32;

// Quantized experts of a layer as kernels/pack.py lays them out.
struct PackedLayer {
    std::int64_t hidden, neurons, experts;
    int bits, group;
    const std::uint8_t* gate_up;         // [E, ceil(I / 32), ceil(H / 32), 2, 2, 64 bits]
    const std::uint16_t* gate_up_scales; // [E, ceil(I / 32), ceil(H / group), 2, 2, 2, 16] float16
    const std::uint8_t* down;            // [E, ceil(I / group), ceil(H / 16), group / 32, 64 bits]
    const std::uint16_t* down_scales;    // [E, ceil(I / group), ceil(H / 16), 2, 16] float16
};

struct FitLayer;
struct GptqBlock;

enum class Element : int { f32 = 0, f16 = 1, bf16 = 2 };

// Full-precision experts as the expert store has them.
struct FullLayer {
    std::int64_t hidden, neurons, experts;
    Element element;
    const void* gate_up;  // [E, I, 2, H]
    const void* down;     // [E, I, H]
};

// What to compute: entries start..stop of `rows` and `weights` go through one expert.
struct RowGroup {
    std::int64_t expert, start, stop;
};
struct Batch {
    std::vector<RowGroup> groups;
    const std::int32_t* rows;  // [P] row of hidden and out
    const float* weights;      // [P]
    const float* hidden;       // [T, H]
    std::int64_t tokens;       // T
    float* out;                // [T, H]
    const std::int32_t* outs = nullptr;  // [P] row of out for each entry, none twice; null: the row of hidden

    // The entries' rows of out begin as zeros: those of `outs`, or all.
    void zero(std::int64_t width) const {
        const auto row = static_cast<std::size_t>(width) * sizeof(float);
        if (!outs) {
            std::memset(out, 0, static_cast<std::size_t>(tokens) * row);
            return;
        }
        for (const RowGroup& group : groups)
            for (std::int64_t p = group.start; p < group.stop; ++p) std::memset(row_of_out(p, width), 0, row);
    }
    float* row_of_out(std::int64_t entry, std::int64_t width) const {
        return out + (outs ? outs[entry] : rows[entry]) * width;
    }
};

// Instruction sets that this processor has, best first: "avx512", "avx2", "portable".
std::vector<std::string> instruction_sets();

// out = 0; out[rows[p]] += weights[p] * FFN_expert(hidden[rows[p]]) group by group. Where there are `outs`, of out only these
// rows are written.
// `set` is a number in the order of instruction_sets(). Sizes and indices were checked by the caller. Throws
// std::bad_alloc.
void packed_ffn(Threads& threads, int set, const PackedLayer& layer, Activation activation, const Batch& batch);
void full_ffn(Threads& threads, int set, const FullLayer& layer, Activation activation, const Batch& batch);

// Quantizes a layer's experts without data; see fit.hpp. Sizes and addresses were checked by the caller.
void fit_layer(Threads& threads, int set, const FitLayer& layer);
void gptq_block(Threads& threads, int set, const GptqBlock& block);

// --- what the instruction sets implement -------------------------------------------------------------------

// A row's inputs as int8 with a scale per group: x ~= scale * q. `affine` has scale and scale * sum(q) per group.
struct QuantizedRow {
    const std::int8_t* q;  // [ceil(H / 32) * 32]
    const float* affine;   // [ceil(H / group), 2]
};

struct PackedJob {
    const std::uint8_t *gate_up, *down;  // at the first neuron of the chunk
    const std::uint16_t *gate_up_scales, *down_scales;
    std::int64_t hidden, neurons;  // neurons: of the chunk
    int group;
    Activation activation;
    int rows;
    const QuantizedRow* x;  // [rows]
    float* out;             // [rows, padded(H)]
};

struct FullJob {
    const void *gate_up, *down;  // at the first neuron of the chunk
    std::int64_t hidden, neurons;
    Activation activation;
    int rows;
    const float* const* x;  // [rows] of [H]
    float* out;             // [rows, padded(H)]
};

// Asks for the cache line kAhead bytes after `at`, into the second-level cache: the misses that a core can have under
// way from its first level do not fill the memory's bandwidth, and hardware prefetchers stop at a page's end.
// docs/experiments.md has the figures.
constexpr int kAhead = 6144;
inline void prefetch(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + kAhead, 0, 2); }

struct Kernels {
    const char* name;
    void (*packed[9])(const PackedJob&);  // by bits
    void (*full[3])(const FullJob&);      // by Element
    void (*quantize)(const float* x, std::int64_t size, int group, std::int8_t* q, float* affine);
    // out[i] += weight * (sum over chunks of part[chunk * stride + i]), for `size` columns
    void (*add)(const float* part, std::int64_t stride, int chunks, float weight, std::int64_t size, float* out);
    void (*fit)(const FitLayer&, std::int64_t job);  // fit.hpp
    void (*gptq)(const GptqBlock&, std::int64_t job);
};

const Kernels& portable_kernels();
const Kernels* avx2_kernels();    // null where the compiler or the processor has none
const Kernels* avx512_kernels();  // the same; means AVX-512 F, BW, VL and VNNI

}  // namespace tiermoe
