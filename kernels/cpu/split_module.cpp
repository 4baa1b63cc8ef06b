// Bindings of split.hpp and split_order.hpp. A pass of a layer is one call:
//     split_pass    split_begin and split_finish
// or, where a policy of Python prefetches between them, two:
//     split_begin   routing -> copies land, loads and the probe's prefetches are queued
//     split_finish  residents run, arrivals as they land; combine; unpin
//
// Passes that have run are recorded as in layer_module.cpp, with a row of `moments` for each: when the pass began and
// ended, the seconds that it waited, and 1 where it has scores, which are the row of `predicted`.
#include <algorithm>
#include <utility>

#include "bindings.hpp"
#include "split.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kOrder = "tiermoe.kernels.SplitOrder";
constexpr const char* kSplit = "tiermoe.kernels.Split";
constexpr const char* kLayer = "tiermoe.kernels.SplitLayer";

struct Record {
    std::int64_t* words;
    std::int64_t size, rows;  // of words, of moments
    double* moments;          // [rows, 4]
    float* predicted;         // [rows, E], or null
    std::int64_t passes;      // recorded since the words were read
};

struct Made {
    Split split;
    Record record;
    const Loads* loads;
};

struct SplitLayer : SplitPass {
    Made* of;
    double began_s;
    bool predicts;
};

SplitOrder* order_of(PyObject* capsule) { return static_cast<SplitOrder*>(PyCapsule_GetPointer(capsule, kOrder)); }
void delete_order(PyObject* capsule) { delete order_of(capsule); }
Made* split_of(PyObject* capsule) { return static_cast<Made*>(PyCapsule_GetPointer(capsule, kSplit)); }
void delete_split(PyObject* capsule) { delete split_of(capsule); }
SplitLayer* split_layer_of(PyObject* capsule) { return static_cast<SplitLayer*>(PyCapsule_GetPointer(capsule, kLayer)); }
void delete_layer(PyObject* capsule) { delete split_layer_of(capsule); }

// -- the order -------------------------------------------------------------------------------------------

// split_order(layers, experts, rate, by_use) -> capsule
PyObject* split_order(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    const std::int64_t layers = PyLong_AsLongLong(args[0]), experts = PyLong_AsLongLong(args[1]);
    const double rate = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return nullptr;
    if (layers < 1 || experts < 1) {
        refuse("a model has layers and experts", std::min(layers, experts));
        return nullptr;
    }
    if (!check_product({layers, experts, 2}, kMostKeys)) return nullptr;
    auto* order = made([&] { return new SplitOrder(layers, experts, rate, args[3] == Py_True); });
    PyObject* capsule = order ? PyCapsule_New(order, kOrder, delete_order) : nullptr;
    if (!capsule) delete order;
    return capsule;
}

bool read_key(PyObject* given, std::int64_t end, std::int64_t& key) {
    key = PyLong_AsLongLong(given);
    return !PyErr_Occurred() && ((key >= 0 && key < end) || refuse("there is no such segment", key));
}

// split_routed(order, keys, counts, tokens)
PyObject* split_routed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    SplitOrder* of = order_of(args[0]);
    std::vector<std::int64_t> keys, counts;
    if (!of || !read_keys(args[1], keys) || !read_keys(args[2], counts)) return nullptr;
    const std::int64_t tokens = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return nullptr;
    for (std::int64_t key : keys)
        if (key < 0 || key >= of->whole() || key / of->experts() != keys.front() / of->experts()) {
            refuse("not an expert of the layer", key);
            return nullptr;
        }
    if (keys.size() != counts.size()) {
        refuse("counts are not those of the keys", static_cast<long long>(counts.size()));
        return nullptr;
    }
    if (!keys.empty())
        of->routed(keys.front() / of->experts(), keys.data(), counts.data(), static_cast<std::int64_t>(keys.size()),
                   tokens);
    Py_RETURN_NONE;
}

// split_moved(order, keys, in): each got a slot, or lost it
PyObject* split_moved(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    SplitOrder* of = order_of(args[0]);
    std::vector<std::int64_t> keys;
    if (!of || !read_keys(args[1], keys)) return nullptr;
    const bool in = PyObject_IsTrue(args[2]) == 1;
    for (std::int64_t key : keys)
        if (key < 0 || key >= 2 * of->whole() || of->present(key) == in) {
            refuse("no segment without a slot, or with one", key);
            return nullptr;
        } else if (in) {
            of->admitted(key);
        } else {
            of->removed(key);
        }
    Py_RETURN_NONE;
}

