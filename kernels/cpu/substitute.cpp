// Buddy expert substitution (Algorithm 1 of BuddyMoE with its gates) for the few tokens of a layer: what
// actors/policies/substitution.py says, to the last bit. Doubles and floats are added, multiplied and divided in the
// same order as there, and never contracted: this file is compiled with -ffp-contract=off.
//
// Arguments are buffers (NumPy arrays), whose item sizes and shapes are checked here. The interpreter lock is released
// while tokens are decided.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr double ln2 = 0.6931471805599453;
constexpr double inverse_ln2 = 1.0 / ln2;
constexpr int log_terms = 8, exp_terms = 12;

double log_of(double x) {
    int exponent;
    double mantissa = std::frexp(x, &exponent);
    if (mantissa < std::sqrt(0.5)) {
        mantissa = mantissa * 2.0;
        exponent -= 1;
    }
    const double ratio = (mantissa - 1.0) / (mantissa + 1.0), square = ratio * ratio;
    double series = 1.0 / (2 * log_terms - 1);
    for (int i = log_terms - 2; i >= 0; --i) series = series * square + 1.0 / (2 * i + 1);
    return exponent * ln2 + (ratio + ratio) * series;
}

double exp_of(double x) {
    static const std::vector<double> terms = [] {
        std::vector<double> all(exp_terms);
        double factorial = 1.0;
        for (int i = 0; i < exp_terms; ++i) {
            if (i) factorial *= i;
            all[static_cast<std::size_t>(i)] = 1.0 / factorial;
        }
        return all;
    }();
    const double power = std::fmax(std::floor(x * inverse_ln2 + 0.5), -1000.0);
    const double rest = std::fmax(x - power * ln2, -1.0);
    double series = terms.back();
    for (int i = exp_terms - 2; i >= 0; --i) series = series * rest + terms[static_cast<std::size_t>(i)];
    return std::ldexp(series, static_cast<int>(power));
}

struct Problem {
    const std::int64_t* ids;     // [T, K]
    const float* weights;        // [T, K]
    const float* probabilities;  // [T, E] or none
    const std::uint8_t* replace; // [E]
    const float* reach;          // [E]
    const std::int32_t* buddies; // [E, R]
    const float* similarity;     // [E, R]
    std::int64_t tokens, top_k, experts, ranks;
    std::int64_t rho, search;
    double tau, gamma, temperature, log_top_k;  // tau -inf, gamma +inf: no gate
    float eta, reuse;
    bool drop, by_buddy, renormalise;
    std::int64_t* out_ids;
    float* out_weights;
    std::int64_t substituted = 0, dropped = 0;
};

// Whether the gates let experts of a token be replaced. p holds K doubles.
bool permitted(const Problem& problem, const float* weights, double* p) {
    const std::int64_t top_k = problem.top_k;
    const bool entropy = problem.tau != -HUGE_VAL, margin = problem.gamma != HUGE_VAL;
    if (!entropy && !margin) return true;
    if (top_k < 2) return !((entropy && 0.0 <= problem.tau) || (margin && 1.0 >= problem.gamma));
    for (std::int64_t k = 0; k < top_k; ++k) p[k] = weights[k];
    if (problem.temperature != 1.0) {
        double top = -HUGE_VAL;
        for (std::int64_t k = 0; k < top_k; ++k) top = p[k] > 0 ? std::fmax(top, log_of(p[k])) : top;
        for (std::int64_t k = 0; k < top_k; ++k) p[k] = p[k] > 0 ? exp_of((log_of(p[k]) - top) / problem.temperature) : 0.0;
    }
    double total = 0.0;
    for (std::int64_t k = 0; k < top_k; ++k) total = total + p[k];
    for (std::int64_t k = 0; k < top_k; ++k) p[k] = p[k] / (total > 0 ? total : 1.0);
    if (entropy) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < top_k; ++k) sum = sum + (p[k] > 0 ? p[k] * log_of(p[k]) : 0.0);
        if ((0.0 - sum) / problem.log_top_k <= problem.tau) return false;
    }
    if (margin) {
        double first = -1.0, second = -1.0;
        for (std::int64_t k = 0; k < top_k; ++k) {
            if (p[k] > first) {
                second = first;
                first = p[k];
            } else if (p[k] > second) {
                second = p[k];
            }
        }
        if (first - second >= problem.gamma) return false;
    }
    return true;
}

