// Bindings of planner.hpp. Arrays are contiguous buffers, whose sizes and numbers are checked here.
#include "planner.hpp"
#include "planner_replay.hpp"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kPlanner = "tiermoe.kernels.Planner";
constexpr long long kMostExperts = 4096;  // of a layer: `Planner` samples a quarter

struct Held {
    Rows states;  // the caller's, for the planner's life
    std::unique_ptr<Planner> planner;
};

void delete_planner(PyObject* capsule) { delete static_cast<Held*>(PyCapsule_GetPointer(capsule, kPlanner)); }

Planner* planner_of(PyObject* capsule) {
    auto* held = static_cast<Held*>(PyCapsule_GetPointer(capsule, kPlanner));
    return held ? held->planner.get() : nullptr;
}

// Whether a number is 0 or more and an int, as which the planner counts.
bool is_count(long long number) {
    return (number >= 0 && number <= std::numeric_limits<int>::max()) || refuse("a count is 0 to 2147483647, not", number);
}

bool is_layer(const Planner& planner, long long layer) {
    return (layer >= 0 && layer < planner.layers()) || refuse("there is no such layer", layer);
}

// int32 [n] experts of one layer.
bool take_experts(const Planner& planner, PyObject* given, Rows& experts, int& n) {
    if (!experts.take(given, 4)) return false;
    if (!is_count(experts.bytes() / 4)) return false;
    n = static_cast<int>(experts.bytes() / 4);
    for (int i = 0; i < n; ++i)
        if (const long long e = experts.data<std::int32_t>()[i]; e < 0 || e >= planner.experts())
            return refuse("there is no such expert", e);
    return true;
}

// Whether an array has the product of these sizes in bytes.
bool has(const Rows& rows, std::initializer_list<std::int64_t> sizes, const char* what) {
    std::int64_t bytes = 1;
    if (product_fits(sizes)) {
        for (const std::int64_t size : sizes) bytes *= size;
        if (rows.bytes() == bytes) return true;
    }
    return refuse(what, static_cast<long long>(rows.bytes()));
}

// A tuple of `PlannerCosts`.
bool take_costs(PyObject* given, PlannerCosts& costs) {
    if (!PyArg_ParseTuple(given, "dddddddd", &costs.copy_s, &costs.gpu_s, &costs.gpu_row_s, &costs.near_s,
                          &costs.near_busy_s, &costs.free_rows, &costs.message_s, &costs.dense_s))
        return false;
    for (const double cost : {costs.copy_s, costs.gpu_s, costs.near_s, costs.near_busy_s, costs.free_rows})
        if (!(cost > 0) || !std::isfinite(cost)) return PyErr_SetString(PyExc_ValueError, "a cost is not above 0"), false;
    for (const double cost : {costs.gpu_row_s, costs.message_s, costs.dense_s})
        if (!(cost >= 0) || !std::isfinite(cost)) return PyErr_SetString(PyExc_ValueError, "a cost is below 0"), false;
    return true;
}

// planner(layers, experts, top_k, slots, workers, costs: tuple of `PlannerCosts`, states: uint8 [L E], without) -> capsule
PyObject* planner(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 8)) return nullptr;
    long long numbers[5];
    for (int i = 0; i < 5; ++i) numbers[i] = PyLong_AsLongLong(args[i]);
    const auto [layers, experts, top_k, slots, workers] = numbers;
    const unsigned long without = PyLong_AsUnsignedLong(args[7]);
    PlannerCosts costs;
    if (PyErr_Occurred() || !take_costs(args[5], costs)) return nullptr;
    if (layers < 1 || layers > 1 << 20 || experts < 1 || experts > kMostExperts) {
        refuse("a planner has 1 layer or more, of 1 to 4096 experts", layers < 1 ? layers : experts);
        return nullptr;
    }
    if (!check_product({layers, experts}, kMostKeys)) return nullptr;  // keys are int32
    if (top_k < 1 || top_k > experts || slots < 0 || slots > experts) {
        refuse("top_k and the slots of a layer are at most its experts", top_k < 1 || top_k > experts ? top_k : slots);
        return nullptr;
    }
    if (workers < 0 || workers > Planner::kMaxWorkers) {
        refuse("a planner knows 0 to 64 near-data workers", workers);
        return nullptr;
    }
    auto held = std::make_unique<Held>();
    if (!held->states.take(args[6], 1) || !has(held->states, {layers, experts}, "states are [L * E], not"))
        return nullptr;
    held->planner = std::make_unique<Planner>(static_cast<int>(layers), static_cast<int>(experts),
                                              static_cast<int>(top_k), static_cast<int>(slots),
                                              static_cast<int>(workers), costs, held->states.data<std::uint8_t>(),
                                              static_cast<std::uint32_t>(without));
    PyObject* capsule = PyCapsule_New(held.get(), kPlanner, delete_planner);
    if (capsule) held.release();
    return capsule;
}