// split_used(order, keys)
PyObject* split_used(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    SplitOrder* of = order_of(args[0]);
    std::vector<std::int64_t> keys;
    if (!of || !read_keys(args[1], keys)) return nullptr;
    for (std::int64_t key : keys) {
        if (key < 0 || key >= 2 * of->whole() || !of->present(key)) {
            refuse("no segment with a slot", key);
            return nullptr;
        }
        of->used(key);
    }
    Py_RETURN_NONE;
}

// split_leaving(order, slot_class) -> list of the segments that have slots of this class, in order of eviction
PyObject* split_leaving(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    SplitOrder* of = order_of(args[0]);
    const std::int64_t slot_class = of ? PyLong_AsLongLong(args[1]) : 0;
    if (PyErr_Occurred()) return nullptr;
    if (slot_class < 0 || slot_class > of->layers()) {
        refuse("there is no such slot class", slot_class);
        return nullptr;
    }
    return list_of(of->first(slot_class, of->whole(), [](std::int64_t) { return true; }));
}

// split_value(order, key) -> float
PyObject* split_value(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    SplitOrder* of = order_of(args[0]);
    std::int64_t key = 0;
    if (!of || !read_key(args[1], of->whole(), key)) return nullptr;
    return PyFloat_FromDouble(of->value(key));
}

// -- the cache and its layers ----------------------------------------------------------------------------

// split(loads, order, marks, words, size, moments, predicted or 0, rows) -> capsule; what is given outlives it
PyObject* split(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    Loads* loads = loads_of(args[0]);
    SplitOrder* order = loads ? order_of(args[1]) : nullptr;
    if (!order) return nullptr;
    Record record{};
    auto* marks = address<std::uint8_t>(args[2]);
    record.words = address<std::int64_t>(args[3]);
    record.size = PyLong_AsLongLong(args[4]);
    record.moments = address<double>(args[5]);
    record.predicted = address<float>(args[6]);
    record.rows = PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred()) return nullptr;
    if (!loads->split() || order->whole() != loads->whole() || order->experts() != loads->experts()) {
        refuse("an order of other experts", order->whole());
        return nullptr;
    }
    if (!check_product({record.size}) || !check_product({record.rows, order->experts()})) return nullptr;
    auto* made = new Made{Split(*loads, *order, marks), record, loads};
    PyObject* capsule = PyCapsule_New(made, kSplit, delete_split);
    if (!capsule) delete made;
    return capsule;
}

// split_layer(split, index, experts, layers, gate_up, down, width, activation, max_rows, probe weight or 0, probe bias or
// 0, its layer, its top, by votes) -> capsule
PyObject* split_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 14)) return nullptr;
    Made* of = split_of(args[0]);
    if (!of) return nullptr;
    auto* made = new SplitLayer{};
    made->of = of;
    made->index = PyLong_AsLongLong(args[1]);
    made->experts = PyLong_AsLongLong(args[2]);
    const std::int64_t layers = PyLong_AsLongLong(args[3]);
    made->gate_up = address<const float>(args[4]);
    made->down = address<const float>(args[5]);
    made->width = PyLong_AsLongLong(args[6]);
    const long long activation = PyLong_AsLongLong(args[7]);
    made->activation = static_cast<Activation>(activation);
    made->max_rows = PyLong_AsLongLong(args[8]);
    made->probe.weight = address<const float>(args[9]);
    made->probe.bias = address<const float>(args[10]);
    made->probe.layer = PyLong_AsLongLong(args[11]);
    made->probe.top = PyLong_AsLongLong(args[12]);
    made->probe.by_votes = PyObject_IsTrue(args[13]) == 1;
    if (!PyErr_Occurred() && (activation < 0 || activation > static_cast<int>(Activation::relu)))
        refuse("there is no such activation", activation);
    if (!PyErr_Occurred() && (made->index < 0 || made->index >= layers || made->probe.layer < 0 ||
                              made->probe.layer >= layers || made->probe.top < 1 ||
                              static_cast<std::size_t>(layers) != of->split.counts().size()))
        refuse("there is no such layer", made->index);
    if (!PyErr_Occurred() && made->experts != of->loads->experts()) refuse("the layer has other experts", made->experts);
    if (!PyErr_Occurred()) check_product({made->experts, made->width});
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(made, kLayer, delete_layer);
    if (!capsule) delete made;
    return capsule;
}

enum class Begun : int { refused = -1, page = 0, open = 1, closed = 2 };

struct Told {
    Judged first, later;
};

// hidden, ids, weights, tokens and top_k; an exception may be set.
Given given_of(PyObject* const* args) {
    return {address<const float>(args[0]), address<const std::int64_t>(args[1]), address<const float>(args[2]),
            PyLong_AsLongLong(args[3]), PyLong_AsLongLong(args[4]), nullptr};
}

