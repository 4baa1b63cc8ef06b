// Bindings of neuron_ffn.hpp, fit.hpp and forms.hpp. Weights are given by address: the caller (kernels/packed_ffn.py,
// kernels/form_ffn.py) checked once that these are contiguous buffers of the sizes given, and keeps them alive. What changes
// from call to call comes as arrays, which are checked here, and so is every number against the others, before a kernel runs.
#include "neuron_ffn.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "fit.hpp"
#include "forms.hpp"

namespace tiermoe::bindings {
namespace {

constexpr std::int64_t kSizeMax = std::int64_t{1} << 31;  // of one axis

using Groups = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;  // expert, start, stop
using Row = Array<const float, 1>;
using Rows = Array<const float, 2>;

Threads* threads(std::int64_t count, const std::vector<std::int64_t>& cores) {
    if (count < 1 || count > 1024) refuse("the number of threads is not in 1..1024", count);
    for (const std::int64_t core : cores)
        if (core < 0 || core >= 1024) refuse("a core is not in 0..1023", core);
    if (!cores.empty() && static_cast<std::int64_t>(cores.size()) != count)
        refuse("there must be one core for each thread; cores given", static_cast<std::int64_t>(cores.size()));
    return new Threads(static_cast<int>(count), std::vector<int>(cores.begin(), cores.end()));
}

// What kernels compute, as it was checked: other threads may write to the array of rows later.
class Checked {
  public:
    Checked(const Groups& groups, const Array<const std::int32_t, 1>& rows, const Row& weights, const Rows& hidden,
            const Array<float, 2>& out, std::int64_t experts, std::int64_t width)
        : rows_(rows.begin(), rows.end()) {
        const std::int64_t count = rows.size(), tokens = hidden.shape(0);
        if (weights.size() != count) refuse("weights are not as many as rows", weights.size());
        if (hidden.shape(1) != width) refuse("hidden has rows of another width", hidden.shape(1));
        if (out.shape(0) != tokens || out.shape(1) != width)
            refuse("out has not the shape of hidden, its rows are", out.shape(0));
        if (tokens >= kSizeMax) refuse("hidden has too many rows", tokens);
        check_product({tokens, width});
        if (out.begin() < hidden.end() && hidden.begin() < out.end()) refuse("out overlaps hidden, of rows", tokens);
        batch = {{}, rows_.data(), weights.data(), hidden.data(), tokens, out.data()};
        for (const auto& [expert, start, stop] : groups) {
            if (expert < 0 || expert >= experts) refuse("there is no such expert", expert);
            if (start < 0 || start > stop) refuse("a group starts out of range", start);
            if (stop > count) refuse("a group stops out of range", stop);
            for (std::int64_t i = start; i < stop; ++i)
                if (rows_[i] < 0 || rows_[i] >= tokens) refuse("there is no such row", rows_[i]);
            batch.groups.push_back({expert, start, stop});
        }
    }
    Batch batch;

