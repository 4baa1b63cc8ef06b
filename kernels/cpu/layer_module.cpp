// A layer of whole experts on a pool in native calls. With an order of eviction in native code (`order.hpp`) it is one:
//     layer_step    routing -> copies that have ended land, stale prefetches are dropped -> victims leave, the missing
//                   experts' copies are queued, then prefetches for the next layers, by native code or by hooks in
//                   Python -> residents run, arrivals as they land -> combine, count
// Where Python orders evictions, it takes part between the calls:
//     layer_begin   as far as the victims wanted; a pass without misses is run at once
//     layer_load    victims are evicted, the missing experts' copies queued
//     layer_finish  the rest
//
// Passes that `layer_begin` has run are recorded for an order in Python, in a ring of int64 that is read once a forward
// (`engine.cache.counting.PassRecord`): word 0 is the number of words in use, itself included; behind it one entry a
// pass: layer, tokens, n, n keys, n counts of tokens. The order of keys is that of `Routing.of`: as picked for a token of
// distinct experts, else rising.
#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "dense.hpp"
#include "importance.hpp"
#include "layer.hpp"
#include "loads.hpp"
#include "rank.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kLayer = "tiermoe.kernels.Layer";

void delete_layer(PyObject* capsule) { delete layer_of(capsule); }

// Adds the time of its scope to the kernels' where somebody asks.
class Timed {
   public:
    explicit Timed(double* times) : times_(times) {
        if (times_) wall_ = now_s(), thread_ = cpu_s();
    }
    ~Timed() {
        if (!times_) return;
        times_[1] += cpu_s() - thread_;
        times_[0] += now_s() - wall_;
    }

   private:
    double* times_;
    double wall_ = 0.0, thread_ = 0.0;
};

// layer(index, experts, states, slots, gate_up, down, neurons, width, activation, max_rows, record, record_words,
//       counts, loads or None) -> capsule; counts and loads outlive it
PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 14)) return nullptr;
    auto* made = new Layer{};
    made->index = PyLong_AsLongLong(args[0]);
    made->experts = PyLong_AsLongLong(args[1]);
    made->states = address<const std::uint8_t>(args[2]);
    made->slots = address<const std::int32_t>(args[3]);
    made->gate_up = address<const float>(args[4]);
    made->down = address<const float>(args[5]);
    made->neurons = PyLong_AsLongLong(args[6]);
    made->width = PyLong_AsLongLong(args[7]);
    const long long activation = PyLong_AsLongLong(args[8]);
    made->max_rows = PyLong_AsLongLong(args[9]);
    made->record = address<std::int64_t>(args[10]);
    made->record_words = PyLong_AsLongLong(args[11]);
    made->counters = PyErr_Occurred() ? nullptr : counts_of(args[12]);
    made->loads = PyErr_Occurred() || args[13] == Py_None ? nullptr : loads_of(args[13]);
    made->activation = static_cast<Activation>(activation);
    if (!PyErr_Occurred() && (activation < 0 || activation > static_cast<int>(Activation::relu)))
        refuse("there is no such activation", activation);
    if (!PyErr_Occurred() && (made->experts != made->counters->experts || made->index < 0 ||
                              made->index >= made->counters->layers ||
                              (made->loads && made->loads->keys() != made->counters->layers * made->experts)))
        refuse("there is no such layer", made->index);
    if (!PyErr_Occurred()) check_product({made->experts, made->neurons, made->width, 2}), check_product({made->record_words});
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(made, kLayer, delete_layer);
    if (!capsule) delete made;
    return capsule;
}

// layer_ahead(layer, weight, bias or 0, layers, top, max_rows): `layer_step` prefetches by these; they outlive it
PyObject* layer_ahead(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    const float* weight = address<const float>(args[1]);
    const float* bias = address<const float>(args[2]);
    const std::int64_t layers = PyLong_AsLongLong(args[3]), top = PyLong_AsLongLong(args[4]);
    const std::int64_t max_rows = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return nullptr;
    if (!of->evicts() || layers < 0 || of->index + layers >= of->counters->layers || top < 1) {
        refuse("there is no such prefetch", layers);
        return nullptr;
    }
    of->ahead = {weight, bias, layers, top, max_rows};
    Py_RETURN_NONE;
}

