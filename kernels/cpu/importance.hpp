// ActiveEvict on arrays: time-decayed use, predicted probabilities, the release target, the residents of least importance,
// and routing by available slots. The equations are in
// actors/policies/activeevict.py, the reference is tests/activeevict_reference.py; it differs in the last bits of sums.
#pragma once

#include <cstdint>
#include <vector>

#include "lazy_heap.hpp"

namespace tiermoe {

struct Importance {
    std::int64_t layers, experts, window, top_k;
    double alpha;
    const double* powers;          // of gamma [2 * window]
    double* values;                // u [L, E]
    std::int64_t* picked;          // [L, window, K], a ring of each layer's tokens
    std::int64_t* seen;            // tokens of each layer [L]
    double* predicted;             // p-hat [L, E]
    std::uint8_t* resident;        // [L * E]
    std::int64_t* stamp;           // of the last use [L * E]
    // Whether the functions below and an order tell all that changes: `changed`, `admitted`, `removed`, `used`.
    bool follows = false;
    // Values or predictions of the layer.
    void changed(std::int64_t layer) {
        if (layers_now.empty() || !layers_now[static_cast<std::size_t>(layer)].known) return;
        layers_now[static_cast<std::size_t>(layer)].known = false;
        unknown.push_back(layer);
    }
    // A resident is one now, with a new stamp; before: it was one.
    std::size_t layer_of(std::int64_t key) const {
        return static_cast<std::uint32_t>(key) / static_cast<std::uint32_t>(experts);
    }
    void admitted(std::int64_t key, bool before);
    void removed(std::int64_t key);  // a resident is none any more

    // of one call
    std::vector<double> exponentials;
    std::vector<std::int64_t> order;
    std::vector<std::uint8_t> named;
    // Of each layer, as far as it is known [layers].
    struct Layer {
        bool known = false;
        double sum = 0.0, rest = 0.0;  // of its residents' values, and what rounding took of it
        double most = 0.0;             // which the sum does not exceed while places in `ranks` hold
    };
    std::vector<Layer> layers_now;
    std::vector<std::int64_t> unknown;
    // Residents of known layers. A sum falls with each resident that leaves, so that importance rises: where a key stands
    // is by the sum `most`, and its importance is found when it comes to the front.
    LazyHeap ranks;
};

// Tokens of a layer picked these experts: ids [n, K], in range.
void importance_saw(Importance& state, std::int64_t layer, const std::int64_t* ids, std::int64_t n);

// p-hat of a layer from its router's logits [rows, E], and the slots of its release target: the gap and the redundancy.
// held: experts with a slot [E].
std::int64_t importance_target(Importance& state, std::int64_t layer, const float* logits, std::int64_t rows,
                               const std::uint8_t* held, double tau, std::int64_t most);

// The first `count` residents, least important first, then least recently used: keys in state.order. allowed: of which
// [L * E]; null: all.
std::int64_t importance_lowest(Importance& state, std::int64_t count, const std::uint8_t* allowed = nullptr);

// Whether all experts of a routing that are not present [E] fit into `vacant` slots.
bool misses_fit(const std::int64_t* ids, std::int64_t pairs, const std::uint8_t* present, std::int64_t experts,
                std::int64_t vacant);

// Budget-aware top-k of a routing [tokens, top_k], ids distinct in a row: writes ids and weights as they run, and returns
// how many pairs are dropped, whose weight is 0 and whose id is that of the token's heaviest kept expert.
std::int64_t budget_top_k(const std::int64_t* ids, const float* weights, std::int64_t tokens, std::int64_t top_k,
                          const std::uint8_t* present, std::int64_t experts, std::int64_t vacant, std::int64_t min_top_k,
                          bool renormalise, std::int64_t* ids_out, float* weights_out);

}  // namespace tiermoe
