#include "virtual_run.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "ahead.hpp"

namespace tiermoe::core {

void VirtualRun::forward(const Recorded& recorded, const Segments& keep, const ByScores* scores, const Calls& calls) {
    passes.drop();
    for (std::int64_t i = 0; i < core_.layout().layers; ++i) {
        try {
            layer(i, recorded, keep, scores, calls);
        } catch (...) {
            core_.abandon();
            throw;
        }
    }
}

// Kernels that take so long without a copy beside them.
void VirtualRun::compute(double seconds) {
    if (costs_.share < 1)
        while (seconds > 0) {
            const double end_s = link_.busy_until();
            if (end_s < 0) break;
            const double whole_s = seconds / costs_.share, left_s = end_s - clock_.now_s;
            const double beside_s = std::min(whole_s, left_s);
            clock_.now_s = beside_s < whole_s ? end_s : clock_.now_s + beside_s;
            seconds -= beside_s * costs_.share;
        }
    if (seconds > 0) clock_.now_s += seconds;
}

double VirtualRun::kernels(std::int64_t first, std::int64_t stop) const {
    const Layout& layout = core_.layout();
    const auto experts = [this](std::int64_t count, std::int64_t rows) {
        return static_cast<double>(count) * costs_.expert_s + static_cast<double>(rows - count) * costs_.expert_row_s;
    };
    const auto rows = [&](std::int64_t i) { return picked_.rows(core_.present().run[i] % layout.experts); };
    if (!layout.split || layout.units[core_.present().run[first]] == costs_.neurons) {
        std::int64_t pairs = 0;
        for (std::int64_t i = first; i < stop; ++i) pairs += rows(i);
        return experts(stop - first, pairs);
    }
    double seconds = 0.0;
    for (std::int64_t i = first; i < stop; ++i)
        seconds += experts(1, rows(i)) *
                   (static_cast<double>(layout.units[core_.present().run[i]]) / static_cast<double>(costs_.neurons));
    return seconds;
}

void VirtualRun::prefetch(std::int64_t layer, const Recorded& recorded, const ByScores& scores) {
    const std::int64_t layers = core_.layout().layers, experts = core_.layout().experts;
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
    if (tokens && (allowed || passes.records))
        ahead.run(core_, first, std::min(stop - first, recorded.distances), tokens, allowed, read,
                  passes.records ? &best_ : nullptr);
    if (scores.synchronous && allowed) core_.finish_prefetch(ahead.nearer, layer);
}

void VirtualRun::layer(std::int64_t layer, const Recorded& recorded, const Segments& keep, const ByScores* scores,
                       const Calls& calls) {
    compute(recorded.dense_s);
    core_.arrive(layer);
    const std::int64_t pairs = recorded.tokens * recorded.top_k;
    const std::int64_t* ids = recorded.ids + layer * pairs;
    picked_.expect(ids, pairs);
    picked_.sort(ids, recorded.tokens, pairs, pairs, layer * core_.layout().experts);
    const Segments& needed = core_.open(layer, picked_.keys, picked_.counts, recorded.tokens, {});
    const double& blocked_s = core_.counts()[static_cast<std::size_t>(layer)].blocked_io_s;
    const double began_s = clock_.now_s, waited_s = blocked_s;
    best_.clear();
    if (calls.routed) calls.routed(layer, picked_.experts, picked_.counts);
    const Plan& plan = core_.plan(needed, keep);
    const bool misses = plan.resident < static_cast<std::int64_t>(plan.run.size());
    core_.begin();
    core_.load();
    if (scores) {
        prefetch(layer, recorded, *scores);
    } else if (calls.ahead) {
        calls.ahead(layer);
    }
    double host_s = static_cast<double>(link_.submitted_bytes() - submitted_) * costs_.load_byte_s;  // of prefetches, too
    if (misses) host_s += costs_.miss_s;
    submitted_ = link_.submitted_bytes();
    if (host_s != 0) clock_.now_s += host_s;
    while (true) {
        const auto [first, stop] = core_.next();
        if (first == stop) break;
        compute(kernels(first, stop));
    }
    core_.close();
    if (passes.records)
        passes.add() = {layer, recorded.tokens, picked_.keys, picked_.counts, began_s, clock_.now_s,
                        std::max(0.0, blocked_s - waited_s), best_};
    if (calls.ran) calls.ran(layer);
}

}  // namespace tiermoe::core
