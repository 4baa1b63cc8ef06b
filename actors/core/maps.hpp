// fMoE's expert maps of past iterations and the search for those like the present one: the arithmetic of
// `policies/fmoe` (its `ExpertMapStore` and `ExpertMapPrefetch` have the equations and the shapes).
//
// A dot product of float32 is summed in 16 lanes in a fixed order, so that equal maps have equal scores and every
// processor finds the same; sums over layers are of float64.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tiermoe::core {

// Entries in memory of others: embeddings [C, D], of unit length or zero; maps [L, C, J]; squares [L, C], the squared length
// of each layer's probabilities.
struct MapStore {
    std::int64_t layers, experts, width, capacity;
    double share;  // d / L: what the semantic score counts in RDY
    float *embeddings, *maps;
    double* squares;
    std::int64_t count = 0, generation = 0;  // entries; changes, so that a search notices one

    float* layer(std::int64_t l) const { return maps + l * capacity * experts; }
    // The row that it takes: the next, or that of the highest redundancy [C], ties to the lowest; null: computed. map [L, J].
    // Throws std::invalid_argument: a number is not finite.
    std::int64_t add(const float* embedding, const float* map, const double* redundancy);
    void fill(std::int64_t entries);  // the arrays hold these, but for their squares
    double redundancy(float semantic, double map) const {
        return static_cast<double>(static_cast<float>(share) * semantic) + (1.0 - share) * map;
    }
};

// Experts of later layers: first the `wanted` ones, then the others, each part by falling priority, then by key.
struct MapForecast {
    std::vector<std::int32_t> keys;
    std::vector<float> priorities;  // p / (layer + 1 - now)
    std::int64_t wanted = 0;
};

// S sequences of one iteration. After `observe` of a layer their scores are those of all layers seen.
class MapSearch {
  public:
    MapSearch(MapStore& store, const float* embeddings, std::int64_t sequences);  // [S, D]

    // Layers from `layer` on of which these are the probabilities [S, layers * J]. Throws std::invalid_argument: there is no
    // such layer, it was seen before, or the store changed.
    void observe(std::int64_t layer, std::int64_t layers, const float* probabilities);
    // The most similar entry of each sequence, the lowest of equals, and its score. semantic: by embedding, without sequences
    // of none; else by trajectory. False: there is none. Throws std::invalid_argument: the store changed.
    bool match(bool semantic);
    // Of the layers first..stop by `match`, `now` layers seen. Throws std::invalid_argument: there are no such layers.
    bool forecast(bool semantic, std::int64_t first, std::int64_t stop, std::int64_t now, std::int64_t top_k, bool dynamic,
                  MapForecast& found);
    // Stores an entry a sequence, and ends the search: the rows that they took. Throws std::invalid_argument: a layer was not
    // seen, the store changed, or a number is not finite.
    std::vector<std::int64_t> commit();

    const MapStore& store() const { return store_; }
    std::int64_t sequences() const { return sequences_; }
    bool complete() const { return seen_ == store_.layers; }
    std::vector<double> scores() const;                                    // by trajectory [S, n]
    const std::vector<std::int64_t>& entries() const { return entries_; }  // of the last match
    const std::vector<double>& best() const { return best_; }              // their scores

  private:
    void check_unchanged() const;
    double trajectory(std::int64_t s, std::int64_t entry) const;
    void select(const float* probabilities, double score, std::int64_t top_k, bool dynamic);

    MapStore& store_;
    const std::int64_t sequences_, generation_, count_;
    std::int64_t seen_ = 0;
    std::vector<float> embeddings_, semantic_, maps_;  // [S, D], [S, n], [S, L, J]
    std::vector<double> dots_, old_squares_, new_squares_;  // [S, n], [n], [S]
    std::vector<std::uint8_t> layers_;                      // whether it was seen [L]
    std::vector<std::int64_t> entries_;
    std::vector<double> best_;
    // of a layer that is forecast
    std::vector<std::pair<float, std::int32_t>> ranked_;
    std::vector<std::uint8_t> taken_;
    std::vector<float> highest_;
};

}  // namespace tiermoe::core