// layer_active(layer, weight, bias or 0, threshold, most, max_rows, narrowest or 0, renormalise): `layer_step` frees slots
// for the next layer by this router, which outlives it, where there is a weight, and drops pairs, where tokens keep some
PyObject* layer_active(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    const Release release{address<const float>(args[1]), address<const float>(args[2]), PyFloat_AsDouble(args[3]),
                          PyLong_AsLongLong(args[4]), PyLong_AsLongLong(args[5])};
    const Budget budget{PyLong_AsLongLong(args[6]), PyObject_IsTrue(args[7]) == 1};
    if (PyErr_Occurred()) return nullptr;
    const bool last = of->index + 1 == of->counters->layers;
    if (!of->evicts() || budget.narrowest < 0 ||
        (release.weight && (last || release.most < 0 || !of->evicts()->importance()))) {
        refuse("there is no such pre-eviction or budget, layer", of->index);
        return nullptr;
    }
    of->release = release;
    of->budget = budget;
    Py_RETURN_NONE;
}

// layer_replace(layer, weight or 0, bias or 0, draws or 0, drawn, next or 0, full, emptied, buddies, similarity, options,
//               beta, max_rows): `layer_step` replaces missing experts; options: as of `substitute`; all outlive it
PyObject* layer_replace(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 13)) return nullptr;
    Layer* of = layer_of(args[0]);
    auto rule = std::make_unique<Replace>();
    Substitution& problem = rule->problem;
    if (!of || !read_options(args[10], problem)) return nullptr;
    rule->weight = address<const float>(args[1]);
    rule->bias = address<const float>(args[2]);
    rule->draws = address<const float>(args[3]);
    rule->drawn = PyLong_AsLongLong(args[4]);
    rule->next = address<std::int64_t>(args[5]);
    rule->full = address<std::uint8_t>(args[6]);
    rule->emptied = address<std::int64_t>(args[7]);
    problem.buddies = address<const std::int32_t>(args[8]);
    problem.similarity = address<const float>(args[9]);
    rule->beta = PyFloat_AsDouble(args[11]);
    rule->max_rows = PyLong_AsLongLong(args[12]);
    if (PyErr_Occurred()) return nullptr;
    const Fault fault = size_fault(problem, rule->weight || rule->draws);
    if (!fault.empty()) return PyErr_Format(PyExc_ValueError, "%s", fault.c_str());
    if (!of->evicts() || problem.experts != of->experts || of->budget.narrowest) {
        refuse("there is no such replacement, layer", of->index);
        return nullptr;
    }
    of->replace = std::move(rule);
    Py_RETURN_NONE;
}

// layer_hooks(layer, callable): `layer_step` calls it with the addresses of hidden and of the ids that the model picked,
// tokens and top_k, once the missing experts' copies are queued; it outlives the layer's passes
PyObject* layer_hooks(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    if (!of->evicts() || !PyCallable_Check(args[1])) {
        refuse("there can be no such hooks, layer", of->index);
        return nullptr;
    }
    of->hooks = args[1];
    Py_RETURN_NONE;
}

