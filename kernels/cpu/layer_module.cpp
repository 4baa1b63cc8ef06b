// A layer of whole experts on a pool in native calls. Without misses it is one call:
//     layer_begin   routing -> experts are RESIDENT -> run, combine, record
// With misses Python decides between the calls which experts lose their slots, and what is prefetched:
//     layer_begin   routing -> copies that have ended land, stale prefetches are dropped -> pinned experts, victims wanted
//     layer_load    victims are evicted, the missing experts' copies queued
//     layer_finish  residents run, arrivals as they land; combine; unpin
//
// The record is a ring of int64 that Python reads once a forward (`engine.cache.counting.PassRecord`): word 0 is the
// number of words in use, itself included; behind it one entry a pass without misses: layer, tokens, n, n keys, n counts
// of tokens. The order of keys is that of `Routing.of`: as picked for a token of distinct experts, else rising.
#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "expert_ffn.hpp"
#include "loads.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kLoads = "tiermoe.kernels.Loads";
constexpr const char* kLayer = "tiermoe.kernels.Layer";
constexpr std::int64_t kMaxPairs = 1 << 12;

Loads* loads_of(PyObject* capsule) { return static_cast<Loads*>(PyCapsule_GetPointer(capsule, kLoads)); }
void delete_loads(PyObject* capsule) { delete loads_of(capsule); }

bool read_keys(PyObject* list, std::vector<std::int64_t>& keys) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "keys must be a list");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) keys.push_back(PyLong_AsLongLong(PyList_GET_ITEM(list, i)));
    return !PyErr_Occurred();
}

PyObject* list_of(const std::vector<std::int64_t>& numbers) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
    for (std::size_t i = 0; list && i < numbers.size(); ++i) {
        PyObject* number = PyLong_FromLongLong(numbers[i]);
        if (!number) Py_CLEAR(list);
        if (list) PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
    }
    return list;
}

// loads(link, keys, slots, experts, (states, evictable, slot, pins, free, generation, counts),
//       [(target, target_stride, source_stride, count, widen, (source, ...)), ...]) -> capsule; the link outlives it
PyObject* loads(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    Link* link = link_of(args[0]);
    if (!link) return nullptr;
    SlotArrays of{};
    of.keys = PyLong_AsLongLong(args[1]);
    of.slots = PyLong_AsLongLong(args[2]);
    const std::int64_t experts = PyLong_AsLongLong(args[3]);
    unsigned long long at[7];
    if (PyErr_Occurred() || !PyArg_ParseTuple(args[4], "KKKKKKK", at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6))
        return nullptr;
    of.states = reinterpret_cast<std::uint8_t*>(at[0]);
    of.evictable = reinterpret_cast<std::uint8_t*>(at[1]);
    of.slot = reinterpret_cast<std::int32_t*>(at[2]);
    of.pins = reinterpret_cast<std::int32_t*>(at[3]);
    of.free = reinterpret_cast<std::int32_t*>(at[4]);
    of.generation = reinterpret_cast<std::int64_t*>(at[5]);
    of.counts = reinterpret_cast<std::int64_t*>(at[6]);
    if (experts < 1 || of.keys < experts || of.keys % experts) {
        refuse("experts of a layer do not divide the keys", experts);
        return nullptr;
    }
    std::vector<ExpertPart> parts;
    for (Py_ssize_t i = 0; PyList_Check(args[5]) && i < PyList_GET_SIZE(args[5]); ++i) {
        unsigned long long target;
        long long target_stride, source_stride, elements;
        int widen;
        PyObject* sources;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(args[5], i), "KLLLpO!", &target, &target_stride, &source_stride, &elements,
                              &widen, &PyTuple_Type, &sources))
            return nullptr;
        ExpertPart part{reinterpret_cast<char*>(target), target_stride, source_stride, elements,
                        widen ? Piece::Kind::widen_bfloat16 : Piece::Kind::bytes, {}};
        for (Py_ssize_t layer = 0; layer < PyTuple_GET_SIZE(sources); ++layer)
            part.sources.push_back(address<const char>(PyTuple_GET_ITEM(sources, layer)));
        if (PyErr_Occurred()) return nullptr;
        if (static_cast<std::int64_t>(part.sources.size()) != of.keys / experts) {
            refuse("sources are not those of all layers", static_cast<long long>(part.sources.size()));
            return nullptr;
        }
        parts.push_back(std::move(part));
    }
    auto* made = new Loads(link, of, experts, std::move(parts));
    PyObject* capsule = PyCapsule_New(made, kLoads, delete_loads);
    if (!capsule) delete made;
    return capsule;
}

