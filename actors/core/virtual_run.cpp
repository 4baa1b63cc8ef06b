#include "virtual_run.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "ahead.hpp"

namespace tiermoe::core {

VirtualRun::VirtualRun(Core& core, VirtualLink& link, Clock& clock, const Costs& costs) : of_(link, clock, costs) {
    for (std::int64_t i = 0; i < core.layout().layers; ++i) layers_.push_back(std::make_unique<VirtualLayer>(core, i, of_));
}

void VirtualRun::forward(const Recorded& recorded, const ByScores* scores, const std::shared_ptr<Placement>& placement,
                         const Calls& calls) {
    struct Placing {  // of this forward alone: no collector sees what a placement holds of Python
        std::vector<std::unique_ptr<VirtualLayer>>& layers;
        void by(const std::shared_ptr<Placement>& placement) const {
            for (auto& layer : layers) layer->placement(placement);
        }
        ~Placing() { by(nullptr); }
    } placing{layers_};
    placing.by(placement);
    of_.passes.drop();
    of_.recorded = &recorded, of_.scores = scores, of_.calls = &calls, of_.part = nullptr;
    const std::int64_t pairs = recorded.tokens * recorded.top_k;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        of_.compute(recorded.dense_s);
        const std::int64_t* ids = recorded.ids + static_cast<std::int64_t>(i) * pairs;
        layers_[i]->run({nullptr, ids, nullptr, recorded.tokens, recorded.top_k, nullptr});
        if (calls.ran) calls.ran(static_cast<std::int64_t>(i));
    }
}

void VirtualRun::run(std::int64_t layer, std::int64_t tokens, const Part& part) {
    const Calls none;
    of_.recorded = nullptr, of_.scores = nullptr, of_.calls = &none, of_.part = &part;
    layers_.at(static_cast<std::size_t>(layer))->run({nullptr, nullptr, nullptr, tokens, 1, nullptr});
}

void VirtualLayer::kernels(std::int64_t first, std::int64_t stop) {
    const Layout& layout = core_.layout();
    const Segments& run = core_.present().run;
    const Costs& costs = of_.costs;
    const auto experts = [&costs](std::int64_t count, std::int64_t rows) {
        return static_cast<double>(count) * costs.expert_s + static_cast<double>(rows - count) * costs.expert_row_s;
    };
    const auto rows = [&](std::int64_t i) { return picked_.rows(run[i] % layout.experts); };
    if (layout.split && layout.units[run[first]] != costs.neurons) {  // a layer's experts are all split, or none
        double seconds = 0.0;
        for (std::int64_t i = first; i < stop; ++i)
            seconds += experts(1, rows(i)) * (static_cast<double>(layout.units[run[i]]) / static_cast<double>(costs.neurons));
        return of_.compute(seconds);
    }
    std::int64_t count[2] = {0, 0}, pairs[2] = {0, 0};  // of replicas, which run first, and of whole experts
    for (std::int64_t i = first; i < stop; ++i) {
        const bool whole = layout.split || run[i] < layout.keys();
        ++count[whole];
        pairs[whole] += rows(i);
    }
    for (const int kind : {0, 1})
        if (count[kind]) of_.compute(experts(count[kind], pairs[kind]));
}