// layer_times(layer, address of two doubles or 0)
PyObject* layer_times(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    of->times = address<double>(args[1]);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

// A group for each of `used`.
void group_pairs(Layer& of) {
    of.groups.clear();
    for (std::size_t i = 0; i < of.used.size(); ++i)
        of.groups.push_back({of.starts[i], of.starts[i + 1], of.slots[of.used[i]] * of.neurons, of.neurons, false});
}

// hidden, ids, weights, tokens, top_k and out; an exception may be set.
Given given_of(PyObject* const* args) {
    return {address<const float>(args[0]), address<const std::int64_t>(args[1]), address<const float>(args[2]),
            PyLong_AsLongLong(args[3]), PyLong_AsLongLong(args[4]), address<float>(args[5])};
}

// Takes a pass and sorts its pairs, as they run where `rules` may change them. False: the pass is not for native code, or
// an exception is set.
bool take_pass(Layer& of, const Given& given, bool rules = false) {
    of.hidden = given.hidden;
    of.picked = of.ids = given.ids;
    of.weights = given.weights;
    of.tokens = given.tokens;
    of.top_k = of.picked_k = given.top_k;
    of.out = given.out;
    of.substituted = of.dropped = 0;
    of.planned = false;
    if (of.tokens < 1 || of.top_k < 1 || !product_fits({of.tokens, of.top_k}, kMaxPairs)) return false;
    if (const std::int64_t at = foreign(of, of.ids); at >= 0) return refuse("there is no such expert", of.ids[at]);
    if (rules && !reroute(of)) return false;
    if (!sort_pairs(of, of.ids)) return false;
    group_pairs(of);
    return true;
}

std::vector<std::int64_t> keys_of(const Layer& of, const std::vector<std::int64_t>& experts) {
    std::vector<std::int64_t> keys;
    for (std::int64_t expert : experts) keys.push_back(of.key(expert));
    return keys;
}

std::vector<std::int64_t> counts_of(const Layer& of) {
    std::vector<std::int64_t> counts;
    for (std::int64_t expert : of.used) counts.push_back(of.counts[expert]);
    return counts;
}

// A pass begins whose experts are in `run`, the first `resident` of them RESIDENT.
void count_begin(Layer& of) {
    if (Order* order = of.evicts()) order->routed(keys_of(of, of.used), counts_of(of));
    of.counters->begin(of.index, of.run, of.resident);
}

void count_end(Layer& of) {
    if (Order* order = of.evicts()) order->used(of.run);
    for (std::int64_t key : of.run) ++of.counters->uses[key];
}

// Runs a pass without misses; false: the record is full.
bool run_resident(Layer& of) {
    const auto used = static_cast<std::int64_t>(of.used.size());
    const bool recorded = !of.evicts();
    if (recorded && !record_fits(of, of.record, of.record_words)) return false;
    size_rows(of);
    of.run = keys_of(of, of.used);
    of.resident = used;
    count_begin(of);
    Py_BEGIN_ALLOW_THREADS;
    {
        const Timed timed(of.times);
        run_groups(of, of.hidden, 0, of.groups.size());
        combine_f32(of.y.data(), of.weights, of.tokens, of.top_k, of.width, of.out);
    }
    Py_END_ALLOW_THREADS;
    count_end(of);
    if (recorded) write_record(of, of.record);
    return true;
}

// Orders the groups as they run (residents, arrivals, missing experts), pins those that are there, and counts. False: the
// pass needs more slots than can be freed before it runs, and nothing has changed.
bool plan_run(Layer& of) {
    Loads& loads = *of.loads;
    std::vector<std::size_t> by[3];
    for (std::size_t i = 0; i < of.used.size(); ++i) by[2 - static_cast<int>(of.state(of.used[i]))].push_back(i);
    if (!by[2].empty()) {
        std::int64_t leaving = loads.free_slots() + loads.evictable();
        for (std::int64_t expert : of.used) leaving -= loads.may_evict(of.key(expert));
        if (leaving < static_cast<std::int64_t>(by[2].size())) return false;
    }
    of.resident = static_cast<std::int64_t>(by[0].size());
    of.arriving = static_cast<std::int64_t>(by[1].size());
    of.run.clear();
    of.missing.clear();
    std::vector<Group> groups;
    for (const auto& places : by)
        for (std::size_t place : places) {
            of.run.push_back(of.key(of.used[place]));
            groups.push_back(of.groups[place]);
        }
    of.groups = std::move(groups);
    const std::int64_t here = of.resident + of.arriving;
    for (std::int64_t i = 0; i < here; ++i) loads.pin(of.run[i]);
    of.missing.assign(of.run.begin() + here, of.run.end());
    count_begin(of);
    for (std::int64_t i = of.resident; i < here; ++i) {
        const Flight* flight = loads.flight(of.run[i]);
        if (flight && flight->prefetch) of.counters->came_late(of.index, of.run[i]);
    }
    return true;
}

// Queues the copies of the missing experts in free slots and those of the victims. False: the link is closed.
bool load_missing(Layer& of, const std::vector<std::int64_t>& victims, bool decode_only) {
    Loads& loads = *of.loads;
    for (std::int64_t i = of.resident; i < of.resident + of.arriving; ++i) {
        const Flight* flight = loads.flight(of.run[i]);
        if (flight && flight->prefetch) loads.promote(*flight);
    }
    const bool open = loads.start(of.missing, victims, false);
    for (std::int64_t key : of.missing) loads.pin(key);
    if (decode_only) of.counters->of(of.index, Counts::demanded) += static_cast<std::int64_t>(of.missing.size());
    return open;
}

std::int64_t victims_wanted(const Layer& of) {
    return std::max<std::int64_t>(0, static_cast<std::int64_t>(of.missing.size()) - of.loads->free_slots());
}

// Prefetches for the layers behind what their routers pick on this layer's input. False: the link is closed.
bool look_ahead(Layer& of, std::uint8_t source) {
    Loads& loads = *of.loads;
    const Ahead& ahead = of.ahead;
    const std::int64_t first = of.key(of.experts), outputs = ahead.layers * of.experts;
    if (!of.counters->allows() || !loads.absent(first, first + outputs)) return true;
    of.scores.resize(static_cast<std::size_t>(of.tokens * outputs));
    router_scores(of.hidden, of.tokens, ahead.weight, of.width, outputs, ahead.bias, 0, of.scores.data());
    std::vector<std::int64_t> nearer;
    for (std::int64_t layer = 0; layer < ahead.layers; ++layer) {
        const auto read = [&](std::int64_t t, std::vector<double>& row) {
            const float* from = of.scores.data() + t * outputs + layer * of.experts;
            row.assign(from, from + of.experts);
        };
        std::vector<std::int64_t> wanted;
        for (int expert : rank_experts(of.tokens, of.experts, ahead.top, true, read).experts)
            wanted.push_back(first + layer * of.experts + expert);
        if (loads.prefetch(wanted, nearer, source) < 0) return false;
        nearer.insert(nearer.end(), wanted.begin(), wanted.end());
    }
    return true;
}

// Frees slots for the next layer by its router's scores on this layer's input.
void release_ahead(Layer& of) {
    Loads& loads = *of.loads;
    Importance& state = *of.evicts()->importance();
    const Release& release = of.release;
    const std::int64_t next = of.index + 1;
    of.scores.resize(static_cast<std::size_t>(of.tokens * of.experts));
    router_scores(of.hidden, of.tokens, release.weight, of.width, of.experts, release.bias, 0, of.scores.data());
    importance_saw(state, of.index, of.picked, of.tokens);
    const std::int64_t slots = importance_target(state, next, of.scores.data(), of.tokens, of.states + of.experts,
                                                 release.threshold, release.most);
    const auto leaving = loads.victims(slots - loads.free_slots());
    loads.start({}, leaving, false);
    of.counters->vacate(next, leaving);
}

// False: an exception is set.
bool call_hooks(const Layer& of) {
    PyObject* args[] = {PyLong_FromVoidPtr(const_cast<float*>(of.hidden)),
                        PyLong_FromVoidPtr(const_cast<std::int64_t*>(of.picked)), PyLong_FromLongLong(of.tokens),
                        PyLong_FromLongLong(of.picked_k)};
    const bool made = args[0] && args[1] && args[2] && args[3];
    PyObject* done = made ? PyObject_Vectorcall(static_cast<PyObject*>(of.hooks), args, 4, nullptr) : nullptr;
    for (PyObject* arg : args) Py_XDECREF(arg);
    Py_XDECREF(done);
    return done;
}

// Runs what `plan_run` has ordered and unpins it: the seconds waited for copies; below 0: one was cancelled, and nothing
// has changed.
double finish(Layer& of) {
    Loads& loads = *of.loads;
    const std::size_t count_run = of.run.size(), residents = static_cast<std::size_t>(of.resident);
    std::vector<std::shared_ptr<Copy>> copies(count_run);  // null: the expert is there
    for (std::size_t i = residents; i < count_run; ++i) {
        const Flight* flight = loads.flight(of.run[i]);
        if (flight) copies[i] = flight->copy;
        of.groups[i].first = of.slots[of.run[i] - of.key(0)] * of.neurons;
    }
    size_rows(of);
    double waited_s = 0.0;
    bool cancelled = false;
    Py_BEGIN_ALLOW_THREADS;
    const auto there = [&](std::size_t i) { return !copies[i] || copies[i]->state == Copy::done; };
    for (std::size_t at = 0, end; at < count_run && !cancelled; at = end) {
        if (copies[at]) waited_s += loads.await(*copies[at]);
        cancelled = !there(at);
        end = at < residents ? residents : at + 1;
        if (at >= residents)
            while (end < count_run && there(end)) ++end;
        const Timed timed(of.times);
        if (!cancelled) run_groups(of, of.hidden, at, end);
        if (!cancelled && end == count_run)
            combine_f32(of.y.data(), of.weights, of.tokens, of.top_k, of.width, of.out);
    }
    Py_END_ALLOW_THREADS;
    if (cancelled) return -1.0;
    for (std::size_t i = 0; i < count_run; ++i) {
        if (copies[i]) loads.land(of.run[i], of.index);
        loads.unpin(of.run[i]);
    }
    count_end(of);
    return waited_s;
}

// Copies that have ended land, stale prefetches are dropped. False: Python's step must find out what has failed.
bool settle_copies(Layer& of) {
    if (of.loads->flights().empty()) return true;
    if (!of.loads->land_ended(of.index)) return false;
    of.loads->drop_stale(of.index, of.counts.data());
    return true;
}

}  // namespace

