// Prefetch by the scores that later layers' routers give a layer's rows: `prefetch.NextGatePrefetch`, and
// `moepic.SpeculativePrefetch`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "../../kernels/cpu/rank.hpp"
#include "core.hpp"

namespace tiermoe::core {

struct RouterPrefetch {
    bool by_votes;     // else by probabilities, of which those of 0 name nobody
    std::int64_t top;  // experts of a row
    std::uint8_t source;
    Segments wanted, nearer;  // of a call: of the last layer, of all layers

    // Queues the experts of the layers from `first` on, most wanted first and nearer layers first; none where not
    // `allowed`. read(at, t, row): the scores of row t [E] for the layer first + at. best: of the nearest layer the highest
    // score of each expert, where there are rows.
    template <typename Read>
    void run(Core& core, std::int64_t first, std::int64_t layers, std::int64_t tokens, bool allowed, const Read& read,
             std::vector<double>& best) {
        const std::int64_t experts = core.layout().experts;
        nearer.clear();
        if (!tokens) return;
        for (std::int64_t at = 0; at < layers; ++at) {
            const auto row = [&](std::int64_t t, std::vector<double>& out) { read(at, t, out); };
            Ranked found = rank_experts(tokens, experts, top, by_votes, row);
            if (!by_votes) found = positive(std::move(found));
            if (!at) best = found.best;
            if (!allowed) return;
            wanted.clear();
            for (int expert : found.experts) wanted.push_back((first + at) * experts + expert);
            core.prefetch(wanted, nearer, source);
            nearer.insert(nearer.end(), wanted.begin(), wanted.end());
        }
    }
};

}  // namespace tiermoe::core
