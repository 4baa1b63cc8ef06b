// The executor of a layer on the CPU: runs the experts that it is given (`Experts`), and leaves those of more rows than they
// take, whose weights a matrix product reads once, and replicas of few bits to Python's kernels.
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include "layer.hpp"

namespace tiermoe::core {

// Linear, weight [outputs, width] and bias [outputs] or null. soft: each so many outputs become their softmax; 0: none.
struct LinearRouter {
    const float *weight, *bias;
    std::int64_t outputs, soft;
};

// What the layers of a cache share: memory of a pass, and the passes that have run.
class CpuLayers : public Passes {
  public:
    std::vector<float> y, sums, scores;
};

class CpuLayer : public Layer {
  public:
    // index, experts: as of `Place`.
    CpuLayer(Core& core, std::int64_t index, std::int64_t experts, const Experts& run, const KernelTable& kernels, CpuLayers& all);

    const LayerStep& step() const { return step_; }
    std::exception_ptr failure() { return std::exchange(failure_, nullptr); }
    Router add(const LinearRouter& router) { return routers_.push_back(router), routers() - 1; }
    Router routers() const override { return static_cast<Router>(routers_.size()); }
    std::int64_t outputs(Router router) const override { return routers_[static_cast<std::size_t>(router)].outputs; }
    const float* scores(const Given& given, Router router) override;

  protected:
    void compute(const Given& given, const Routed& routed) override;

  private:
    static bool step(void* self, const Given& given, Spent& spent);

    const Experts& experts_;
    const KernelTable kernels_;
    CpuLayers& all_;
    const LayerStep step_;
    std::vector<LinearRouter> routers_;
    std::vector<Group> few_, many_;  // of one stretch
    std::exception_ptr failure_;
};

}  // namespace tiermoe::core