// Whether these keys can take slots, those of the victims included.
bool check_start(const Loads& of, const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims) {
    for (std::int64_t key : keys)
        if (key < 0 || key >= of.keys() || of.state(key) != SlotState::absent) return refuse("not an absent expert", key);
    for (std::int64_t key : victims)
        if (key < 0 || key >= of.keys() || !of.may_evict(key)) return refuse("the expert cannot be evicted", key);
    if (static_cast<std::int64_t>(keys.size()) > of.free_slots() + static_cast<std::int64_t>(victims.size()))
        return refuse("there are too few slots for experts, which are", static_cast<long long>(keys.size()));
    return true;
}

// loads_prefetch(loads, keys, victims) -> bool; False: the link is closed
PyObject* loads_prefetch(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Loads* of = loads_of(args[0]);
    std::vector<std::int64_t> keys, victims;
    if (!of || !read_keys(args[1], keys) || !read_keys(args[2], victims) || !check_start(*of, keys, victims))
        return nullptr;
    return PyBool_FromLong(of->start(keys, victims, true));
}

// loads_keys(loads) -> list of the keys whose copies are under way, oldest first
PyObject* loads_keys(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Loads* of = loads_of(args[0]);
    if (!of) return nullptr;
    std::vector<std::int64_t> keys;
    for (const Flight& flight : of->flights()) keys.push_back(flight.key);
    return list_of(keys);
}

// loads_take(loads) -> list of (key, slot, generation, prefetch, copy) of the copies under way, which are forgotten here
PyObject* loads_take(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Loads* of = loads_of(args[0]);
    PyObject* out = of ? PyList_New(0) : nullptr;
    if (!out) return nullptr;
    for (const Flight& flight : of->take()) {
        PyObject* copy = copy_capsule(flight.copy);
        PyObject* item = !copy ? nullptr
                               : Py_BuildValue("(LiLNN)", static_cast<long long>(flight.key), of->slot(flight.key),
                                               static_cast<long long>(of->generation(flight.key)),
                                               PyBool_FromLong(flight.prefetch), copy);
        const int failed = item ? PyList_Append(out, item) : -1;
        Py_XDECREF(item);
        if (failed) {
            Py_DECREF(out);
            return nullptr;
        }
    }
    return out;
}

// loads_land(loads, key, layer) -> seconds waited; None: the copy was cancelled
PyObject* loads_land(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Loads* of = loads_of(args[0]);
    const std::int64_t key = of ? PyLong_AsLongLong(args[1]) : 0, layer = of ? PyLong_AsLongLong(args[2]) : 0;
    if (PyErr_Occurred()) return nullptr;
    const Flight* flight = of->flight(key);
    if (!flight) {
        refuse("no copy is under way for expert", key);
        return nullptr;
    }
    const std::shared_ptr<Copy> copy = flight->copy;
    double waited_s = 0.0;
    Py_BEGIN_ALLOW_THREADS;
    waited_s = of->await(*copy);
    Py_END_ALLOW_THREADS;
    if (!of->land(key, layer)) Py_RETURN_NONE;
    return PyFloat_FromDouble(waited_s);
}

// loads_landed(loads) -> list of (layer, demands, prefetches, io_s, link_s, path_s) since the last call
PyObject* loads_landed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Loads* of = loads_of(args[0]);
    PyObject* out = of ? PyList_New(0) : nullptr;
    if (!out) return nullptr;
    for (std::size_t layer = 0; layer < of->landed().size(); ++layer) {
        Landed& found = of->landed()[layer];
        if (!found.demands && !found.prefetches) continue;
        PyObject* item = Py_BuildValue("(nLLddd)", static_cast<Py_ssize_t>(layer), static_cast<long long>(found.demands),
                                       static_cast<long long>(found.prefetches), found.io_s, found.link_s, found.path_s);
        const int failed = item ? PyList_Append(out, item) : -1;
        Py_XDECREF(item);
        if (failed) {
            Py_DECREF(out);
            return nullptr;
        }
        found = Landed{};
    }
    return out;
}