// One token: out_ids and out_weights hold its routing already. `claims` is 1 for every expert, also afterwards.
// `left_out` holds K flags, `original` K experts.
void decide(Problem& problem, std::int64_t t, std::vector<float>& claims, std::vector<std::uint8_t>& left_out,
            std::vector<std::int64_t>& original) {
    const std::int64_t top_k = problem.top_k;
    std::int64_t* ids = problem.out_ids + t * top_k;
    const float* row = problem.probabilities ? problem.probabilities + t * problem.experts : nullptr;
    std::int64_t replaced = 0, left = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
        original[k] = ids[k];
        left_out[k] = 0;
    }
    for (std::int64_t k = 0; k < top_k; ++k) claims[original[k]] = 0.0f;
    for (std::int64_t k = 0; k < top_k; ++k) {
        const std::int64_t expert = ids[k];
        if (!problem.replace[expert]) continue;
        if (replaced >= problem.rho) break;
        const std::int32_t* buddies = problem.buddies + expert * problem.ranks;
        const float* similarity = problem.similarity + expert * problem.ranks;
        std::int64_t best = -1;
        float best_score = 0.0f;
        for (std::int64_t r = 0; r < problem.search; ++r) {
            const std::int64_t buddy = buddies[r];
            float score = similarity[r];
            if (problem.eta > 0 && row) score = score * (1.0f + problem.eta * row[buddy]);
            score = score * problem.reach[buddy];
            score = score * claims[buddy];
            if (score > best_score) {
                best = buddy;
                best_score = score;
            }
        }
        if (best >= 0) {
            ids[k] = best;
            claims[best] = claims[best] * problem.reuse;
            ++replaced;
        } else if (problem.drop) {
            left_out[k] = 1;
            ++left;
        }
    }
    for (std::int64_t k = 0; k < top_k; ++k) claims[original[k]] = claims[ids[k]] = 1.0f;
    if (!replaced && !left) return;
    if (left == top_k) {
        left_out[0] = 0;
        --left;
    }
    if (left) {
        std::int64_t kept = 0;
        while (left_out[kept]) ++kept;
        for (std::int64_t k = 0; k < top_k; ++k)
            if (left_out[k]) ids[k] = ids[kept];
    }
    problem.substituted += replaced;
    problem.dropped += left;
    if (!left && !problem.by_buddy) return;
    float* weights = problem.out_weights + t * top_k;
    double before = 0.0, after = 0.0;
    std::vector<double> values(weights, weights + top_k);
    for (std::int64_t k = 0; k < top_k; ++k) {
        before += values[k];
        if (left_out[k])
            values[k] = 0.0;
        else if (problem.by_buddy && ids[k] != original[k] && row[original[k]] > 0)
            values[k] = values[k] * static_cast<double>(row[ids[k]]) / static_cast<double>(row[original[k]]);
        after += values[k];
    }
    for (std::int64_t k = 0; k < top_k; ++k) {
        if (problem.renormalise && after > 0) values[k] = values[k] * before / after;
        weights[k] = static_cast<float>(values[k]);
    }
}

void run(Problem& problem) {
    std::vector<float> claims(static_cast<std::size_t>(problem.experts), 1.0f);
    std::vector<std::uint8_t> left_out(static_cast<std::size_t>(problem.top_k));
    std::vector<std::int64_t> original(static_cast<std::size_t>(problem.top_k));
    std::vector<double> p(static_cast<std::size_t>(problem.top_k));
    for (std::int64_t i = 0; i < problem.tokens * problem.top_k; ++i) {
        problem.out_ids[i] = problem.ids[i];
        problem.out_weights[i] = problem.weights[i];
    }
    for (std::int64_t t = 0; t < problem.tokens; ++t) {
        bool missing = false;
        for (std::int64_t k = 0; k < problem.top_k; ++k) missing |= problem.replace[problem.ids[t * problem.top_k + k]] != 0;
        if (missing && permitted(problem, problem.weights + t * problem.top_k, p.data()))
            decide(problem, t, claims, left_out, original);
    }
}

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

bool within(const Problem& problem) {
    for (std::int64_t i = 0; i < problem.tokens * problem.top_k; ++i)
        if (problem.ids[i] < 0 || problem.ids[i] >= problem.experts) {
            PyErr_Format(PyExc_ValueError, "there is no expert %lld", static_cast<long long>(problem.ids[i]));
            return false;
        }
    for (std::int64_t i = 0; i < problem.tokens * problem.top_k; ++i) {
        const std::int32_t* list = problem.buddies + problem.ids[i] * problem.ranks;
        for (std::int64_t r = 0; r < problem.search; ++r)
            if (list[r] < 0 || list[r] >= problem.experts) {
                PyErr_Format(PyExc_ValueError, "there is no buddy %ld", static_cast<long>(list[r]));
                return false;
            }
    }
    return true;
}

