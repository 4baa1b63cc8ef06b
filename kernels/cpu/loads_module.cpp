// Bindings of what native passes share: counters, the order of eviction, slots and copies under way.
#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "loads.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kCounts = "tiermoe.kernels.Counts";
constexpr const char* kOrder = "tiermoe.kernels.Order";
constexpr const char* kLoads = "tiermoe.kernels.Loads";

}  // namespace

Loads* loads_of(PyObject* capsule) { return static_cast<Loads*>(PyCapsule_GetPointer(capsule, kLoads)); }
Counts* counts_of(PyObject* capsule) { return static_cast<Counts*>(PyCapsule_GetPointer(capsule, kCounts)); }

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

namespace {

Order* order_of(PyObject* capsule) { return static_cast<Order*>(PyCapsule_GetPointer(capsule, kOrder)); }
void delete_order(PyObject* capsule) { delete order_of(capsule); }
void delete_counts(PyObject* capsule) { delete counts_of(capsule); }
void delete_loads(PyObject* capsule) { delete loads_of(capsule); }

bool check_keys(const std::vector<std::int64_t>& keys, std::int64_t end) {
    for (std::int64_t key : keys)
        if (key < 0 || key >= end) return refuse("there is no such expert", key);
    return true;
}

// counts(layers, experts, fields, outcomes, uses, pending, vacant, governor, min_useful, window, rest) -> capsule
PyObject* counts(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 11)) return nullptr;
    Counts of{};
    of.layers = PyLong_AsLongLong(args[0]);
    of.experts = PyLong_AsLongLong(args[1]);
    of.fields = address<std::int64_t>(args[2]);
    of.outcomes = address<std::int64_t>(args[3]);
    of.uses = address<std::int64_t>(args[4]);
    of.pending = address<std::uint8_t>(args[5]);
    of.vacant = address<std::uint8_t>(args[6]);
    of.governor = address<std::int64_t>(args[7]);
    of.min_useful = PyFloat_AsDouble(args[8]);
    of.window = PyLong_AsLongLong(args[9]);
    of.rest = PyLong_AsLongLong(args[10]);
    if (PyErr_Occurred() || !check_product({of.layers, of.experts}, kMostKeys)) return nullptr;
    auto* found = made([&] { return new Counts(of); });
    PyObject* capsule = found ? PyCapsule_New(found, kCounts, delete_counts) : nullptr;
    if (!capsule) delete found;
    return capsule;
}

// order(kind, layers, experts, least, growth, probabilities or 0, importance or None) -> capsule; both outlive it
PyObject* order(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 7)) return nullptr;
    const long long kind = PyLong_AsLongLong(args[0]), layers = PyLong_AsLongLong(args[1]);
    const long long experts = PyLong_AsLongLong(args[2]);
    const double least = PyFloat_AsDouble(args[3]), growth = PyFloat_AsDouble(args[4]);
    const auto* probabilities = address<const double>(args[5]);
    if (PyErr_Occurred()) return nullptr;
    Importance* importance = args[6] == Py_None ? nullptr : importance_of(args[6]);
    if (PyErr_Occurred()) return nullptr;
    const auto of = static_cast<Order::Kind>(kind);
    const bool fits = !importance || (importance->layers == layers && importance->experts == experts);
    if (kind < 0 || kind > static_cast<int>(Order::Kind::worth) || layers < 1 || experts < 1 || !fits ||
        (of == Order::Kind::map) != (probabilities != nullptr) || (of == Order::Kind::importance) != (importance != nullptr)) {
        refuse("there is no such order", kind);
        return nullptr;
    }
    if (!check_product({layers, experts}, kMostKeys)) return nullptr;
    auto* found = made([&] { return new Order(of, layers, experts, least, growth, probabilities, importance); });
    PyObject* capsule = found ? PyCapsule_New(found, kOrder, delete_order) : nullptr;
    if (!capsule) delete found;
    return capsule;
}

