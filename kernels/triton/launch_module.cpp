// tiermoe.kernels._launch: launches of compiled Triton kernels without Python (kernels/triton/launch.py).
//
//   launch.hpp          Driver, Launch
//   ring.hpp            Ring      small arrays to the GPU
//   fetch.hpp           Fetch     what the host reads of a layer
//   layer_launches.hpp  Experts   a layer's experts
//
// The interpreter's lock is kept throughout: a thread that gets it may keep it for milliseconds. What Python does in
// between (a kernel's first launch, a wait for a buffer) may give it up, so no state is half changed there.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "fetch.hpp"
#include "layer_launches.hpp"

NB_MODULE(_launch, m) {
    using namespace tiermoe::launch;
    m.doc() = "Launches of compiled Triton kernels from native code (kernels/triton/launch_module.cpp).";
    nb::set_leak_warnings(false);  // at the interpreter's end kernels may still be there
    nb::class_<Driver>(m, "Driver", "Functions of the GPU's driver by address: cuLaunchKernel, cuGetErrorString, cuCtxSetCurrent; 0: none.")
        .def("__init__", [](Driver* made, std::uint64_t launch, std::uint64_t text, std::uint64_t current) {
            if (!launch) throw std::invalid_argument("a driver launches");
            new (made) Driver{reinterpret_cast<LaunchKernel>(launch), reinterpret_cast<ErrorText>(text),
                              reinterpret_cast<SetContext>(current)};
        }, "launch"_a, "text"_a = 0, "current"_a = 0);
    nb::class_<Launch>(m, "Launch", R"(A kernel's compiled forms. loose: numbers of its integers that Triton does not specialise.

A subclass has `first(grid, *args)`, which launches once and returns a function (grid, *args), or (driver, function,
context, threads, shared, packed, nulls, () -> stream).)")
        .def(nb::init<const std::vector<std::size_t>&>(), "loose"_a)
        .def_prop_ro("known", &Launch::known)
        .def("__call__", [](Launch& launch, const std::tuple<std::int64_t, std::int64_t, std::int64_t>& grid, nb::args given) {
            Arg args[kMostArgs];
            const std::size_t count = given.size();
            if (count > kMostArgs) throw nb::type_error("a kernel takes at most 32 arguments");
            for (std::size_t i = 0; i < count; ++i) args[i] = argument(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i)));
            launch.launch({std::get<0>(grid), std::get<1>(grid), std::get<2>(grid)}, args, count);
        }, nb::sig("def __call__(self, grid: tuple[int, int, int], /, *args: typing.Any) -> None"));
    nb::class_<Ring>(m, "Ring", "Pinned buffers, taken in turn. A subclass has `turned`, `read_by_this_stream`, `grown`, `copied`, `source`.")
        .def(nb::init<const std::vector<std::uint64_t>&, std::size_t, std::size_t, Launch*, std::int64_t, nb::object>(), "buffers"_a,
             "nbytes"_a, "sections"_a, "copy"_a.none(), "block"_a, "stream"_a.none(), nb::keep_alive<1, 5>())
        .def("write", put_array, "target"_a, "array"_a, "Bring a contiguous array to a tensor, for later work on the current stream.");
    nb::class_<Fetch>(m, "Fetch", R"(What the host reads of a layer, in one pinned buffer, by one kernel and one event; for one thread.

A subclass has `grown(nbytes)`, a new buffer as int32; `views(parts)`, of each (place, bytes, number of its type or
-1 for scores, shape) a tensor and an array on it; and `copied(target, source)`, called where there is no kernel.

Args:
    runtime: kept, for it keeps the driver. calls, context: of the driver, as of `_core.Driver`.
    stream: gives the address of the current one.
    reads: the kernels with 0, 1 and 2 routers; empty: there are none. block, scores: of a program.
    types: dtype, bytes of an item, and whether it arrives as float32. spin_s: of a wait, before it gives up the lock.)")
        .def(nb::init<nb::object, const nb::dict&, std::uint64_t, nb::object, const std::vector<Launch*>&, std::int64_t, std::int64_t,
                      nb::object, const Fetch::Types&, double>(),
             "runtime"_a, "calls"_a, "context"_a, "stream"_a, "reads"_a, "block"_a, "scores"_a, "int32"_a, "types"_a, "spin_s"_a,
             nb::keep_alive<1, 6>())
        .def("enqueue", &Fetch::enqueue, "tensors"_a, "hidden"_a.none(), "routers"_a,
             "Read tensors, and the scores of routers (weight [D*E, H], bias, D, softmax) of hidden [T, H].")
        .def("wait", &Fetch::wait, "Wait for what was enqueued; after some time without the interpreter's lock.")
        .def("take", &Fetch::take, nb::sig("def take(self) -> list[typing.Any]"),
             "Arrays of what was read: of tensors, then of scores [T, E], of several layers [T, D, E].")
        .def_prop_ro("reads", &Fetch::reads, nb::sig("def reads(self) -> typing_extensions.CapsuleType | None"),
                     "`LayerReads` of `kernels/triton/experts.hpp`, of this object; None: there is no kernel.");
    nb::class_<Experts>(m, "Experts", R"(The launches that run experts.

up, down: tensors that the launches get of the slots, behind the pairs. dtype: of rows.
classes: (most rows, rows of a tile, gate_up, its columns, down, its columns), ascending. sizes: neurons of the pool
and of a slot, H, items of a row of activations, and what divides them. tables: a `Ring`. scratch: (rows, numbers of a
table, pairs) -> activations, words for pairs, weights and table, the table, the pairs, rows of y. kept: rows up to which these
are kept, for each stream. combining: top_k -> the launch that sums, whose program has `block` columns.)")
        .def(nb::init<nb::tuple, nb::tuple, nb::object, const std::vector<Experts::Class>&,
                      const std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>&, nb::object, nb::object,
                      std::int64_t, nb::object, nb::tuple, nb::object, nb::object, std::int64_t>(),
             "up"_a, "down"_a, "dtype"_a, "classes"_a, "sizes"_a, "tables"_a, "scratch"_a, "kept"_a, "stream"_a, "dtypes"_a, "int64"_a,
             "combining"_a, "block"_a, nb::keep_alive<1, 5>())
        .def("run", &Experts::run, "hidden"_a, "pairs"_a, "groups"_a, "top_k"_a, "y"_a)
        .def("combine", &Experts::combine, "y"_a, "weights"_a,
             nb::sig("def combine(self, y: typing.Any, weights: typing.Any) -> typing.Any"))
        .def_prop_ro("launches", &Experts::launches, "`ExpertLaunches` of `kernels/triton/experts.hpp`, of this object.");
}