Layer* layer_of(PyObject* capsule) { return static_cast<Layer*>(PyCapsule_GetPointer(capsule, kLayer)); }

Ended step_layer(Layer& of, const Given& given, bool decode_only, std::int64_t source, double& waited_s) {
    if (!of.evicts() || source < 0 || source > 255 || (source && !of.ahead.top)) {
        refuse("such a pass takes part of Python, layer", of.index);
        return Ended::left;
    }
    if (!take_pass(of, given, true)) return Ended::left;
    const bool releases = of.release.weight;
    if ((source && of.tokens > of.ahead.max_rows) || (releases && of.tokens > of.release.max_rows) ||
        (releases && of.picked_k != of.evicts()->importance()->top_k) || !settle_copies(of) || !plan_run(of))
        return Ended::left;
    of.counters->of(of.index, Counts::substituted_pairs) += of.substituted;
    of.counters->of(of.index, Counts::dropped_pairs) += of.dropped;
    if (of.replace && of.replace->read) *of.replace->next += of.replace->read;
    of.counters->load(of.index, of.missing);
    const bool missing = of.missing.size() + static_cast<std::size_t>(of.arriving) > 0;
    if (missing && !load_missing(of, of.loads->victims(victims_wanted(of)), decode_only)) return Ended::closed;
    if (source && !look_ahead(of, static_cast<std::uint8_t>(source))) return Ended::closed;
    if (releases) release_ahead(of);
    if (of.hooks && !call_hooks(of)) return Ended::left;
    const double found_s = finish(of);
    if (found_s < 0) return Ended::cancelled;
    waited_s = found_s;
    return Ended::ran;
}