// loads_dropped(loads) -> list of the keys whose prefetches `layer_begin` has cancelled since the last call
PyObject* loads_dropped(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Loads* of = loads_of(args[0]);
    return of ? list_of(of->take_dropped()) : nullptr;
}

struct Layer {
    std::int64_t index, experts, neurons, width, max_rows, record_words;
    const std::uint8_t* states;  // `SlotState` of each expert of the layer [E]
    const std::int32_t* slots;   // [E]
    const float* gate_up;
    const float* down;
    std::int64_t* record;
    Activation activation;
    Loads* loads;  // null: only passes without misses run here
    // of one pass
    std::int64_t tokens, top_k, resident, arriving;
    std::vector<std::int64_t> counts, order, used, run, missing;  // counts [E], order [N]; experts, but missing: keys
    std::vector<Group> groups;                                    // of `used`, then of `run`
    std::vector<float> y;

    std::int64_t key(std::int64_t expert) const { return index * experts + expert; }
    SlotState state(std::int64_t expert) const { return static_cast<SlotState>(states[expert]); }
};

Layer* layer_of(PyObject* capsule) { return static_cast<Layer*>(PyCapsule_GetPointer(capsule, kLayer)); }
void delete_layer(PyObject* capsule) { delete layer_of(capsule); }

// layer(index, experts, states, slots, gate_up, down, neurons, width, activation, max_rows, record, record_words,
//       loads or None) -> capsule; the loads outlive it
PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 13)) return nullptr;
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
    made->loads = args[12] == Py_None ? nullptr : loads_of(args[12]);
    made->activation = static_cast<Activation>(activation);
    if (!PyErr_Occurred() && (activation < 0 || activation > static_cast<int>(Activation::relu)))
        refuse("there is no such activation", activation);
    if (!PyErr_Occurred() && made->loads &&
        (made->experts != made->loads->experts() || made->key(made->experts) > made->loads->keys() || made->index < 0))
        refuse("there is no such layer", made->index);
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(made, kLayer, delete_layer);
    if (!capsule) delete made;
    return capsule;
}

// Sorts the pairs by expert; false: an expert has too many rows.
bool sort_pairs(Layer& of, const std::int64_t* ids, std::int64_t pairs) {
    of.counts.assign(static_cast<std::size_t>(of.experts), 0);
    bool distinct = true;
    for (std::int64_t i = 0; i < pairs; ++i) {
        if (++of.counts[ids[i]] > of.max_rows) return false;
        distinct &= of.counts[ids[i]] == 1;
    }
    of.used.clear();
    if (of.tokens == 1 && distinct)
        of.used.assign(ids, ids + pairs);
    else
        for (std::int64_t e = 0; e < of.experts; ++e)
            if (of.counts[e]) of.used.push_back(e);
    of.groups.clear();
    of.order.resize(static_cast<std::size_t>(pairs));
    std::int64_t at = 0;
    for (std::int64_t expert : of.used) {
        const std::int64_t start = at;
        for (std::int64_t i = 0; i < pairs; ++i)
            if (ids[i] == expert) of.order[at++] = i;
        of.groups.push_back({start, at, of.slots[expert] * of.neurons, of.neurons, false});
    }
    return true;
}

void run_groups(Layer& of, const float* hidden, std::size_t begin, std::size_t end) {
    expert_ffn_f32(hidden, of.gate_up, of.down, of.order.data(), of.groups.data() + begin,
                   static_cast<std::int64_t>(end - begin), of.top_k, of.width, of.activation, of.y.data(), nullptr);
}

void size_rows(Layer& of) {
    const auto size = static_cast<std::size_t>(of.tokens * of.top_k * of.width);
    if (of.y.size() < size) of.y.resize(size);
}

// Runs a pass without misses and records it; false: the record is full.
bool run_resident(Layer& of, const float* hidden, const float* weights, float* out) {
    const auto used = static_cast<std::int64_t>(of.used.size());
    std::int64_t* record = of.record;
    if (record[0] + 3 + 2 * used > of.record_words) return false;
    size_rows(of);
    Py_BEGIN_ALLOW_THREADS;
    run_groups(of, hidden, 0, of.groups.size());
    combine_f32(of.y.data(), weights, of.tokens, of.top_k, of.width, out);
    Py_END_ALLOW_THREADS;
    std::int64_t* entry = record + record[0];
    *entry++ = of.index;
    *entry++ = of.tokens;
    *entry++ = used;
    for (std::int64_t expert : of.used) *entry++ = of.key(expert);
    for (std::int64_t expert : of.used) *entry++ = of.counts[expert];
    record[0] += 3 + 2 * used;
    return true;
}

