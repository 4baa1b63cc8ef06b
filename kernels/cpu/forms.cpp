#include "forms.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace tiermoe {
namespace {

constexpr std::int64_t kScratchBytes = 32 << 20;  // memory for the rows of some items, unless one item needs more

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// In the order of instruction_sets().
const FormKernels& kernels_of(int set) {
    static const std::vector<const FormKernels*> all = [] {
        std::vector<const FormKernels*> found;
        for (const FormKernels* kernels : {avx512_forms(), avx2_forms(), &portable_forms()})
            if (kernels) found.push_back(kernels);
        return found;
    }();
    return *all[static_cast<std::size_t>(set)];
}

float element(Element type, const void* values, std::int64_t at) {
    if (type == Element::f32) return static_cast<const float*>(values)[at];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(values)[at];
    std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    if (type == Element::f16) {
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
        if (rest < 0x0400u) {  // subnormal: 2^-24
            value = static_cast<float>(rest) * 5.9604644775390625e-8f;
            return sign ? -value : value;
        }
        wide = sign | (rest < 0x7c00u ? (rest << 13) + 0x38000000u : 0x7f800000u | (rest & 0x3ffu) << 13);
    }
    std::memcpy(&value, &wide, sizeof(value));
    return value;
}

// Up to kItemRows rows of one group, with the memory of their inputs and neurons.
struct Item {
    const FormExpert* expert;
    std::int64_t start;
    int rows;
    float *gate_x, *up_x, *h, *down_x;  // [rows, arranged()], h [rows, neurons]
};

bool same_arrangement(const FormMatrix& a, const FormMatrix& b) {
    return a.weight == b.weight || (!a.order && !b.order && a.kind == b.kind && a.integers() == b.integers());
}

std::int64_t item_floats(const Item& item) {
    const FormExpert& e = *item.expert;
    const std::int64_t up = same_arrangement(e.gate, e.up) ? 0 : e.up.arranged();
    return item.rows * (e.gate.arranged() + up + ceil_div(e.down.inputs, kUnit) * kUnit + e.down.arranged());
}

// Gives an item its memory from `at` on.
void place(Item& item, float* at) {
    const FormExpert& e = *item.expert;
    item.gate_x = item.up_x = at;
    at += item.rows * e.gate.arranged();
    if (!same_arrangement(e.gate, e.up)) {
        item.up_x = at;
        at += item.rows * e.up.arranged();
    }
    item.h = at;
    item.down_x = at + item.rows * ceil_div(e.down.inputs, kUnit) * kUnit;
}

// The calls of one form_ffn on the items that fit into memory together.
class Pass {
   public:
    Pass(Threads& threads, const FormKernels& kernels, const FormLayer& layer, Activation activation, const Batch& batch,
         std::vector<Item>& items, std::int64_t scratch, float* thread_scratch)
        : threads_(threads), kernels_(kernels), layer_(layer), activation_(activation), batch_(batch), items_(items),
          scratch_(scratch), thread_scratch_(thread_scratch) {}

    void run(std::size_t first, std::size_t last) {
        const std::int64_t items = static_cast<std::int64_t>(last - first), chunks = ceil_div(layer_.neurons, kFormOutputs);
        const auto item = [&](std::int64_t i) -> Item& { return items_[first + static_cast<std::size_t>(i)]; };
        threads_.run(items, [&](std::int64_t i, int) { arrange_inputs(item(i)); });
        check();
        threads_.run(items * chunks, [&](std::int64_t job, int thread) {
            neurons(item(job / chunks), job % chunks * kFormOutputs, thread);
        });
        threads_.run(items, [&](std::int64_t i, int) {
            const Item& it = item(i);
            for (int r = 0; r < it.rows; ++r)
                arrange(it.expert->down, it.h + r * layer_.neurons, it.down_x + r * it.expert->down.arranged());
        });
        check();
        threads_.run(ceil_div(layer_.hidden, kFormOutputs), [&](std::int64_t chunk, int thread) {
            for (std::int64_t i = 0; i < items; ++i) outputs(item(i), chunk * kFormOutputs, thread);
        });
    }

   private:
    void arrange(const FormMatrix& matrix, const float* x, float* arranged) {
        if (!kernels_.arrange(matrix, x, arranged)) bad_order_ = true;
    }