  private:
    std::vector<std::int32_t> rows_;
};

void check_set(std::int64_t set) {
    if (set < 0 || set >= static_cast<std::int64_t>(instruction_sets().size())) refuse("there is no such instruction set", set);
}

Activation activation_of(std::int64_t code, Activation last) {
    if (code < 0 || code > static_cast<int>(last)) refuse("there is no such activation", code);
    return static_cast<Activation>(code);
}

Element element_of(std::int64_t code) {
    if (code < 0 || code > static_cast<int>(Element::bf16)) refuse("there is no such element type", code);
    return static_cast<Element>(code);
}

void check_sizes(std::int64_t hidden, std::int64_t neurons, std::int64_t experts) {
    for (const std::int64_t size : {hidden, neurons, experts})
        if (size < 1 || size >= kSizeMax) refuse("a size is out of range", size);
    check_product({hidden, neurons, experts, 2});
}

int bits_of(std::int64_t bits) {
    if (bits != 1 && bits != 2 && bits != 3 && bits != 4 && bits != 8) refuse("there is no such width", bits);
    return static_cast<int>(bits);
}

int group_of(std::int64_t group) {
    if (group != 32 && group != 64 && group != 128) refuse("there is no such group size", group);
    return static_cast<int>(group);
}

void packed(Threads& threads, std::int64_t set, std::int64_t activation, std::int64_t width, std::int64_t neurons,
            std::int64_t experts, std::int64_t bits, std::int64_t group, std::uintptr_t gate_up, std::uintptr_t gate_up_scales,
            std::uintptr_t down, std::uintptr_t down_scales, const Groups& groups, const Array<const std::int32_t, 1>& rows,
            const Row& weights, const Rows& hidden, const Array<float, 2>& out) {
    check_set(set), check_sizes(width, neurons, experts);
    const PackedLayer layer{width, neurons, experts, bits_of(bits), group_of(group), at<const std::uint8_t>(gate_up),
                            at<const std::uint16_t>(gate_up_scales), at<const std::uint8_t>(down),
                            at<const std::uint16_t>(down_scales)};
    const Activation of = activation_of(activation, Activation::relu);
    const Checked checked(groups, rows, weights, hidden, out, experts, width);
    const nb::gil_scoped_release free;
    packed_ffn(threads, static_cast<int>(set), layer, of, checked.batch);
}

void full(Threads& threads, std::int64_t set, std::int64_t activation, std::int64_t width, std::int64_t neurons,
          std::int64_t experts, std::int64_t element, std::uintptr_t gate_up, std::uintptr_t down, const Groups& groups,
          const Array<const std::int32_t, 1>& rows, const Row& weights, const Rows& hidden, const Array<float, 2>& out) {
    check_set(set), check_sizes(width, neurons, experts);
    const FullLayer layer{width, neurons, experts, element_of(element), at<const void>(gate_up), at<const void>(down)};
    const Activation of = activation_of(activation, Activation::relu);
    const Checked checked(groups, rows, weights, hidden, out, experts, width);
    const nb::gil_scoped_release free;
    full_ffn(threads, static_cast<int>(set), layer, of, checked.batch);
}

// bits, and the addresses of gate_up, gate_up_scales, down, down_scales, errors
using Width = std::tuple<std::int64_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t>;

void fit(Threads& threads, std::int64_t set, std::int64_t hidden, std::int64_t neurons, std::int64_t experts,
         std::int64_t element, std::int64_t group, std::uintptr_t gate_up, std::uintptr_t down, std::uintptr_t powers,
         const std::vector<Width>& widths) {
    check_set(set), check_sizes(hidden, neurons, experts);
    if (widths.size() > kMostWidths) refuse("there are too many widths", static_cast<std::int64_t>(widths.size()));
    FitLayer layer{};
    layer.full = {hidden, neurons, experts, element_of(element), at<const void>(gate_up), at<const void>(down)};
    layer.powers = at<float>(powers);
    layer.group = group_of(group);
    FitWidth made[kMostWidths];
    layer.widths = made;
    for (const auto& [bits, gate_up_codes, gate_up_scales, down_codes, down_scales, errors] : widths)
        made[layer.count++] = {bits_of(bits), at<std::uint8_t>(gate_up_codes), at<std::uint16_t>(gate_up_scales),
                               at<std::uint8_t>(down_codes), at<std::uint16_t>(down_scales), at<float>(errors)};
    const nb::gil_scoped_release free;
    fit_layer(threads, static_cast<int>(set), layer);
}

void gptq(Threads& threads, std::int64_t set, std::int64_t outputs, std::int64_t inputs, std::int64_t bits, std::uintptr_t left,
          std::uintptr_t weights, std::uintptr_t factor, std::int64_t stride, std::uintptr_t pivots, std::uintptr_t codes,
          std::uintptr_t rest, std::uintptr_t scales, std::uintptr_t offsets) {
    check_set(set);
    if (outputs < 1 || outputs >= kSizeMax || inputs < 1 || inputs > 128 || stride < inputs || stride >= kSizeMax)
        refuse("a size is out of range, or that of a group, whose inputs are", inputs);
    const GptqBlock block{outputs, static_cast<int>(inputs), bits_of(bits), at<float>(left), at<const float>(weights),
                          at<const float>(factor), stride, at<const float>(pivots), at<float>(codes), at<float>(rest),
                          at<float>(scales), at<float>(offsets)};
    const nb::gil_scoped_release free;
    gptq_block(threads, static_cast<int>(set), block);
}

// --- published forms ---------------------------------------------------------------------------------------

// gate, up, down, (gate_first, gate_step, up_first, up_step, bias_type, gate_up_bias, down_bias)
using Expert = std::tuple<MatrixNumbers, MatrixNumbers, MatrixNumbers, std::array<std::int64_t, 7>>;

template <typename T>
const T* part(std::int64_t address) {
    return at<const T>(static_cast<std::uintptr_t>(address));
}

}  // namespace

FormMatrix matrix_of(const MatrixNumbers& n) {
    for (int i = 3; i < 7; ++i)
        if (n[i] < 1 || n[i] >= kSizeMax) refuse("a size is out of range", n[i]);
    check_product({n[3], n[4]});
    const FormMatrix matrix{static_cast<FormKind>(n[0]), static_cast<ScaleType>(n[1]), n[2] != 0, n[3], n[4], n[5], n[6],
                            part<std::uint8_t>(n[7]), part<std::uint8_t>(n[8]), part<std::uint8_t>(n[9]), part<float>(n[10]),
                            part<std::int32_t>(n[11])};
    if (!matrix.fits()) refuse("the parts do not fit to a matrix of kind", n[0]);
    return matrix;
}

namespace {

FormExpert expert_of(const Expert& given, const FormLayer& layer) {
    const auto& [gate, up, down, n] = given;
    const FormExpert expert{matrix_of(gate), matrix_of(up), matrix_of(down), n[0], n[1], n[2], n[3], element_of(n[4]),
                            part<void>(n[5]), part<void>(n[6])};
    const auto rows_fit = [&](const FormMatrix& matrix, std::int64_t first, std::int64_t step) {
        return first >= 0 && step >= 1 && step <= 2 && first + step * (layer.neurons - 1) < matrix.outputs;
    };
    if (expert.gate.inputs != layer.hidden || expert.up.inputs != layer.hidden || expert.down.inputs != layer.neurons ||
        expert.down.outputs != layer.hidden || !rows_fit(expert.gate, n[0], n[1]) || !rows_fit(expert.up, n[2], n[3]))
        refuse("the matrices are not those of an expert with neurons", layer.neurons);
    return expert;
}

FormLayer* form_layer(std::int64_t hidden, std::int64_t neurons, const std::vector<Expert>& experts) {
    if (hidden < 1 || neurons < 1) refuse("a size is out of range", std::min(hidden, neurons));
    check_product({hidden, neurons, 2});
    auto layer = std::make_unique<FormLayer>();
    layer->hidden = hidden, layer->neurons = neurons;
    for (const Expert& expert : experts) layer->experts.push_back(expert_of(expert, *layer));
    return layer.release();
}

void form(Threads& threads, std::int64_t set, std::int64_t activation, const FormLayer& layer, const Groups& groups,
          const Array<const std::int32_t, 1>& rows, const Row& weights, const Rows& hidden, const Array<float, 2>& out) {
    check_set(set);
    const Activation of = activation_of(activation, Activation::gpt_oss);
    const Checked checked(groups, rows, weights, hidden, out, static_cast<std::int64_t>(layer.experts.size()), layer.hidden);
    const nb::gil_scoped_release free;
    form_ffn(threads, static_cast<int>(set), layer, of, checked.batch);
}

// --- the experts of a layer, for the core's executor -----------------------------------------------------------

// Whole experts of one layer, each in the slot of its own from `first` on, run by `ffn` on these threads.
template <typename Layer, void (*ffn)(Threads&, int, const Layer&, Activation, const Batch&)>
struct HostExperts : Experts {
    HostExperts(Threads& threads, std::int64_t set, Layer layer, Activation activation, std::int64_t first, std::int64_t count)
        : threads(threads), set(static_cast<int>(set)), layer(std::move(layer)), activation(activation), first(first), count(count) {}

