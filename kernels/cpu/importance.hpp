// ActiveEvict on arrays: time-decayed use, predicted probabilities, the release target, the residents of least importance,
// and routing by available slots. The reference, with the equations, is actors/policies/activeevict.py; it differs in the last bits of sums.
#pragma once

#include <cstdint>
#include <vector>

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
    // Whether `changed` is called for all that changes but by the functions below: who has a slot, and stamps.
    bool follows = false;
    void changed(std::int64_t layer) {
        if (!known.empty()) known[static_cast<std::size_t>(layer)] = 0;
    }
    // Least important first, then least recently used; by `score`.
    bool before(std::int64_t a, std::int64_t b) const {
        return score[a] != score[b] ? score[a] < score[b] : stamp[a] != stamp[b] ? stamp[a] < stamp[b] : a < b;
    }
    std::vector<double> score;  // [L * E], of residents when their layer was ranked
    // of one call
    std::vector<double> exponentials;
    std::vector<std::int64_t> order;
    std::vector<std::uint8_t> named;
    // Residents of each layer, the first to leave first, as far as they are known [layers].
    std::vector<std::vector<std::int64_t>> ranked;
    std::vector<std::uint8_t> known;
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
                          const std::uint8_t* present, std::int64_t experts, std::int64_t vacant, std::int64_t narrowest,
                          bool renormalise, std::int64_t* ids_out, float* weights_out);

}  // namespace tiermoe