// order_admitted(order, keys), order_removed(order, keys), order_used(order, keys)
template <typename Change>
PyObject* change_order(PyObject* const* args, Py_ssize_t count, Change change) {
    if (!expect(count, 2)) return nullptr;
    Order* of = order_of(args[0]);
    std::vector<std::int64_t> keys;
    if (!of || !read_keys(args[1], keys) || !check_keys(keys, of->keys())) return nullptr;
    change(*of, keys);
    Py_RETURN_NONE;
}
PyObject* order_admitted(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return change_order(args, count, [](Order& of, const auto& keys) {
        for (std::int64_t key : keys) of.admitted(key);
    });
}
PyObject* order_removed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return change_order(args, count, [](Order& of, const auto& keys) {
        for (std::int64_t key : keys) of.removed(key);
    });
}
PyObject* order_used(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return change_order(args, count, [](Order& of, const auto& keys) { of.used(keys); });
}

// order_routed(order, keys, counts)
PyObject* order_routed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Order* of = order_of(args[0]);
    std::vector<std::int64_t> keys, tokens;
    if (!of || !read_keys(args[1], keys) || !read_keys(args[2], tokens) || !check_keys(keys, of->keys())) return nullptr;
    if (keys.size() != tokens.size()) {
        refuse("counts are not those of the experts", static_cast<long long>(tokens.size()));
        return nullptr;
    }
    of->routed(keys, tokens);
    Py_RETURN_NONE;
}

// order_first(order, count) -> list of keys
PyObject* order_first(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Order* of = order_of(args[0]);
    const long long wanted = of ? PyLong_AsLongLong(args[1]) : 0;
    return !of || PyErr_Occurred() ? nullptr : list_of(of->first(wanted, nullptr));
}

// The order `worth` of a capsule; null: an exception is set.
Worth* worth_of(PyObject* capsule) {
    const Order* of = order_of(capsule);
    if (of && !of->worth()) refuse("the order is not by worth, and has so many experts", of->keys());
    return of ? of->worth() : nullptr;
}

bool check_key(PyObject* capsule, PyObject* given, std::int64_t& key) {
    const Order* of = worth_of(capsule) ? order_of(capsule) : nullptr;
    key = of ? PyLong_AsLongLong(given) : 0;
    if (!of || PyErr_Occurred()) return false;
    return (key >= 0 && key < of->keys()) || refuse("there is no such expert", key);
}

// worth_bind(order, share, worth: address of float64 [keys] or 0); it outlives the order or the next call
PyObject* worth_bind(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Worth* of = worth_of(args[0]);
    if (!of) return nullptr;
    const long long share = PyLong_AsLongLong(args[1]);
    const auto* worth = address<const double>(args[2]);
    if (PyErr_Occurred()) return nullptr;
    if (share < 0 || share > kMostKeys) {
        refuse("a share of the slots is 0 or more, not", share);
        return nullptr;
    }
    of->bind(share, worth);
    Py_RETURN_NONE;
}

// worth_prompt(order, uses: address of int64 [keys] or 0); it outlives the order or the next call
PyObject* worth_prompt(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Worth* of = worth_of(args[0]);
    auto* uses = of ? address<std::int64_t>(args[1]) : nullptr;
    if (!of || PyErr_Occurred()) return nullptr;
    of->prompt(uses);
    Py_RETURN_NONE;
}

// worth_refuse(order, key), worth_admit(order, key)
PyObject* worth_refuse(PyObject*, PyObject* const* args, Py_ssize_t count) {
    std::int64_t key;
    if (!expect(count, 2) || !check_key(args[0], args[1], key)) return nullptr;
    worth_of(args[0])->refuse(key);
    Py_RETURN_NONE;
}
PyObject* worth_admit(PyObject*, PyObject* const* args, Py_ssize_t count) {
    std::int64_t key;
    if (!expect(count, 2) || !check_key(args[0], args[1], key)) return nullptr;
    worth_of(args[0])->readmit(key);
    Py_RETURN_NONE;
}

