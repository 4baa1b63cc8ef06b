#include "cpu_layer.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <utility>

#include "../../kernels/cpu/sizes.hpp"

namespace tiermoe::core {

CpuLayer::CpuLayer(Core& core, const Place& place, const Shape& shape, const KernelTable& kernels, CpuLayers& all)
    : Layer(core, place, kernels, all), shape_(shape), all_(all), step_{step, this} {
    all_.sums.resize(std::max(all_.sums.size(), static_cast<std::size_t>(kSumRows * shape.width)));
}

const float* CpuLayer::scores(const Given& given, Router router) {
    const LinearRouter& of = routers_[static_cast<std::size_t>(router)];
    all_.scores.resize(static_cast<std::size_t>(given.tokens * of.outputs));
    kernels().router_scores(given.hidden, given.tokens, of.weight, shape_.width, of.outputs, of.bias, of.soft, all_.scores.data());
    return all_.scores.data();
}

void CpuLayer::compute(const Given& given, const Routed& routed) {
    const auto size = static_cast<std::size_t>(given.tokens * routed.top_k * shape_.width);
    if (all_.y.size() < size) all_.y.resize(size);
    const auto timing = [this](auto&& compute) {
        const double began_s = timed_s();
        compute();
        kernels_s() += timed_s() - began_s;
    };
    for (const std::vector<Group>* groups = &next(); !groups->empty(); groups = &next())
        timing([&] {
            kernels().expert_ffn(given.hidden, shape_.gate_up, shape_.down, picked_.order.data(), groups->data(),
                                static_cast<std::int64_t>(groups->size()), routed.top_k, shape_.width, shape_.activation,
                                all_.y.data(), all_.sums.data());
        });
    timing([&] {
        kernels().combine(all_.y.data(), routed.weights, given.tokens, routed.top_k, shape_.width, given.out);
    });
}

Stepped CpuLayer::step(void* self, const Given& given, Asking asking, Spent& spent) {
    CpuLayer& layer = *static_cast<CpuLayer*>(self);
    try {
        const Stepped how = layer.run(given, asking);
        spent = layer.spent();
        return how;
    } catch (const abi::__forced_unwind&) {  // the thread ends: nobody may stop it
        throw;
    } catch (...) {
        layer.failure_ = std::current_exception();
        return Stepped::failed;
    }
}

}  // namespace tiermoe::core
