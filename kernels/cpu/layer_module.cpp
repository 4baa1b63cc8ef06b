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
#include "layer.hpp"
#include "loads.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kLayer = "tiermoe.kernels.Layer";
void delete_loads(PyObject* capsule) { delete loads_of(capsule); }

bool read_arrays(PyObject* given, SlotArrays& of) {
    unsigned long long at[7];
    if (!PyArg_ParseTuple(given, "KKKKKKK", at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6)) return false;
    of.states = reinterpret_cast<std::uint8_t*>(at[0]);
    of.evictable = reinterpret_cast<std::uint8_t*>(at[1]);
    of.slot = reinterpret_cast<std::int32_t*>(at[2]);
    of.pins = reinterpret_cast<std::int32_t*>(at[3]);
    of.free = reinterpret_cast<std::int32_t*>(at[4]);
    of.generation = reinterpret_cast<std::int64_t*>(at[5]);
    of.counts = reinterpret_cast<std::int64_t*>(at[6]);
    return true;
}

// (classes of keys, first slot of each class, first unit of each slot, first unit of each key in its expert, units of
// each key), or None
bool read_layout(PyObject* given, const SlotArrays& of, Layout& layout) {
    if (given == Py_None) return true;
    PyObject* lists[5];
    if (!PyArg_ParseTuple(given, "OOOOO", lists, lists + 1, lists + 2, lists + 3, lists + 4)) return false;
    std::vector<std::int64_t>* into[] = {&layout.class_of, &layout.class_first, &layout.first, &layout.begin,
                                         &layout.units};
    for (int i = 0; i < 5; ++i)
        if (!read_keys(lists[i], *into[i])) return false;
    const auto is = [](const std::vector<std::int64_t>& list, std::int64_t size) {
        return static_cast<std::int64_t>(list.size()) == size;
    };
    if (!is(layout.class_of, of.keys) || !is(layout.first, of.slots) || !is(layout.begin, of.keys) ||
        !is(layout.units, of.keys))
        return refuse("a layout is not that of all keys and slots", of.keys);
    for (std::int64_t slot_class : layout.class_of)
        if (slot_class < 0 || !(slot_class < static_cast<std::int64_t>(layout.class_first.size())))
            return refuse("there is no such slot class", slot_class);
    return true;
}

bool read_parts(PyObject* list, std::int64_t layers, std::vector<ExpertPart>& parts) {
    for (Py_ssize_t i = 0; PyList_Check(list) && i < PyList_GET_SIZE(list); ++i) {
        unsigned long long target;
        long long target_unit, source_stride, source_unit, elements;
        int widen;
        PyObject* sources;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "KLLLLpO!", &target, &target_unit, &source_stride, &source_unit,
                              &elements, &widen, &PyTuple_Type, &sources))
            return false;
        ExpertPart part{reinterpret_cast<char*>(target), target_unit, source_stride, source_unit, elements,
                        widen ? Piece::Kind::widen_bfloat16 : Piece::Kind::bytes, {}};
        for (Py_ssize_t layer = 0; layer < PyTuple_GET_SIZE(sources); ++layer)
            part.sources.push_back(address<const char>(PyTuple_GET_ITEM(sources, layer)));
        if (PyErr_Occurred()) return false;
        if (static_cast<std::int64_t>(part.sources.size()) != layers)
            return refuse("sources are not those of all layers", static_cast<long long>(part.sources.size()));
        parts.push_back(std::move(part));
    }
    return true;
}

bool read_slots(PyObject* const* args, SlotArrays& of, Layout& layout) {
    of.keys = PyLong_AsLongLong(args[0]);
    of.slots = PyLong_AsLongLong(args[1]);
    return !PyErr_Occurred() && read_arrays(args[2], of) && read_layout(args[3], of, layout);
}

// loads(link, experts, layers, [(target, target_unit, source_stride, source_unit, count, widen, (source, ...)), ...],
//       keys, slots, (states, evictable, slot, pins, free, generation, counts), layout or None)
// -> capsule; the link outlives it
PyObject* loads(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    Link* link = link_of(args[0]);
    if (!link) return nullptr;
    const std::int64_t experts = PyLong_AsLongLong(args[1]), layers = PyLong_AsLongLong(args[2]);
    SlotArrays of{};
    Layout layout;
    std::vector<ExpertPart> parts;
    if (PyErr_Occurred() || !read_slots(args + 4, of, layout) || !read_parts(args[3], layers, parts)) return nullptr;
    if (experts < 1 || of.keys != experts * layers * (layout.first.empty() ? 1 : 2)) {
        refuse("experts of a layer do not divide the keys", experts);
        return nullptr;
    }
    auto* made = new Loads(link, of, experts, std::move(parts), std::move(layout));
    PyObject* capsule = PyCapsule_New(made, kLoads, delete_loads);
    if (!capsule) delete made;
    return capsule;
}