// Orders the groups as they run (residents, arrivals, missing experts) and pins those that are there. False: the pass
// needs more slots than can be freed before it runs, and nothing has changed.
bool plan_run(Layer& of) {
    Loads& loads = *of.loads;
    std::vector<std::size_t> by[3];
    std::int64_t leaving = loads.free_slots() + loads.evictable();
    for (std::size_t i = 0; i < of.used.size(); ++i) {
        const SlotState state = of.state(of.used[i]);
        by[2 - static_cast<int>(state)].push_back(i);
        leaving -= loads.may_evict(of.key(of.used[i]));
    }
    if (leaving < static_cast<std::int64_t>(by[2].size())) return false;
    of.resident = static_cast<std::int64_t>(by[0].size());
    of.arriving = static_cast<std::int64_t>(by[1].size());
    of.run.clear();
    of.missing.clear();
    std::vector<Group> groups;
    for (const auto& places : by)
        for (std::size_t place : places) {
            of.run.push_back(of.used[place]);
            groups.push_back(of.groups[place]);
        }
    for (std::size_t i = 0; i < of.run.size(); ++i)
        if (static_cast<std::int64_t>(i) < of.resident + of.arriving)
            loads.pin(of.key(of.run[i]));
        else
            of.missing.push_back(of.key(of.run[i]));
    of.groups = std::move(groups);
    return true;
}

PyObject* keys_of(const Layer& of, const std::vector<std::int64_t>& experts) {
    std::vector<std::int64_t> keys;
    for (std::int64_t expert : experts) keys.push_back(of.key(expert));
    return list_of(keys);
}

// layer_begin(layer, hidden, ids, weights, tokens, top_k, out, runs) -> True: the pass has run | None: nothing was done
// that Python's step would not do | (keys, counts, run, resident, arriving, victims wanted). Without `runs`, or where
// prefetches were dropped (`loads_dropped`), a pass without misses is given so, too.
PyObject* layer_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of) return nullptr;
    const float* hidden = address<const float>(args[1]);
    const std::int64_t* ids = address<const std::int64_t>(args[2]);
    const float* weights = address<const float>(args[3]);
    of->tokens = PyLong_AsLongLong(args[4]);
    of->top_k = PyLong_AsLongLong(args[5]);
    float* out = address<float>(args[6]);
    const int runs = PyObject_IsTrue(args[7]);
    if (PyErr_Occurred()) return nullptr;
    const std::int64_t pairs = of->tokens * of->top_k;
    if (of->tokens < 1 || of->top_k < 1 || pairs > kMaxPairs) Py_RETURN_NONE;
    for (std::int64_t i = 0; i < pairs; ++i)
        if (ids[i] < 0 || ids[i] >= of->experts) {
            refuse("there is no such expert", ids[i]);
            return nullptr;
        }
    if (!sort_pairs(*of, ids, pairs)) Py_RETURN_NONE;
    Loads* loads = of->loads;
    bool dropped = false;
    if (loads && !loads->flights().empty()) {
        if (!loads->land_ended(of->index)) Py_RETURN_NONE;
        dropped = loads->drop_stale(of->index, of->counts.data());
    }
    const bool all = std::all_of(of->used.begin(), of->used.end(),
                                 [&](std::int64_t expert) { return of->state(expert) == SlotState::resident; });
    if (all && runs && !dropped) {
        if (run_resident(*of, hidden, weights, out)) Py_RETURN_TRUE;
        Py_RETURN_NONE;
    }
    if (!loads || !plan_run(*of)) Py_RETURN_NONE;
    const auto missing = static_cast<std::int64_t>(of->missing.size());
    std::vector<std::int64_t> counts;
    for (std::int64_t expert : of->used) counts.push_back(of->counts[expert]);
    return Py_BuildValue("(NNNLLL)", keys_of(*of, of->used), list_of(counts), keys_of(*of, of->run),
                         static_cast<long long>(of->resident), static_cast<long long>(of->arriving),
                         static_cast<long long>(std::max<std::int64_t>(0, missing - loads->free_slots())));
}

