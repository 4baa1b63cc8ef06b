#include "neuron_ffn.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>

#include "fit.hpp"

namespace tiermoe {
namespace {

constexpr std::int64_t kChunks = 8;                 // of one expert; depends on its shape alone, as results must
constexpr std::int64_t kFullStep = 8;               // a chunk of full-precision neurons is a multiple of this
constexpr std::int64_t kPartialBytes = 16 << 20;    // memory for partial sums, unless one item needs more
constexpr std::int64_t kSlice = 512;                // columns that one job adds up

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

const std::vector<const Kernels*>& all_kernels() {
    static const std::vector<const Kernels*> all = [] {
        std::vector<const Kernels*> found;
        for (const Kernels* kernels : {avx512_kernels(), avx2_kernels(), &portable_kernels()})
            if (kernels) found.push_back(kernels);
        return found;
    }();
    return all;
}

// Up to kItemRows rows of one group.
struct Item {
    std::int64_t expert, start;
    int rows;
};

std::vector<Item> items_of(const Batch& batch) {
    std::vector<Item> items;
    for (const RowGroup& group : batch.groups)
        for (std::int64_t at = group.start; at < group.stop; at += kItemRows)
            items.push_back({group.expert, at, static_cast<int>(std::min<std::int64_t>(kItemRows, group.stop - at))});
    return items;
}

// How `steps` steps of neurons are cut: chunk c begins at step begin(c).
struct Cut {
    explicit Cut(std::int64_t steps) : steps(steps), chunks(std::min(steps, kChunks)) {}
    std::int64_t begin(std::int64_t chunk) const { return steps * chunk / chunks; }
    std::int64_t steps, chunks;
};

// Computes item by item into partial sums [chunks, rows, width], as many items at a time as fit, and adds them to out.
void run_items(Threads& threads, const Kernels& kernels, const std::vector<Item>& items, const Cut& cut,
               std::int64_t hidden, const Batch& batch, float* partial, std::int64_t partial_floats,
               const std::function<void(const Item&, std::int64_t chunk, float* out)>& compute) {
    const std::int64_t width = ceil_div(hidden, kTileOutputs) * kTileOutputs, slices = ceil_div(hidden, kSlice);
    std::vector<float*> at;
    for (std::size_t first = 0, last; first < items.size(); first = last) {
        at.clear();
        std::int64_t used = 0;
        for (last = first; last < items.size(); ++last) {
            const std::int64_t floats = cut.chunks * items[last].rows * width;
            if (used + floats > partial_floats) break;
            at.push_back(partial + used);
            used += floats;
        }
        threads.run(static_cast<std::int64_t>(last - first) * cut.chunks, [&](std::int64_t job, int) {
            const std::int64_t i = job / cut.chunks, chunk = job % cut.chunks;
            const Item& item = items[first + static_cast<std::size_t>(i)];
            compute(item, chunk, at[static_cast<std::size_t>(i)] + chunk * item.rows * width);
        });
        threads.run(slices, [&](std::int64_t slice, int) {
            const std::int64_t column = slice * kSlice, size = std::min(kSlice, hidden - column);
            for (std::size_t i = first; i < last; ++i)
                for (int r = 0; r < items[i].rows; ++r) {
                    const std::int64_t p = items[i].start + r;
                    kernels.add(at[i - first] + r * width + column, items[i].rows * width,
                                static_cast<int>(cut.chunks), batch.weights[p], size,
                                batch.row_of_out(p, hidden) + column);
                }
        });
    }
}

std::int64_t partial_size(const std::vector<Item>& items, const Cut& cut, std::int64_t hidden) {
    const std::int64_t row = cut.chunks * ceil_div(hidden, kTileOutputs) * kTileOutputs;
    std::int64_t largest = 0, all = 0;
    for (const Item& item : items) {
        largest = std::max(largest, item.rows * row);
        all += item.rows * row;
    }
    return std::max(largest, std::min(all, kPartialBytes / static_cast<std::int64_t>(sizeof(float))));
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : all_kernels()) names.emplace_back(kernels->name);
    return names;
}

void packed_ffn(Threads& threads, int set, const PackedLayer& layer, Activation activation, const Batch& batch) {
    const std::lock_guard<std::mutex> lock(threads.busy());
    const Threads::Bound bound(threads);
    const Kernels& kernels = *all_kernels()[static_cast<std::size_t>(set)];
    const std::vector<Item> items = items_of(batch);
    const Cut cut(ceil_div(layer.neurons, layer.group));
    const std::int64_t groups = ceil_div(layer.hidden, layer.group);
    const std::int64_t padded = ceil_div(layer.hidden, 64) * 64;

    // Rows that some group names, each quantized once.
    std::vector<std::int32_t> place(static_cast<std::size_t>(batch.tokens), -1);
    std::vector<std::int32_t> used;
    for (const Item& item : items)
        for (int r = 0; r < item.rows; ++r) {
            const std::int32_t row = batch.rows[item.start + r];
            if (place[static_cast<std::size_t>(row)] >= 0) continue;
            place[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(used.size());
            used.push_back(row);
        }
    const std::int64_t partial = partial_size(items, cut, layer.hidden);
    const std::int64_t count = static_cast<std::int64_t>(used.size());
    float* sums = static_cast<float*>(threads.scratch(
        static_cast<std::size_t>((partial + count * groups * 2) * 4 + count * padded)));
    float* affine = sums + partial;
    auto* codes = reinterpret_cast<std::int8_t*>(affine + count * groups * 2);
    threads.run(count, [&](std::int64_t i, int) {
        kernels.quantize(batch.hidden + used[static_cast<std::size_t>(i)] * layer.hidden, layer.hidden, layer.group,
                         codes + i * padded, affine + i * groups * 2);
    });

    const std::int64_t blocks = ceil_div(layer.neurons, kBlockNeurons), group_blocks = layer.group / kBlockNeurons;
    const std::int64_t block_codes = ceil_div(layer.hidden, kTileInputs) * 4 * 64 * layer.bits;
    const std::int64_t block_scales = groups * 8 * kTileOutputs;
    const std::int64_t columns = ceil_div(layer.hidden, kTileOutputs);
    const std::int64_t group_codes = columns * (layer.group / kTileInputs) * 64 * layer.bits;
    const std::int64_t group_scales = columns * 2 * kTileOutputs;
    batch.zero(layer.hidden);
    run_items(threads, kernels, items, cut, layer.hidden, batch, sums, partial,
              [&](const Item& item, std::int64_t chunk, float* out) {
                  const std::int64_t begin = cut.begin(chunk), end = cut.begin(chunk + 1);
                  QuantizedRow x[kItemRows];
                  for (int r = 0; r < item.rows; ++r) {
                      const std::int64_t i = place[static_cast<std::size_t>(batch.rows[item.start + r])];
                      x[r] = {codes + i * padded, affine + i * groups * 2};
                  }
                  const std::int64_t block = item.expert * blocks + begin * group_blocks;
                  const std::int64_t group = item.expert * cut.steps + begin;
                  PackedJob job;
                  job.gate_up = layer.gate_up + block * block_codes;
                  job.gate_up_scales = layer.gate_up_scales + block * block_scales;
                  job.down = layer.down + group * group_codes;
                  job.down_scales = layer.down_scales + group * group_scales;
                  job.hidden = layer.hidden;
                  job.neurons = std::min(layer.neurons, end * layer.group) - begin * layer.group;
                  job.group = layer.group;
                  job.activation = activation;
                  job.rows = item.rows;
                  job.x = x;
                  job.out = out;
                  kernels.packed[layer.bits](job);
              });
}

void full_ffn(Threads& threads, int set, const FullLayer& layer, Activation activation, const Batch& batch) {
    const std::lock_guard<std::mutex> lock(threads.busy());
    const Threads::Bound bound(threads);
    const Kernels& kernels = *all_kernels()[static_cast<std::size_t>(set)];
    const std::vector<Item> items = items_of(batch);
    const Cut cut(ceil_div(layer.neurons, kFullStep));
    const std::int64_t partial = partial_size(items, cut, layer.hidden);
    float* sums = static_cast<float*>(threads.scratch(static_cast<std::size_t>(partial) * 4));
    const std::int64_t element = layer.element == Element::f32 ? 4 : 2;
    batch.zero(layer.hidden);
    run_items(threads, kernels, items, cut, layer.hidden, batch, sums, partial,
              [&](const Item& item, std::int64_t chunk, float* out) {
                  const std::int64_t begin = cut.begin(chunk) * kFullStep;
                  const std::int64_t end = std::min(layer.neurons, cut.begin(chunk + 1) * kFullStep);
                  const float* x[kItemRows];
                  for (int r = 0; r < item.rows; ++r) x[r] = batch.hidden + batch.rows[item.start + r] * layer.hidden;
                  const std::int64_t first = (item.expert * layer.neurons + begin) * layer.hidden * element;
                  const FullJob job = {static_cast<const char*>(layer.gate_up) + 2 * first,
                                       static_cast<const char*>(layer.down) + first,
                                       layer.hidden, end - begin, activation, item.rows, x, out};
                  kernels.full[static_cast<int>(layer.element)](job);
              });
}

void gptq_block(Threads& threads, int set, const GptqBlock& block) {
    const Kernels& kernels = *all_kernels()[static_cast<std::size_t>(set)];
    const std::lock_guard<std::mutex> lock(threads.busy());
    const Threads::Bound bound(threads);
    threads.run(ceil_div(block.outputs, kTileOutputs), [&](std::int64_t job, int) { kernels.gptq(block, job); });
}

void fit_layer(Threads& threads, int set, const FitLayer& layer) {
    const Kernels& kernels = *all_kernels()[static_cast<std::size_t>(set)];
    const FullLayer& full = layer.full;
    const std::int64_t each = ceil_div(full.neurons, kBlockNeurons) + ceil_div(full.neurons, layer.group);
    const std::lock_guard<std::mutex> lock(threads.busy());
    const Threads::Bound bound(threads);
    threads.run(full.experts * each, [&](std::int64_t job, int) { kernels.fit(layer, job); });
}

}  // namespace tiermoe
