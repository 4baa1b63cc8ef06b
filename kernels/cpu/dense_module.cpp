// Bindings of dense.hpp. Constants are given by address: the caller (kernels/dense.py) keeps them alive. Every number of a
// program is checked when it is built, and the numbers of a step when it begins.
#include "dense.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "link.hpp"
#include "table.hpp"

namespace tiermoe::bindings {
namespace {

constexpr std::int64_t kInts = 25, kFloats = 2;  // of a step
constexpr std::int64_t kLongBytes = 4 << 20;  // weights of a segment during which other threads of Python may run

DenseStep step_of(const std::int64_t* ints, const double* floats) {
    DenseStep step;
    step.code = static_cast<DenseCode>(ints[0]);
    step.kind = static_cast<int>(ints[1]);
    step.round = ints[2] != 0;
    DenseOperand* operands[] = {&step.out, &step.a, &step.b, &step.c};
    for (int i = 0; i < 4; ++i)
        *operands[i] = {ints[3 + 3 * i], reinterpret_cast<const float*>(ints[4 + 3 * i]), ints[5 + 3 * i]};
    for (int i = 0; i < 10; ++i) step.p[i] = ints[15 + i];
    for (int i = 0; i < 2; ++i) step.f[i] = floats[i];
    return step;
}

DenseProgram* program(std::uintptr_t ints, std::uintptr_t floats, std::int64_t count, std::vector<std::int64_t> segments,
                      const std::vector<MatrixNumbers>& matrices, std::int64_t arena, std::int64_t rows,
                      std::int64_t layers, std::int64_t groups, std::int64_t threads) {
    if (count < 0 || layers < 0 || groups < 0 || threads < 1 || threads > 1024) refuse("a size is out of range", count);
    std::vector<DenseStep> steps;
    for (std::int64_t i = 0; i < count; ++i)
        steps.push_back(step_of(at<const std::int64_t>(ints) + i * kInts, at<const double>(floats) + i * kFloats));
    std::vector<FormMatrix> forms;
    for (const MatrixNumbers& numbers : matrices) forms.push_back(matrix_of(numbers));
    return new DenseProgram(std::move(steps), std::move(segments), std::move(forms), arena, rows, layers, groups,
                            static_cast<int>(threads));
}

using Group = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::int64_t>;

void begin(DenseProgram& program, std::int64_t rows, std::int64_t sequences, std::uintptr_t cu_rows,
           const std::vector<Group>& groups) {
    std::vector<DenseGroup> made;
    for (const auto& [read, write, cu_keys, window] : groups)
        made.push_back({at<const std::int64_t>(read), at<const std::int64_t>(write), at<const std::int32_t>(cu_keys), window});
    program.begin(rows, sequences, at<const std::int32_t>(cu_rows), std::move(made));
}

// Other threads of Python may run during a long segment.
void run(DenseProgram& program, std::int64_t segment, const std::vector<std::uintptr_t>& addresses) {
    std::vector<void*> io;
    for (const std::uintptr_t address : addresses) io.push_back(at<void>(address));
    std::optional<nb::gil_scoped_release> free;
    if (segment >= 0 && segment < program.segments() && program.weight_bytes(segment) >= kLongBytes) free.emplace();
    program.run(segment, io);
}

std::int64_t run_layers(DenseProgram& program, std::int64_t segment, const std::vector<nb::capsule>& layers,
                        std::int64_t rows, std::int64_t top_k, bool cpu, std::uintptr_t hidden, std::uintptr_t ids,
                        std::uintptr_t weights, std::uintptr_t out, std::uintptr_t last, std::uintptr_t spent) {
    std::vector<const LayerStep*> steps;
    for (const nb::capsule& layer : layers) steps.push_back(static_cast<LayerStep*>(named(layer, kLayerStep)));
    const LayerInput given{at<const float>(hidden), at<const std::int64_t>(ids), at<const float>(weights), rows, top_k,
                           at<float>(out)};
    const nb::gil_scoped_release free;
    double* seconds = at<double>(spent);
    const auto count = static_cast<std::int64_t>(steps.size());
    for (std::int64_t i = 0; i < count; ++i, seconds += 3) {
        Spent found;
        const double begin_s = cpu ? cpu_s() : now_s();
        const bool ran = steps[i]->run(steps[i]->self, given, found);
        seconds[2] = (cpu ? cpu_s() : now_s()) - begin_s;
        if (!ran) return -1 - i;
        seconds[0] = found.waited_s;
        seconds[1] = cpu ? found.kernels_cpu_s : found.kernels_s;
        if (i + 1 < count || !last)
            program.run(segment + i, {at<void>(out), at<void>(hidden), at<void>(ids), at<void>(weights)});
        else
            program.run(segment + i, {at<void>(out), at<void>(last)});
    }
    return count;
}

void scores(std::uintptr_t hidden, std::int64_t rows, std::uintptr_t weight, std::int64_t width, std::int64_t outputs,
            std::uintptr_t bias, std::int64_t softmax, const Array<float>& out) {
    check_product({rows, width}), check_product({outputs, width}), check_product({rows, outputs});
    if (rows < 1 || width < 1 || outputs < 1 || softmax < 0 || (softmax && outputs % softmax) || out.size() != rows * outputs)
        refuse("the scores have another size", out.size());
    router_scores(at<const float>(hidden), rows, at<const float>(weight), width, outputs, at<const float>(bias), softmax,
                  out.data());
}

}  // namespace

void bind_dense(nb::module_& m) {
    m.def("router_scores", &scores, "hidden"_a, "rows"_a, "weight"_a, "width"_a, "outputs"_a, "bias"_a, "softmax"_a, "out"_a,
          "A router's scores on a few rows. softmax: over each so many outputs; 0: none.\n\n"
          "Raises ValueError: `out` has another size.");
    nb::class_<DenseProgram>(m, "Program", "A program of row operators, with its threads; see dense.hpp.");
    m.def("dense_program", &program, "ints"_a, "floats"_a, "count"_a, "segments"_a, "matrices"_a, "arena"_a, "rows"_a, "layers"_a,
          "groups"_a, "threads"_a,
          "ints and floats are the addresses of [count, 25] int64 and [count, 2] float64. matrices: in published forms, as\n"
          "`MatrixNumbers` has them.\n\n"
          "Raises ValueError: a number of a step is out of range; OSError: a thread cannot be started.");
    m.def("dense_bind", [](DenseProgram& program, std::int64_t layer, std::uintptr_t keys, std::uintptr_t values,
                           std::int64_t key_stride, std::int64_t value_stride, int kind, bool round) {
        if (kind < 0 || kind > static_cast<int>(CacheKind::fp8)) refuse("there is no such kind of cache", kind);
        program.bind(layer, {at<void>(keys), at<void>(values), key_stride, value_stride, static_cast<CacheKind>(kind), round});
    }, "program"_a, "layer"_a, "keys"_a, "values"_a, "key_stride"_a, "value_stride"_a, "kind"_a, "round"_a,
          "Where a layer's keys and values are, and of which `CacheKind`. Raises ValueError: there is no such layer or kind.");
    m.def("dense_begin", &begin, "program"_a, "rows"_a, "sequences"_a, "cu_rows"_a, "groups"_a,
          "The rows of the next step, and of each group of its cache read, write, cu_keys and window.\n\n"
          "Raises ValueError: the tables do not fit each other.");
    m.def("dense_run", &run, "program"_a, "segment"_a, "addresses"_a,
          "One segment. Raises ValueError: there is no such segment, no step has begun, or an address is missing.");
    m.def("dense_layers", &run_layers, "program"_a, "segment"_a, "layers"_a, "rows"_a, "top_k"_a, "cpu"_a,
          "hidden"_a, "ids"_a, "weights"_a, "out"_a, "last"_a, "spent"_a,
          "Layers (`CpuLayer.step`), each with the segment behind it, from this on. How many ran; -1 - n: layer n has failed.\n\n"
          "hidden, ids and weights are the inputs of the first and of the first that did not run.\n"
          "last: output of the program's last segment, where it is behind the last of these; else 0. spent: float64\n"
          "[layers, 3], seconds that each waited for copies, ran kernels (where it times them) and took; cpu: the last two\n"
          "by the thread's CPU time. Raises ValueError: there is no such segment.");
}

}  // namespace tiermoe::bindings
