// What the executors share: a layer's routing, and the passes that observers are told of.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../kernels/cpu/expert_ffn.hpp"
#include "core.hpp"

namespace tiermoe::core {

constexpr std::int64_t kNowhere = -1;  // in the place of an expert: other devices run the pair

// A layer's routing as it runs: the experts that it needs, as picked for one token of distinct experts, else rising, and its
// pairs (token, k), grouped by expert. What is planned, sent to peers and run of a layer is said by it.
class Picked {
  public:
    explicit Picked(std::int64_t experts)
        : rows_(static_cast<std::size_t>(experts)), place_(rows_.size()), begun_(rows_.size()) {}

    // lowest: 0, or `kNowhere`. Throws std::invalid_argument: there is no such expert.
    void expect(const std::int64_t* ids, std::int64_t pairs, std::int64_t lowest = 0) const {
        for (std::int64_t i = 0; i < pairs; ++i)
            if (ids[i] < lowest || ids[i] >= static_cast<std::int64_t>(rows_.size()))
                throw std::invalid_argument("there is no such expert: " + std::to_string(ids[i]));
    }
    // Of ids as expected [pairs]. False: one has more than `max_rows` rows. first: key of the layer's expert 0.
    bool sort(const std::int64_t* ids, std::int64_t tokens, std::int64_t pairs, std::int64_t max_rows, Key first) {
        for (std::int64_t e : experts) rows_[e] = 0;
        experts.clear();
        keys.clear();
        counts.clear();
        bool fits = true;
        std::int64_t some = 0;  // pairs that have an expert
        for (std::int64_t i = 0; i < pairs; ++i) {
            if (ids[i] == kNowhere) continue;
            ++some;
            if (!rows_[ids[i]]++) experts.push_back(ids[i]);
            fits &= rows_[ids[i]] <= max_rows;
        }
        if (tokens > 1 || static_cast<std::int64_t>(experts.size()) < some) std::sort(experts.begin(), experts.end());
        for (std::int64_t e : experts) {
            keys.push_back(first + e);
            counts.push_back(rows_[e]);
        }
        return fits;
    }
    // After `sort`: where each expert's pairs begin in `order`; its segments are yet to run.
    void place() {
        starts.assign(1, 0);
        for (std::size_t i = 0; i < experts.size(); ++i) {
            place_[experts[i]] = static_cast<std::int64_t>(i);
            begun_[experts[i]] = 0;
            starts.push_back(starts.back() + counts[i]);
        }
    }
    // After `place`: the pairs of ids [pairs]; behind all groups those without an expert.
    void group(const std::int64_t* ids, std::int64_t pairs) {
        std::int64_t behind = starts.back();
        next_.assign(starts.begin(), starts.end() - 1);
        order.resize(static_cast<std::size_t>(pairs));
        for (std::int64_t p = 0; p < pairs; ++p) order[ids[p] == kNowhere ? behind++ : next_[place_[ids[p]]]++] = p;
    }
    // In place of these: experts as expected, and the rows of each, which are the pairs. False: one comes twice.
    bool take(const Segments& some, const Segments& rows, Key first) {
        for (std::int64_t e : experts) rows_[e] = 0;
        experts = some;
        counts = rows;
        keys.clear();
        if (rows.size() != some.size()) return false;
        for (std::size_t i = 0; i < some.size(); ++i) {
            if (rows_[some[i]] || rows[i] < 1) return false;
            rows_[some[i]] = rows[i];
            keys.push_back(first + some[i]);
        }
        place();
        order.resize(static_cast<std::size_t>(starts.back()));
        std::iota(order.begin(), order.end(), 0);
        return true;
    }
    std::int64_t rows(std::int64_t expert) const { return rows_[expert]; }
    bool needs(std::int64_t expert) const {
        return expert >= 0 && expert < static_cast<std::int64_t>(rows_.size()) && rows_[expert] > 0;
    }
    // The first and the end of a needed expert's pairs.
    std::pair<std::int64_t, std::int64_t> span(std::int64_t expert) const {
        const std::int64_t at = place_[expert];
        return {starts[at], starts[at + 1]};
    }
    // Of the present plan's run[first:stop], after `place`. neurons: of a whole expert's slot. Replicas of experts go to
    // `replicas`, with their slot among replicas in the place of a neuron.
    const std::vector<Group>& groups(Core& core, std::int64_t first, std::int64_t stop, std::int64_t neurons) {
        const Layout& layout = core.layout();
        found_.clear();
        replicas.clear();
        for (std::int64_t i = first; i < stop; ++i) {
            const Segment s = core.present().run[i];
            const std::int64_t expert = s % layout.experts;
            if (!needs(expert)) throw std::invalid_argument("the plan is of another routing");
            const auto [begin, end] = span(expert);
            const Slot slot = core.slots()[s];
            if (!layout.split && s >= layout.keys()) {
                replicas.push_back({begin, end, slot - core.first_slot(core.class_of(s)), 0, false});
                continue;
            }
            const std::int64_t units = layout.split ? layout.units[s] : neurons;
            const std::int64_t unit = layout.first_unit.empty() ? slot * neurons : layout.first_unit[slot];
            found_.push_back({begin, end, unit, units, std::exchange(begun_[expert], std::uint8_t{1}) != 0});
        }
        return found_;
    }

    const std::vector<Group>& found() const { return found_; }  // of the last `groups`

    Segments experts, keys, counts;           // of the last `sort`
    std::vector<std::int64_t> starts, order;  // of the last `place` and `group`; the last of `starts` ends those that run
    std::vector<Group> replicas;              // of the last `groups`

  private:
    std::vector<std::int64_t> rows_;   // [E]; of those that are not in `experts` 0
    std::vector<std::int64_t> place_;  // [E]; in `experts`
    std::vector<std::uint8_t> begun_;  // [E]; one segment of a split expert has run
    std::vector<std::int64_t> next_;
    std::vector<Group> found_;
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