Begun begin(SplitLayer& of, const Given& given, bool decode, std::int64_t source, Told& told) {
    of.tokens = given.tokens;
    of.top_k = given.top_k;
    of.decode = decode;
    of.waited_s = of.kernels_s = 0.0;
    Split& split = of.of->split;
    Record& record = of.of->record;
    if (of.tokens < 1 || of.top_k < 1 || !product_fits({of.tokens, of.top_k}, kMaxPairs)) return Begun::page;
    if (const std::int64_t at = foreign(of, given.ids); at >= 0) {
        refuse("there is no such expert", given.ids[at]);
        return Begun::refused;
    }
    if (record.words[0] == 1) record.passes = 0;
    of.began_s = now_s();
    if (!sort_pairs(of, given.ids) || record.passes == record.rows || !record_fits(of, record.words, record.size) ||
        !split.plan(of)) {
        told.first = split.judge();  // of prefetches that were dropped
        return Begun::page;
    }
    bool open = split.begin(of);
    told.first = split.judge();
    of.predicts = source && of.probe.weight;
    if (open && of.predicts) {
        of.probe.source = static_cast<std::uint8_t>(source);
        open = split.prefetch(of, given.hidden);
        told.later = split.judge();
    }
    return open ? Begun::open : Begun::closed;
}

// False: a copy was cancelled.
bool finish(SplitLayer& of, const float* hidden, const float* weights, float* out, bool cpu) {
    Split& split = of.of->split;
    const auto unlocked = [](const auto& work) {
        Py_BEGIN_ALLOW_THREADS;
        work();
        Py_END_ALLOW_THREADS;
    };
    if (!split.finish(of, hidden, weights, out, cpu ? cpu_s : now_s, unlocked)) return false;
    Record& record = of.of->record;
    if (record.words[0] == 1) record.passes = 0;  // the words were read since `begin`
    double* moments = record.moments + 4 * record.passes;
    moments[0] = of.began_s;
    moments[1] = now_s();
    moments[2] = of.waited_s;
    moments[3] = of.predicts && record.predicted;
    if (of.predicts && record.predicted)
        std::copy(of.scores.begin(), of.scores.end(), record.predicted + record.passes * of.experts);
    write_record(of, record.words);
    ++record.passes;
    return true;
}

// split_begin(layer, hidden, ids, weights, tokens, top_k, decode, source or 0)
// -> (state, used, wasted, wasted by prefetch); state: 0, Python's step must run the pass; 1, begun; 2, the link is closed
PyObject* split_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    SplitLayer* of = split_layer_of(args[0]);
    if (!of) return nullptr;
    const Given given = given_of(args + 1);
    const bool decode = PyObject_IsTrue(args[6]) == 1;
    const long long source = PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred()) return nullptr;
    Told told{};
    const Begun begun = begin(*of, given, decode, source, told);
    if (begun == Begun::refused) return nullptr;
    return Py_BuildValue("(iLLL)", static_cast<int>(begun), static_cast<long long>(told.first.used),
                         static_cast<long long>(told.first.wasted), static_cast<long long>(told.later.wasted));
}

// split_pass(layer, hidden, ids, weights, tokens, top_k, decode, source or 0, out, cpu) -> (state, used, wasted, wasted by
// prefetch, seconds waited, seconds in kernels): `split_begin` and, where it has begun, `split_finish`; state 3: a copy was
// cancelled
PyObject* split_pass(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 10)) return nullptr;
    SplitLayer* of = split_layer_of(args[0]);
    const int cpu = of ? PyObject_IsTrue(args[9]) : -1;
    if (cpu < 0) return nullptr;
    const Given given = given_of(args + 1);
    const bool decode = PyObject_IsTrue(args[6]) == 1;
    const long long source = PyLong_AsLongLong(args[7]);
    float* out = address<float>(args[8]);
    if (PyErr_Occurred()) return nullptr;
    Told told{};
    int state = static_cast<int>(begin(*of, given, decode, source, told));
    if (state < 0) return nullptr;
    if (state == static_cast<int>(Begun::open) && !finish(*of, given.hidden, given.weights, out, cpu)) state = 3;
    return Py_BuildValue("(iLLLdd)", state, static_cast<long long>(told.first.used),
                         static_cast<long long>(told.first.wasted), static_cast<long long>(told.later.wasted),
                         of->waited_s, of->kernels_s);
}

// split_finish(layer, hidden, weights, out, cpu) -> (seconds waited for copies, seconds in kernels, by the thread's CPU
// time where `cpu`) | None: a copy was cancelled
PyObject* split_finish(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 5)) return nullptr;
    SplitLayer* of = split_layer_of(args[0]);
    const int cpu = of ? PyObject_IsTrue(args[4]) : -1;
    if (cpu < 0) return nullptr;
    const float *hidden = address<const float>(args[1]), *weights = address<const float>(args[2]);
    float* out = address<float>(args[3]);
    if (PyErr_Occurred()) return nullptr;
    if (!finish(*of, hidden, weights, out, cpu)) Py_RETURN_NONE;
    return Py_BuildValue("(dd)", of->waited_s, of->kernels_s);
}

}  // namespace

