// Runs buddy substitution on exact-size heap buffers, on random problems with every option: what it answers must be what
// Algorithm 1 allows, and input out of range must be refused. Exit 0: all is so. With an argument it decides an expert
// that its own check refuses, to show that the sanitizer would say so.
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>

#include "substitute.hpp"

namespace {

using tiermoe::Substitution;

// Exactly as many elements as asked for: a vector may reserve more.
template <typename T>
struct Buffer {
    explicit Buffer(std::int64_t size) : data(new T[static_cast<std::size_t>(size)]()), size(size) {}
    T& operator[](std::int64_t i) { return data[static_cast<std::size_t>(i)]; }
    std::unique_ptr<T[]> data;
    std::int64_t size;
};

std::uint32_t state = 1;
std::int64_t below(std::int64_t limit) {
    state = state * 1664525u + 1013904223u;
    return static_cast<std::int64_t>(state >> 8) % limit;
}
float uniform() { return static_cast<float>(below(1 << 20)) / (1 << 20); }

struct Random {
    Random(std::int64_t tokens, std::int64_t top_k, std::int64_t experts, std::int64_t ranks)
        : ids(tokens * top_k), out_ids(tokens * top_k), shard_of(experts), weights(tokens * top_k),
          probabilities(tokens * experts), reach(experts), similarity(experts * ranks), out_weights(tokens * top_k),
          replace(experts), resident(experts), buddies(experts * ranks) {
        for (std::int64_t t = 0; t < tokens; ++t)
            for (std::int64_t k = 0, first = below(experts); k < top_k; ++k)
                ids[t * top_k + k] = (first + k) % experts;
        for (auto* floats : {&weights, &probabilities, &similarity})
            for (std::int64_t i = 0; i < floats->size; ++i) (*floats)[i] = below(16) ? uniform() : 0.0f;
        for (std::int64_t e = 0; e < experts; ++e) {
            resident[e] = below(2) != 0;
            shard_of[e] = e % shards;
            reach[e] = resident[e] ? (shard_of[e] ? 0.5f : 1.0f) : 0.0f;
        }
        for (std::int64_t i = 0; i < buddies.size; ++i) buddies[i] = static_cast<std::int32_t>(below(experts));
        problem = {ids.data.get(), weights.data.get(), probabilities.data.get(), replace.data.get(), reach.data.get(),
                   buddies.data.get(), similarity.data.get(), tokens, top_k, experts, ranks, below(top_k + 2),
                   1 + below(ranks), below(2) ? uniform() : -HUGE_VAL, below(2) ? uniform() : HUGE_VAL,
                   below(2) ? 1.0 : 0.8 + 0.4 * uniform(), std::log(static_cast<double>(top_k)),
                   below(2) ? uniform() : 0.0f, below(2) ? 0.5f : 0.0f, below(2) != 0, below(2) != 0, below(2) != 0,
                   out_ids.data.get(), out_weights.data.get()};
    }
    std::string gate(double beta, const std::int64_t* owner) {
        return tiermoe::replaceable(ids.data.get(), ids.size, resident.data.get(), resident.size, beta, owner, shards,
                                    shares_of, replace.data.get());
    }
    bool right() {
        if (!gate(below(2) ? HUGE_VAL : 0.75, below(2) ? shard_of.data.get() : nullptr).empty()) return false;
        if (!tiermoe::size_fault(problem, true).empty() || !tiermoe::content_fault(problem).empty()) return false;
        tiermoe::substitute(problem);
        std::int64_t changed = 0;
        for (std::int64_t t = 0; t < problem.tokens; ++t) {
            std::set<std::int64_t> picked;
            std::int64_t replaced = 0;
            for (std::int64_t k = 0; k < problem.top_k; ++k) picked.insert(ids[t * problem.top_k + k]);
            for (std::int64_t k = 0; k < problem.top_k; ++k) {
                const std::int64_t at = t * problem.top_k + k, now = out_ids[at];
                if (now < 0 || now >= problem.experts || !std::isfinite(out_weights[at])) return false;
                if (now == ids[at]) continue;
                if (!replace[ids[at]]) return false;
                if (!problem.drop && (!resident[now] || picked.count(now))) return false;
                ++replaced;
            }
            if (!problem.drop && replaced > problem.rho) return false;
            changed += replaced;
        }
        return problem.drop ? changed <= problem.substituted + problem.dropped : changed == problem.substituted;
    }
    // Each wrong input, alone: all must be refused.
    bool refuses() {
        const auto sizes = [&](auto change) {
            Substitution wrong = problem;
            change(wrong);
            return !tiermoe::size_fault(wrong, true).empty();
        };
        bool all = sizes([](auto& p) { p.tokens = -1; }) && sizes([](auto& p) { p.tokens = std::int64_t{1} << 40; }) &&
                   sizes([](auto& p) { p.top_k = 0; }) && sizes([](auto& p) { p.experts = (1 << 20) + 1; }) &&
                   sizes([](auto& p) { p.ranks = -3; }) && sizes([](auto& p) { p.search = p.ranks + 1; }) &&
                   sizes([](auto& p) { p.search = 0; }) && sizes([](auto& p) { p.rho = -1; }) &&
                   sizes([](auto& p) { p.temperature = 0.0; }) && sizes([](auto& p) { p.temperature = NAN; });
        Substitution blind = problem;
        blind.eta = 1.0f;
        all = all && !tiermoe::size_fault(blind, false).empty();
        for (const std::int64_t wrong : {std::int64_t{-1}, problem.experts, INT64_MIN, INT64_MAX}) {
            std::int64_t& last = ids[ids.size - 1];
            const std::int64_t right = last;
            last = wrong;
            all = all && !tiermoe::content_fault(problem).empty() && !gate(0.5, nullptr).empty();
            last = right;
            std::int64_t& owner = shard_of[shard_of.size - 1];
            const std::int64_t shard = owner;
            owner = wrong == problem.experts ? shards : wrong;
            all = all && !gate(0.5, shard_of.data.get()).empty();
            owner = shard;
        }
        for (const std::int32_t wrong : {-1, static_cast<std::int32_t>(problem.experts), INT32_MIN, INT32_MAX}) {
            std::int32_t& buddy = buddies[ids[0] * problem.ranks + problem.search - 1];
            const std::int32_t right = buddy;
            buddy = wrong;
            all = all && !tiermoe::content_fault(problem).empty();
            buddy = right;
        }
        return all && tiermoe::content_fault(problem).empty();
    }
    static constexpr std::int64_t shards = 2;
    Buffer<std::int64_t> ids, out_ids, shard_of;
    Buffer<float> weights, probabilities, reach, similarity, out_weights;
    Buffer<std::uint8_t> replace, resident;
    Buffer<std::int32_t> buddies;
    Substitution problem;
    std::vector<tiermoe::Share> shares_of;
};

}  // namespace

int main(int argc, char**) {
    if (argc > 1) {
        Random random(1, 2, 4, 4);
        for (std::int64_t e = 0; e < 4; ++e) random.replace[e] = 1;
        random.ids[1] = 4;
        tiermoe::substitute(random.problem);
        return 0;
    }
    int count = 0;
    for (const std::int64_t tokens : {0, 1, 3, 17})
        for (const std::int64_t top_k : {1, 2, 4, 8})
            for (const std::int64_t experts : {8, 13, 64})
                for (const std::int64_t ranks : {1, 5, 16})
                    for (int again = 0; again < 20; ++again, ++count) {
                        Random random(tokens, top_k, experts, ranks);
                        if (random.right() && (tokens == 0 || random.refuses())) continue;
                        std::fprintf(stderr, "wrong: %d tokens, top-%d of %d, %d ranks\n", static_cast<int>(tokens),
                                     static_cast<int>(top_k), static_cast<int>(experts), static_cast<int>(ranks));
                        return 1;
                    }
    std::printf("checked %d problems\n", count);
    return 0;
}
