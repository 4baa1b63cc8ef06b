// Buddy expert substitution (Algorithm 1 of BuddyMoE with its gates) for the few tokens of a layer: what
// tests/buddymoe_reference.py gives, to the last bit. Doubles and floats are added, multiplied and divided in the same order as
// there, and no sum swallows the product before it.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "substitute.hpp"

#include <cmath>
#include <vector>

namespace tiermoe {
namespace {

constexpr double ln2 = 0.6931471805599453;
constexpr double inverse_ln2 = 1.0 / ln2;
constexpr int log_terms = 8, exp_terms = 12;

double log_of(double x) {
    int exponent = 0;
    double mantissa = std::frexp(x, &exponent);
    if (mantissa < std::sqrt(0.5)) {
        mantissa = mantissa * 2.0;
        exponent -= 1;
    }
    const double ratio = (mantissa - 1.0) / (mantissa + 1.0), square = ratio * ratio;
    double series = 1.0 / (2 * log_terms - 1);
    for (int i = log_terms - 2; i >= 0; --i) series = series * square + 1.0 / (2 * i + 1);
    return exponent * ln2 + (ratio + ratio) * series;
}

double exp_of(double x) {
    static const std::vector<double> terms = [] {
        std::vector<double> all(exp_terms);
        double factorial = 1.0;
        for (int i = 0; i < exp_terms; ++i) {
            if (i) factorial *= i;
            all[static_cast<std::size_t>(i)] = 1.0 / factorial;
        }
        return all;
    }();
    const double power = std::fmax(std::floor(x * inverse_ln2 + 0.5), -1000.0);
    const double rest = std::fmax(x - power * ln2, -1.0);
    double series = terms.back();
    for (int i = exp_terms - 2; i >= 0; --i) series = series * rest + terms[static_cast<std::size_t>(i)];
    return std::ldexp(series, static_cast<int>(power));
}

// Whether the gates let experts of a token be replaced. p holds K doubles.
bool permitted(const Substitution& problem, const float* weights, double* p) {
    const std::int64_t top_k = problem.top_k;
    const bool entropy = problem.tau != -HUGE_VAL, margin = problem.gamma != HUGE_VAL;
    if (!entropy && !margin) return true;
    if (top_k < 2) return !((entropy && 0.0 <= problem.tau) || (margin && 1.0 >= problem.gamma));
    for (std::int64_t k = 0; k < top_k; ++k) p[k] = weights[k];
    if (problem.temperature != 1.0) {
        double top = -HUGE_VAL;
        for (std::int64_t k = 0; k < top_k; ++k) top = p[k] > 0 ? std::fmax(top, log_of(p[k])) : top;
        for (std::int64_t k = 0; k < top_k; ++k) p[k] = p[k] > 0 ? exp_of((log_of(p[k]) - top) / problem.temperature) : 0.0;
    }
    double total = 0.0;
    for (std::int64_t k = 0; k < top_k; ++k) total = total + p[k];
    for (std::int64_t k = 0; k < top_k; ++k) p[k] = p[k] / (total > 0 ? total : 1.0);
    if (entropy) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < top_k; ++k) sum = sum + (p[k] > 0 ? p[k] * log_of(p[k]) : 0.0);
        if ((0.0 - sum) / problem.log_top_k <= problem.tau) return false;
    }
    if (margin) {
        double first = -1.0, second = -1.0;
        for (std::int64_t k = 0; k < top_k; ++k) {
            if (p[k] > first) {
                second = first;
                first = p[k];
            } else if (p[k] > second) {
                second = p[k];
            }
        }
        if (first - second >= problem.gamma) return false;
    }
    return true;
}

// One token: out_ids and out_weights hold its routing already. `claims` is 1 for every expert, also afterwards.
// `left_out` holds K flags, `original` K experts.
void decide(Substitution& problem, std::int64_t t, std::vector<float>& claims, std::vector<std::uint8_t>& left_out,
            std::vector<std::int64_t>& original) {
    const std::int64_t top_k = problem.top_k;
    std::int64_t* ids = problem.out_ids + t * top_k;
    const float* row = problem.probabilities ? problem.probabilities + t * problem.experts : nullptr;
    std::int64_t replaced = 0, left = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
        original[k] = ids[k];
        left_out[k] = 0;
    }
    for (std::int64_t k = 0; k < top_k; ++k) claims[original[k]] = 0.0f;
    for (std::int64_t k = 0; k < top_k; ++k) {
        const std::int64_t expert = ids[k];
        if (!problem.replace[expert]) continue;
        if (replaced >= problem.rho) break;
        const std::int32_t* buddies = problem.buddies + expert * problem.ranks;
        const float* similarity = problem.similarity + expert * problem.ranks;
        std::int64_t best = -1;
        float best_score = 0.0f;
        for (std::int64_t r = 0; r < problem.search; ++r) {
            const std::int64_t buddy = buddies[r];
            float score = similarity[r];
            if (problem.eta > 0 && row) score = score * (1.0f + problem.eta * row[buddy]);
            score = score * problem.reach[buddy];
            score = score * claims[buddy];
            if (score > best_score) {
                best = buddy;
                best_score = score;
            }
        }
        if (best >= 0) {
            ids[k] = best;
            claims[best] = claims[best] * problem.reuse;
            ++replaced;
        } else if (problem.drop) {
            left_out[k] = 1;
            ++left;
        }
    }
    for (std::int64_t k = 0; k < top_k; ++k) claims[original[k]] = claims[ids[k]] = 1.0f;
    if (!replaced && !left) return;
    if (left == top_k) {
        left_out[0] = 0;
        --left;
    }
    if (left) {
        std::int64_t kept = 0;
        while (left_out[kept]) ++kept;
        for (std::int64_t k = 0; k < top_k; ++k)
            if (left_out[k]) ids[k] = ids[kept];
    }
    problem.substituted += replaced;
    problem.dropped += left;
    if (!left && !problem.by_buddy) return;
    float* weights = problem.out_weights + t * top_k;
    double before = 0.0, after = 0.0;
    std::vector<double> values(weights, weights + top_k);
    for (std::int64_t k = 0; k < top_k; ++k) {
        before += values[k];
        if (left_out[k])
            values[k] = 0.0;
        else if (problem.by_buddy && ids[k] != original[k] && row[original[k]] > 0)
            values[k] = values[k] * static_cast<double>(row[ids[k]]) / static_cast<double>(row[original[k]]);
        after += values[k];
    }
    for (std::int64_t k = 0; k < top_k; ++k) {
        if (problem.renormalise && after > 0) values[k] = values[k] * before / after;
        weights[k] = static_cast<float>(values[k]);
    }
}

}  // namespace