// layer_load(layer, victims) -> bool; False: the link is closed
PyObject* layer_load(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Layer* of = layer_of(args[0]);
    std::vector<std::int64_t> victims;
    if (!of || !of->loads || !read_keys(args[1], victims) || !check_start(*of->loads, of->missing, victims))
        return nullptr;
    for (std::int64_t i = of->resident; i < of->resident + of->arriving; ++i) {
        const Flight* flight = of->loads->flight(of->key(of->run[i]));
        if (flight && flight->prefetch) of->loads->promote(*flight);
    }
    if (of->missing.empty()) Py_RETURN_TRUE;
    const bool open = of->loads->start(of->missing, victims, false);
    for (std::int64_t key : of->missing) of->loads->pin(key);
    return PyBool_FromLong(open);
}

// layer_finish(layer, hidden, weights, out) -> seconds waited for copies; None: one was cancelled, and all is as before
PyObject* layer_finish(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    Layer* of = layer_of(args[0]);
    if (!of || !of->loads) return nullptr;
    const float* hidden = address<const float>(args[1]);
    const float* weights = address<const float>(args[2]);
    float* out = address<float>(args[3]);
    if (PyErr_Occurred()) return nullptr;
    Loads& loads = *of->loads;
    const std::size_t count_run = of->run.size();
    std::vector<std::shared_ptr<Copy>> copies(count_run);  // null: the expert is there
    for (auto i = static_cast<std::size_t>(of->resident); i < count_run; ++i) {
        const Flight* flight = loads.flight(of->key(of->run[i]));
        if (flight) copies[i] = flight->copy;
        of->groups[i].first = of->slots[of->run[i]] * of->neurons;
    }
    size_rows(*of);
    double waited_s = 0.0;
    bool cancelled = false;
    Py_BEGIN_ALLOW_THREADS;
    const auto there = [&](std::size_t i) { return !copies[i] || copies[i]->state == Copy::done; };
    for (std::size_t at = 0, end; at < count_run && !cancelled; at = end) {
        if (copies[at]) waited_s += loads.await(*copies[at]);
        cancelled = !there(at);
        end = at < static_cast<std::size_t>(of->resident) ? static_cast<std::size_t>(of->resident) : at + 1;
        if (at >= static_cast<std::size_t>(of->resident))
            while (end < count_run && there(end)) ++end;
        if (!cancelled) run_groups(*of, hidden, at, end);
    }
    if (!cancelled) combine_f32(of->y.data(), weights, of->tokens, of->top_k, of->width, out);
    Py_END_ALLOW_THREADS;
    if (cancelled) Py_RETURN_NONE;
    for (std::size_t i = 0; i < count_run; ++i) {
        if (copies[i]) loads.land(of->key(of->run[i]), of->index);
        loads.unpin(of->key(of->run[i]));
    }
    return PyFloat_FromDouble(waited_s);
}

}  // namespace

PyMethodDef layer_methods[] = {
    {"loads", fast(loads), METH_FASTCALL, "The slots of a cache and the copies into them; see loads.hpp."},
    {"loads_prefetch", fast(loads_prefetch), METH_FASTCALL, "Evict, and queue copies behind all demand."},
    {"loads_keys", fast(loads_keys), METH_FASTCALL, "Whose copies are under way."},
    {"loads_take", fast(loads_take), METH_FASTCALL, "Hand over the copies under way."},
    {"loads_land", fast(loads_land), METH_FASTCALL, "Wait for a copy and make it resident."},
    {"loads_landed", fast(loads_landed), METH_FASTCALL, "What has landed, by layer."},
    {"loads_dropped", fast(loads_dropped), METH_FASTCALL, "Prefetches that were cancelled."},
    {"layer", fast(layer), METH_FASTCALL, "A layer on a pool."},
    {"layer_begin", fast(layer_begin), METH_FASTCALL, "Run a layer without misses, or find what it needs."},
    {"layer_load", fast(layer_load), METH_FASTCALL, "Queue the copies of its missing experts."},
    {"layer_finish", fast(layer_finish), METH_FASTCALL, "Run a layer, arrivals as they land."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
