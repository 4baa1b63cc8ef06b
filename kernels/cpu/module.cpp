// The module: experts and what runs beside them. Addresses and sizes in, nothing out; the caller (kernels/expert_ffn.py)
// makes sure that the addresses are those of contiguous buffers of the sizes given, and keeps them alive. Here the numbers
// are checked against each other before a kernel runs: group ranges and pair numbers against the pairs, neurons against the
// pool. The interpreter lock is released while a kernel runs.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "table.hpp"

namespace tiermoe::bindings {
namespace {

constexpr std::int64_t kMaxWidth = 1 << 20;

using Groups = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool>>;

// Every group lies within the pairs and every pair it names within the rows of y, and its neurons in the pool. `pairs` is read
// only where a range was found good, once: into `held`, as other threads may write to it later.
std::vector<Group> checked(const Groups& given, const std::int64_t* pairs, std::int64_t pair_count, std::int64_t neurons,
                           std::vector<std::int64_t>& held) {
    std::vector<Group> groups;
    groups.reserve(given.size());
    for (const auto& [start, stop, first, count, add] : given) {
        if (start < 0 || start > stop) refuse("a group starts out of range", start);
        if (stop > pair_count) refuse("a group stops out of range", stop);
        if (first < 0 || first > neurons) refuse("there is no such neuron", first);
        if (count < 0 || count > neurons - first) refuse("a group has more neurons than there are", count);
        if (static_cast<std::int64_t>(held.size()) < stop) held.resize(static_cast<std::size_t>(stop));
        for (std::int64_t at = start; at < stop; ++at) {
            const std::int64_t pair = held[at] = pairs[at];
            if (pair < 0 || pair >= pair_count) refuse("there is no such pair", pair);
        }
        groups.push_back({start, stop, first, count, add});
    }
    return groups;
}

void expert_ffn(std::uintptr_t hidden, std::uintptr_t gate_up, std::uintptr_t down, std::uintptr_t pairs,
                std::int64_t pair_count, const Groups& given, std::int64_t top_k, std::int64_t neurons, std::int64_t width,
                std::int64_t activation, std::uintptr_t y) {
    if (activation < 0 || activation > static_cast<int>(Activation::relu)) refuse("there is no such activation", activation);
    // A pair belongs to row pair / top_k of hidden: a remainder would let the last pairs read past its end.
    if (top_k < 1 || pair_count % top_k != 0) refuse("top_k does not divide the number of pairs", top_k);
    if (width < 0 || width > kMaxWidth) refuse("the width is out of range", width);
    check_product({pair_count, width}), check_product({neurons, width, 2});
    std::vector<std::int64_t> held;
    const std::vector<Group> groups = checked(given, at<const std::int64_t>(pairs), pair_count, neurons, held);
    bool adds = false;
    for (const Group& group : groups) adds |= group.add;
    std::vector<float> sums(adds ? static_cast<std::size_t>(kSumRows * width) : 0);
    const nb::gil_scoped_release free;
    expert_ffn_f32(at<const float>(hidden), at<const float>(gate_up), at<const float>(down), held.data(), groups.data(),
                   static_cast<std::int64_t>(groups.size()), top_k, width, static_cast<Activation>(activation), at<float>(y),
                   sums.data());
}

void combine(std::uintptr_t y, std::uintptr_t weights, std::int64_t tokens, std::int64_t top_k, std::int64_t width,
             std::uintptr_t out) {
    check_product({tokens, top_k, width});
    const nb::gil_scoped_release free;
    combine_f32(at<const float>(y), at<const float>(weights), tokens, top_k, width, at<float>(out));
}

// Float32 slots.
struct SlotExperts : Experts {
    const float *gate_up, *down;
    Activation activation;

    void run(const float* hidden, const std::int64_t* pairs, const Group* groups, std::int64_t group_count, std::int64_t top_k,
             float* y, float* sums) const override {
        expert_ffn_f32(hidden, gate_up, down, pairs, groups, group_count, top_k, width, activation, y, sums);
    }
};

nb::capsule slot_experts(std::uintptr_t gate_up, std::uintptr_t down, std::int64_t neurons, std::int64_t width,
                         std::int64_t activation, std::int64_t max_rows) {
    if (activation < 0 || activation > static_cast<int>(Activation::relu)) refuse("there is no such activation", activation);
    check_product({neurons, width, 2});
    auto made = std::make_unique<SlotExperts>();
    made->width = width, made->neurons = neurons, made->max_rows = max_rows;
    made->gate_up = at<const float>(gate_up), made->down = at<const float>(down);
    made->activation = static_cast<Activation>(activation);
    return experts_capsule(std::move(made));
}

nb::capsule table() {
    static const KernelTable kernels{combine_f32, router_scores};
    return nb::capsule(&kernels, kKernelTable.c_str());
}

// A thread that cannot be started or bound, a handler that cannot be set.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
}

}  // namespace
}  // namespace tiermoe::bindings

NB_MODULE(_cpu, m) {
    using namespace tiermoe::bindings;
    m.doc() = "CPU kernels (kernels/cpu). Buffers are given by address, which the modules of `tiermoe.kernels` check.";
    nb::set_leak_warnings(false);  // at the interpreter's end a pool may still be there
    nb::register_exception_translator(translate);
    m.def("table", &table, "The kernels that the core's executor runs; see table.hpp.");
    m.def("expert_ffn", &expert_ffn, "hidden"_a, "gate_up"_a, "down"_a, "pairs"_a, "pair_count"_a, "groups"_a, "top_k"_a,
          "neurons"_a, "width"_a, "activation"_a, "y"_a,
          "Experts over groups (start, stop, first, neurons, add) of pairs; see expert_ffn.hpp.\n\n"
          "The pool has so many neurons, hidden pair_count / top_k rows, pairs pair_count entries, y as many rows.\n"
          "Raises ValueError: a group, a pair, a neuron, the width or the activation is out of range.");
    m.def("slot_experts", &slot_experts, "gate_up"_a, "down"_a, "neurons"_a, "width"_a, "activation"_a, "max_rows"_a,
          "Experts of float32 slots for the core's executor, of so many neurons each; see experts.hpp.\n\n"
          "Raises ValueError: a number is out of range.");
    m.def("combine", &combine, "y"_a, "weights"_a, "tokens"_a, "top_k"_a, "width"_a, "out"_a,
          "Weighted sum of each token's pairs; see expert_ffn.hpp.");
    bind_decode(m);
    bind_dense(m);
    bind_neurons(m);
}
