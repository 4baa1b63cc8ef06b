// A layer whose experts are all resident, in one call: routing -> slots -> experts -> combine -> record.
//
// The record is a ring of int64 that Python reads once a forward (`actors/engine/cache/record.py`): word 0 is the number
// of words in use, itself included; behind it one entry a pass: layer, tokens, n, n keys, n counts of tokens. The order
// of keys is that of `Routing.of`: as picked for a token of distinct experts, else rising.
#include <vector>

#include "bindings.hpp"
#include "expert_ffn.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kResident = "tiermoe.kernels.Resident";
constexpr std::int64_t kMaxPairs = 1 << 12;

struct Resident {
    std::int64_t layer, experts, neurons, width, max_rows, record_words;
    const std::int32_t* slots;  // of each expert of the layer [E]; negative: not resident
    const float* gate_up;
    const float* down;
    std::int64_t* record;
    Activation activation;
    // of one call
    std::vector<std::int64_t> counts, order, used;
    std::vector<Group> groups;
    std::vector<float> y;
};

void delete_resident(PyObject* capsule) { delete static_cast<Resident*>(PyCapsule_GetPointer(capsule, kResident)); }

// resident(layer, experts, slots, gate_up, down, neurons, width, activation, max_rows, record, record_words) -> capsule
PyObject* resident(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 11)) return nullptr;
    auto* made = new Resident{};
    made->layer = PyLong_AsLongLong(args[0]);
    made->experts = PyLong_AsLongLong(args[1]);
    made->slots = address<const std::int32_t>(args[2]);
    made->gate_up = address<const float>(args[3]);
    made->down = address<const float>(args[4]);
    made->neurons = PyLong_AsLongLong(args[5]);
    made->width = PyLong_AsLongLong(args[6]);
    const long long activation = PyLong_AsLongLong(args[7]);
    made->max_rows = PyLong_AsLongLong(args[8]);
    made->record = address<std::int64_t>(args[9]);
    made->record_words = PyLong_AsLongLong(args[10]);
    made->activation = static_cast<Activation>(activation);
    if (!PyErr_Occurred() && (activation < 0 || activation > static_cast<int>(Activation::relu)))
        refuse("there is no such activation", activation);
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(made, kResident, delete_resident);
    if (!capsule) delete made;
    return capsule;
}

// Sorts the pairs by expert into groups on slots; false: an expert is not resident, or has too many rows.
bool sort_pairs(Resident& layer, const std::int64_t* ids, std::int64_t pairs, bool one_token) {
    layer.counts.assign(static_cast<std::size_t>(layer.experts), 0);
    bool distinct = true;
    for (std::int64_t i = 0; i < pairs; ++i) {
        if (layer.slots[ids[i]] < 0 || ++layer.counts[ids[i]] > layer.max_rows) return false;
        distinct &= layer.counts[ids[i]] == 1;
    }
    layer.used.clear();
    if (one_token && distinct)
        layer.used.assign(ids, ids + pairs);
    else
        for (std::int64_t e = 0; e < layer.experts; ++e)
            if (layer.counts[e]) layer.used.push_back(e);
    layer.groups.clear();
    layer.order.resize(static_cast<std::size_t>(pairs));
    std::int64_t at = 0;
    for (std::int64_t expert : layer.used) {
        const std::int64_t start = at;
        for (std::int64_t i = 0; i < pairs; ++i)
            if (ids[i] == expert) layer.order[at++] = i;
        layer.groups.push_back({start, at, layer.slots[expert] * layer.neurons, layer.neurons, false});
    }
    return true;
}

// run_resident(resident, hidden, ids, weights, tokens, top_k, out) -> bool; False: nothing was done
PyObject* run_resident(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 7)) return nullptr;
    auto* layer = static_cast<Resident*>(PyCapsule_GetPointer(args[0], kResident));
    if (!layer) return nullptr;
    const float* hidden = address<const float>(args[1]);
    const std::int64_t* ids = address<const std::int64_t>(args[2]);
    const float* weights = address<const float>(args[3]);
    const std::int64_t tokens = PyLong_AsLongLong(args[4]), top_k = PyLong_AsLongLong(args[5]);
    float* out = address<float>(args[6]);
    if (PyErr_Occurred()) return nullptr;
    const std::int64_t pairs = tokens * top_k;
    if (tokens < 1 || top_k < 1 || pairs > kMaxPairs) Py_RETURN_FALSE;
    for (std::int64_t i = 0; i < pairs; ++i)
        if (ids[i] < 0 || ids[i] >= layer->experts) {
            refuse("there is no such expert", ids[i]);
            return nullptr;
        }
    if (!sort_pairs(*layer, ids, pairs, tokens == 1)) Py_RETURN_FALSE;
    const auto used = static_cast<std::int64_t>(layer->used.size());
    std::int64_t* record = layer->record;
    if (record[0] + 3 + 2 * used > layer->record_words) Py_RETURN_FALSE;
    if (layer->y.size() < static_cast<std::size_t>(pairs * layer->width)) layer->y.resize(pairs * layer->width);
    Py_BEGIN_ALLOW_THREADS;
    expert_ffn_f32(hidden, layer->gate_up, layer->down, layer->order.data(), layer->groups.data(), used, top_k,
                   layer->width, layer->activation, layer->y.data(), nullptr);
    combine_f32(layer->y.data(), weights, tokens, top_k, layer->width, out);
    Py_END_ALLOW_THREADS;
    std::int64_t* entry = record + record[0];
    *entry++ = layer->layer;
    *entry++ = tokens;
    *entry++ = used;
    for (std::int64_t expert : layer->used) *entry++ = layer->layer * layer->experts + expert;
    for (std::int64_t expert : layer->used) *entry++ = layer->counts[expert];
    record[0] += 3 + 2 * used;
    Py_RETURN_TRUE;
}

}  // namespace

PyMethodDef resident_methods[] = {
    {"resident", fast(resident), METH_FASTCALL, "A layer on a pool, for run_resident."},
    {"run_resident", fast(run_resident), METH_FASTCALL, "Run a layer whose experts are all resident."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
