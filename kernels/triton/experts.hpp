// What the core's executor of a GPU calls in `_launch`, which it does not link, as functions in capsules: what the host reads
// of a layer, and a layer's launches.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "../cpu/expert_ffn.hpp"

namespace tiermoe {

// One of the arrays that were read: items of so many bytes, until the next call.
struct ReadPart {
    const void* at;
    std::int64_t count, bytes;
};

// Called with the interpreter's lock. Errors are Python's, as of a function in C.
struct LayerReads {
    static constexpr std::size_t kRouters = 2;
    void* self;
    // tensors, and routers (weight, bias, layers, softmax) of hidden: sequences as `Fetch.enqueue` takes them; parts: of all
    // of them. 0, or -1: an error. waited_s: of the wait, by this clock; null: nobody asks.
    int (*read)(void* self, PyObject* tensors, PyObject* hidden, PyObject* routers, ReadPart* parts, double (*clock_s)(),
                double* waited_s);
};

struct ExpertLaunches;

// hidden [T, H] and weights [T, K]: tensors on the device. top_k: of the pairs that run; changed: their weights [T, top_k] on
// the host, which take the place of `weights`; null: none do. order: the pairs t * top_k + k by expert, on the host.
struct LayerRows {
    PyObject *hidden, *weights, *into;  // into: a tensor of hidden's kind for the sums; null: they get a new one
    std::int64_t tokens, top_k;
    const float* changed;
    const std::int64_t* order;
    bool zeroed = false;  // rows of pairs for which no group comes count as zeros
    const ExpertLaunches* low = nullptr;  // of low-bit replicas, of this module, too; null: none come
};
// Groups that are in their slots, and those of replicas, whose `first` is a slot among replicas.
struct Landed {
    const Group* groups;
    std::int64_t count;
    const Group* replicas;
    std::int64_t replica_count;
};
// The next groups, all given before being launched; none: all were. False: the pass ends by an error that the caller keeps.
struct NextGroups {
    bool (*next)(void* self, Landed* landed);
    void* self;
};

// Called with the interpreter's lock. Errors are Python's, as of a function in C.
struct ExpertLaunches {
    void* self;
    // 1: `run` takes tensors of these types; 0: it does not; -1: an error. top_k: of the weights; no more is read.
    int (*takes)(void* self, const LayerRows& rows);
    // The sums [T, H], a new reference; null: an error, or what `next` has kept.
    PyObject* (*run)(void* self, const LayerRows& rows, const NextGroups& next);
};

// Builds with other layouts have other names.
inline const std::string kExpertLaunches = "tiermoe.ExpertLaunches.3." + std::to_string(sizeof(LayerRows)) + "." +
                                           std::to_string(sizeof(Group)) + "." + std::to_string(sizeof(ExpertLaunches));
inline const std::string kLayerReads = "tiermoe.LayerReads.1." + std::to_string(sizeof(ReadPart)) + "." +
                                       std::to_string(sizeof(LayerReads));

}  // namespace tiermoe