void VirtualLayer::prefetch(const ByScores& scores) {
    const Recorded& recorded = *of_.recorded;
    const std::int64_t layer = place().index, layers = core_.layout().layers, experts = core_.layout().experts;
    const bool wraps = scores.wraps && layer + 1 == layers;
    const std::int64_t first = wraps ? 0 : layer + 1, stop = wraps ? 1 : std::min(first + scores.distance, layers);
    const bool allowed = core_.governor().allows();
    if (!scores.always) {
        if (!allowed || first >= stop) return;
        if (!scores.synchronous && core_.there(first * experts, stop * experts)) return;
    }
    const auto read = [&](std::int64_t distance, std::int64_t t, std::vector<double>& row) {
        std::fill(row.begin(), row.end(), -std::numeric_limits<double>::infinity());
        if (wraps) t = recorded.last_rows[static_cast<std::size_t>(t)];
        const std::int64_t at = ((t * layers + layer) * recorded.distances + distance) * recorded.picks;
        for (std::int64_t k = 0; k < recorded.picks; ++k)
            row.at(static_cast<std::size_t>(recorded.next_ids[at + k])) = recorded.next_scores[at + k];
    };
    RouterPrefetch ahead{scores.by_votes, scores.top, scores.source, {}, {}};
    const std::int64_t tokens = wraps ? static_cast<std::int64_t>(recorded.last_rows.size()) : recorded.tokens;
    if (tokens && (allowed || of_.passes.records))
        ahead.run(core_, first, std::min(stop - first, recorded.distances), tokens, allowed, read,
                  of_.passes.records ? &best_ : nullptr);
    if (scores.synchronous && allowed) core_.finish_prefetch(ahead.nearer, layer);
}

void VirtualLayer::route(const Given& given, Routed& routed) {
    routed.picked = &picked_;
    routing_ = &routed;
    if (of_.part) {
        picked_.expect(of_.part->experts.data(), static_cast<std::int64_t>(of_.part->experts.size()));
        if (!picked_.take(of_.part->experts, of_.part->counts, key(0))) throw std::invalid_argument("experts come once, with a count each");
        return;
    }
    const std::int64_t* ids = given.ids;
    std::int64_t pairs = given.tokens * given.top_k;
    std::optional<Rerouted> rerouted;
    if (of_.calls->rule) rerouted = of_.calls->rule(place().index);
    if (rerouted) {
        if (placement_) throw Broken("a layer that a native placement decides is not rerouted");
        ids = rerouted->pairs.data(), pairs = static_cast<std::int64_t>(rerouted->pairs.size());
        routed.low = std::move(rerouted->low);
    }
    picked_.expect(ids, pairs);
    picked_.sort(ids, given.tokens, pairs, pairs, key(0));
    if (placement_) {  // which counts the rows of sequences
        picked_.place();
        picked_.group(ids, pairs);
    }
}

const Segments& VirtualLayer::here(const Segments& needed) {
    const Calls& calls = *of_.calls;
    sent_ = nullptr;
    if (of_.part) keep_ = of_.part->keep;
    if (placement_) {
        if (calls.show) calls.show(place().index);
        placed_ = true;
        const Segments& here = placement_->where(*this, *routing_, needed, keep_);
        if (!placement_->away().empty()) sent_ = &placement_->away();
        return here;
    }
    if (!calls.place) return needed;
    where_ = calls.place(place().index, needed, picked_);
    if (!where_.away.empty()) sent_ = &where_.away;
    keep_ = where_.keep;
    return where_.here;
}

void VirtualLayer::load() {
    if (sent_) of_.calls->send(place().index, *sent_, picked_);
    core_.load();
}

void VirtualLayer::look_ahead(const Given&) {
    if (of_.scores) prefetch(*of_.scores);
    if (of_.calls->ahead) of_.calls->ahead(place().index);
}

void VirtualLayer::compute(const Given&, const Routed&) {
    const Plan& plan = core_.present();
    const std::int64_t submitted = of_.link.submitted_bytes();
    double host_s = static_cast<double>(submitted - of_.submitted) * of_.costs.load_byte_s;  // of prefetches, too
    if (plan.resident < static_cast<std::int64_t>(plan.run.size())) host_s += of_.costs.miss_s;
    of_.submitted = submitted;
    if (host_s != 0) of_.clock.now_s += host_s;
    while (true) {
        const auto [first, stop] = core_.next();
        if (first == stop) break;
        kernels(first, stop);
    }
    if (sent_) std::tie(peer_blocked_s_, peer_link_s_) = of_.calls->join(place().index);
}

}  // namespace tiermoe::core
