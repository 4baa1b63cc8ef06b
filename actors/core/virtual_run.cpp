#include "virtual_run.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "ahead.hpp"

namespace tiermoe::core {

VirtualRun::VirtualRun(Core& core, VirtualLink& link, Clock& clock, const Costs& costs) : of_(link, clock, costs) {
    for (std::int64_t i = 0; i < core.layout().layers; ++i) layers_.push_back(std::make_unique<VirtualLayer>(core, i, of_));
}

void VirtualRun::forward(const Recorded& recorded, const Segments& keep, const ByScores* scores, const Calls& calls) {
    of_.passes.drop();
    of_.recorded = &recorded, of_.keep = &keep, of_.scores = scores, of_.calls = &calls;
    const std::int64_t pairs = recorded.tokens * recorded.top_k;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        of_.compute(recorded.dense_s);
        const std::int64_t* ids = recorded.ids + static_cast<std::int64_t>(i) * pairs;
        layers_[i]->run({nullptr, ids, nullptr, recorded.tokens, recorded.top_k, nullptr});
        if (calls.ran) calls.ran(static_cast<std::int64_t>(i));
    }
}

void Virtual::compute(double seconds) {
    if (costs.share < 1)
        while (seconds > 0) {
            const double end_s = link.busy_until();
            if (end_s < 0) break;
            const double whole_s = seconds / costs.share, left_s = end_s - clock.now_s;
            const double beside_s = std::min(whole_s, left_s);
            clock.now_s = beside_s < whole_s ? end_s : clock.now_s + beside_s;
            seconds -= beside_s * costs.share;
        }
    if (seconds > 0) clock.now_s += seconds;
}

double VirtualLayer::kernels_of(std::int64_t first, std::int64_t stop) const {
    const Layout& layout = core_.layout();
    const Costs& costs = of_.costs;
    const auto experts = [&costs](std::int64_t count, std::int64_t rows) {
        return static_cast<double>(count) * costs.expert_s + static_cast<double>(rows - count) * costs.expert_row_s;
    };
    const auto rows = [&](std::int64_t i) { return picked_.rows(core_.present().run[i] % layout.experts); };
    if (!layout.split || layout.units[core_.present().run[first]] == costs.neurons) {
        std::int64_t pairs = 0;
        for (std::int64_t i = first; i < stop; ++i) pairs += rows(i);
        return experts(stop - first, pairs);
    }
    double seconds = 0.0;
    for (std::int64_t i = first; i < stop; ++i)
        seconds += experts(1, rows(i)) *
                   (static_cast<double>(layout.units[core_.present().run[i]]) / static_cast<double>(costs.neurons));
    return seconds;
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
    const std::int64_t pairs = given.tokens * given.top_k;
    picked_.expect(given.ids, pairs);
    picked_.sort(given.ids, given.tokens, pairs, pairs, key(0));
    routed.picked = &picked_;
}

const Segments& VirtualLayer::here(const Segments& needed) {
    keep_ = *of_.keep;
    if (of_.calls->routed) of_.calls->routed(place().index, picked_.experts, picked_.counts);
    return needed;
}

void VirtualLayer::look_ahead(const Given&) {
    if (of_.scores) {
        prefetch(*of_.scores);
    } else if (of_.calls->ahead) {
        of_.calls->ahead(place().index);
    }
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
        if (first == stop) return;
        of_.compute(kernels_of(first, stop));
    }
}

}  // namespace tiermoe::core