    void run(const float* hidden, const std::int64_t* pairs, const Group* groups, std::int64_t group_count, std::int64_t top_k,
             float* y, float*) const override {
        Batch batch{};
        std::vector<std::int32_t> rows, outs;
        for (const Group* g = groups; g != groups + group_count; ++g) {
            const std::int64_t slot = g->first / neurons - first, start = static_cast<std::int64_t>(rows.size());
            if (g->first % neurons || g->neurons != neurons || g->add) refuse("experts are whole, not from neuron", g->first);
            if (slot < 0 || slot >= count) refuse("the layer has no such slot", slot + first);
            for (std::int64_t at = g->start; at < g->stop; ++at) {
                if (pairs[at] >= kSizeMax) refuse("there are too many pairs", pairs[at]);
                rows.push_back(static_cast<std::int32_t>(pairs[at] / top_k));
                outs.push_back(static_cast<std::int32_t>(pairs[at]));
            }
            batch.groups.push_back({slot, start, static_cast<std::int64_t>(rows.size())});
        }
        const std::vector<float> ones(rows.size(), 1.0f);
        batch.rows = rows.data(), batch.outs = outs.data(), batch.weights = ones.data();
        batch.hidden = hidden, batch.out = y;
        ffn(threads, set, layer, activation, batch);
    }

