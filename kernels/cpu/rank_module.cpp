// Bindings of rank.hpp; rows are tokens.
#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings.hpp"
#include "rank.hpp"

namespace tiermoe::bindings {
namespace {

// Scores [T, E] of float or double, rows at any distance.
class Scores {
   public:
    ~Scores() {
        if (held_) PyBuffer_Release(&view_);
    }
    bool take(PyObject* given) {
        if (PyObject_GetBuffer(given, &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) return false;
        held_ = true;
        const char* kind = view_.format ? view_.format : "";
        wide_ = std::strcmp(kind, "d") == 0;
        if (view_.ndim != 2 || !(wide_ || std::strcmp(kind, "f") == 0))
            return PyErr_Format(PyExc_ValueError, "scores are float32 or float64 [T, E], not '%s' with %d axes", kind,
                                view_.ndim);
        return true;
    }
    std::int64_t tokens() const { return view_.shape[0]; }
    std::int64_t experts() const { return view_.shape[1]; }
    // A row as doubles, which hold every float.
    void row(std::int64_t t, std::vector<double>& out) const {
        const char* from = static_cast<const char*>(view_.buf) + t * view_.strides[0];
        const Py_ssize_t step = view_.strides[1];
        for (std::size_t e = 0; e < out.size(); ++e, from += step) {
            if (wide_) {
                std::memcpy(&out[e], from, sizeof(double));
            } else {
                float value;
                std::memcpy(&value, from, sizeof(value));
                out[e] = value;
            }
        }
    }

   private:
    Py_buffer view_{};
    bool held_ = false, wide_ = false;
};

Ranked rank_experts(const Scores& scores, std::int64_t top, bool by_votes) {
    return tiermoe::rank_experts(scores.tokens(), scores.experts(), top, by_votes,
                    [&](std::int64_t t, std::vector<double>& row) { scores.row(t, row); });
}

PyObject* keys_of(const std::vector<int>& experts, long long base) {
    PyObject* keys = PyList_New(static_cast<Py_ssize_t>(experts.size()));
    for (std::size_t i = 0; keys && i < experts.size(); ++i) {
        PyObject* key = PyLong_FromLongLong(base + experts[i]);
        if (!key) Py_CLEAR(keys);
        if (keys) PyList_SET_ITEM(keys, static_cast<Py_ssize_t>(i), key);
    }
    return keys;
}

bool take(PyObject* const* args, Py_ssize_t count, Scores& scores, long long& top, long long& base) {
    if (!expect(count, 3) || !scores.take(args[0])) return false;
    top = PyLong_AsLongLong(args[1]);
    base = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return false;
    return top >= 1 || refuse("a row names at least one expert", top);
}

// rank_by_votes(scores [T, E], top, base) -> keys, base added
PyObject* rank_by_votes(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Scores scores;
    long long top, base;
    if (!take(args, count, scores, top, base)) return nullptr;
    return keys_of(rank_experts(scores, top, true).experts, base);
}

// rank_by_score(scores [T, E], top, base) -> (keys, their highest scores), of positive scores
PyObject* rank_by_score(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Scores scores;
    long long top, base;
    if (!take(args, count, scores, top, base)) return nullptr;
    const Ranked found = positive(rank_experts(scores, top, false));
    const auto& experts = found.experts;
    PyObject* keys = keys_of(experts, base);
    PyObject* best = keys ? PyList_New(static_cast<Py_ssize_t>(experts.size())) : nullptr;
    for (std::size_t i = 0; best && i < experts.size(); ++i) {
        PyObject* score = PyFloat_FromDouble(found.best[static_cast<std::size_t>(experts[i])]);
        if (!score) Py_CLEAR(best);
        if (best) PyList_SET_ITEM(best, static_cast<Py_ssize_t>(i), score);
    }
    PyObject* pair = best ? PyTuple_Pack(2, keys, best) : nullptr;
    Py_XDECREF(keys);
    Py_XDECREF(best);
    return pair;
}

}  // namespace

PyMethodDef rank_methods[] = {
    {"rank_by_votes", fast(rank_by_votes), METH_FASTCALL, "`predicted_experts` of policies/prefetch.py."},
    {"rank_by_score", fast(rank_by_score), METH_FASTCALL, "`by_score` of policies/prefetch.py."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
