// Buddy expert substitution (Algorithm 1 of BuddyMoE with its gates) for the few tokens of a layer, on plain buffers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tiermoe {

struct Substitution {
    const std::int64_t* ids;     // [T, K]
    const float* weights;        // [T, K]
    const float* probabilities;  // [T, E] or none
    const std::uint8_t* replace; // [E]
    const float* reach;          // [E]
    const std::int32_t* buddies; // [E, R]
    const float* similarity;     // [E, R]
    std::int64_t tokens, top_k, experts, ranks;
    std::int64_t rho, search;
    double tau, gamma, temperature, log_top_k;  // tau -inf, gamma +inf: no gate
    float eta, reuse;
    bool drop, by_buddy, renormalise;
    std::int64_t* out_ids;
    float* out_weights;
    std::int64_t substituted = 0, dropped = 0;
};

// What is wrong with an input, for people; empty where nothing is.
using Fault = std::string;

// Of sizes and options; probable: whether there are probabilities. Buffers are not looked at.
Fault size_fault(const Substitution& problem, bool probable);

// Of the experts of the tokens and of their buddies, in buffers that have the sizes.
Fault content_fault(const Substitution& problem);

// Fills the outputs of a problem without fault.
void substitute(Substitution& problem);

// Of a shard's experts, each once: those that are asked for, and of these those that are not here.
struct Share {
    std::int64_t requested = 0, absent = 0;
    // Equation 2; 0 where nothing is asked for.
    double delta() const { return requested ? static_cast<double>(absent) / static_cast<double>(requested) : 0.0; }
};

// The distribution gate. out[e] = expert e is asked for, not here, and its shard has fewer than beta of its requested experts
// missing. owner: shard of each expert, below `shards`; null: there is one. shares: of each. Where there is a fault, both are
// of no use.
Fault replaceable(const std::int64_t* picked, std::int64_t pairs, const std::uint8_t* here, std::int64_t experts,
                  double beta, const std::int64_t* owner, std::int64_t shards, std::vector<Share>& shares, std::uint8_t* out);

}  // namespace tiermoe