bool is_split(PyObject* layer) { return PyCapsule_IsValid(layer, kLayer) != 0; }

Ended step_split(PyObject* layer, const Given& given, const Mode& mode, double* spent, std::int64_t* judged) {
    SplitLayer& of = *split_layer_of(layer);
    const std::int64_t first = of.probe.layer * of.experts;
    const bool asks = mode.source && (mode.always || of.of->loads->absent(first, first + of.experts));
    Told told{};
    const Begun begun = begin(of, given, mode.decode_only, asks ? mode.source : 0, told);
    judged[0] += told.first.used;
    judged[1] += told.first.wasted + told.later.wasted;
    if (begun == Begun::closed) return Ended::closed;
    if (begun != Begun::open) return Ended::left;
    if (!finish(of, given.hidden, given.weights, given.out, mode.cpu)) return Ended::cancelled;
    spent[0] = of.waited_s;
    spent[1] = of.kernels_s;
    return Ended::ran;
}

namespace {

// split_take(split) -> ([(layer, forwards, waves, hits, misses, top hits, prefetched hits, late, demanded, wasted),
// ...], [(source, queued, hits, late, wasted, cancelled), ...]) since the last call, of those that have any
PyObject* split_take(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Made* of = split_of(args[0]);
    PyObject* layers = of ? PyList_New(0) : nullptr;
    PyObject* sources = layers ? PyList_New(0) : nullptr;
    bool failed = !sources;
    const auto add = [&](PyObject* list, PyObject* item) {
        failed |= !item || PyList_Append(list, item) < 0;
        Py_XDECREF(item);
    };
    for (std::size_t i = 0; !failed && i < of->split.counts().size(); ++i) {
        SplitCounts& c = of->split.counts()[i];
        if (!(c.forwards | c.demanded | c.wasted)) continue;  // demanded: by turns, after a count within the pass
        add(layers, Py_BuildValue("(nLLLLLLLLL)", static_cast<Py_ssize_t>(i), static_cast<long long>(c.forwards),
                                  static_cast<long long>(c.waves), static_cast<long long>(c.hits),
                                  static_cast<long long>(c.misses), static_cast<long long>(c.top_hits),
                                  static_cast<long long>(c.prefetched_hits), static_cast<long long>(c.late),
                                  static_cast<long long>(c.demanded), static_cast<long long>(c.wasted)));
        c = SplitCounts{};
    }
    for (std::size_t i = 1; !failed && i < of->split.sources().size(); ++i) {
        PrefetchCounts& c = of->split.sources()[i];
        if (!(c.queued | c.hits | c.late | c.wasted | c.cancelled)) continue;
        add(sources, Py_BuildValue("(nLLLLL)", static_cast<Py_ssize_t>(i), static_cast<long long>(c.queued),
                                   static_cast<long long>(c.hits), static_cast<long long>(c.late),
                                   static_cast<long long>(c.wasted), static_cast<long long>(c.cancelled)));
        c = PrefetchCounts{};
    }
    PyObject* pair = failed ? nullptr : PyTuple_Pack(2, layers, sources);
    Py_XDECREF(layers);
    Py_XDECREF(sources);
    return pair;
}

}  // namespace

PyMethodDef split_methods[] = {
    {"split_order", fast(split_order), METH_FASTCALL, "The order of eviction of split experts; see split_order.hpp."},
    {"split_routed", fast(split_routed), METH_FASTCALL, "A layer's routing is known."},
    {"split_moved", fast(split_moved), METH_FASTCALL, "Segments got slots, or lost them."},
    {"split_used", fast(split_used), METH_FASTCALL, "Segments have run."},
    {"split_leaving", fast(split_leaving), METH_FASTCALL, "A slot class in order of eviction."},
    {"split_value", fast(split_value), METH_FASTCALL, "The priority of an expert."},
    {"split", fast(split), METH_FASTCALL, "A cache of split experts; see split.hpp."},
    {"split_layer", fast(split_layer), METH_FASTCALL, "A layer of it."},
    {"split_begin", fast(split_begin), METH_FASTCALL, "Plan, load, prefetch."},
    {"split_pass", fast(split_pass), METH_FASTCALL, "Both in one call."},
    {"split_finish", fast(split_finish), METH_FASTCALL, "Run, arrivals as they land."},
    {"split_take", fast(split_take), METH_FASTCALL, "The counters since the last call."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
