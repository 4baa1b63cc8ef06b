// Python bindings of neuron_ffn.hpp and forms.hpp. Weights are given by address: the caller (kernels/packed_ffn.py,
// kernels/form_ffn.py) checked once that these are contiguous buffers of the sizes given, and keeps them alive. What changes from call to call comes as arrays,
// which are checked here, and so is every number against the others, before a kernel runs.
#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "fit.hpp"
#include "forms.hpp"
#include "neuron_ffn.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kThreads = "tiermoe.kernels.Threads";
constexpr long long kSizeMax = 1ll << 31;  // of one axis

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
    std::vector<std::int32_t> checked;  // rows, as they were checked: other threads may write to the array later
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
    if (!check_product({tokens, hidden})) return false;
    const auto* rows = arrays.rows.data<const std::int32_t>();
    arrays.checked.assign(rows, rows + count);
    batch.rows = arrays.checked.data();
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
    if (!check_product({number[2], number[3], number[4], 2})) return false;
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
    std::string refused;
    Py_BEGIN_ALLOW_THREADS;
    try {
        kernel();
    } catch (const std::bad_alloc&) {
        out_of_memory = true;
    } catch (const std::system_error& error) {
        failed = error.code().value();
    } catch (const std::out_of_range& error) {
        refused = error.what();
    }
    Py_END_ALLOW_THREADS;
    if (out_of_memory) return PyErr_NoMemory();
    if (!refused.empty()) {
        PyErr_SetString(PyExc_ValueError, refused.c_str());
        return nullptr;
    }
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
    if (!check_product({hidden, neurons, experts, 2})) return nullptr;
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

// --- published forms ---------------------------------------------------------------------------------------

constexpr const char* kFormLayer = "tiermoe.kernels.FormLayer";

void delete_layer(PyObject* capsule) { delete static_cast<FormLayer*>(PyCapsule_GetPointer(capsule, kFormLayer)); }

// A tuple of `count` integers.
bool read_numbers(PyObject* tuple, Py_ssize_t count, long long* numbers) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "a tuple of %zd numbers is expected", count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return !PyErr_Occurred();
}

template <typename T>
const T* at_address(long long number) {
    return reinterpret_cast<const T*>(static_cast<std::uintptr_t>(number));
}

// kind, scale_type, divides, outputs, inputs, group, block, and the addresses of weight, scale, zero, global_scale and
// order, 0 for none
bool read_matrix(PyObject* tuple, FormMatrix& matrix) {
    long long n[12];
    if (!read_numbers(tuple, 12, n)) return false;
    for (int i = 3; i < 7; ++i)
        if (n[i] < 1 || n[i] >= kSizeMax) return refuse("a size is out of range", n[i]);
    if (!check_product({n[3], n[4]})) return false;
    matrix = {static_cast<FormKind>(n[0]), static_cast<ScaleType>(n[1]), n[2] != 0, n[3], n[4], n[5], n[6],
              at_address<std::uint8_t>(n[7]), at_address<std::uint8_t>(n[8]), at_address<std::uint8_t>(n[9]),
              at_address<float>(n[10]), at_address<std::int32_t>(n[11])};
    return matrix.fits() || refuse("the parts do not fit to a matrix of kind", n[0]);
}

// gate, up, down, (gate_first, gate_step, up_first, up_step, bias_type, gate_up_bias, down_bias)
bool read_expert(PyObject* tuple, const FormLayer& layer, FormExpert& expert) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4) {
        PyErr_SetString(PyExc_TypeError, "each expert must be a tuple (gate, up, down, numbers)");
        return false;
    }
    long long n[7];
    if (!read_matrix(PyTuple_GET_ITEM(tuple, 0), expert.gate) || !read_matrix(PyTuple_GET_ITEM(tuple, 1), expert.up) ||
        !read_matrix(PyTuple_GET_ITEM(tuple, 2), expert.down) || !read_numbers(PyTuple_GET_ITEM(tuple, 3), 7, n))
        return false;
    const auto rows_fit = [&](const FormMatrix& matrix, long long first, long long step) {
        return first >= 0 && step >= 1 && step <= 2 && first + step * (layer.neurons - 1) < matrix.outputs;
    };
    const bool fits = expert.gate.inputs == layer.hidden && expert.up.inputs == layer.hidden &&
                      expert.down.inputs == layer.neurons && expert.down.outputs == layer.hidden &&
                      rows_fit(expert.gate, n[0], n[1]) && rows_fit(expert.up, n[2], n[3]);
    if (!fits) return refuse("the matrices are not those of an expert with neurons", layer.neurons);
    if (n[4] < 0 || n[4] > static_cast<int>(Element::bf16)) return refuse("there is no such element type", n[4]);
    expert.gate_first = n[0];
    expert.gate_step = n[1];
    expert.up_first = n[2];
    expert.up_step = n[3];
    expert.bias_type = static_cast<Element>(n[4]);
    expert.gate_up_bias = at_address<void>(n[5]);
    expert.down_bias = at_address<void>(n[6]);
    return true;
}