void substitute(Substitution& problem) {
    std::vector<float> claims(static_cast<std::size_t>(problem.experts), 1.0f);
    std::vector<std::uint8_t> left_out(static_cast<std::size_t>(problem.top_k));
    std::vector<std::int64_t> original(static_cast<std::size_t>(problem.top_k));
    std::vector<double> p(static_cast<std::size_t>(problem.top_k));
    for (std::int64_t i = 0; i < problem.tokens * problem.top_k; ++i) {
        problem.out_ids[i] = problem.ids[i];
        problem.out_weights[i] = problem.weights[i];
    }
    for (std::int64_t t = 0; t < problem.tokens; ++t) {
        bool missing = false;
        for (std::int64_t k = 0; k < problem.top_k; ++k) missing |= problem.replace[problem.ids[t * problem.top_k + k]] != 0;
        if (missing && permitted(problem, problem.weights + t * problem.top_k, p.data()))
            decide(problem, t, claims, left_out, original);
    }
}

Fault size_fault(const Substitution& problem, bool probable) {
    constexpr std::int64_t most = 1 << 20;  // so that no product of two overflows
    for (const std::int64_t size : {problem.top_k, problem.experts, problem.ranks})
        if (size < 1 || size > most) return "a size is out of range: " + std::to_string(size);
    if (problem.tokens < 0 || problem.tokens > most)
        return "there cannot be " + std::to_string(problem.tokens) + " tokens";
    if (problem.search < 1 || problem.search > problem.ranks)
        return "the search is out of range: " + std::to_string(problem.search);
    if (problem.rho < 0) return "rho counts replacements: " + std::to_string(problem.rho);
    if (!(problem.temperature > 0.0) || std::isinf(problem.temperature)) return "the temperature must be positive";
    if (!probable && (problem.eta > 0 || problem.by_buddy))
        return "eta, and weights by the buddy, need the router's probabilities";
    return {};
}

Fault content_fault(const Substitution& problem) {
    for (std::int64_t i = 0; i < problem.tokens * problem.top_k; ++i) {
        const std::int64_t expert = problem.ids[i];
        if (expert < 0 || expert >= problem.experts) return "there is no expert " + std::to_string(expert);
        const std::int32_t* list = problem.buddies + expert * problem.ranks;
        for (std::int64_t r = 0; r < problem.search; ++r)
            if (list[r] < 0 || list[r] >= problem.experts) return "there is no buddy " + std::to_string(list[r]);
    }
    return {};
}

Fault replaceable(const std::int64_t* picked, std::int64_t pairs, const std::uint8_t* here, std::int64_t experts,
                  double beta, const std::int64_t* owner, std::int64_t shards, std::vector<Share>& shares, std::uint8_t* out) {
    if (shards < 1) return "there cannot be " + std::to_string(shards) + " shards";
    for (std::int64_t e = 0; e < experts; ++e) {
        if (owner && (owner[e] < 0 || owner[e] >= shards)) return "there is no shard " + std::to_string(owner[e]);
        out[e] = 0;
    }
    for (std::int64_t i = 0; i < pairs; ++i) {
        if (picked[i] < 0 || picked[i] >= experts) return "there is no expert " + std::to_string(picked[i]);
        out[picked[i]] = 1;
    }
    const auto of = [owner](std::int64_t e) { return owner ? static_cast<std::size_t>(owner[e]) : 0; };
    shares.assign(static_cast<std::size_t>(shards), {});
    for (std::int64_t e = 0; e < experts; ++e)
        if (out[e]) ++shares[of(e)].requested, shares[of(e)].absent += !here[e];
    for (std::int64_t e = 0; e < experts; ++e) out[e] = out[e] && !here[e] && shares[of(e)].delta() < beta;
    return {};
}

}  // namespace tiermoe
