#include "layer.hpp"

#include <algorithm>
#include <stdexcept>

#include "../../kernels/cpu/sizes.hpp"

namespace tiermoe::core {

Layer::Layer(Core& core, const Place& place, Passes& passes)
    : core_(core), at_(place), passes_(passes), picked_(place.experts), place_(static_cast<std::size_t>(place.experts)),
      begun_(place_.size()) {
    if (place.index < 0 || place.index >= core.layout().layers || place.experts != core.layout().experts)
        throw std::invalid_argument("there is no such layer");
    if (core.layout().split == core.layout().first_unit.empty()) throw std::invalid_argument("segments have places in the pool");
    passes_.experts = place.experts;
}

// Pairs by expert. False: an expert has too many rows.
bool Layer::sort_pairs(std::int64_t tokens, const Routed& routed) {
    const std::int64_t pairs = tokens * routed.top_k;
    const std::int64_t* ids = routed.ids;
    if (!picked_.sort(ids, tokens, pairs, at_.max_rows, key(0))) return false;
    starts_.assign(1, 0);
    for (std::size_t i = 0; i < picked_.experts.size(); ++i) {
        place_[picked_.experts[i]] = static_cast<std::int64_t>(i);
        starts_.push_back(starts_.back() + picked_.counts[i]);
    }
    next_.assign(starts_.begin(), starts_.end() - 1);
    order_.resize(static_cast<std::size_t>(pairs));
    for (std::int64_t p = 0; p < pairs; ++p) order_[next_[place_[ids[p]]]++] = p;
    return true;
}

const std::vector<Group>& Layer::next() {
    const Layout& layout = core_.layout();
    const auto [first, stop] = core_.next();
    groups_.clear();
    for (std::int64_t i = first; i < stop; ++i) {
        const Segment s = core_.present().run[i];
        const std::int64_t expert = s % layout.keys() - key(0), at = place_[expert];
        const Slot slot = core_.slots()[s];
        const std::int64_t units = layout.split ? layout.units[s] : at_.neurons;
        const std::int64_t unit = layout.first_unit.empty() ? slot * at_.neurons : layout.first_unit[slot];
        groups_.push_back({starts_[at], starts_[at + 1], unit, units, std::exchange(begun_[expert], std::uint8_t{1}) != 0});
    }
    return groups_;
}

Stepped Layer::run(const Given& given, Asking asking) {
    const std::int64_t tokens = given.tokens;
    if (tokens < 1 || given.top_k < 1 || !product_fits({tokens, given.top_k}, at_.max_pairs)) return Stepped::left;
    picked_.expect(given.ids, tokens * given.top_k);
    core_.arrive(at_.index);
    Routed routed{given.ids, given.weights, given.top_k};
    if (!reroute(given, routed)) return Stepped::left;
    if (!sort_pairs(tokens, routed)) return Stepped::left;
    rerouted();
    const double& blocked_s = core_.counts()[at_.index].blocked_io_s;
    const double began_s = passes_.records ? core_.link().now_s() : 0.0, waited_s = blocked_s;
    spent_ = Spent{};
    best_.clear();
    std::fill(begun_.begin(), begun_.end(), std::uint8_t{0});
    try {
        core_.plan(core_.open(at_.index, picked_.keys, picked_.counts, tokens, {}), {});
        core_.begin();
        load();
        if (!look_ahead(given, asking) && hooks_) hooks_(given);
        compute(given, routed);
        core_.close();
    } catch (...) {
        core_.abandon();
        throw;
    }
    core_.rerouted(routed.substituted, routed.dropped);
    spent_.waited_s = blocked_s - waited_s;
    if (passes_.records) {
        Passed& passed = passes_.add();
        passed.layer = at_.index;
        passed.tokens = tokens;
        passed.keys.assign(picked_.keys.begin(), picked_.keys.end());
        passed.counts.assign(picked_.counts.begin(), picked_.counts.end());
        passed.began_s = began_s;
        passed.ended_s = core_.link().now_s();
        passed.waited_s = spent_.waited_s;
        passed.scores.assign(best_.begin(), best_.end());
    }
    return Stepped::ran;
}

}  // namespace tiermoe::core
