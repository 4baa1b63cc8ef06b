// What the core's executor of a GPU calls in `_launch`, which it does not link: a layer's launches, as functions in a capsule.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

#include "../cpu/expert_ffn.hpp"

namespace tiermoe {

// hidden [T, H] and weights [T, K]: tensors on the device. order: the pairs t * K + k by expert [T * K], on the host.
struct LayerRows {
    PyObject *hidden, *weights;
    std::int64_t tokens, top_k;
    const std::int64_t* order;
};
// The next groups that are in their slots, all given before being launched; none: all were. False: the pass ends by an error
// that the caller keeps.
struct NextGroups {
    bool (*next)(void* self, const Group** groups, std::int64_t* count);
    void* self;
};

// Called with the interpreter's lock. Errors are Python's, as of a function in C.
struct ExpertLaunches {
    void* self;
    // 1: `run` takes tensors of these types; 0: it does not; -1: an error. Of `order` nothing is read.
    int (*takes)(void* self, const LayerRows& rows);
    // The sums [T, H], a new reference; null: an error, or what `next` has kept.
    PyObject* (*run)(void* self, const LayerRows& rows, const NextGroups& next);
};

// Builds with other layouts have other names.
inline const std::string kExpertLaunches = "tiermoe.ExpertLaunches.1." + std::to_string(sizeof(LayerRows)) + "." +
                                           std::to_string(sizeof(Group)) + "." + std::to_string(sizeof(ExpertLaunches));

}  // namespace tiermoe
