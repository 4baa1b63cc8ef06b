// What the executors in C++ share: a layer's pairs by expert, and the passes that observers are told of.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core.hpp"

namespace tiermoe::core {

// The experts that a layer needs, in the order of `Routing.experts`: as picked for one token of distinct experts, else rising.
class Picked {
  public:
    explicit Picked(std::int64_t experts) : rows_(static_cast<std::size_t>(experts)) {}

    // Throws std::invalid_argument: there is no such expert.
    void expect(const std::int64_t* ids, std::int64_t pairs) const {
        for (std::int64_t i = 0; i < pairs; ++i)
            if (ids[i] < 0 || ids[i] >= static_cast<std::int64_t>(rows_.size()))
                throw std::invalid_argument("there is no such expert: " + std::to_string(ids[i]));
    }
    // Of ids as expected [pairs]. False: one has more than `max_rows` rows. first: key of the layer's expert 0.
    bool sort(const std::int64_t* ids, std::int64_t tokens, std::int64_t pairs, std::int64_t max_rows, Key first) {
        for (std::int64_t e : experts) rows_[e] = 0;
        experts.clear();
        keys.clear();
        counts.clear();
        bool fits = true;
        for (std::int64_t i = 0; i < pairs; ++i) {
            if (!rows_[ids[i]]++) experts.push_back(ids[i]);
            fits &= rows_[ids[i]] <= max_rows;
        }
        if (tokens > 1 || static_cast<std::int64_t>(experts.size()) < pairs) std::sort(experts.begin(), experts.end());
        for (std::int64_t e : experts) {
            keys.push_back(first + e);
            counts.push_back(rows_[e]);
        }
        return fits;
    }
    std::int64_t rows(std::int64_t expert) const { return rows_[expert]; }

    Segments experts, keys, counts;  // of the last `sort`

  private:
    std::vector<std::int64_t> rows_;  // [E]; of those that are not in `experts` 0
};

// A pass that has run. Moments are of the link's clock; waited_s: for copies, in between. scores: what was predicted for the
// next layer's experts, the highest of any row, or nothing.
struct Passed {
    std::int64_t layer, tokens;
    Segments keys, counts;
    double began_s, ended_s, waited_s;
    std::vector<double> scores;
};

// The passes that have run until somebody takes them, once a forward.
class Passes {
  public:
    bool records = false;
    std::int64_t experts = 0;  // of a layer

    Passed& add() {
        if (count_ == all_.size()) all_.emplace_back();
        return all_[count_++];
    }
    void drop() { count_ = 0; }
    template <typename Each>
    void take(const Each& of) {
        const std::size_t count = std::exchange(count_, 0);
        for (std::size_t i = 0; i < count; ++i) of(all_[i]);
    }

  private:
    std::vector<Passed> all_;
    std::size_t count_ = 0;
};

}  // namespace tiermoe::core
