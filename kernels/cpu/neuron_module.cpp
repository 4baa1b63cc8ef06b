// Python bindings of neuron_ffn.hpp. Weights are given by address: the caller (kernels/packed_ffn.py) checked once that
// these are contiguous buffers of the sizes given, and keeps them alive. What changes from call to call comes as arrays,
// which are checked here, and so is every number against the others, before a kernel runs.
#include <new>
#include <system_error>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "fit.hpp"
#include "neuron_ffn.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kThreads = "tiermoe.kernels.Threads";
constexpr long long kSizeMax = 1ll << 31;  // of one axis: products of a few of them fit in 64 bits

void delete_threads(PyObject* capsule) { delete static_cast<Threads*>(PyCapsule_GetPointer(capsule, kThreads)); }

// threads(count, cores: list[int]) -> capsule
PyObject* threads(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    const long long size = PyLong_AsLongLong(args[0]);
    if (PyErr_Occurred()) return nullptr;
    if (size < 1 || size > 1024) {
        refuse("the number of threads is not in 1..1024", size);
        return nullptr;
    }
    if (!PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "cores must be a list of numbers");
        return nullptr;
    }
    std::vector<int> cores;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
        const long long core = PyLong_AsLongLong(PyList_GET_ITEM(args[1], i));
        if (PyErr_Occurred()) return nullptr;
        if (core < 0 || core >= 1024) {
            refuse("a core is not in 0..1023", core);
            return nullptr;
        }
        cores.push_back(static_cast<int>(core));
    }
    if (!cores.empty() && static_cast<long long>(cores.size()) != size) {
        refuse("there must be one core for each thread; cores given", static_cast<long long>(cores.size()));
        return nullptr;
    }
    Threads* made = nullptr;
    try {
        made = new Threads(static_cast<int>(size), cores);
    } catch (const std::system_error& error) {
        PyErr_SetString(PyExc_OSError, error.what());
        return nullptr;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    PyObject* capsule = PyCapsule_New(made, kThreads, delete_threads);
    if (!capsule) delete made;
    return capsule;
}

bool read_groups(PyObject* list, std::vector<RowGroup>& groups) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "groups must be a list of (expert, start, stop)");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        PyObject* item = PyList_GET_ITEM(list, i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
            PyErr_SetString(PyExc_TypeError, "each group must be a tuple (expert, start, stop)");
            return false;
        }
        groups.push_back({PyLong_AsLongLong(PyTuple_GET_ITEM(item, 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(item, 1)),
                          PyLong_AsLongLong(PyTuple_GET_ITEM(item, 2))});
        if (PyErr_Occurred()) return false;
    }
    return true;
}

// A contiguous array of one element type, held while a kernel runs.
class Array {
   public:
    Array() = default;
    ~Array() {
        if (view_.obj) PyBuffer_Release(&view_);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    // `type` is its letter in the struct module.
    bool open(PyObject* object, const char* name, char type, int axes, bool writable) {
        if (PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) < 0)
            return false;
        const char* format = view_.format ? view_.format : "B";
        if (view_.ndim == axes && format[0] == type && format[1] == '\0') return true;
        PyErr_Format(PyExc_ValueError, "%s must have %d axes and type '%c', not %d and '%s'", name, axes, type,
                     view_.ndim, format);
        return false;
    }
    Py_ssize_t size(int axis) const { return view_.shape[axis]; }
    template <typename T>
    T* data() const {
        return static_cast<T*>(view_.buf);
    }

   private:
    Py_buffer view_ = {};
};