    Threads& threads;
    const int set;
    const Layer layer;
    const Activation activation;
    const std::int64_t first, count;
};

template <typename Layer, void (*ffn)(Threads&, int, const Layer&, Activation, const Batch&)>
nb::capsule host_experts(Threads& threads, std::int64_t set, Layer layer, Activation activation, std::int64_t first,
                         std::int64_t count, std::int64_t max_rows) {
    check_set(set);
    if (first < 0 || !product_fits({first + count, layer.neurons}, kMostItems)) refuse("there is no such slot", first);
    const std::int64_t width = layer.hidden, neurons = layer.neurons;
    auto made = std::make_unique<HostExperts<Layer, ffn>>(threads, set, std::move(layer), activation, first, count);
    made->width = width, made->neurons = neurons, made->max_rows = max_rows;
    return experts_capsule(std::move(made));
}

nb::capsule form_experts(Threads& threads, std::int64_t set, std::int64_t activation, const FormLayer& layer,
                         std::int64_t first, std::int64_t max_rows) {
    const auto count = static_cast<std::int64_t>(layer.experts.size());
    return host_experts<FormLayer, form_ffn>(threads, set, layer, activation_of(activation, Activation::gpt_oss), first, count,
                                             max_rows);
}

nb::capsule full_experts(Threads& threads, std::int64_t set, std::int64_t activation, std::int64_t width, std::int64_t neurons,
                         std::int64_t experts, std::int64_t element, std::uintptr_t gate_up, std::uintptr_t down,
                         std::int64_t first, std::int64_t max_rows) {
    check_sizes(width, neurons, experts);
    const FullLayer layer{width, neurons, experts, element_of(element), at<const void>(gate_up), at<const void>(down)};
    return host_experts<FullLayer, full_ffn>(threads, set, layer, activation_of(activation, Activation::relu), first, experts,
                                             max_rows);
}

void linear(Threads& threads, std::int64_t set, const MatrixNumbers& numbers, const Rows& x, const Array<float, 2>& out) {
    check_set(set);
    const FormMatrix matrix = matrix_of(numbers);
    if (x.shape(1) != matrix.inputs || out.shape(0) != x.shape(0) || out.shape(1) != matrix.outputs)
        refuse("x and out are not those of a matrix with inputs", matrix.inputs);
    const nb::gil_scoped_release free;
    form_linear(threads, static_cast<int>(set), matrix, x.data(), x.shape(0), out.data());
}

}  // namespace

void bind_neurons(nb::module_& m) {
    constexpr const char* kRaises = "Raises ValueError: an array of another shape, type or layout; a number out of range.";
    m.def("instruction_sets", [] { return nb::tuple(nb::cast(instruction_sets())); },
          nb::sig("def instruction_sets() -> tuple[str, ...]"),
          "What this processor can run, best first: \"avx512\" (with VNNI), \"avx2\", \"portable\".");
    nb::class_<Threads>(m, "Pool", "A pool of threads, which ends them when it goes; see threads.hpp.");
    m.def("threads", &threads, "count"_a, "cores"_a,
          "Raises ValueError: a number out of range; OSError: a thread cannot be started, or not on its core.");
    m.def("packed_ffn", &packed, "threads"_a, "set_number"_a, "activation"_a, "hidden"_a, "neurons"_a, "experts"_a, "bits"_a,
          "group"_a, "gate_up"_a, "gate_up_scales"_a, "down"_a, "down_scales"_a, "groups"_a, "rows"_a, "weights"_a,
          "hidden_rows"_a, "out"_a, kRaises);
    m.def("full_ffn", &full, "threads"_a, "set_number"_a, "activation"_a, "hidden"_a, "neurons"_a, "experts"_a, "element"_a,
          "gate_up"_a, "down"_a, "groups"_a, "rows"_a, "weights"_a, "hidden_rows"_a, "out"_a, kRaises);
    m.def("fit", &fit, "threads"_a, "set_number"_a, "hidden"_a, "neurons"_a, "experts"_a, "element"_a, "group"_a, "gate_up"_a,
          "down"_a, "powers"_a, "widths"_a,
          "widths: bits, and the addresses of gate_up, gate_up_scales, down, down_scales, errors.\n\n"
          "Raises ValueError: a number out of range.");
    m.def("gptq_block", &gptq, "threads"_a, "set_number"_a, "outputs"_a, "inputs"_a, "bits"_a, "left"_a, "weights"_a,
          "factor"_a, "stride"_a, "pivots"_a, "codes"_a, "rest"_a, "scales"_a, "offsets"_a,
          "One group of a GPTQ sweep; see fit.hpp. Raises ValueError: a number out of range.");
    nb::class_<FormLayer>(m, "FormExperts", "The parts of a layer's experts in published forms, by address.");
    m.def("form_layer", &form_layer, "hidden"_a, "neurons"_a, "experts"_a,
          "Of each expert gate, up, down, and the numbers of `Expert` in neuron_module.cpp.\n\n"
          "Raises ValueError: they do not fit together.");
    m.def("form_ffn", &form, "threads"_a, "set_number"_a, "activation"_a, "layer"_a, "groups"_a, "rows"_a, "weights"_a,
          "hidden_rows"_a, "out"_a,
          "Raises ValueError: an array of another shape, type or layout; a number or an order out of range.");
    m.def("full_experts", &full_experts, "threads"_a, "set_number"_a, "activation"_a, "hidden"_a, "neurons"_a, "experts"_a,
          "element"_a, "gate_up"_a, "down"_a, "first"_a, "max_rows"_a,
          "Experts of slots from `first` on for the core's executor; see experts.hpp. What is given stays with the caller.\n\n"
          "Raises ValueError: a number is out of range.");
    m.def("form_experts", &form_experts, "threads"_a, "set_number"_a, "activation"_a, "layer"_a, "first"_a, "max_rows"_a,
          "As `full_experts`.");
    m.def("form_linear", &linear, "threads"_a, "set_number"_a, "matrix"_a, "x"_a, "out"_a,
          "Raises ValueError: an array of another shape, type or layout; a number or an order out of range.");
}

}  // namespace tiermoe::bindings
