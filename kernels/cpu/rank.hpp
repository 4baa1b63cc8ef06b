// The order of experts by router scores: by votes of the rows, or by their highest score.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace tiermoe {

struct Ranked {  // of the experts named by at least one row
    std::vector<int> experts;
    std::vector<double> best;  // of each expert [E]: its highest score
};

// Each row names its `top` experts; ties go to the lowest number. by_votes: experts by rows that name them, then as
// without: by highest score. read(t, out): the scores of row t as doubles [E], which hold every float.
template <typename Read>
Ranked rank_experts(std::int64_t tokens, std::int64_t experts, std::int64_t top, bool by_votes, const Read& read) {
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(top, experts));
    Ranked found;
    found.best.assign(static_cast<std::size_t>(experts), -std::numeric_limits<double>::infinity());
    std::vector<double> row(static_cast<std::size_t>(experts));
    std::vector<std::int64_t> votes(static_cast<std::size_t>(experts), 0);
    std::vector<int> places;
    for (std::int64_t t = 0; t < tokens; ++t) {
        read(t, row);
        places.clear();
        const auto before = [&row](int a, int b) { return row[a] > row[b]; };
        for (std::size_t e = 0; e < row.size(); ++e) {
            found.best[e] = std::max(found.best[e], row[e]);
            if (places.size() == count && !before(static_cast<int>(e), places.back())) continue;
            if (places.size() == count) places.pop_back();
            places.insert(std::upper_bound(places.begin(), places.end(), static_cast<int>(e), before),
                          static_cast<int>(e));
        }
        for (int e : places) ++votes[static_cast<std::size_t>(e)];
    }
    if (tokens == 1) {
        found.experts = places;
        return found;
    }
    for (std::size_t e = 0; e < row.size(); ++e)
        if (votes[e]) found.experts.push_back(static_cast<int>(e));
    std::stable_sort(found.experts.begin(), found.experts.end(), [&](int a, int b) {
        if (by_votes && votes[a] != votes[b]) return votes[a] > votes[b];
        return found.best[a] > found.best[b];
    });
    return found;
}

// Without the experts of no positive score.
inline Ranked positive(Ranked found) {
    auto& experts = found.experts;
    while (!experts.empty() && !(found.best[static_cast<std::size_t>(experts.back())] > 0)) experts.pop_back();
    return found;
}

}  // namespace tiermoe