PyObject* failed_keys(const Layer& of, Ended how) { return how == Ended::closed ? PyList_New(0) : list_of(of.run); }

namespace {

// layer_step(layer, hidden, ids, weights, tokens, top_k, out, decode_only, source or 0) -> seconds waited for copies | None:
// nothing was done that Python's step would not do | the keys whose copies were cancelled; empty: the link is closed
PyObject* layer_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 9)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    const Given given = given_of(args + 1);
    const bool decode_only = PyObject_IsTrue(args[7]) == 1;
    const long long source = PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred()) return nullptr;
    double waited_s = 0.0;
    const Ended how = step_layer(*of, given, decode_only, source, waited_s);
    if (PyErr_Occurred()) return nullptr;
    if (how == Ended::left) Py_RETURN_NONE;
    return how == Ended::ran ? PyFloat_FromDouble(waited_s) : failed_keys(*of, how);
}

// layer_begin(layer, hidden, ids, weights, tokens, top_k, out, runs) -> True: the pass has run | None: nothing was done
// that Python's step would not do | (keys, counts, run, resident, arriving, victims wanted). Without `runs`, or where
// prefetches were dropped that Python does not know of (`loads_dropped`), a pass without misses is given so, too.
PyObject* layer_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    const Given given = given_of(args + 1);
    const int runs = PyObject_IsTrue(args[7]);
    if (PyErr_Occurred()) return nullptr;
    if (!take_pass(*of, given)) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    Loads* loads = of->loads;
    if (loads && !settle_copies(*of)) Py_RETURN_NONE;
    const bool all = std::all_of(of->used.begin(), of->used.end(),
                                 [&](std::int64_t expert) { return of->state(expert) == SlotState::resident; });
    if (all && runs && !(loads && loads->any_dropped())) {
        if (run_resident(*of)) Py_RETURN_TRUE;
        Py_RETURN_NONE;
    }
    if (!loads || !plan_run(*of)) Py_RETURN_NONE;
    of->planned = true;
    return Py_BuildValue("(NNNLLL)", list_of(keys_of(*of, of->used)), list_of(counts_of(*of)), list_of(of->run),
                         static_cast<long long>(of->resident), static_cast<long long>(of->arriving),
                         static_cast<long long>(victims_wanted(*of)));
}

