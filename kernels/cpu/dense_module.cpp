// Python bindings of dense.hpp. Constants are given by address: the caller (kernels/dense.py) keeps them alive. Every
// number of a program is checked when it is built, and the numbers of a step when it begins.
#include <new>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "bindings.hpp"
#include "link.hpp"
#include "table.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kProgram = "tiermoe.kernels.DenseProgram";
constexpr Py_ssize_t kInts = 25, kFloats = 2;  // of a step
constexpr std::int64_t kLongBytes = 4 << 20;  // weights of a segment during which other threads of Python may run

void delete_program(PyObject* capsule) { delete static_cast<DenseProgram*>(PyCapsule_GetPointer(capsule, kProgram)); }

DenseProgram* program_of(PyObject* capsule) {
    return static_cast<DenseProgram*>(PyCapsule_GetPointer(capsule, kProgram));
}

template <typename F>
PyObject* guarded(F&& body) {
    try {
        return body();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::system_error& error) {
        PyErr_SetString(PyExc_OSError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::length_error&) {
        PyErr_NoMemory();
    }
    return nullptr;
}

// Without the interpreter's lock while in scope.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked&) = delete;
    ~Unlocked() { PyEval_RestoreThread(state_); }

  private:
    PyThreadState* state_;
};

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

// dense_program(ints, floats, count, segments: list[int], arena, rows, layers, groups, threads) -> capsule; ints and
// floats are the addresses of [count, 25] int64 and [count, 2] float64
PyObject* dense_program(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 9)) return nullptr;
    const std::int64_t* ints = address<const std::int64_t>(args[0]);
    const double* floats = address<const double>(args[1]);
    const long long steps = PyLong_AsLongLong(args[2]);
    if (!PyList_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "segments must be a list of numbers");
        return nullptr;
    }
    std::vector<std::int64_t> segments;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[3]); ++i)
        segments.push_back(PyLong_AsLongLong(PyList_GET_ITEM(args[3], i)));
    long long sizes[5];
    for (int i = 0; i < 5; ++i) sizes[i] = PyLong_AsLongLong(args[4 + i]);
    if (PyErr_Occurred()) return nullptr;
    if (steps < 0 || sizes[2] < 0 || sizes[3] < 0 || sizes[4] < 1 || sizes[4] > 1024) {
        refuse("a size is out of range", steps);
        return nullptr;
    }
    return guarded([&]() -> PyObject* {
        std::vector<DenseStep> made;
        for (long long i = 0; i < steps; ++i) made.push_back(step_of(ints + i * kInts, floats + i * kFloats));
        auto program = std::make_unique<DenseProgram>(std::move(made), std::move(segments), sizes[0], sizes[1],
                                                      sizes[2], sizes[3], static_cast<int>(sizes[4]));
        PyObject* capsule = PyCapsule_New(program.get(), kProgram, delete_program);
        if (capsule) program.release();
        return capsule;
    });
}

// dense_bind(program, layer, keys, values, key_stride, value_stride, bf16)
PyObject* dense_bind(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 7)) return nullptr;
    DenseProgram* program = program_of(args[0]);
    if (!program) return nullptr;
    const long long layer = PyLong_AsLongLong(args[1]);
    DenseCache cache;
    cache.keys = address<void>(args[2]);
    cache.values = address<void>(args[3]);
    cache.key_stride = PyLong_AsLongLong(args[4]);
    cache.value_stride = PyLong_AsLongLong(args[5]);
    cache.bf16 = PyObject_IsTrue(args[6]) == 1;
    if (PyErr_Occurred()) return nullptr;
    return guarded([&]() -> PyObject* {
        program->bind(layer, cache);
        Py_RETURN_NONE;
    });
}

// dense_begin(program, rows, sequences, cu_rows, groups: list[tuple[read, write, cu_keys, window]])
PyObject* dense_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 5)) return nullptr;
    DenseProgram* program = program_of(args[0]);
    if (!program) return nullptr;
    const long long rows = PyLong_AsLongLong(args[1]), sequences = PyLong_AsLongLong(args[2]);
    const std::int32_t* cu_rows = address<const std::int32_t>(args[3]);
    if (!PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "groups must be a list of (read, write, cu_keys, window)");
        return nullptr;
    }
    std::vector<DenseGroup> groups;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[4]); ++i) {
        PyObject* item = PyList_GET_ITEM(args[4], i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4) {
            PyErr_SetString(PyExc_TypeError, "each group must be a tuple (read, write, cu_keys, window)");
            return nullptr;
        }
        DenseGroup group;
        group.read = address<const std::int64_t>(PyTuple_GET_ITEM(item, 0));
        group.write = address<const std::int64_t>(PyTuple_GET_ITEM(item, 1));
        group.cu_keys = address<const std::int32_t>(PyTuple_GET_ITEM(item, 2));
        group.window = PyLong_AsLongLong(PyTuple_GET_ITEM(item, 3));
        groups.push_back(group);
    }
    if (PyErr_Occurred()) return nullptr;
    return guarded([&]() -> PyObject* {
        program->begin(rows, sequences, cu_rows, std::move(groups));
        Py_RETURN_NONE;
    });
}

// Other threads of Python may run during a long segment.
void run_segment(DenseProgram& program, std::int64_t segment, const std::vector<void*>& io) {
    if (segment < 0 || segment >= program.segments() || program.weight_bytes(segment) < kLongBytes)
        return program.run(segment, io);
    const Unlocked unlocked;
    program.run(segment, io);
}

