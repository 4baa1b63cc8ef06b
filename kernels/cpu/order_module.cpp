// Bindings of the orders of eviction: of whole experts (order.hpp, worth.hpp) and of split ones (split_order.hpp).
#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "order.hpp"
#include "split_order.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kOrder = "tiermoe.kernels.Order";
constexpr const char* kSplitOrder = "tiermoe.kernels.SplitOrder";

Order* order_of(PyObject* capsule) { return static_cast<Order*>(PyCapsule_GetPointer(capsule, kOrder)); }
void delete_order(PyObject* capsule) { delete order_of(capsule); }

bool check_keys(const std::vector<std::int64_t>& keys, std::int64_t end) {
    for (std::int64_t key : keys)
        if (key < 0 || key >= end) return refuse("there is no such expert", key);
    return true;
}

// order(kind, layers, experts, least, growth, probabilities or 0, told or 0, importance or None) -> capsule; these outlive it
PyObject* order(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    const long long kind = PyLong_AsLongLong(args[0]), layers = PyLong_AsLongLong(args[1]);
    const long long experts = PyLong_AsLongLong(args[2]);
    const double least = PyFloat_AsDouble(args[3]), growth = PyFloat_AsDouble(args[4]);
    const auto* probabilities = address<const double>(args[5]);
    const auto* told = address<const std::int64_t>(args[6]);
    if (PyErr_Occurred()) return nullptr;
    Importance* importance = args[7] == Py_None ? nullptr : importance_of(args[7]);
    if (PyErr_Occurred()) return nullptr;
    const auto of = static_cast<Order::Kind>(kind);
    const bool fits = !importance || (importance->layers == layers && importance->experts == experts);
    if (kind < 0 || kind > static_cast<int>(Order::Kind::worth) || layers < 1 || experts < 1 || !fits ||
        (of == Order::Kind::map) != (probabilities != nullptr) || (probabilities == nullptr) != (told == nullptr) ||
        (of == Order::Kind::importance) != (importance != nullptr)) {
        refuse("there is no such order", kind);
        return nullptr;
    }
    if (!check_product({layers, experts}, kMostKeys)) return nullptr;
    auto* found = made([&] { return new Order(of, layers, experts, least, growth, probabilities, told, importance); });
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

// -- of split experts --------------------------------------------------------------------------------------

SplitOrder* split_order_of(PyObject* capsule) {
    return static_cast<SplitOrder*>(PyCapsule_GetPointer(capsule, kSplitOrder));
}
void delete_split_order(PyObject* capsule) { delete split_order_of(capsule); }

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
    PyObject* capsule = order ? PyCapsule_New(order, kSplitOrder, delete_split_order) : nullptr;
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
    SplitOrder* of = split_order_of(args[0]);
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
    SplitOrder* of = split_order_of(args[0]);
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
    SplitOrder* of = split_order_of(args[0]);
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
    SplitOrder* of = split_order_of(args[0]);
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
    SplitOrder* of = split_order_of(args[0]);
    std::int64_t key = 0;
    if (!of || !read_key(args[1], of->whole(), key)) return nullptr;
    return PyFloat_FromDouble(of->value(key));
}

}  // namespace

PyMethodDef order_methods[] = {
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
    {"split_order", fast(split_order), METH_FASTCALL, "The order of eviction of split experts; see split_order.hpp."},
    {"split_routed", fast(split_routed), METH_FASTCALL, "A layer's routing is known."},
    {"split_moved", fast(split_moved), METH_FASTCALL, "Segments got slots, or lost them."},
    {"split_used", fast(split_used), METH_FASTCALL, "Segments have run."},
    {"split_leaving", fast(split_leaving), METH_FASTCALL, "A slot class in order of eviction."},
    {"split_value", fast(split_value), METH_FASTCALL, "The priority of an expert."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
