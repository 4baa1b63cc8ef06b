// The dense part of a decode step as a list of steps on rows: every value is one vector a row (a token), every step is
// one operator on all rows. Built once from a traced model (kernels/dense.py); a run executes one segment of the list,
// between two calls of something else (the experts).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "forms.hpp"
#include "threads.hpp"

namespace tiermoe {

enum class DenseCode : int { linear, binary, unary, reduce, softmax, norm, topk, gather, scatter, copy, select, attend, load, store };
enum class BinaryKind : int { add, sub, mul, div, maximum, minimum, gt, ge, lt, le, eq, ne, mask };
enum class UnaryKind : int {
    copy, neg, rsqrt, sqrt, exp, log, sigmoid, silu, gelu, gelu_tanh, tanh, relu, abs, cos, sin, reciprocal, power,
    square, softplus, clamp, scale, shift, logical_not, fill, gt, ge, lt, le, eq, ne
};
enum class ReduceKind : int { sum, mean, maximum, minimum };
enum class DenseType : int { f32, bf16, i64, i32 };

// A vector for each row in the arena at `at` floats (times the most rows), or one constant vector for all rows.
struct DenseOperand {
    std::int64_t at = -1;  // below 0: constant
    const float* constant = nullptr;
    std::int64_t width = 0;
};

struct DenseStep {
    DenseCode code;
    int kind = 0;
    bool round = false;  // the result is rounded to bfloat16, as an operator of that type does
    DenseOperand out, a, b, c;
    std::int64_t p[10] = {};
    double f[2] = {};
};

// One group of layers that share a table of cache rows, for the step under way. Shapes as transformers' paged cache
// gives them: the keys of sequence s are read[cu_keys[s] .. cu_keys[s + 1]), its new tokens last; row r is written to
// write[r].
struct DenseGroup {
    const std::int64_t* read = nullptr;  // null: every key is of a new token
    const std::int64_t* write = nullptr;
    const std::int32_t* cu_keys = nullptr;
    std::int64_t window = 0;  // keys that a token sees, itself included; 0: all before it
};

// Numbers of a cache. Of 8 bits, a head's row is its numbers, padding to 4 bytes, and their float32 scale: bytes.
enum class CacheKind : int { f32, bf16, int8, fp8 };

struct DenseCache {  // of one layer; rows of `stride` elements
    void* keys = nullptr;
    void* values = nullptr;
    std::int64_t key_stride = 0, value_stride = 0;
    CacheKind kind = CacheKind::f32;
    bool round = false;  // numbers of 8 bits are rounded to bfloat16 where they are read
};

class DenseProgram {
   public:
    // Throws std::invalid_argument: a number out of range. segments: ends of each segment in `steps`. matrices: in their
    // published forms; a product of kind 2 names one in p[0].
    DenseProgram(std::vector<DenseStep> steps, std::vector<std::int64_t> segments, std::vector<FormMatrix> matrices,
                 std::int64_t arena_floats, std::int64_t max_rows, std::int64_t layers, std::int64_t groups, int threads);

    void bind(std::int64_t layer, const DenseCache& cache);
    // sequences: cu_rows has one more entry; the rows of all are `rows`.
    void begin(std::int64_t rows, std::int64_t sequences, const std::int32_t* cu_rows, std::vector<DenseGroup> groups);
    // io: addresses of what `load` and `store` steps of the segment name.
    void run(std::int64_t segment, const std::vector<void*>& io);

    std::int64_t segments() const { return static_cast<std::int64_t>(segments_.size()); }
    std::int64_t io_count(std::int64_t segment) const { return io_[static_cast<std::size_t>(segment)]; }
    std::int64_t weight_bytes(std::int64_t segment) const { return bytes_[static_cast<std::size_t>(segment)]; }
    std::int64_t groups() const { return static_cast<std::int64_t>(group_count_); }
    std::int64_t max_rows() const { return max_rows_; }
    std::int64_t layers() const { return static_cast<std::int64_t>(caches_.size()); }

   private:
    void check(const DenseStep& step) const;
    void check_operand(const DenseOperand& operand, std::int64_t width, bool optional) const;
    float* row(const DenseOperand& operand, std::int64_t r) {
        return arena_.get() + operand.at * max_rows_ + r * operand.width;
    }
    void linear(const DenseStep& step);
    std::int64_t product_bytes(const DenseStep& step) const;  // of a product's weights
    void attend(const DenseStep& step);
    void round_rows(const DenseStep& step, const DenseCache& cache);

    const std::vector<DenseStep> steps_;
    const std::vector<std::int64_t> segments_;
    const std::vector<FormMatrix> matrices_;
    const std::int64_t arena_floats_, max_rows_;
    const std::size_t group_count_;
    std::unique_ptr<float[]> arena_store_;
    struct Aligned {
        float* p = nullptr;
        float* get() const { return p; }
    } arena_;
    std::vector<DenseCache> caches_;
    std::vector<DenseGroup> current_;
    std::vector<std::int64_t> io_, bytes_;
    std::vector<std::vector<float>> scores_, decoded_;  // one for each thread
    // of a cache of 8 bits, the keys and the values of the new rows: as they are stored, and as these are read
    std::vector<std::uint8_t> coded_[2];
    std::vector<float> rounded_[2];
    std::int64_t rows_ = 0, sequences_ = 0;
    const std::int32_t* cu_rows_ = nullptr;
    std::unique_ptr<Threads> threads_;  // null: one thread
    Threads alone_{1, {}};              // for what is too small for more
};

// out[r] = x[r] . weight^T + bias: the scores of one or more routers on rows of their input, apart from any program.
// soft: each so many outputs become their softmax; 0: none. x [rows, width], weight [outputs, width], bias [outputs] or
// null, out [rows, outputs].
void router_scores(const float* x, std::int64_t rows, const float* weight, std::int64_t width, std::int64_t outputs,
                   const float* bias, std::int64_t soft, float* out);

}  // namespace tiermoe
