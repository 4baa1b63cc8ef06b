// Bindings of kernels/cpu/rank.hpp; rows are tokens.
#include "../../kernels/cpu/rank.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

using Scores = nb::ndarray<nb::ro, nb::device::cpu>;  // [T, E], rows at any distance
using Keys = std::vector<std::int64_t>;

template <typename T>
Ranked ranked_as(const Scores& scores, std::int64_t top, bool by_votes) {
    const auto* data = static_cast<const T*>(scores.data());
    const auto read = [&](std::int64_t t, std::vector<double>& row) {
        const T* from = data + t * scores.stride(0);
        for (double& score : row) {
            score = *from;
            from += scores.stride(1);
        }
    };
    const auto tokens = static_cast<std::int64_t>(scores.shape(0)), experts = static_cast<std::int64_t>(scores.shape(1));
    return rank_experts(tokens, experts, top, by_votes, read);
}

Ranked ranked(const Scores& scores, std::int64_t top, bool by_votes) {
    if (top < 1) refuse("a row names at least one expert", top);
    if (scores.ndim() == 2 && scores.dtype() == nb::dtype<float>()) return ranked_as<float>(scores, top, by_votes);
    if (scores.ndim() == 2 && scores.dtype() == nb::dtype<double>()) return ranked_as<double>(scores, top, by_votes);
    throw std::invalid_argument("scores are float32 or float64 [T, E]");
}

Keys keys_of(const std::vector<int>& experts, std::int64_t base) {
    Keys keys;
    keys.reserve(experts.size());
    for (const int expert : experts) keys.push_back(base + expert);
    return keys;
}

}  // namespace

void bind_ranks(nb::module_& m) {
    m.def("rank_by_votes", [](const Scores& scores, std::int64_t top, std::int64_t base) {
        return keys_of(ranked(scores, top, true).experts, base);
    }, "scores"_a, "top"_a, "base"_a,
          "Experts that a later router would pick, most wanted first, with `base` added to each: each row of scores [T, E],\n"
          "float32 or float64, votes for its `top` highest; by votes, then highest score, then number.");
    m.def("rank_by_score", [](const Scores& scores, std::int64_t top, std::int64_t base) {
        const Ranked found = positive(ranked(scores, top, false));
        std::vector<double> best;
        best.reserve(found.experts.size());
        for (const int expert : found.experts) best.push_back(found.best[static_cast<std::size_t>(expert)]);
        return std::pair(keys_of(found.experts, base), best);
    }, "scores"_a, "top"_a, "base"_a,
          "The experts of the rows' `top` highest positive scores [T, E], float32 or float64, highest first, then by number,\n"
          "with `base` added to each; and their highest scores.");
}

}  // namespace tiermoe::bindings