// form_layer(hidden, neurons, experts: list) -> capsule
PyObject* form_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    if (!PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "experts must be a list");
        return nullptr;
    }
    FormLayer layer;
    layer.hidden = PyLong_AsLongLong(args[0]);
    layer.neurons = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (layer.hidden < 1 || layer.neurons < 1 || !check_product({layer.hidden, layer.neurons, 2})) {
        if (!PyErr_Occurred()) refuse("a size is out of range", std::min(layer.hidden, layer.neurons));
        return nullptr;
    }
    layer.experts.resize(static_cast<std::size_t>(PyList_GET_SIZE(args[2])));
    for (std::size_t i = 0; i < layer.experts.size(); ++i)
        if (!read_expert(PyList_GET_ITEM(args[2], static_cast<Py_ssize_t>(i)), layer, layer.experts[i])) return nullptr;
    auto* made = new FormLayer(std::move(layer));
    PyObject* capsule = PyCapsule_New(made, kFormLayer, delete_layer);
    if (!capsule) delete made;
    return capsule;
}

// threads, set
bool read_pool(PyObject* const* args, Threads*& threads, int& set) {
    threads = static_cast<Threads*>(PyCapsule_GetPointer(args[0], kThreads));
    const long long number = threads ? PyLong_AsLongLong(args[1]) : 0;
    if (PyErr_Occurred()) return false;
    set = static_cast<int>(number);
    return (number >= 0 && number < static_cast<long long>(instruction_sets().size())) ||
           refuse("there is no such instruction set", number);
}

// form_ffn(threads, set, activation, layer, <batch>)
PyObject* form(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Threads* threads;
    int set;
    if (!expect(count, 4 + kBatchArgs) || !read_pool(args, threads, set)) return nullptr;
    const long long activation = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    if (activation < 0 || activation > static_cast<int>(Activation::gpt_oss)) {
        refuse("there is no such activation", activation);
        return nullptr;
    }
    const auto* layer = static_cast<const FormLayer*>(PyCapsule_GetPointer(args[3], kFormLayer));
    if (!layer) return nullptr;
    Arrays arrays;
    Batch batch;
    if (!read_batch(args + 4, static_cast<std::int64_t>(layer->experts.size()), layer->hidden, arrays, batch))
        return nullptr;
    return released([&] { form_ffn(*threads, set, *layer, static_cast<Activation>(activation), batch); });
}

// form_linear(threads, set, matrix, x float32 [n, inputs], out float32 [n, outputs])
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Threads* threads;
    int set;
    FormMatrix matrix;
    Array x, out;
    if (!expect(count, 5) || !read_pool(args, threads, set) || !read_matrix(args[2], matrix)) return nullptr;
    if (!x.open(args[3], "x", 'f', 2, false) || !out.open(args[4], "out", 'f', 2, true)) return nullptr;
    if (x.size(1) != matrix.inputs || out.size(0) != x.size(0) || out.size(1) != matrix.outputs) {
        refuse("x and out are not those of a matrix with inputs", matrix.inputs);
        return nullptr;
    }
    return released([&] { form_linear(*threads, set, matrix, x.data<const float>(), x.size(0), out.data<float>()); });
}

// gptq_block(threads, set, outputs, inputs, bits, left, weights, factor, stride, pivots, codes, rest, scales, offsets)
PyObject* gptq(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 14)) return nullptr;
    auto* threads = static_cast<Threads*>(PyCapsule_GetPointer(args[0], kThreads));
    if (!threads) return nullptr;
    long long number[5];
    const int at[5] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; ++i) number[i] = PyLong_AsLongLong(args[at[i]]);
    const auto [set, outputs, inputs, bits, stride] =
        std::tuple(number[0], number[1], number[2], number[3], number[4]);
    const GptqBlock block = {outputs, static_cast<int>(inputs), static_cast<int>(bits), address<float>(args[5]),
                             address<const float>(args[6]), address<const float>(args[7]), stride,
                             address<const float>(args[9]), address<float>(args[10]), address<float>(args[11]),
                             address<float>(args[12]), address<float>(args[13])};
    if (PyErr_Occurred()) return nullptr;
    if (set < 0 || set >= static_cast<long long>(instruction_sets().size()) || outputs < 1 || outputs >= kSizeMax ||
        inputs < 1 || inputs > 128 || stride < inputs || stride >= kSizeMax) {
        PyErr_SetString(PyExc_ValueError, "an argument is out of range");
        return nullptr;
    }
    if (bits != 1 && bits != 2 && bits != 3 && bits != 4 && bits != 8) {
        refuse("there is no such width", bits);
        return nullptr;
    }
    return released([&] { gptq_block(*threads, static_cast<int>(set), block); });
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
    {"form_layer", fast(form_layer), METH_FASTCALL, "Experts in published forms; see forms.hpp."},
    {"form_ffn", fast(form), METH_FASTCALL, "Runs them; see forms.hpp."},
    {"form_linear", fast(linear), METH_FASTCALL, "One matrix in a published form; see forms.hpp."},
    {"gptq_block", fast(gptq), METH_FASTCALL, "One group of a GPTQ sweep; see fit.hpp."},
    {"instruction_sets", sets, METH_NOARGS, "Names of what this processor can run, best first."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