// plan(planner, layer, needed: int32 [n], rows: int32 [n], now_s, link_free_s, flight_keys: int32 [F],
//              arrival_s: float64 [F], action: uint8 [n], worker: uint8 [n], prompt_tokens, gpus, held: uint8 [n] or None,
//              room)
//   -> (end_s, near_s, link_s, owner_s, loads, near, waits, wanted: list of (key, victim, worth_s, prefetch))
PyObject* plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 14)) return nullptr;
    Planner* planner = planner_of(args[0]);
    if (!planner) return nullptr;
    const long long layer = PyLong_AsLongLong(args[1]);
    const double now_s = PyFloat_AsDouble(args[4]), link_free_s = PyFloat_AsDouble(args[5]);
    const double prompt_tokens = PyFloat_AsDouble(args[10]);
    Rows needed, rows, keys, arrivals, action, worker, gpus, held;
    const bool owned = args[11] != Py_None;
    const long long room = PyLong_AsLongLong(args[13]);
    int n = 0;
    if (PyErr_Occurred() || !is_layer(*planner, layer) || !take_experts(*planner, args[2], needed, n) ||
        !rows.take(args[3], 4) || !keys.take(args[6], 4) || !arrivals.take(args[7], 8) ||
        !action.take(args[8], 1, true) || !worker.take(args[9], 1, true) ||
        (owned && (!gpus.take(args[11], 1) || !held.take(args[12], 1))))
        return nullptr;
    const std::int64_t flights = keys.bytes() / 4;
    if (!is_count(flights) || !is_count(room)) return nullptr;
    if (n > planner->experts()) return refuse("more experts are needed than a layer has", n), nullptr;
    if (!has(rows, {4, n}, "rows are int32 [n], not bytes:") || !has(arrivals, {8, flights}, "arrivals are float64 [F], not bytes:") ||
        !has(action, {n}, "actions are uint8 [n], not bytes:") || !has(worker, {n}, "workers are uint8 [n], not bytes:") ||
        (owned && (!has(gpus, {n}, "GPUs are uint8 [n], not bytes:") || !has(held, {n}, "what they hold is uint8 [n], not bytes:"))))
        return nullptr;
    const Owners owners{owned ? gpus.data<std::uint8_t>() : nullptr, owned ? held.data<std::uint8_t>() : nullptr};
    const Planned found = planner->plan(static_cast<int>(layer), n, needed.data<std::int32_t>(),
                                        rows.data<std::int32_t>(), now_s, link_free_s, static_cast<int>(flights),
                                        keys.data<std::int32_t>(), arrivals.data<double>(),
                                        action.data<std::uint8_t>(), worker.data<std::uint8_t>(), prompt_tokens,
                                        owned ? &owners : nullptr, static_cast<int>(room));
    PyObject* wanted = PyList_New(planner->wanted_count());
    for (int i = 0; wanted && i < planner->wanted_count(); ++i) {
        const Wanted& one = planner->wanted(i);
        PyObject* item = Py_BuildValue("iidO", one.key, one.victim, one.worth_s, one.prefetch ? Py_True : Py_False);
        if (!item) Py_CLEAR(wanted);
        if (wanted) PyList_SET_ITEM(wanted, i, item);
    }
    if (!wanted) return nullptr;
    return Py_BuildValue("ddddiiiN", found.end_s, found.near_s, found.link_s, found.owner_s, found.loads, found.near_count,
                         found.waits, wanted);
}

// predict(planner, layer, ids: int32 [rows, ranks], ranks)
PyObject* predict(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    Planner* planner = planner_of(args[0]);
    if (!planner) return nullptr;
    const long long layer = PyLong_AsLongLong(args[1]), ranks = PyLong_AsLongLong(args[3]);
    Rows ids;
    int n = 0;
    if (PyErr_Occurred() || !is_layer(*planner, layer) || !take_experts(*planner, args[2], ids, n)) return nullptr;
    if (!is_count(ranks)) return nullptr;
    if (ranks < 1 || n % ranks) return refuse("predictions are [rows, ranks], not of ranks", ranks), nullptr;
    planner->predict(static_cast<int>(layer), static_cast<int>(n / ranks), static_cast<int>(ranks),
                     ids.data<std::int32_t>());
    Py_RETURN_NONE;
}

