// Checks maps.cpp on random streams of iterations, with buffers of exactly their size; see test_sanitized.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "../../actors/core/maps.hpp"

using namespace tiermoe::core;

namespace {

std::mt19937 random_bits(5);

std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_bits() % static_cast<std::uint32_t>(n)); }

template <typename T>
std::unique_ptr<T[]> exact(std::int64_t n) {  // no capacity behind its end
    return std::make_unique<T[]>(static_cast<std::size_t>(n));
}

int fail(const char* what) {
    std::printf("wrong: %s\n", what);
    return 1;
}

// A store of at most a few entries; the best match is the one by definition, and each forecast names each expert once.
int check_stream() {
    const std::int64_t layers = 1 + below(5), experts = 1 + below(40), width = 1 + below(40), capacity = 1 + below(6);
    auto embeddings = exact<float>(capacity * width), maps = exact<float>(layers * capacity * experts);
    auto squares = exact<double>(layers * capacity);
    MapStore store{layers, experts, width, capacity, 0.5, embeddings.get(), maps.get(), squares.get()};
    for (int iteration = 0; iteration < 6; ++iteration) {
        const std::int64_t sequences = 1 + below(4), top_k = 1 + below(experts);
        auto asked = exact<float>(sequences * width);
        for (std::int64_t s = 0; s < sequences; ++s) asked[s * width + below(width)] = below(4) ? 1.0f : 0.0f;
        MapSearch search(store, asked.get(), sequences);
        std::vector<std::vector<double>> seen(static_cast<std::size_t>(sequences));
        for (std::int64_t layer = 0; layer < layers;) {
            MapForecast found;
            if (search.forecast(layer == 0, layer, layers, layer, top_k, below(2), found)) {
                const auto keys = static_cast<std::size_t>((layers - layer) * experts);
                std::vector<std::int32_t> named = found.keys;
                std::sort(named.begin(), named.end());
                if (named.size() != keys || std::unique(named.begin(), named.end()) != named.end() ||
                    found.priorities.size() != keys || search.best().size() != search.entries().size())
                    return fail("a forecast does not name each expert once");
            }
            const std::int64_t count = 1 + below(layers - layer);
            auto probabilities = exact<float>(sequences * count * experts);
            for (std::int64_t i = 0; i < sequences * count * experts; ++i) {
                probabilities[i] = static_cast<float>(below(8));
                seen[static_cast<std::size_t>(i / (count * experts))].push_back(probabilities[i]);
            }
            search.observe(layer, count, probabilities.get());
            layer += count;
            const std::vector<double> scores = search.scores();
            for (std::int64_t s = 0; s < sequences; ++s)
                for (std::int64_t y = 0; y < store.count; ++y) {
                    double dots = 0, mine = 0, other = 0;
                    for (std::int64_t at = 0; at < layer * experts; ++at) {
                        const double a = seen[static_cast<std::size_t>(s)][static_cast<std::size_t>(at)];
                        const double b = store.layer(at / experts)[y * experts + at % experts];
                        dots += a * b, mine += a * a, other += b * b;
                    }
                    const double cosine = mine * other > 0 ? dots / std::sqrt(mine * other) : 0.0;
                    if (std::abs(scores[static_cast<std::size_t>(s * store.count + y)] - cosine) > 1e-5) return fail("a score");
                }
        }
        const std::int64_t before = store.count;
        const std::vector<std::int64_t> rows = search.commit();
        if (store.count != std::min(capacity, before + sequences) || static_cast<std::int64_t>(rows.size()) != sequences)
            return fail("entries");
        for (std::int64_t row : rows)
            if (row < 0 || row >= store.count) return fail("a row");
        bool refused = false;
        try {
            search.commit();
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        if (!refused) return fail("a search that has ended goes on");
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "overrun")) {
        auto one = exact<float>(1), maps = exact<float>(1);
        auto square = exact<double>(1);
        MapStore store{4, 64, 1, 1, 0.5, one.get(), maps.get(), square.get()};
        const float embedding = 1;
        const std::vector<float> map(256, 1.0f);
        store.add(&embedding, map.data(), nullptr);  // into arrays of another size
        return 0;
    }
    for (int stream = 0; stream < 400; ++stream)
        if (check_stream()) return 1;
    std::printf("checked 400 streams\n");
    return 0;
}