// worth_refused(order), worth_settled(order) -> list of keys
PyObject* worth_refused(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const Worth* of = expect(count, 1) ? worth_of(args[0]) : nullptr;
    return of ? list_of(of->refused()) : nullptr;
}
PyObject* worth_settled(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const Worth* of = expect(count, 1) ? worth_of(args[0]) : nullptr;
    return of ? list_of(of->settled()) : nullptr;
}

// worth_victims(order, count, may: buffer of uint8 [keys]) -> list of keys: of those that may leave the first
PyObject* worth_victims(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const Worth* of = expect(count, 3) ? worth_of(args[0]) : nullptr;
    const long long wanted = of ? PyLong_AsLongLong(args[1]) : 0;
    Rows may;
    if (!of || PyErr_Occurred() || !may.take(args[2], 1)) return nullptr;
    if (may.bytes() != order_of(args[0])->keys()) {
        refuse("a mask is not that of all experts, of which there are", order_of(args[0])->keys());
        return nullptr;
    }
    return list_of(of->first(wanted, may.data<const std::uint8_t>()));
}

// worth_note(order): note what passes use from now on
PyObject* worth_note(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Worth* of = expect(count, 1) ? worth_of(args[0]) : nullptr;
    if (!of) return nullptr;
    of->note();
    Py_RETURN_NONE;
}

// worth_noted(order) -> list of (layer, int32 experts as bytes), layers in rising order; nothing is noted any more
PyObject* worth_noted(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Worth* of = expect(count, 1) ? worth_of(args[0]) : nullptr;
    PyObject* out = of ? PyList_New(0) : nullptr;
    if (!out) return nullptr;
    const auto noted = of->take_noted();
    for (std::size_t layer = 0; layer < noted.size(); ++layer) {
        if (noted[layer].empty()) continue;
        PyObject* item = Py_BuildValue("(ny#)", static_cast<Py_ssize_t>(layer),
                                       reinterpret_cast<const char*>(noted[layer].data()),
                                       static_cast<Py_ssize_t>(noted[layer].size() * sizeof(std::int32_t)));
        const int failed = item ? PyList_Append(out, item) : -1;
        Py_XDECREF(item);
        if (failed) {
            Py_DECREF(out);
            return nullptr;
        }
    }
    return out;
}

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
//       keys, slots, (states, evictable, slot, pins, free, generation, counts), layout or None,
//       counts or None, order or None) -> capsule; link, counts and order outlive it
PyObject* loads(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 10)) return nullptr;
    Link* link = link_of(args[0]);
    if (!link) return nullptr;
    Counts* counts = args[8] == Py_None ? nullptr : counts_of(args[8]);
    Order* order = args[9] == Py_None ? nullptr : order_of(args[9]);
    if (PyErr_Occurred()) return nullptr;
    const std::int64_t experts = PyLong_AsLongLong(args[1]), layers = PyLong_AsLongLong(args[2]);
    SlotArrays of{};
    Layout layout;
    std::vector<ExpertPart> parts;
    if (PyErr_Occurred() || !read_slots(args + 4, of, layout) || !read_parts(args[3], layers, parts)) return nullptr;
    if (!check_product({experts, layers, 2}, kMostKeys) || !check_product({of.slots}, kMostKeys)) return nullptr;
    if (experts < 1 || of.keys != experts * layers * (layout.first.empty() ? 1 : 2)) {
        refuse("experts of a layer do not divide the keys", experts);
        return nullptr;
    }
    const bool whole = layout.first.empty();
    if ((counts && (!whole || counts->layers * counts->experts != of.keys)) ||
        (order && (!counts || order->keys() != of.keys))) {
        refuse("counters and order are of other experts than these", of.keys);
        return nullptr;
    }
    auto* found = made(
        [&] { return new Loads(link, of, experts, std::move(parts), std::move(layout), counts, order); });
    PyObject* capsule = found ? PyCapsule_New(found, kLoads, delete_loads) : nullptr;
    if (!capsule) delete found;
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

