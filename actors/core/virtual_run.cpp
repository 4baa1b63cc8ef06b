#include "virtual_run.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tiermoe::core {

VirtualRun::VirtualRun(Core& core, VirtualLink& link, Clock& clock, const Costs& costs)
    : of_(link, clock, costs) {
    for (std::int64_t i = 0; i < core.layout().layers; ++i) layers_.push_back(std::make_unique<VirtualLayer>(core, i, of_));
}

void VirtualRun::forward(const Recorded& recorded) {
    of_.recorded = &recorded, of_.part = nullptr;
    const std::int64_t pairs = recorded.tokens * recorded.top_k;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        of_.compute(recorded.dense_s);
        const std::int64_t begin = static_cast<std::int64_t>(i) * pairs;
        const float* weights = recorded.weights ? recorded.weights + begin : nullptr;
        layers_[i]->run({nullptr, recorded.ids + begin, weights, recorded.tokens, recorded.top_k, nullptr});
    }
}

void VirtualRun::run(std::int64_t layer, std::int64_t tokens, const Part& part) {
    of_.recorded = nullptr, of_.part = &part;
    layers_.at(static_cast<std::size_t>(layer))->run({nullptr, nullptr, nullptr, tokens, 1, nullptr});
}

void VirtualLayer::kernels() {
    const Costs& costs = of_.costs;
    const std::vector<Group>& groups = picked_.found();
    const auto experts = [&costs](std::int64_t count, std::int64_t rows) {
        return static_cast<double>(count) * costs.expert_s + static_cast<double>(rows - count) * costs.expert_row_s;
    };
    const auto compute = [&](const std::vector<Group>& whole) {
        std::int64_t rows = 0;
        for (const Group& g : whole) rows += g.stop - g.start;
        if (!whole.empty()) of_.compute(experts(static_cast<std::int64_t>(whole.size()), rows));
    };
    compute(picked_.replicas);
    if (groups.empty() || groups[0].neurons == costs.neurons) return compute(groups);
    double seconds = 0.0;  // a layer's experts are all split, or none
    for (const Group& g : groups)
        seconds += experts(1, g.stop - g.start) * (static_cast<double>(g.neurons) / static_cast<double>(costs.neurons));
    of_.compute(seconds);
}

Scored VirtualLayer::scored(const Given& given, Router router) {
    const Recorded& recorded = *of_.recorded;
    if (recorded.distances * place().experts < outputs(router)) throw std::invalid_argument("a prefetch by scores needs recorded ones");
    const std::int64_t layer = place().index, layers = core_.layout().layers;
    const bool wraps = layer + 1 == layers;
    return {wraps ? static_cast<std::int64_t>(recorded.last_rows.size()) : given.tokens,
            [&recorded, layer, layers, experts = place().experts, wraps](std::int64_t distance, std::int64_t t, std::vector<double>& row) {
        row.assign(static_cast<std::size_t>(experts), -std::numeric_limits<double>::infinity());
        if (wraps) t = recorded.last_rows[static_cast<std::size_t>(t)];
        const std::int64_t at = ((t * layers + layer) * recorded.distances + distance) * recorded.picks;
        for (std::int64_t k = 0; k < recorded.picks; ++k)
            row.at(static_cast<std::size_t>(recorded.next_ids[at + k])) = recorded.next_scores[at + k];
    }};
}

void VirtualLayer::route(const Given& given, Routed& routed) {
    if (of_.part) {
        picked_.expect(of_.part->experts.data(), static_cast<std::int64_t>(of_.part->experts.size()));
        if (!picked_.take(of_.part->experts, of_.part->counts, key(0))) throw std::invalid_argument("experts come once, with a count each");
        routed.picked = &picked_;
        return;
    }
    Layer::route(given, routed);
    if (routed.weights == given.weights) return;
    runs_.clear();  // without the pairs that a rule has dropped, which take no time
    for (std::int64_t p = 0; p < given.tokens * routed.top_k; ++p)
        if (routed.weights[p] != 0.0f) runs_.push_back(routed.ids[p]);
    routed.ids = runs_.data();
    picked_.sort(routed.ids, given.tokens, static_cast<std::int64_t>(runs_.size()), 0, key(0));
    picked_.place();
    picked_.group(routed.ids, static_cast<std::int64_t>(runs_.size()));
}

void VirtualLayer::compute(const Given&, const Routed&) {
    const Plan& plan = core_.present();
    const std::int64_t submitted = of_.link.submitted_bytes();
    double host_s = static_cast<double>(submitted - of_.submitted) * of_.costs.load_byte_s;  // of prefetches, too
    if (plan.resident < static_cast<std::int64_t>(plan.run.size())) host_s += of_.costs.miss_s;
    of_.submitted = submitted;
    if (host_s != 0) of_.clock.now_s += host_s;
    while (next()) kernels();
    added();
}

}  // namespace tiermoe::core
