// The executor of recorded layers on a virtual clock: kernels let time pass, nothing is computed. A layer's pass is
// `Layer::run`.
#pragma once

#include <memory>
#include <vector>

#include "layer.hpp"
#include "virtual_link.hpp"

namespace tiermoe::core {

// Seconds of a machine (`cluster.simulate.machine.Machine`).
struct Costs {
    double expert_s, expert_row_s;  // of an expert's first row, and of each further one
    double share;                   // speed of kernels while a copy is under way
    double load_byte_s, miss_s;     // of the host: for each byte that is loaded, in a layer that misses
    std::int64_t neurons;           // of a whole expert, in the units of the layout
};

// A forward: ids [L, T, K] as picked, distinct in a row, and their weights, which rules read; null: there are no rules.
struct Recorded {
    const std::int64_t* ids;
    const float* weights;
    std::int64_t tokens, top_k;
    double dense_s;  // of a layer
    // what later routers pick on a layer's input [T, L, D, P]: experts, and their scores; null: not recorded
    const std::int64_t* next_ids;
    const double* next_scores;
    std::int64_t distances, picks;
    const Segments& last_rows;  // of which the last layer's next one, the first of the next forward, was recorded
};

// Rows of a layer that came in a message: experts, and the rows of each.
struct Part {
    const Segments &experts, &counts;
};

// What the layers of one device share: its clock and link, and what runs at present.
struct Virtual {
    Virtual(VirtualLink& link, Clock& clock, const Costs& costs) : link(link), clock(clock), costs(costs) {}
    void compute(double seconds) { link.compute(seconds, costs.share); }

    VirtualLink& link;
    Clock& clock;
    const Costs costs;
    std::int64_t submitted = 0;  // bytes whose loads the host has paid for
    Passes passes;
    // a forward, or a part of a layer
    const Recorded* recorded = nullptr;
    const Part* part = nullptr;
};

// The host's time, then kernels that let time pass.
class VirtualLayer : public Layer {
  public:
    VirtualLayer(Core& core, std::int64_t index, Virtual& of)
        : Layer(core, {index, core.layout().experts, of.costs.neurons, 0}, of.passes), of_(of) {}
    // Of so many later layers' recorded scores, or of a router whose scores Python finds.
    Router add(std::int64_t layers) { return routers_.push_back(layers * place().experts), routers() - 1; }
    Router routers() const override { return static_cast<Router>(routers_.size()); }
    std::int64_t outputs(Router router) const override { return routers_[static_cast<std::size_t>(router)]; }
    const float* scores(const Given& given, Router router) override {
        return parts_->scores(*this, router, given.tokens * outputs(router));
    }
    Scored scored(const Given& given, Router router) override;

  protected:
    void route(const Given& given, Routed& routed) override;
    void compute(const Given& given, const Routed& routed) override;

  private:
    void kernels();  // of a stretch of the plan

    Virtual& of_;
    std::vector<std::int64_t> routers_;
    Segments runs_;  // experts of the pairs that a rule has left
};

class VirtualRun {
  public:
    VirtualRun(Core& core, VirtualLink& link, Clock& clock, const Costs& costs);
    VirtualRun(const VirtualRun&) = delete;  // its layers refer to it

    const std::vector<std::unique_ptr<VirtualLayer>>& layers() const { return layers_; }
    Passes& passes() { return of_.passes; }
    void forward(const Recorded& recorded);
    // A layer's rows that another device has sent: `tokens` of them.
    void run(std::int64_t layer, std::int64_t tokens, const Part& part);

  private:
    Virtual of_;
    std::vector<std::unique_ptr<VirtualLayer>> layers_;
};

}  // namespace tiermoe::core