// used(planner, layer, needed: int32 [n], share: float32 [E] or None)
PyObject* used(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 4)) return nullptr;
    Planner* planner = planner_of(args[0]);
    if (!planner) return nullptr;
    const long long layer = PyLong_AsLongLong(args[1]);
    Rows needed, share;
    int n = 0;
    if (PyErr_Occurred() || !is_layer(*planner, layer) || !take_experts(*planner, args[2], needed, n)) return nullptr;
    const bool given = args[3] != Py_None;
    if (given && (!share.take(args[3], 4) || !has(share, {4, planner->experts()}, "shares are float32 [E], not bytes:")))
        return nullptr;
    planner->used(static_cast<int>(layer), n, needed.data<std::int32_t>(), given ? share.data<float>() : nullptr);
    Py_RETURN_NONE;
}

// prompt_end(planner, counts: int64 [L E], tokens, requests, batch, hot: int32 [L slots])
PyObject* prompt_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    Planner* planner = planner_of(args[0]);
    if (!planner) return nullptr;
    const double tokens = PyFloat_AsDouble(args[2]);
    const long long requests = PyLong_AsLongLong(args[3]), batch = PyLong_AsLongLong(args[4]);
    Rows counts, hot;
    if (PyErr_Occurred() || !counts.take(args[1], 8) || !hot.take(args[5], 4, true) ||
        !has(counts, {8, planner->layers(), planner->experts()}, "counts are int64 [L, E], not bytes:") ||
        !has(hot, {4, planner->layers(), planner->slots()}, "hot is int32 [L, slots], not bytes:"))
        return nullptr;
    if (!is_count(requests) || !is_count(batch)) return nullptr;
    if (requests < 1 || batch < requests) return refuse("prompts are of 1 request or more of the batch, not", requests), nullptr;
    if (!(tokens >= 0)) return refuse("a prompt has 0 tokens or more", static_cast<long long>(tokens)), nullptr;
    planner->prompt_end(counts.data<std::int64_t>(), tokens, static_cast<int>(requests), static_cast<int>(batch),
                        hot.data<std::int32_t>());
    Py_RETURN_NONE;
}

// popularity(planner, counts: int64 [L E], tokens, top_k, batch)
PyObject* popularity(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 5)) return nullptr;
    Planner* planner = planner_of(args[0]);
    if (!planner) return nullptr;
    const double tokens = PyFloat_AsDouble(args[2]);
    const long long top_k = PyLong_AsLongLong(args[3]), batch = PyLong_AsLongLong(args[4]);
    Rows counts;
    if (PyErr_Occurred() || !counts.take(args[1], 8) ||
        !has(counts, {8, planner->layers(), planner->experts()}, "counts are int64 [L, E], not bytes:"))
        return nullptr;
    if (!is_count(top_k) || !is_count(batch)) return nullptr;
    if (batch < 1 || !(tokens >= 0)) return refuse("popularity needs a batch of 1 or more, not", batch), nullptr;
    planner->popularity(counts.data<std::int64_t>(), tokens, static_cast<int>(top_k), static_cast<int>(batch));
    Py_RETURN_NONE;
}

// resize(planner, slots)
PyObject* resize(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Planner* planner = planner_of(args[0]);
    if (!planner) return nullptr;
    const long long slots = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (slots < 0 || slots > planner->experts()) return refuse("the slots of a layer are at most its experts", slots), nullptr;
    planner->resize(static_cast<int>(slots));
    Py_RETURN_NONE;
}

bool take_key(const Planner& planner, PyObject* given, long long& key) {
    key = PyLong_AsLongLong(given);
    if (PyErr_Occurred()) return false;
    return (key >= 0 && key < 1LL * planner.layers() * planner.experts()) || refuse("there is no such expert", key);
}

// admit(planner, key) -> (admitted, victim or -1)
PyObject* admit(PyObject*, PyObject* const* args, Py_ssize_t count) {
    long long key;
    Planner* planner = expect(count, 2) ? planner_of(args[0]) : nullptr;
    if (!planner || !take_key(*planner, args[1], key)) return nullptr;
    std::int32_t victim = -1;
    const auto found = planner->admit(static_cast<std::int32_t>(key), victim);
    if (found == Planner::Admission::refused) victim = -1;
    return Py_BuildValue("Oi", found == Planner::Admission::refused ? Py_False : Py_True, victim);
}

// worth(planner, key) -> seconds: S of its layer times V
PyObject* worth(PyObject*, PyObject* const* args, Py_ssize_t count) {
    long long key;
    Planner* planner = expect(count, 2) ? planner_of(args[0]) : nullptr;
    if (!planner || !take_key(*planner, args[1], key)) return nullptr;
    return PyFloat_FromDouble(planner->value(static_cast<std::int32_t>(key)) *
                              planner->saved_s(static_cast<int>(key / planner->experts())));
}