// The layer of a capsule between `layer_begin`, which gave its keys, and the end of `layer_finish`; null: an exception is set.
Layer* planned_layer(PyObject* capsule) {
    Layer* of = layer_of(capsule);
    if (of && !of->planned) refuse("no pass of the layer has begun that loads, layer", of->index);
    return PyErr_Occurred() ? nullptr : of;
}

// layer_load(layer, victims, decode_only) -> bool; False: the link is closed
PyObject* layer_load(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Layer* of = planned_layer(args[0]);
    std::vector<std::int64_t> victims;
    if (!of) return nullptr;
    if (!read_keys(args[1], victims)) return nullptr;
    const int decode_only = PyObject_IsTrue(args[2]);
    if (!check_start(*of->loads, of->missing, victims)) return nullptr;
    return PyBool_FromLong(load_missing(*of, victims, decode_only));
}

// layer_finish(layer) -> seconds waited for copies; None: one was cancelled, and all is as before
PyObject* layer_finish(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Layer* of = planned_layer(args[0]);
    if (!of) return nullptr;
    const double waited_s = finish(*of);
    if (waited_s < 0) Py_RETURN_NONE;
    of->planned = false;
    return PyFloat_FromDouble(waited_s);
}

}  // namespace

PyMethodDef layer_methods[] = {
    {"layer", fast(layer), METH_FASTCALL, "A layer on a pool."},
    {"layer_ahead", fast(layer_ahead), METH_FASTCALL, "Prefetch by the routers of the layers behind."},
    {"layer_active", fast(layer_active), METH_FASTCALL, "Drop pairs that do not fit, and free slots for the next layer."},
    {"layer_replace", fast(layer_replace), METH_FASTCALL, "Replace missing experts by others, or leave them out."},
    {"layer_hooks", fast(layer_hooks), METH_FASTCALL, "Call hooks in Python."},
    {"layer_times", fast(layer_times), METH_FASTCALL, "Time the kernels."},
    {"layer_step", fast(layer_step), METH_FASTCALL, "Run a layer."},
    {"layer_begin", fast(layer_begin), METH_FASTCALL, "Run a layer without misses, or find what it needs."},
    {"layer_load", fast(layer_load), METH_FASTCALL, "Queue the copies of its missing experts."},
    {"layer_finish", fast(layer_finish), METH_FASTCALL, "Run a layer, arrivals as they land."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