// loads_start(loads, keys) -> bool; False: the link is closed
PyObject* loads_start(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Loads* of = loads_of(args[0]);
    std::vector<std::int64_t> keys;
    if (!of || !read_keys(args[1], keys) || !check_start(*of, keys, {})) return nullptr;
    return PyBool_FromLong(of->start(keys, {}, true));
}

// loads_prefetch(loads, wanted, nearer, source) -> how many are queued; -1: the link is closed
PyObject* loads_prefetch(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    Loads* of = loads_of(args[0]);
    std::vector<std::int64_t> wanted, nearer;
    if (!of || !read_keys(args[1], wanted) || !read_keys(args[2], nearer)) return nullptr;
    const long long source = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || !check_keys(wanted, of->keys()) || !check_keys(nearer, of->keys())) return nullptr;
    if (source < 1 || source > 255 || !of->order()) {
        refuse("there is no order of eviction, or no such source", source);
        return nullptr;
    }
    return PyLong_FromLongLong(of->prefetch(wanted, nearer, static_cast<std::uint8_t>(source)));
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
    const Flight* flight = key < 0 || key >= of->keys() ? nullptr : of->flight(key);
    if (!flight || layer < 0 || layer >= static_cast<std::int64_t>(of->landed().size())) {
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

}  // namespace

PyMethodDef loads_methods[] = {
    {"counts", fast(counts), METH_FASTCALL, "Counters of a cache; see counts.hpp."},
    {"order", fast(order), METH_FASTCALL, "An order of eviction; see order.hpp."},
    {"order_admitted", fast(order_admitted), METH_FASTCALL, "Experts got slots."},
    {"order_removed", fast(order_removed), METH_FASTCALL, "Experts lost their slots."},
    {"order_used", fast(order_used), METH_FASTCALL, "A pass ran these experts."},
    {"order_routed", fast(order_routed), METH_FASTCALL, "A layer's routing is known."},
    {"order_first", fast(order_first), METH_FASTCALL, "Who goes first."},
    {"worth_bind", fast(worth_bind), METH_FASTCALL, "What each expert is worth; see worth.hpp."},
    {"worth_prompt", fast(worth_prompt), METH_FASTCALL, "Uses by the prompts that run now."},
    {"worth_refuse", fast(worth_refuse), METH_FASTCALL, "A resident leaves before all others."},
    {"worth_admit", fast(worth_admit), METH_FASTCALL, "It leaves by its worth again."},
    {"worth_refused", fast(worth_refused), METH_FASTCALL, "Who leaves before all others."},
    {"worth_settled", fast(worth_settled), METH_FASTCALL, "Residents of greatest worth within their layers' shares."},
    {"worth_victims", fast(worth_victims), METH_FASTCALL, "Who goes first of those that may."},
    {"worth_note", fast(worth_note), METH_FASTCALL, "Note what passes use."},
    {"worth_noted", fast(worth_noted), METH_FASTCALL, "What they have used, by layer."},
    {"loads", fast(loads), METH_FASTCALL, "The slots of a cache and the copies into them; see loads.hpp."},
    {"loads_divide", fast(loads_divide), METH_FASTCALL, "Other slots of the same pool."},
    {"loads_give", fast(loads_give), METH_FASTCALL, "Take a copy over."},
    {"loads_start", fast(loads_start), METH_FASTCALL, "Queue copies into free slots behind all demand."},
    {"loads_prefetch", fast(loads_prefetch), METH_FASTCALL, "Evict, and queue copies behind all demand."},
    {"loads_keys", fast(loads_keys), METH_FASTCALL, "Whose copies are under way."},
    {"loads_take", fast(loads_take), METH_FASTCALL, "Hand over the copies under way."},
    {"loads_land", fast(loads_land), METH_FASTCALL, "Wait for a copy and make it resident."},
    {"loads_landed", fast(loads_landed), METH_FASTCALL, "What has landed, by layer."},
    {"loads_dropped", fast(loads_dropped), METH_FASTCALL, "Prefetches that were cancelled."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
