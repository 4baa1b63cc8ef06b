// Runs the kernels on exact-size heap buffers of odd shapes, against a direct loop in double. Exit 0: all agree.
// With an argument it reads one float past a buffer instead, to show that the sanitizer would say so.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "expert_ffn.hpp"

using tiermoe::Activation;
using tiermoe::Group;

namespace {

// Exactly as many elements as asked for: a vector may reserve more.
template <typename T>
struct Buffer {
    explicit Buffer(std::int64_t size) : data(new T[static_cast<std::size_t>(size)]), size(size) {}
    T& operator[](std::int64_t i) { return data[static_cast<std::size_t>(i)]; }
    std::unique_ptr<T[]> data;
    std::int64_t size;
};

std::uint32_t state = 1;
float uniform() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

double activate(double v, Activation activation) {
    switch (activation) {
        case Activation::silu: return v / (1.0 + std::exp(-v));
        case Activation::gelu: return 0.5 * v * (1.0 + std::erf(v / std::sqrt(2.0)));
        case Activation::gelu_tanh:
            return 0.5 * v * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v)));
        case Activation::relu: return v > 0.0 ? v : 0.0;
    }
    return v;
}

// `sizes` rows through slots 0, 1, 0, 1, ...; the last pair belongs to no group and must stay as it was.
bool run(std::int64_t width, std::int64_t neurons, std::int64_t top_k, const std::vector<std::int64_t>& sizes,
         Activation activation) {
    std::int64_t rows = 1;
    for (std::int64_t size : sizes) rows += size;
    const std::int64_t tokens = (rows + top_k - 1) / top_k, slots = 2;
    Buffer<float> hidden(tokens * width), up(slots * neurons * 2 * width), down(slots * neurons * width);
    Buffer<float> y(tokens * top_k * width), weights(tokens * top_k), out(tokens * width);
    for (auto* buffer : {&hidden, &up, &down, &y, &weights})
        for (std::int64_t i = 0; i < buffer->size; ++i) (*buffer)[i] = uniform();
    Buffer<float> before(y.size);
    std::copy(y.data.get(), y.data.get() + y.size, before.data.get());

    Buffer<std::int64_t> pairs(rows - 1);
    for (std::int64_t i = 0; i + 1 < rows; ++i) pairs[i] = rows - 2 - i;
    Buffer<Group> groups(static_cast<std::int64_t>(sizes.size()));
    std::int64_t at = 0;
    for (std::int64_t g = 0; g < groups.size; at += sizes[static_cast<std::size_t>(g)], ++g)
        groups[g] = {at, at + sizes[static_cast<std::size_t>(g)], g % slots * neurons, neurons, g % 3 == 2};
    Buffer<float> sums(tiermoe::kSumRows * width);
    tiermoe::expert_ffn_f32(hidden.data.get(), up.data.get(), down.data.get(), pairs.data.get(), groups.data.get(),
                            groups.size, top_k, width, activation, y.data.get(), sums.data.get());

    for (std::int64_t g = 0; g < groups.size; ++g)
        for (std::int64_t p = groups[g].start; p < groups[g].stop; ++p) {
            std::vector<double> row(static_cast<std::size_t>(width), 0.0);
            const float* x = hidden.data.get() + pairs[p] / top_k * width;
            for (std::int64_t j = 0; j < neurons; ++j) {
                const std::int64_t neuron = groups[g].first + j;
                double a = 0.0, b = 0.0;
                for (std::int64_t h = 0; h < width; ++h) {
                    a += static_cast<double>(up[neuron * 2 * width + h]) * x[h];
                    b += static_cast<double>(up[(neuron * 2 + 1) * width + h]) * x[h];
                }
                for (std::int64_t h = 0; h < width; ++h)
                    row[static_cast<std::size_t>(h)] += activate(a, activation) * b * down[neuron * width + h];
            }
            for (std::int64_t h = 0; h < width; ++h) {
                const double added = groups[g].add ? before[pairs[p] * width + h] : 0.0;
                const double expected = added + row[static_cast<std::size_t>(h)], found = y[pairs[p] * width + h];
                if (std::abs(found - expected) > 1e-3 + 1e-4 * std::abs(expected)) return false;
            }
        }
    for (std::int64_t i = (rows - 1) * width; i < y.size; ++i)
        if (y[i] != before[i]) return false;

    tiermoe::combine_f32(y.data.get(), weights.data.get(), tokens, top_k, width, out.data.get());
    for (std::int64_t i = 0; i < out.size; ++i) {
        double expected = 0.0;
        for (std::int64_t k = 0; k < top_k; ++k)
            expected += static_cast<double>(weights[i / width * top_k + k]) * y[(i / width * top_k + k) * width + i % width];
        if (std::abs(out[i] - expected) > 1e-3 + 1e-4 * std::abs(expected)) return false;
    }
    return true;
}

}  // namespace

int main(int argc, char**) {
    if (argc > 1) {
        Buffer<float> small(4);
        std::unique_ptr<float[]> out(new float[5]);
        const float weight = 1.0f;
        tiermoe::combine_f32(small.data.get(), &weight, 1, 1, 5, out.get());
        return 0;
    }
    int count = 0;
    for (std::int64_t width : {1, 3, 15, 16, 17, 33, 48})
        for (std::int64_t neurons : {1, 7, 8, 9, 19})
            for (std::int64_t top_k : {1, 2, 3})
                for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{1}, {5}, {2, 0, 3, 4}, {12, 1, 6}})
                    for (int activation = 0; activation < 4; ++activation, ++count)
                        if (!run(width, neurons, top_k, sizes, static_cast<Activation>(activation))) {
                            std::fprintf(stderr, "wrong: width %d neurons %d top_k %d activation %d\n",
                                         static_cast<int>(width), static_cast<int>(neurons),
                                         static_cast<int>(top_k), activation);
                            return 1;
                        }
    std::printf("checked %d shapes\n", count);
    return 0;
}
