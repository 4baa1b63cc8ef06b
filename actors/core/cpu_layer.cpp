#include "cpu_layer.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "../../kernels/cpu/sizes.hpp"

namespace tiermoe::core {
namespace {

constexpr std::int64_t kKeptPairs = 1 << 12;  // whose rows have the same memory in each pass

}  // namespace

CpuLayer::CpuLayer(Core& core, std::int64_t index, std::int64_t experts, const Experts& run, const KernelTable& kernels,
                   CpuLayers& all)
    : Layer(core, {index, experts, run.neurons, run.max_rows}, all), experts_(run), kernels_(kernels), all_(all), step_{step, this} {
    all_.sums.resize(std::max(all_.sums.size(), static_cast<std::size_t>(kSumRows * run.width)));
}

const float* CpuLayer::scores(const Given& given, Router router) {
    const LinearRouter& of = routers_[static_cast<std::size_t>(router)];
    all_.scores.resize(static_cast<std::size_t>(given.tokens * of.outputs));
    kernels_.router_scores(given.hidden, given.tokens, of.weight, experts_.width, of.outputs, of.bias, of.soft, all_.scores.data());
    return all_.scores.data();
}

void CpuLayer::compute(const Given& given, const Routed& routed) {
    const std::int64_t pairs = given.tokens * routed.top_k;
    const auto size = static_cast<std::size_t>(pairs * experts_.width);
    std::unique_ptr<float[]> own;  // prompts' memory is not kept
    if (pairs > kKeptPairs) {
        own.reset(new float[size]);
    } else if (all_.y.size() < size) {
        all_.y.resize(size);
    }
    float* const y = own ? own.get() : all_.y.data();
    if (holes()) std::fill_n(y, size, 0.0f);
    const auto timing = [this](auto&& compute) {
        const double began_s = timed_s();
        compute();
        kernels_s() += timed_s() - began_s;
    };
    while (next()) {
        const std::vector<Group>* few = &picked_.found();
        if (routed.large || !picked_.replicas.empty()) {
            few_.clear(), many_.clear();
            for (const Group& g : picked_.found()) (g.stop - g.start > place().max_rows ? many_ : few_).push_back(g);
            few = &few_;
            if (!many_.empty() || !picked_.replicas.empty()) {
                if (!parts_) throw std::invalid_argument("experts of many rows, and replicas, are for kernels of Python, which this layer lacks");
                parts_->kernels(*this, many_, picked_.replicas, y);
            }
        }
        timing([&] {
            experts_.run(given.hidden, picked_.order.data(), few->data(), static_cast<std::int64_t>(few->size()), routed.top_k, y,
                         all_.sums.data());
        });
    }
    timing([&] { kernels_.combine(y, routed.weights, given.tokens, routed.top_k, experts_.width, given.out); });
    added();
}

bool CpuLayer::step(void* self, const Given& given, Spent& spent) {
    CpuLayer& layer = *static_cast<CpuLayer*>(self);
    try {
        layer.run(given);
        spent = layer.spent();
        return true;
    } catch (const abi::__forced_unwind&) {  // the thread ends: nobody may stop it
        throw;
    } catch (...) {
        layer.failure_ = std::current_exception();
        return false;
    }
}

}  // namespace tiermoe::core