// dense_run(program, segment, addresses: tuple[int, ...])
PyObject* dense_run(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    DenseProgram* program = program_of(args[0]);
    if (!program) return nullptr;
    const long long segment = PyLong_AsLongLong(args[1]);
    if (!PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "addresses must be a tuple");
        return nullptr;
    }
    std::vector<void*> io;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[2]); ++i) io.push_back(address<void>(PyTuple_GET_ITEM(args[2], i)));
    if (PyErr_Occurred()) return nullptr;
    return guarded([&]() -> PyObject* {
        run_segment(*program, segment, io);
        Py_RETURN_NONE;
    });
}

// dense_layers(program, segment, layers: list of `LayerStep`, rows, top_k, asking, cpu, hidden, ids, weights, out, last or 0,
//              spent) -> how many of these layers have run, each with the segment behind it, from this on; n below 0: layer
// -1 - n has failed. hidden, ids and weights are the inputs of the first and of the first that did not run. asking: of
// `Asking`. last: output of the program's last segment, where it is behind the last of these. spent: float64 [len(layers), 3],
// seconds that each waited for copies, ran kernels (where it times them) and took; cpu: the last two by the thread's CPU time.
// The interpreter's lock is free meanwhile.
PyObject* dense_layers(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 13)) return nullptr;
    DenseProgram* program = program_of(args[0]);
    if (!program) return nullptr;
    if (!PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "layers must be a list");
        return nullptr;
    }
    std::vector<const LayerStep*> layers;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[2]); ++i)
        layers.push_back(static_cast<LayerStep*>(PyCapsule_GetPointer(PyList_GET_ITEM(args[2], i), kLayerStep.c_str())));
    const long long segment = PyLong_AsLongLong(args[1]), rows = PyLong_AsLongLong(args[3]);
    const long long top_k = PyLong_AsLongLong(args[4]), asking = PyLong_AsLongLong(args[5]);
    const bool cpu = PyObject_IsTrue(args[6]) == 1;
    void *hidden = address<void>(args[7]), *ids = address<void>(args[8]), *weights = address<void>(args[9]);
    void *out = address<void>(args[10]), *last = address<void>(args[11]);
    double* spent = address<double>(args[12]);
    if (PyErr_Occurred()) return nullptr;
    if (asking < 0 || asking > static_cast<int>(Asking::always)) {
        refuse("there is no such way to look ahead", asking);
        return nullptr;
    }
    const LayerInput given{static_cast<float*>(hidden), static_cast<std::int64_t*>(ids), static_cast<float*>(weights),
                           rows, top_k, static_cast<float*>(out)};
    const auto run = [&]() -> long long {
        const Unlocked unlocked;
        for (std::size_t at = 0; at < layers.size(); ++at, spent += 3) {
            const auto number = static_cast<long long>(at);
            Spent found;
            const double begin_s = cpu ? cpu_s() : now_s();
            const Stepped how = layers[at]->run(layers[at]->self, given, static_cast<Asking>(asking), found);
            spent[2] = (cpu ? cpu_s() : now_s()) - begin_s;
            if (how != Stepped::ran) return how == Stepped::left ? number : -1 - number;
            spent[0] = found.waited_s;
            spent[1] = cpu ? found.kernels_cpu_s : found.kernels_s;
            if (at + 1 < layers.size() || !last)
                program->run(segment + number, {out, hidden, ids, weights});
            else
                program->run(segment + number, {out, last});
        }
        return static_cast<long long>(layers.size());
    };
    return guarded([&] { return PyLong_FromLongLong(run()); });
}

// router_scores(hidden, rows, weight, width, outputs, bias or 0, softmax, out: buffer of rows * outputs floats)
PyObject* router_scores(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    const float* hidden = address<const float>(args[0]);
    const std::int64_t rows = PyLong_AsLongLong(args[1]);
    const float* weight = address<const float>(args[2]);
    const std::int64_t width = PyLong_AsLongLong(args[3]), outputs = PyLong_AsLongLong(args[4]);
    const float* bias = address<const float>(args[5]);
    const std::int64_t soft = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || !check_product({rows, width}) || !check_product({outputs, width}) ||
        !check_product({rows, outputs}))
        return nullptr;
    Py_buffer out;
    if (PyObject_GetBuffer(args[7], &out, PyBUF_WRITABLE) != 0) return nullptr;
    if (rows < 1 || width < 1 || outputs < 1 || soft < 0 || (soft && outputs % soft) ||
        out.len != rows * outputs * static_cast<Py_ssize_t>(sizeof(float))) {
        PyBuffer_Release(&out);
        refuse("the scores have another size", static_cast<long long>(out.len));
        return nullptr;
    }
    tiermoe::router_scores(hidden, rows, weight, width, outputs, bias, soft, static_cast<float*>(out.buf));
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef dense_methods[] = {
    {"router_scores", fast(router_scores), METH_FASTCALL, "A router's scores on a few rows; see dense.hpp."},
    {"dense_program", fast(dense_program), METH_FASTCALL, "A program of row operators; see dense.hpp."},
    {"dense_bind", fast(dense_bind), METH_FASTCALL, "Where a layer's keys and values are; see dense.hpp."},
    {"dense_begin", fast(dense_begin), METH_FASTCALL, "The rows and cache tables of the next step; see dense.hpp."},
    {"dense_run", fast(dense_run), METH_FASTCALL, "One segment of a program; see dense.hpp."},
    {"dense_layers", fast(dense_layers), METH_FASTCALL, "Layers of a step, with the segments behind them."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