// replaceable(ids, resident, beta, shard_of or None, shards, out): out[e] = expert e is asked for, not resident, and its
// shard has fewer than beta of its requested experts missing
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
    if (shards < 1 || shards > experts) return PyErr_Format(PyExc_ValueError, "there cannot be %lld shards", shards);
    const std::int64_t* picked = ids.data<const std::int64_t>();
    const std::int64_t* owner = several ? shard_of.data<const std::int64_t>() : nullptr;
    const std::uint8_t* here = resident.data<const std::uint8_t>();
    std::uint8_t* replace = out.data<std::uint8_t>();
    for (Py_ssize_t e = 0; e < experts; ++e) {
        if (owner && (owner[e] < 0 || owner[e] >= shards))
            return PyErr_Format(PyExc_ValueError, "there is no shard %lld", static_cast<long long>(owner[e]));
        replace[e] = 0;
    }
    const Py_ssize_t pairs = ids.items();
    for (Py_ssize_t i = 0; i < pairs; ++i) {
        if (picked[i] < 0 || picked[i] >= experts)
            return PyErr_Format(PyExc_ValueError, "there is no expert %lld", static_cast<long long>(picked[i]));
        replace[picked[i]] = 1;
    }
    std::vector<std::int64_t> requested(static_cast<std::size_t>(shards)), absent(static_cast<std::size_t>(shards));
    for (Py_ssize_t e = 0; e < experts; ++e)
        if (replace[e]) {
            const std::size_t shard = owner ? static_cast<std::size_t>(owner[e]) : 0;
            ++requested[shard];
            absent[shard] += !here[e];
        }
    for (Py_ssize_t e = 0; e < experts; ++e) {
        const std::size_t shard = owner ? static_cast<std::size_t>(owner[e]) : 0;
        if (!replace[e]) continue;
        const double share = static_cast<double>(absent[shard]) / static_cast<double>(requested[shard]);
        replace[e] = !here[e] && share < beta;
    }
    Py_RETURN_NONE;
}

// substitute(ids, weights, probabilities or None, replace, reach, buddies, similarity, out_ids, out_weights,
//            (tokens, top_k, experts, ranks, rho, search, tau, gamma, temperature, log_top_k, eta, reuse, drop, by_buddy,
//             renormalise)) -> (substituted, dropped)
PyObject* substitute(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 10) return PyErr_Format(PyExc_TypeError, "expected 10 arguments, got %zd", count);
    Problem problem{};
    long long tokens, top_k, experts, ranks, rho, search;
    int drop, by_buddy, renormalise;
    if (!PyTuple_Check(args[9])) return PyErr_Format(PyExc_TypeError, "the options are a tuple");
    if (!PyArg_ParseTuple(args[9], "LLLLLLddddffppp", &tokens, &top_k, &experts, &ranks, &rho, &search, &problem.tau,
                          &problem.gamma, &problem.temperature, &problem.log_top_k, &problem.eta, &problem.reuse, &drop,
                          &by_buddy, &renormalise))
        return nullptr;
    constexpr long long most = 1 << 20;  // so that no product of two overflows
    if (tokens < 0 || tokens > most || top_k < 1 || top_k > most || experts < 1 || experts > most || ranks < 1 ||
        ranks > most || search < 1 || search > ranks)
        return PyErr_Format(PyExc_ValueError, "a shape or the search is out of range");
    const bool probable = args[2] != Py_None;
    if (!probable && (problem.eta > 0 || by_buddy))
        return PyErr_Format(PyExc_ValueError, "eta, and weights by the buddy, need the router's probabilities");
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
    problem.tokens = tokens, problem.top_k = top_k, problem.experts = experts, problem.ranks = ranks;
    problem.rho = rho, problem.search = search;
    problem.drop = drop, problem.by_buddy = by_buddy, problem.renormalise = renormalise;
    problem.out_ids = out_ids.data<std::int64_t>();
    problem.out_weights = out_weights.data<float>();
    if (!within(problem)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    run(problem);
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("LL", static_cast<long long>(problem.substituted), static_cast<long long>(problem.dropped));
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"replaceable", fast(replaceable), METH_FASTCALL, "The distribution gate of BuddyMoE; see kernels/substitute.py."},
    {"substitute", fast(substitute), METH_FASTCALL, "Algorithm 1 of BuddyMoE; see kernels/substitute.py."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_substitute", "Buddy substitution of tiermoe.", -1, methods,
                          nullptr,               nullptr,       nullptr,                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__substitute() { return PyModule_Create(&definition); }
