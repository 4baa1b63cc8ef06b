// The Python side of substitute.cpp: arguments are buffers (NumPy arrays), whose item sizes and shapes are checked here.
// The interpreter lock is kept: experts and buddies are read again after their check, and no thread may write to them.
#include <cstring>

#include "bindings.hpp"
#include "substitute.hpp"

namespace tiermoe::bindings {
namespace {

// A contiguous buffer of the kind and shape wanted (rows < 0: of any), released when it goes. Kinds are those of Python's struct module.
class Buffer {
  public:
    ~Buffer() {
        if (held_) PyBuffer_Release(&view_);
    }
    bool take(PyObject* object, const char* name, const char* kinds, Py_ssize_t item, Py_ssize_t rows,
              Py_ssize_t columns, bool write) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (write ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object, &view_, flags) != 0) return false;
        held_ = true;
        const char* kind = view_.format ? view_.format : "B";
        const bool right = kind[0] != 0 && kind[1] == 0 && std::strchr(kinds, kind[0]) && view_.itemsize == item;
        if (right && (rows < 0 || view_.len == rows * columns * item)) return true;
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, in items '%s' of %zd; there must be %zd x %zd of %zd ('%s')",
                     name, view_.len, kind, view_.itemsize, rows, columns, item, kinds);
        return false;
    }
    Py_ssize_t items() const { return view_.len / view_.itemsize; }
    template <typename T>
    T* data() const {
        return static_cast<T*>(view_.buf);
    }

  private:
    Py_buffer view_{};
    bool held_ = false;
};

PyObject* refuse(const Fault& fault) {
    return PyErr_Format(PyExc_ValueError, "%s", fault.c_str());
}

// replaceable(ids, resident, beta, shard_of or None, shards, out)
PyObject* replaceable(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 6) return PyErr_Format(PyExc_TypeError, "expected 6 arguments, got %zd", count);
    const double beta = PyFloat_AsDouble(args[2]);
    const long long shards = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return nullptr;
    const Py_ssize_t experts = PyObject_Size(args[1]);
    if (experts < 0) return nullptr;
    Buffer ids, resident, shard_of, out;
    const bool several = args[3] != Py_None;
    if (!ids.take(args[0], "ids", "lq", 8, -1, 1, false) || !resident.take(args[1], "resident", "?B", 1, 1, experts, false) ||
        (several && !shard_of.take(args[3], "shard_of", "lq", 8, 1, experts, false)) ||
        !out.take(args[5], "out", "?B", 1, 1, experts, true))
        return nullptr;
    const Fault fault = tiermoe::replaceable(
        ids.data<const std::int64_t>(), ids.items(), resident.data<const std::uint8_t>(), experts, beta,
        several ? shard_of.data<const std::int64_t>() : nullptr, shards, out.data<std::uint8_t>());
    if (!fault.empty()) return refuse(fault);
    Py_RETURN_NONE;
}

// substitute(ids, weights, probabilities or None, replace, reach, buddies, similarity, out_ids, out_weights,
//            (tokens, top_k, experts, ranks, rho, search, tau, gamma, temperature, log_top_k, eta, reuse, drop, by_buddy,
//             renormalise)) -> (substituted, dropped)
PyObject* substitute(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 10) return PyErr_Format(PyExc_TypeError, "expected 10 arguments, got %zd", count);
    Substitution problem{};
    if (!read_options(args[9], problem)) return nullptr;
    const bool probable = args[2] != Py_None;
    const std::int64_t tokens = problem.tokens, top_k = problem.top_k, experts = problem.experts, ranks = problem.ranks;
    Fault fault = size_fault(problem, probable);
    if (!fault.empty()) return refuse(fault);
    Buffer ids, weights, probabilities, replace, reach, buddies, similarity, out_ids, out_weights;
    if (!ids.take(args[0], "ids", "lq", 8, tokens, top_k, false) ||
        !weights.take(args[1], "weights", "f", 4, tokens, top_k, false) ||
        (probable && !probabilities.take(args[2], "probabilities", "f", 4, tokens, experts, false)) ||
        !replace.take(args[3], "replace", "?B", 1, 1, experts, false) ||
        !reach.take(args[4], "reach", "f", 4, 1, experts, false) ||
        !buddies.take(args[5], "buddies", "i", 4, experts, ranks, false) ||
        !similarity.take(args[6], "similarity", "f", 4, experts, ranks, false) ||
        !out_ids.take(args[7], "out_ids", "lq", 8, tokens, top_k, true) ||
        !out_weights.take(args[8], "out_weights", "f", 4, tokens, top_k, true))
        return nullptr;
    problem.ids = ids.data<const std::int64_t>();
    problem.weights = weights.data<const float>();
    problem.probabilities = probable ? probabilities.data<const float>() : nullptr;
    problem.replace = replace.data<const std::uint8_t>();
    problem.reach = reach.data<const float>();
    problem.buddies = buddies.data<const std::int32_t>();
    problem.similarity = similarity.data<const float>();
    problem.out_ids = out_ids.data<std::int64_t>();
    problem.out_weights = out_weights.data<float>();
    fault = content_fault(problem);
    if (!fault.empty()) return refuse(fault);
    tiermoe::substitute(problem);
    return Py_BuildValue("LL", static_cast<long long>(problem.substituted), static_cast<long long>(problem.dropped));
}

}  // namespace

bool read_options(PyObject* tuple, Substitution& problem) {
    long long tokens, top_k, experts, ranks, rho, search;
    int drop, by_buddy, renormalise;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "the options are a tuple");
        return false;
    }
    if (!PyArg_ParseTuple(tuple, "LLLLLLddddffppp", &tokens, &top_k, &experts, &ranks, &rho, &search, &problem.tau,
                          &problem.gamma, &problem.temperature, &problem.log_top_k, &problem.eta, &problem.reuse, &drop,
                          &by_buddy, &renormalise))
        return false;
    problem.tokens = tokens, problem.top_k = top_k, problem.experts = experts, problem.ranks = ranks;
    problem.rho = rho, problem.search = search;
    problem.drop = drop, problem.by_buddy = by_buddy, problem.renormalise = renormalise;
    return true;
}

PyMethodDef substitute_methods[] = {
    {"replaceable", fast(replaceable), METH_FASTCALL, "The distribution gate of BuddyMoE; see kernels/substitute.py."},
    {"substitute", fast(substitute), METH_FASTCALL, "Algorithm 1 of BuddyMoE; see kernels/substitute.py."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