    void check() const {
        if (bad_order_) throw std::invalid_argument("the order of a matrix names an input that is not there");
    }

    void arrange_inputs(const Item& item) {
        const FormExpert& e = *item.expert;
        for (int r = 0; r < item.rows; ++r) {
            const float* x = batch_.hidden + batch_.rows[item.start + r] * layer_.hidden;
            arrange(e.gate, x, item.gate_x + r * e.gate.arranged());
            if (item.up_x != item.gate_x) arrange(e.up, x, item.up_x + r * e.up.arranged());
        }
    }

    void dots(const FormMatrix& matrix, std::int64_t first, std::int64_t step, std::int64_t count, const Item& item,
              float* x, float* out, int thread) {
        float* rows[kItemRows];
        for (int r = 0; r < item.rows; ++r) rows[r] = x + r * matrix.arranged();
        kernels_.dots({&matrix, first, step, count, item.rows, rows, out, kFormOutputs,
                       thread_scratch_ + thread * scratch_});
    }

    void neurons(const Item& item, std::int64_t first, int thread) {
        const FormExpert& e = *item.expert;
        const std::int64_t count = std::min<std::int64_t>(kFormOutputs, layer_.neurons - first);
        alignas(64) float gate[kItemRows * kFormOutputs], up[kItemRows * kFormOutputs];
        const std::int64_t gate_row = e.gate_first + e.gate_step * first, up_row = e.up_first + e.up_step * first;
        dots(e.gate, gate_row, e.gate_step, count, item, item.gate_x, gate, thread);
        dots(e.up, up_row, e.up_step, count, item, item.up_x, up, thread);
        for (int r = 0; r < item.rows; ++r) {
            float *g = gate + r * kFormOutputs, *u = up + r * kFormOutputs;
            if (e.gate_up_bias)
                for (std::int64_t k = 0; k < count; ++k) {
                    g[k] += element(e.bias_type, e.gate_up_bias, gate_row + e.gate_step * k);
                    u[k] += element(e.bias_type, e.gate_up_bias, up_row + e.up_step * k);
                }
            kernels_.activate(g, u, count, activation_, item.h + r * layer_.neurons + first);
        }
    }

    void outputs(const Item& item, std::int64_t first, int thread) {
        const FormExpert& e = *item.expert;
        const std::int64_t count = std::min<std::int64_t>(kFormOutputs, layer_.hidden - first);
        alignas(64) float y[kItemRows * kFormOutputs];
        dots(e.down, first, 1, count, item, item.down_x, y, thread);
        for (int r = 0; r < item.rows; ++r) {
            const std::int64_t p = item.start + r;
            float *out = batch_.row_of_out(p, layer_.hidden) + first, *at = y + r * kFormOutputs;
            if (e.down_bias)
                for (std::int64_t k = 0; k < count; ++k) at[k] += element(e.bias_type, e.down_bias, first + k);
            for (std::int64_t k = 0; k < count; ++k) out[k] += batch_.weights[p] * at[k];
        }
    }

    Threads& threads_;
    const FormKernels& kernels_;
    const FormLayer& layer_;
    const Activation activation_;
    const Batch& batch_;
    std::vector<Item>& items_;
    const std::int64_t scratch_;  // floats of a thread
    float* const thread_scratch_;
    std::atomic<bool> bad_order_{false};
};

}  // namespace

std::int64_t FormMatrix::row_bytes() const {
    switch (kind) {
        case FormKind::f32: return inputs * 4;
        case FormKind::f16:
        case FormKind::bf16: return inputs * 2;
        case FormKind::fp8:
        case FormKind::int8: return inputs;
        case FormKind::mxfp4:
        case FormKind::nvfp4:
        case FormKind::int4: return (inputs + 1) / 2;
        default: return inputs / gguf_block(kind).weights * gguf_block(kind).bytes;
    }
}