// The arguments that both kernels share, in this order from `args`:
//   groups, rows int32 [P], weights float32 [P], x float32 [T, H], out float32 [T, H]
constexpr Py_ssize_t kBatchArgs = 5;
struct Arrays {
    Array rows, weights, x, out;
};
bool read_batch(PyObject* const* args, std::int64_t experts, std::int64_t hidden, Arrays& arrays, Batch& batch) {
    if (!read_groups(args[0], batch.groups)) return false;
    if (!arrays.rows.open(args[1], "rows", 'i', 1, false) || !arrays.weights.open(args[2], "weights", 'f', 1, false) ||
        !arrays.x.open(args[3], "hidden", 'f', 2, false) || !arrays.out.open(args[4], "out", 'f', 2, true))
        return false;
    const Py_ssize_t count = arrays.rows.size(0), tokens = arrays.x.size(0);
    if (arrays.weights.size(0) != count) return refuse("weights are not as many as rows", arrays.weights.size(0));
    if (arrays.x.size(1) != hidden) return refuse("hidden has rows of another width", arrays.x.size(1));
    if (arrays.out.size(0) != tokens || arrays.out.size(1) != hidden)
        return refuse("out has not the shape of hidden, its rows are", arrays.out.size(0));
    if (tokens >= kSizeMax) return refuse("hidden has too many rows", tokens);
    batch.rows = arrays.rows.data<const std::int32_t>();
    batch.weights = arrays.weights.data<const float>();
    batch.hidden = arrays.x.data<const float>();
    batch.tokens = tokens;
    batch.out = arrays.out.data<float>();
    if (batch.out < batch.hidden + tokens * hidden && batch.hidden < batch.out + tokens * hidden)
        return refuse("out overlaps hidden, of rows", tokens);
    for (const RowGroup& group : batch.groups) {
        if (group.expert < 0 || group.expert >= experts) return refuse("there is no such expert", group.expert);
        if (group.start < 0 || group.start > group.stop) return refuse("a group starts out of range", group.start);
        if (group.stop > count) return refuse("a group stops out of range", group.stop);
        for (std::int64_t at = group.start; at < group.stop; ++at)
            if (batch.rows[at] < 0 || batch.rows[at] >= tokens) return refuse("there is no such row", batch.rows[at]);
    }
    return true;
}

// The arguments before them: threads, set, activation, hidden, neurons, experts
struct Common {
    Threads* threads;
    int set;
    Activation activation;
    std::int64_t hidden, neurons, experts;
};
constexpr Py_ssize_t kCommonArgs = 6;
bool read_common(PyObject* const* args, Common& common) {
    common.threads = static_cast<Threads*>(PyCapsule_GetPointer(args[0], kThreads));
    if (!common.threads) return false;
    long long number[5];
    for (int i = 0; i < 5; ++i) number[i] = PyLong_AsLongLong(args[i + 1]);
    if (PyErr_Occurred()) return false;
    if (number[0] < 0 || number[0] >= static_cast<long long>(instruction_sets().size()))
        return refuse("there is no such instruction set", number[0]);
    if (number[1] < 0 || number[1] > static_cast<int>(Activation::relu))
        return refuse("there is no such activation", number[1]);
    for (int i = 2; i < 5; ++i)
        if (number[i] < 1 || number[i] >= kSizeMax) return refuse("a size is out of range", number[i]);
    common.set = static_cast<int>(number[0]);
    common.activation = static_cast<Activation>(number[1]);
    common.hidden = number[2];
    common.neurons = number[3];
    common.experts = number[4];
    return true;
}

template <typename F>
PyObject* released(F&& kernel) {
    bool out_of_memory = false;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS;
    try {
        kernel();
    } catch (const std::bad_alloc&) {
        out_of_memory = true;
    } catch (const std::system_error& error) {
        failed = error.code().value();
    }
    Py_END_ALLOW_THREADS;
    if (out_of_memory) return PyErr_NoMemory();
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

// packed_ffn(<common>, bits, group, gate_up, gate_up_scales, down, down_scales, <batch>)
PyObject* packed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, kCommonArgs + 6 + kBatchArgs)) return nullptr;
    Common common;
    if (!read_common(args, common)) return nullptr;
    PyObject* const* own = args + kCommonArgs;
    const long long bits = PyLong_AsLongLong(own[0]), group = PyLong_AsLongLong(own[1]);
    PackedLayer layer = {common.hidden, common.neurons, common.experts, static_cast<int>(bits), static_cast<int>(group),
                         address<const std::uint8_t>(own[2]), address<const std::uint16_t>(own[3]),
                         address<const std::uint8_t>(own[4]), address<const std::uint16_t>(own[5])};
    if (PyErr_Occurred()) return nullptr;
    if (bits != 1 && bits != 2 && bits != 3 && bits != 4 && bits != 8) {
        refuse("there is no such width", bits);
        return nullptr;
    }
    if (group != 32 && group != 64 && group != 128) {
        refuse("there is no such group size", group);
        return nullptr;
    }
    Arrays arrays;
    Batch batch;
    if (!read_batch(own + 6, common.experts, common.hidden, arrays, batch)) return nullptr;
    return released([&] { packed_ffn(*common.threads, common.set, layer, common.activation, batch); });
}