// values(planner) -> address of V, float64 [L * E], which lives as long as the planner
PyObject* values(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Planner* planner = expect(count, 1) ? planner_of(args[0]) : nullptr;
    return planner ? PyLong_FromVoidPtr(const_cast<double*>(planner->values())) : nullptr;
}

// saw(planner, part, expected_s, seen_s)
PyObject* saw(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Planner* planner = expect(count, 4) ? planner_of(args[0]) : nullptr;
    if (!planner) return nullptr;
    const long long part = PyLong_AsLongLong(args[1]);
    const double expected_s = PyFloat_AsDouble(args[2]), seen_s = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred()) return nullptr;
    if (part < 0 || part > 7) return refuse("there is no such part of the costs", part), nullptr;
    planner->saw(static_cast<Part>(part), expected_s, seen_s);
    Py_RETURN_NONE;
}

// took(planner, seen_s)
PyObject* took(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Planner* planner = expect(count, 2) ? planner_of(args[0]) : nullptr;
    const double seen_s = planner ? PyFloat_AsDouble(args[1]) : 0.0;
    if (!planner || PyErr_Occurred()) return nullptr;
    planner->took(seen_s);
    Py_RETURN_NONE;
}

// filled(planner)
PyObject* filled(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Planner* planner = expect(count, 1) ? planner_of(args[0]) : nullptr;
    if (!planner) return nullptr;
    planner->filled();
    Py_RETURN_NONE;
}

// costs(planner) -> the tuple of `planner`, as corrected
PyObject* costs(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Planner* planner = expect(count, 1) ? planner_of(args[0]) : nullptr;
    if (!planner) return nullptr;
    const PlannerCosts& c = planner->costs();
    return Py_BuildValue("dddddddd", c.copy_s, c.gpu_s, c.gpu_row_s, c.near_s, c.near_busy_s, c.free_rows, c.message_s,
                         c.dense_s);
}

// error(planner) -> share of the time
PyObject* error(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Planner* planner = expect(count, 1) ? planner_of(args[0]) : nullptr;
    return planner ? PyFloat_FromDouble(planner->error()) : nullptr;
}