bool FormMatrix::fits() const {
    if (kind < FormKind::f32 || kind > FormKind::tq2_0 || outputs < 1 || inputs < 1 || !weight) return false;
    const bool grouped = kind >= FormKind::fp8 && kind <= FormKind::int8, ints = kind == FormKind::int4 || kind == FormKind::int8;
    if (grouped != (scale != nullptr) || grouped != (scale_type != ScaleType::none)) return false;
    if (scale_type < ScaleType::none || scale_type > ScaleType::e4m3 || group < 1 || block < 1) return false;
    if ((scale_type == ScaleType::e4m3) != (kind == FormKind::nvfp4) || (kind == FormKind::nvfp4) != (global_scale != nullptr))
        return false;
    if ((zero || order) && !ints) return false;
    const std::int64_t unit = kind >= FormKind::q8_0 ? gguf_block(kind).weights
                              : kind == FormKind::mxfp4 ? 32 : kind == FormKind::nvfp4 ? 16 : 1;
    const bool fixed = kind == FormKind::mxfp4 ? group == 32 : kind != FormKind::nvfp4 || group == 16;
    return inputs % unit == 0 && fixed;
}

void form_ffn(Threads& threads, int set, const FormLayer& layer, Activation activation, const Batch& batch) {
    const std::lock_guard<std::mutex> lock(threads.busy());
    const Threads::Bound bound(threads);
    std::vector<Item> items;
    std::int64_t scratch = 0, all = 0, largest = 0;
    for (const RowGroup& group : batch.groups) {
        const FormExpert& expert = layer.experts[static_cast<std::size_t>(group.expert)];
        for (const FormMatrix* matrix : {&expert.gate, &expert.up, &expert.down})
            scratch = std::max(scratch, ceil_div(form_scratch(*matrix), 16) * 16);
        for (std::int64_t at = group.start; at < group.stop; at += kItemRows) {
            const int rows = static_cast<int>(std::min<std::int64_t>(kItemRows, group.stop - at));
            items.push_back({&expert, at, rows, nullptr, nullptr, nullptr, nullptr});
            largest = std::max(largest, item_floats(items.back()));
            all += item_floats(items.back());
        }
    }
    const std::int64_t room = std::max(largest, std::min(all, kScratchBytes / static_cast<std::int64_t>(sizeof(float))));
    auto* own = static_cast<float*>(threads.scratch(static_cast<std::size_t>(threads.count() * scratch + room) * sizeof(float)));
    float* shared = own + threads.count() * scratch;
    Pass pass(threads, kernels_of(set), layer, activation, batch, items, scratch, own);
    batch.zero(layer.hidden);
    for (std::size_t first = 0, last; first < items.size(); first = last) {
        std::int64_t used = 0;
        for (last = first; last < items.size() && used + item_floats(items[last]) <= room; ++last) {
            place(items[last], shared + used);
            used += item_floats(items[last]);
        }
        pass.run(first, last);
    }
}

void form_linear(Threads& threads, int set, const FormMatrix& matrix, const float* x, std::int64_t rows, float* out) {
    const std::lock_guard<std::mutex> lock(threads.busy());
    const Threads::Bound bound(threads);
    const FormKernels& kernels = kernels_of(set);
    const std::int64_t scratch = ceil_div(form_scratch(matrix), 16) * 16, size = matrix.arranged();
    auto* own = static_cast<float*>(
        threads.scratch(static_cast<std::size_t>(threads.count() * scratch + kItemRows * size) * sizeof(float)));
    float* arranged = own + threads.count() * scratch;
    for (std::int64_t first = 0; first < rows; first += kItemRows) {
        const int count = static_cast<int>(std::min<std::int64_t>(kItemRows, rows - first));
        float* at[kItemRows];
        for (int r = 0; r < count; ++r) {
            at[r] = arranged + r * size;
            if (!kernels.arrange(matrix, x + (first + r) * matrix.inputs, arranged + r * size))
                throw std::invalid_argument("the order of a matrix names an input that is not there");
        }
        threads.run(ceil_div(matrix.outputs, kFormOutputs), [&](std::int64_t chunk, int thread) {
            const std::int64_t begin = chunk * kFormOutputs;
            kernels.dots({&matrix, begin, 1, std::min<std::int64_t>(kFormOutputs, matrix.outputs - begin), count, at,
                          out + first * matrix.outputs + begin, matrix.outputs, own + thread * scratch});
        });
    }
}

}  // namespace tiermoe
