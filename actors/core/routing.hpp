// A layer's routing as Python holds it.
#pragma once

#include "../../kernels/cpu/sizes.hpp"
#include "bindings.hpp"

namespace tiermoe::core {

inline std::int64_t in_range(std::int64_t layer, std::int64_t experts, std::int64_t tokens, std::int64_t top_k) {
    if (layer < 0 || layer >= kMostKeys || experts < 1 || !product_fits({layer + 1, experts}, kMostKeys)) refuse("there is no such layer", layer);
    if (tokens < 0 || top_k < 1 || !product_fits({tokens, top_k}, kMostKeys)) refuse("a routing has pairs, not tokens", tokens);
    return experts;
}

struct Routing : Picked {
    Routing(std::int64_t layer, std::int64_t experts, std::int64_t tokens, std::int64_t top_k)
        : Picked(in_range(layer, experts, tokens, top_k)), layer(layer), tokens(tokens), top_k(top_k) {}
    // As it runs in a pass.
    Routing(const Picked& picked, std::int64_t layer, std::int64_t tokens, std::int64_t top_k)
        : Picked(picked), layer(layer), tokens(tokens), top_k(top_k) {}
    std::int64_t pairs() const { return starts.back(); }
    // The expert of a key. Throws std::invalid_argument: the layer does not need it.
    std::int64_t expert(Key key) const {
        const std::int64_t found = key - (keys.empty() ? 0 : keys[0] - experts[0]);
        if (!needs(found)) refuse("the layer does not need expert", key);
        return found;
    }
    const std::int64_t layer, tokens, top_k;
};

}  // namespace tiermoe::core