// loads_divide(loads, keys, slots, arrays, layout)
PyObject* loads_divide(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 5)) return nullptr;
    Loads* of = loads_of(args[0]);
    SlotArrays arrays{};
    Layout layout;
    if (!of || !read_slots(args + 1, arrays, layout)) return nullptr;
    if (arrays.keys != of->keys() || layout.first.empty() == of->split() || !of->flights().empty()) {
        refuse("slots cannot be divided so under copies", static_cast<long long>(of->flights().size()));
        return nullptr;
    }
    of->divide(arrays, std::move(layout));
    Py_RETURN_NONE;
}

// Whether these keys can take slots, those of the victims included.
bool check_start(const Loads& of, const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims) {
    for (std::int64_t key : keys)
        if (key < 0 || key >= of.keys() || of.state(key) != SlotState::absent) return refuse("not an absent expert", key);
    for (std::int64_t key : victims)
        if (key < 0 || key >= of.keys() || !of.may_evict(key)) return refuse("the expert cannot be evicted", key);
    std::vector<std::int64_t> room;
    for (std::int64_t i = 0; i < of.classes(); ++i) room.push_back(of.free_slots(i));
    for (std::int64_t key : victims) ++room[of.class_of(key)];
    for (std::int64_t key : keys)
        if (--room[of.class_of(key)] < 0)
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

// loads_give(loads, key, prefetch, copy): a copy into the slot of a LOADING expert is known here from now on
PyObject* loads_give(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    Loads* of = loads_of(args[0]);
    const std::int64_t key = of ? PyLong_AsLongLong(args[1]) : 0;
    const int prefetch = of ? PyObject_IsTrue(args[2]) : 0;
    const std::shared_ptr<Copy>* copy = of ? copy_of(args[3]) : nullptr;
    if (!copy || PyErr_Occurred()) return nullptr;
    if (key < 0 || key >= of->keys() || of->state(key) != SlotState::loading || of->flight(key)) {
        refuse("not an expert whose copy is known elsewhere", key);
        return nullptr;
    }
    of->give({key, prefetch != 0, *copy});
    Py_RETURN_NONE;
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

struct Layer : Pass {
    std::int64_t neurons, record_words;
    const std::uint8_t* states;  // `SlotState` of each expert of the layer [E]
    const std::int32_t* slots;   // [E]
    std::int64_t* record;
    Loads* loads;  // null: only passes without misses run here
    // of one pass
    std::int64_t resident, arriving;
    std::vector<std::int64_t> run, missing;  // experts, but missing: keys

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

// A group for each of `used`.
void group_pairs(Layer& of) {
    of.groups.clear();
    for (std::size_t i = 0; i < of.used.size(); ++i)
        of.groups.push_back(
            {of.starts[i], of.starts[i + 1], of.slots[of.used[i]] * of.neurons, of.neurons, false});
}

// Runs a pass without misses and records it; false: the record is full.
bool run_resident(Layer& of, const float* hidden, const float* weights, float* out) {
    if (!record_fits(of, of.record, of.record_words)) return false;
    size_rows(of);
    Py_BEGIN_ALLOW_THREADS;
    run_groups(of, hidden, 0, of.groups.size());
    combine_f32(of.y.data(), weights, of.tokens, of.top_k, of.width, out);
    Py_END_ALLOW_THREADS;
    write_record(of, of.record);
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
    if (of->tokens < 1 || of->top_k < 1 || of->tokens * of->top_k > kMaxPairs) Py_RETURN_NONE;
    if (const std::int64_t at = foreign(*of, ids); at >= 0) {
        refuse("there is no such expert", ids[at]);
        return nullptr;
    }
    if (!sort_pairs(*of, ids)) Py_RETURN_NONE;
    group_pairs(*of);
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

Loads* loads_of(PyObject* capsule) { return static_cast<Loads*>(PyCapsule_GetPointer(capsule, kLoads)); }

PyMethodDef layer_methods[] = {
    {"loads", fast(loads), METH_FASTCALL, "The slots of a cache and the copies into them; see loads.hpp."},
    {"loads_divide", fast(loads_divide), METH_FASTCALL, "Other slots of the same pool."},
    {"loads_give", fast(loads_give), METH_FASTCALL, "Take a copy over."},
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
