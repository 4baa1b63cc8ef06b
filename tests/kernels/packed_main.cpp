// Runs the neuron kernels on exact-size heap buffers of odd shapes, with every instruction set of this processor: they
// must agree with each other, and 1 and 3 threads bit by bit. Exit 0: all agree. With an argument it reads past a buffer
// instead, to show that the sanitizer would say so.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "neuron_ffn.hpp"

namespace {

using namespace tiermoe;

// Exactly as many elements as asked for: a vector may reserve more.
template <typename T>
struct Buffer {
    explicit Buffer(std::int64_t size) : data(new T[static_cast<std::size_t>(size)]()), size(size) {}
    T& operator[](std::int64_t i) { return data[static_cast<std::size_t>(i)]; }
    std::unique_ptr<T[]> data;
    std::int64_t size;
};

std::uint32_t state = 1;
std::uint32_t random_bits() {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}
float uniform() { return static_cast<float>(random_bits()) / 8388608.0f - 1.0f; }

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Rows {
    explicit Rows(std::int64_t hidden) : rows(kCount), weights(kCount), x(kTokens * hidden), out(kTokens * hidden) {
        for (std::int64_t i = 0; i < kCount; ++i) {
            rows[i] = static_cast<std::int32_t>(random_bits() % kTokens);
            weights[i] = uniform();
        }
        for (std::int64_t i = 0; i < x.size; ++i) x[i] = uniform();
    }
    Batch batch() {
        return {{{1, 0, 1}, {0, 1, 1}, {0, 1, 8}, {1, 8, kCount}}, rows.data.get(), weights.data.get(), x.data.get(),
                kTokens, out.data.get()};
    }
    static constexpr std::int64_t kCount = 75, kTokens = 70;
    Buffer<std::int32_t> rows;
    Buffer<float> weights, x, out;
};

// `compute(threads, set, batch)` with every instruction set, on 1 and on 3 threads.
template <typename F>
bool agree(Threads& one, Threads& three, std::int64_t hidden, F&& compute) {
    Rows rows(hidden);
    std::vector<float> first;
    for (std::size_t set = 0; set < instruction_sets().size(); ++set) {
        compute(one, static_cast<int>(set), rows.batch());
        const std::vector<float> alone(rows.out.data.get(), rows.out.data.get() + rows.out.size);
        compute(three, static_cast<int>(set), rows.batch());
        if (std::memcmp(alone.data(), rows.out.data.get(), alone.size() * sizeof(float)) != 0) return false;
        if (first.empty()) first = alone;
        float largest = 0.0f, apart = 0.0f;
        for (std::size_t i = 0; i < alone.size(); ++i) {
            largest = std::fmax(largest, std::fabs(first[i]));
            apart = std::fmax(apart, std::fabs(first[i] - alone[i]));
        }
        if (!(apart <= 0.02f * largest)) return false;  // an activation may round to the other side
    }
    return true;
}

bool packed(Threads& one, Threads& three, std::int64_t hidden, std::int64_t neurons, int bits, int group) {
    const std::int64_t experts = 2, blocks = ceil_div(neurons, 32), groups = ceil_div(neurons, group);
    Buffer<std::uint8_t> gate_up(experts * blocks * ceil_div(hidden, 32) * 4 * 64 * bits);
    Buffer<std::uint16_t> gate_up_scales(experts * blocks * ceil_div(hidden, group) * 128);
    Buffer<std::uint8_t> down(experts * groups * ceil_div(hidden, 16) * (group / 32) * 64 * bits);
    Buffer<std::uint16_t> down_scales(experts * groups * ceil_div(hidden, 16) * 32);
    for (auto* codes : {&gate_up, &down})
        for (std::int64_t i = 0; i < codes->size; ++i) (*codes)[i] = static_cast<std::uint8_t>(random_bits());
    for (auto* scales : {&gate_up_scales, &down_scales})  // float16 of about 2^-8, either sign
        for (std::int64_t i = 0; i < scales->size; ++i)
            (*scales)[i] = static_cast<std::uint16_t>(0x1c00u | (random_bits() & 0x83ffu));
    const PackedLayer layer = {hidden, neurons, experts, bits, group, gate_up.data.get(), gate_up_scales.data.get(),
                               down.data.get(), down_scales.data.get()};
    return agree(one, three, hidden, [&](Threads& threads, int set, const Batch& batch) {
        packed_ffn(threads, set, layer, Activation::silu, batch);
    });
}

template <typename T>
bool full(Threads& one, Threads& three, std::int64_t hidden, std::int64_t neurons, Element element) {
    const std::int64_t experts = 2;
    Buffer<T> gate_up(experts * neurons * 2 * hidden), down(experts * neurons * hidden);
    for (auto* weights : {&gate_up, &down})
        for (std::int64_t i = 0; i < weights->size; ++i) {
            if constexpr (sizeof(T) == 4) (*weights)[i] = uniform();
            else (*weights)[i] = static_cast<T>(0x3400u | (random_bits() & 0x83ffu));  // small in both types
        }
    const FullLayer layer = {hidden, neurons, experts, element, gate_up.data.get(), down.data.get()};
    return agree(one, three, hidden, [&](Threads& threads, int set, const Batch& batch) {
        full_ffn(threads, set, layer, Activation::gelu, batch);
    });
}

}  // namespace

int main(int argc, char**) {
    Threads one(1, {}), three(3, {});
    if (argc > 1) {
        Buffer<float> weights(3 * 16);
        Rows rows(17);
        const FullLayer layer = {17, 1, 2, Element::f32, weights.data.get(), weights.data.get()};
        full_ffn(one, 0, layer, Activation::relu, rows.batch());
        return 0;
    }
    int count = 0;
    for (std::int64_t hidden : {1, 16, 33, 70, 160})
        for (std::int64_t neurons : {1, 17, 64, 130}) {
            for (int bits : {1, 2, 3, 4, 8})
                for (int group : {32, 64, 128}) {
                    ++count;
                    if (!packed(one, three, hidden, neurons, bits, group)) {
                        std::fprintf(stderr, "wrong: hidden %d neurons %d bits %d group %d\n", static_cast<int>(hidden),
                                     static_cast<int>(neurons), bits, group);
                        return 1;
                    }
                }
            count += 3;
            if (!full<float>(one, three, hidden, neurons, Element::f32) ||
                !full<std::uint16_t>(one, three, hidden, neurons, Element::f16) ||
                !full<std::uint16_t>(one, three, hidden, neurons, Element::bf16)) {
                std::fprintf(stderr, "wrong: full, hidden %d neurons %d\n", static_cast<int>(hidden),
                             static_cast<int>(neurons));
                return 1;
            }
        }
    std::printf("checked %d shapes\n", count);
    return 0;
}
