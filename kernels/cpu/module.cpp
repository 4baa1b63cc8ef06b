// Python bindings: addresses and sizes in, nothing out. The caller (kernels/expert_ffn.py) makes sure that the addresses
// are those of contiguous buffers of the sizes given, and keeps them alive. Here the numbers are checked against each
// other before a kernel runs: group ranges and pair numbers against the pairs, neurons against the pool. The
// interpreter lock is released while a kernel runs.
#include "bindings.hpp"

#include <vector>

#include "table.hpp"

namespace {

using tiermoe::bindings::address;
using tiermoe::bindings::check_product;
using tiermoe::bindings::expect;
using tiermoe::bindings::fast;
using tiermoe::bindings::refuse;

constexpr std::int64_t kMaxWidth = 1 << 20;

// Whether every group lies within the pairs and every pair it names within the rows of y, and its neurons in the pool.
// `pairs` is read only where a range was found good, once: into `held`, as other threads may write to it later.
bool in_range(const std::vector<tiermoe::Group>& groups, const std::int64_t* pairs, std::int64_t pair_count,
              std::int64_t neurons, std::vector<std::int64_t>& held) {
    for (const tiermoe::Group& group : groups) {
        if (group.start < 0 || group.start > group.stop) return refuse("a group starts out of range", group.start);
        if (group.stop > pair_count) return refuse("a group stops out of range", group.stop);
        if (group.first < 0 || group.first > neurons) return refuse("there is no such neuron", group.first);
        if (group.neurons < 0 || group.neurons > neurons - group.first)
            return refuse("a group has more neurons than there are", group.neurons);
        if (static_cast<std::int64_t>(held.size()) < group.stop) held.resize(static_cast<std::size_t>(group.stop));
        for (std::int64_t at = group.start; at < group.stop; ++at) {
            const std::int64_t pair = held[at] = pairs[at];
            if (pair < 0 || pair >= pair_count) return refuse("there is no such pair", pair);
        }
    }
    return true;
}

// expert_ffn(hidden, gate_up, down, pairs, pair_count, groups: list[tuple[start, stop, first, neurons, add]], top_k,
//            neurons, width, activation, y); the pool has so many neurons, hidden pair_count / top_k rows, pairs
//            pair_count entries, y as many rows
PyObject* expert_ffn(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 11)) return nullptr;
    const float* hidden = address<const float>(args[0]);
    const float* gate_up = address<const float>(args[1]);
    const float* down = address<const float>(args[2]);
    const std::int64_t* pairs = address<const std::int64_t>(args[3]);
    const std::int64_t pair_count = PyLong_AsLongLong(args[4]);
    if (!PyList_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "groups must be a list of (start, stop, first, neurons, add)");
        return nullptr;
    }
    std::vector<tiermoe::Group> groups(static_cast<std::size_t>(PyList_GET_SIZE(args[5])));
    bool adds = false;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        PyObject* item = PyList_GET_ITEM(args[5], static_cast<Py_ssize_t>(i));
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 5 || !PyBool_Check(PyTuple_GET_ITEM(item, 4))) {
            PyErr_SetString(PyExc_TypeError, "each group must be a tuple (start, stop, first, neurons, add)");
            return nullptr;
        }
        groups[i] = {PyLong_AsLongLong(PyTuple_GET_ITEM(item, 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(item, 1)),
                     PyLong_AsLongLong(PyTuple_GET_ITEM(item, 2)), PyLong_AsLongLong(PyTuple_GET_ITEM(item, 3)),
                     PyTuple_GET_ITEM(item, 4) == Py_True};
        adds |= groups[i].add;
    }
    const std::int64_t top_k = PyLong_AsLongLong(args[6]);
    const std::int64_t neurons = PyLong_AsLongLong(args[7]);
    const std::int64_t width = PyLong_AsLongLong(args[8]);
    const long long activation_code = PyLong_AsLongLong(args[9]);
    float* y = address<float>(args[10]);
    if (PyErr_Occurred()) return nullptr;
    const auto activation = static_cast<tiermoe::Activation>(activation_code);
    if (activation_code < 0 || activation_code > static_cast<int>(tiermoe::Activation::relu)) {
        refuse("there is no such activation", activation_code);
        return nullptr;
    }
    // A pair belongs to row pair / top_k of hidden: a remainder would let the last pairs read past its end.
    if (top_k < 1 || pair_count % top_k != 0) {
        refuse("top_k does not divide the number of pairs", top_k);
        return nullptr;
    }
    if (width < 0 || width > kMaxWidth) {
        refuse("the width is out of range", width);
        return nullptr;
    }
    std::vector<std::int64_t> held;
    if (!check_product({pair_count, width}) || !check_product({neurons, width, 2}) ||
        !in_range(groups, pairs, pair_count, neurons, held))
        return nullptr;
    std::vector<float> sums(adds ? static_cast<std::size_t>(tiermoe::kSumRows * width) : 0);
    Py_BEGIN_ALLOW_THREADS;
    tiermoe::expert_ffn_f32(hidden, gate_up, down, held.data(), groups.data(), static_cast<std::int64_t>(groups.size()),
                            top_k, width, activation, y, sums.data());
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// combine(y, weights, tokens, top_k, width, out)
PyObject* combine(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    const float* y = address<const float>(args[0]);
    const float* weights = address<const float>(args[1]);
    const std::int64_t tokens = PyLong_AsLongLong(args[2]);
    const std::int64_t top_k = PyLong_AsLongLong(args[3]);
    const std::int64_t width = PyLong_AsLongLong(args[4]);
    float* out = address<float>(args[5]);
    if (PyErr_Occurred() || !check_product({tokens, top_k, width})) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    tiermoe::combine_f32(y, weights, tokens, top_k, width, out);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// table() -> capsule of `KernelTable`
PyObject* table(PyObject*, PyObject* const*, Py_ssize_t count) {
    static tiermoe::KernelTable kernels{
        tiermoe::expert_ffn_f32, tiermoe::combine_f32, tiermoe::router_scores, tiermoe::misses_fit, tiermoe::budget_top_k,
        tiermoe::importance_saw, tiermoe::importance_target, tiermoe::size_fault, tiermoe::replaceable, tiermoe::substitute};
    return expect(count, 0) ? PyCapsule_New(&kernels, tiermoe::kKernelTable.c_str(), nullptr) : nullptr;
}

PyMethodDef methods[] = {
    {"table", fast(table), METH_FASTCALL, "The kernels that the core's executor runs; see table.hpp."},
    {"expert_ffn", fast(expert_ffn), METH_FASTCALL, "Expert FFN over groups of pairs; see expert_ffn.hpp."},
    {"combine", fast(combine), METH_FASTCALL, "Weighted sum of each token's pairs; see expert_ffn.hpp."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", "CPU kernels of tiermoe.", -1, methods,
                          nullptr,               nullptr, nullptr,                  nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() {
    PyObject* module = PyModule_Create(&definition);
    for (PyMethodDef* more : {tiermoe::bindings::neuron_methods, tiermoe::bindings::measure_methods,
                               tiermoe::bindings::dense_methods,
                               tiermoe::bindings::importance_methods, tiermoe::bindings::rank_methods,
                               tiermoe::bindings::decode_methods, tiermoe::bindings::page_methods,
                               tiermoe::bindings::substitute_methods})
        if (module && PyModule_AddFunctions(module, more) < 0) Py_CLEAR(module);
    return module;
}