// full_ffn(<common>, element, gate_up, down, <batch>)
PyObject* full(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, kCommonArgs + 3 + kBatchArgs)) return nullptr;
    Common common;
    if (!read_common(args, common)) return nullptr;
    PyObject* const* own = args + kCommonArgs;
    const long long element = PyLong_AsLongLong(own[0]);
    const FullLayer layer = {common.hidden, common.neurons, common.experts, static_cast<Element>(element),
                             address<const void>(own[1]), address<const void>(own[2])};
    if (PyErr_Occurred()) return nullptr;
    if (element < 0 || element > static_cast<int>(Element::bf16)) {
        refuse("there is no such element type", element);
        return nullptr;
    }
    Arrays arrays;
    Batch batch;
    if (!read_batch(own + 3, common.experts, common.hidden, arrays, batch)) return nullptr;
    return released([&] { full_ffn(*common.threads, common.set, layer, common.activation, batch); });
}

// fit(threads, set, hidden, neurons, experts, element, group, gate_up, down, powers,
//     [(bits, gate_up, gate_up_scales, down, down_scales, errors), ..])
PyObject* fit(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 11)) return nullptr;
    auto* threads = static_cast<Threads*>(PyCapsule_GetPointer(args[0], kThreads));
    if (!threads) return nullptr;
    long long number[6];
    for (int i = 0; i < 6; ++i) number[i] = PyLong_AsLongLong(args[i + 1]);
    FitLayer layer = {};
    layer.full.gate_up = address<const void>(args[7]);
    layer.full.down = address<const void>(args[8]);
    layer.powers = address<float>(args[9]);
    if (PyErr_Occurred()) return nullptr;
    const auto [set, hidden, neurons, experts, element, group] =
        std::tuple(number[0], number[1], number[2], number[3], number[4], number[5]);
    const bool known = 0 <= set && set < static_cast<long long>(instruction_sets().size()) && 0 <= element &&
                       element <= static_cast<int>(Element::bf16) && (group == 32 || group == 64 || group == 128);
    const bool sized = 1 <= hidden && hidden < kSizeMax && 1 <= neurons && neurons < kSizeMax && 1 <= experts &&
                       experts < kSizeMax;
    if (!known || !sized || !PyList_Check(args[10]) || PyList_GET_SIZE(args[10]) > kMostWidths) {
        PyErr_SetString(PyExc_ValueError, "an argument is out of range");
        return nullptr;
    }
    layer.full.hidden = hidden;
    layer.full.neurons = neurons;
    layer.full.experts = experts;
    layer.full.element = static_cast<Element>(element);
    layer.group = static_cast<int>(group);
    FitWidth widths[kMostWidths];
    layer.widths = widths;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[10]); ++i) {
        PyObject* item = PyList_GET_ITEM(args[10], i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 6) {
            PyErr_SetString(PyExc_TypeError, "a width must be a tuple of 6");
            return nullptr;
        }
        const long long bits = PyLong_AsLongLong(PyTuple_GET_ITEM(item, 0));
        widths[layer.count++] = {static_cast<int>(bits), address<std::uint8_t>(PyTuple_GET_ITEM(item, 1)),
                                 address<std::uint16_t>(PyTuple_GET_ITEM(item, 2)),
                                 address<std::uint8_t>(PyTuple_GET_ITEM(item, 3)),
                                 address<std::uint16_t>(PyTuple_GET_ITEM(item, 4)),
                                 address<float>(PyTuple_GET_ITEM(item, 5))};
        if (PyErr_Occurred()) return nullptr;
        if (bits != 1 && bits != 2 && bits != 3 && bits != 4 && bits != 8) {
            refuse("there is no such width", bits);
            return nullptr;
        }
    }
    return released([&] { fit_layer(*threads, static_cast<int>(set), layer); });
}

PyObject* sets(PyObject*, PyObject*) {
    const std::vector<std::string> names = instruction_sets();
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(names.size()));
    for (std::size_t i = 0; tuple && i < names.size(); ++i) {
        PyObject* name = PyUnicode_FromString(names[i].c_str());
        if (!name) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), name);
    }
    return tuple;
}

}  // namespace

PyMethodDef neuron_methods[] = {
    {"threads", fast(threads), METH_FASTCALL, "A pool of threads; see threads.hpp."},
    {"packed_ffn", fast(packed), METH_FASTCALL, "Experts in packed weights; see neuron_ffn.hpp."},
    {"full_ffn", fast(full), METH_FASTCALL, "Experts in full precision; see neuron_ffn.hpp."},
    {"fit", fast(fit), METH_FASTCALL, "Data-free quantization of a layer; see fit.hpp."},
    {"instruction_sets", sets, METH_NOARGS, "Names of what this processor can run, best first."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