// replay(rule, slots, (layers, experts, top_k, batch, rounds, prompt_tokens), needed: int32 [S, L, W], rows: the same,
//        count: int32 [S, L], predicted: int32 [S, L, batch, P], share: float32 [S, L, E], prompts: int64 [rounds, L, E],
//        popular: int64 [L, E], popular_tokens, truth: costs, belief: costs, without, start, planner_s, first)
//   -> (decode_s, prompt_s, error, tokens, prompts, needed, hits, loads, near, waits, fills, prefetches)
PyObject* replay(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 17)) return nullptr;
    const long long rule = PyLong_AsLongLong(args[0]), slots = PyLong_AsLongLong(args[1]);
    Routing r{};
    PlannerCosts truth, belief;
    if (!PyArg_ParseTuple(args[2], "iiiiii", &r.layers, &r.experts, &r.top_k, &r.batch, &r.rounds, &r.prompt_tokens) ||
        !take_costs(args[11], truth) || !take_costs(args[12], belief))
        return nullptr;
    r.popular_tokens = PyFloat_AsDouble(args[10]);
    const unsigned long without = PyLong_AsUnsignedLong(args[13]);
    const bool start = PyObject_IsTrue(args[14]) == 1;
    const double planner_s = PyFloat_AsDouble(args[15]);
    const long long first = PyLong_AsLongLong(args[16]);
    Rows needed, rows, counts, predicted, share, prompts, popular;
    if (PyErr_Occurred() || !needed.take(args[3], 4) || !rows.take(args[4], 4) || !counts.take(args[5], 4) ||
        !predicted.take(args[6], 4) || !share.take(args[7], 4) || !prompts.take(args[8], 8) || !popular.take(args[9], 8))
        return nullptr;
    if (rule < 0 || rule > static_cast<int>(Rule::planner)) return refuse("there is no such rule", rule), nullptr;
    if (r.layers < 1 || r.experts < 1 || r.experts > kMostExperts || r.top_k < 1 || r.top_k > r.experts || r.batch < 1 ||
        r.rounds < 1 || r.prompt_tokens < 1 || slots < 0 || slots > r.experts)
        return refuse("a model's shape or its slots are out of range", slots), nullptr;
    const std::int64_t layer_steps = counts.bytes() / 4;
    if (!check_product({r.layers, r.experts}, kMostKeys) || !is_count(layer_steps)) return nullptr;
    r.steps = static_cast<int>(layer_steps / r.layers);
    r.widest = layer_steps ? static_cast<int>(needed.bytes() / 4 / layer_steps) : 0;
    r.ranks = layer_steps ? static_cast<int>(predicted.bytes() / 4 / layer_steps / r.batch) : 0;
    if (!has(counts, {4, r.steps, r.layers}, "counts are [S, L], not bytes:") || r.steps < 1 || r.steps % r.rounds ||
        !has(needed, {4, layer_steps, r.widest}, "needed is [S, L, W], not bytes:") || !has(rows, {needed.bytes()}, "rows are as needed, not bytes:") ||
        r.ranks < r.top_k || !has(predicted, {4, layer_steps, r.batch, r.ranks}, "predictions are [S, L, batch, P], not bytes:") ||
        !has(share, {4, r.steps, r.layers, r.experts}, "shares are [S, L, E], not bytes:") || !has(prompts, {8, r.rounds, r.layers, r.experts}, "prompts are [rounds, L, E], not bytes:") ||
        !has(popular, {8, r.layers, r.experts}, "popularity is [L, E], not bytes:")) {
        if (!PyErr_Occurred()) refuse("steps come in whole rounds, predictions name top_k or more; steps:", r.steps);
        return nullptr;
    }
    r.needed = needed.data<std::int32_t>(), r.rows = rows.data<std::int32_t>(), r.count = counts.data<std::int32_t>();
    r.predicted = predicted.data<std::int32_t>(), r.share = share.data<float>();
    r.prompts = prompts.data<std::int64_t>(), r.popular = popular.data<std::int64_t>();
    const auto inside = [&](const Rows& given) {
        const auto* ids = given.data<std::int32_t>();
        return std::all_of(ids, ids + given.bytes() / 4, [&](std::int32_t e) { return e >= 0 && e < r.experts; });
    };
    const bool counted = std::all_of(r.count, r.count + layer_steps, [&](std::int32_t c) { return c >= 0 && c <= r.widest; });
    if (!inside(needed) || !inside(predicted) || !counted) return refuse("there is no such expert; a layer has", r.experts), nullptr;
    Replayed found;
    Py_BEGIN_ALLOW_THREADS;
    found = Replay(r, static_cast<Rule>(rule), static_cast<int>(slots), truth, belief, static_cast<std::uint32_t>(without),
                   start, planner_s, static_cast<int>(first)).run();
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("dddLLLLLLLLL", found.decode_s, found.prompt_s, found.error, (long long)found.tokens,
                         (long long)found.prompts, (long long)found.needed, (long long)found.hits, (long long)found.loads,
                         (long long)found.near, (long long)found.waits, (long long)found.fills, (long long)found.prefetches);
}

PyMethodDef methods[] = {
    {"planner", fast(planner), METH_FASTCALL, "A planner; see planner.hpp."},
    {"plan", fast(plan), METH_FASTCALL, "Actions of a layer's experts, and background copies."},
    {"predict", fast(predict), METH_FASTCALL, "Experts that a later layer is predicted to need."},
    {"used", fast(used), METH_FASTCALL, "A layer has run."},
    {"prompt_end", fast(prompt_end), METH_FASTCALL, "Prompts have run: the experts to keep."},
    {"popularity", fast(popularity), METH_FASTCALL, "Popularity from elsewhere."},
    {"resize", fast(resize), METH_FASTCALL, "Another number of slots."},
    {"admit", fast(admit), METH_FASTCALL, "Whether an expert takes a slot, and whose."},
    {"worth", fast(worth), METH_FASTCALL, "Seconds that keeping an expert is worth."},
    {"values", fast(values), METH_FASTCALL, "Where V of each expert is."},
    {"saw", fast(saw), METH_FASTCALL, "Correct a part of the costs."},
    {"took", fast(took), METH_FASTCALL, "A layer's seen time."},
    {"filled", fast(filled), METH_FASTCALL, "A background copy of a miss has ended."},
    {"costs", fast(costs), METH_FASTCALL, "Costs as corrected."},
    {"error", fast(error), METH_FASTCALL, "Mean error of predicted layer times."},
    {"replay", fast(replay), METH_FASTCALL, "A rule on a stated machine; see planner_replay.hpp."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_planner", "The planner of `auto`.", -1, methods,
                          nullptr,               nullptr,    nullptr,                 nullptr};

}  // namespace
}  // namespace tiermoe::bindings

PyMODINIT_FUNC PyInit__planner() { return PyModule_Create(&tiermoe::bindings::definition); }
