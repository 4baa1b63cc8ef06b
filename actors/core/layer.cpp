#include "layer.hpp"

#include <algorithm>
#include <stdexcept>

#include "../../kernels/cpu/sizes.hpp"

namespace tiermoe::core {

Layer::Layer(Core& core, const Place& place, Passes& passes) : core_(core), picked_(place.experts), at_(place), passes_(passes) {
    if (place.index < 0 || place.index >= core.layout().layers || place.experts != core.layout().experts)
        throw std::invalid_argument("there is no such layer");
    if (core.layout().split == core.layout().first_unit.empty()) throw std::invalid_argument("segments have places in the pool");
    passes_.experts = place.experts;
}

void Layer::route(const Given& given, Routed& routed) {
    if (given.tokens < 0 || given.top_k < 1 || !product_fits({given.tokens, given.top_k}, kMostItems))
        throw std::invalid_argument("a pass has rows, and experts of each");
    picked_.expect(given.ids, given.tokens * given.top_k, partial ? kNowhere : 0);
    if (!rules_.empty()) rules_[first_of(rules_)]->apply(*this, given, routed);
    const std::int64_t pairs = given.tokens * routed.top_k;
    if (routed.ids != given.ids) picked_.expect(routed.ids, pairs);
    routed.large = !picked_.sort(routed.ids, given.tokens, pairs, at_.max_rows, key(0));
    picked_.place();
    picked_.group(routed.ids, pairs);
    routed.picked = &picked_;
}

const Segments& Layer::here(const Segments& needed) {
    const bool watched = parts_ && parts_->watched;
    if (!placement_) return watched || planned() ? parts_->place(*this, needed, keep_, away_) : needed;
    if (watched) parts_->routed(*this);
    placed_ = true;
    const double began_s = timed_s();
    const Segments& found = placement_->where(*this, *routed_, needed, keep_);
    placed_s_ = timed_s() - began_s;
    away_ = !placement_->away().empty();
    return found;
}

LayerAhead* Layer::taking(const Given& given) const {
    for (std::size_t i = first_of(aheads_); i < aheads_.size(); ++i)
        if (aheads_[i]->takes(*this, given)) return aheads_[i].get();
    return nullptr;
}

Scored Layer::scored(const Given& given, Router router) {
    const std::int64_t outputs = this->outputs(router), experts = at_.experts;
    return {given.tokens, [from = scores(given, router), outputs, experts](std::int64_t at, std::int64_t t, std::vector<double>& row) {
        row.assign(from + t * outputs + at * experts, from + t * outputs + (at + 1) * experts);
    }};
}

bool Layer::next() {
    while (true) {
        const auto [first, stop] = stretch();
        if (first != stop) {
            routed_->picked->groups(core_, first, stop, at_.neurons);
            return true;
        }
        if (!away_) return false;
        const Segments lost = parts_->lost();
        if (lost.empty()) return false;
        core_.arrive();  // background copies of these may have begun since the layer did
        core_.plan(core_.segments_of(lost), {});
        core_.begin();
        load();
    }
}

void Layer::run(const Given& given) {
    if (routed_) throw Broken("a pass runs within one of the same layer");
    core_.arrive(at_.index);
    Routed routed{given.ids, given.weights, given.top_k, given.tokens};
    given_ = &given, routed_ = &routed;
    struct Over {
        Layer& of;
        ~Over() {
            of.given_ = nullptr, of.routed_ = nullptr;
            if (of.parts_) of.parts_->over();
        }
    } over{*this};
    const double& blocked_s = core_.counts()[at_.index].blocked_io_s;
    const double began_s = passes_.records ? core_.link().now_s() : 0.0, waited_s = blocked_s;
    spent_ = Spent{};
    best_.clear();
    keep_.clear();
    away_ = placed_ = false;
    peer_blocked_s_ = peer_link_s_ = placed_s_ = 0.0;
    route(given, routed);
    const Picked& picked = *routed.picked;
    try {
        core_.plan(here(core_.open(at_.index, picked.keys, picked.counts, routed.tokens, routed.low)), keep_);
        core_.begin();
        if (away_) parts_->send(*this);
        load();
        if (placed_) placement_->loaded(*this);
        if (LayerAhead* ahead = taking(given)) ahead->run(*this, given, best_);
        compute(given, routed);
        core_.close(peer_blocked_s_, peer_link_s_);
        if (placed_) placement_->ran(*this);
    } catch (...) {
        core_.abandon();
        throw;
    }
    core_.rerouted(routed.substituted, routed.dropped);
    spent_.waited_s = blocked_s - waited_s;
    if (passes_.records) {
        Passed& passed = passes_.add();
        passed.layer = at_.index;
        passed.tokens = routed.tokens;
        passed.keys.assign(picked.keys.begin(), picked.keys.end());
        passed.counts.assign(picked.counts.begin(), picked.counts.end());
        passed.began_s = began_s;
        passed.ended_s = core_.link().now_s();
        passed.waited_s = spent_.waited_s;
        passed.scores.assign(best_.begin(), best_.end());
    }
    if (parts_) parts_->ran();
}

void AskRouters::run(Layer& layer, const Given& given, std::vector<double>& best) {
    if (of->rests) return;
    Core& core = layer.core();
    const bool allowed = core.governor().allows();
    if (of->idle(core, reach, allowed)) return;
    if (whole() && core.stream(prefetch.source)) return;
    const Scored scored = layer.scored(given, router);
    prefetch.run(core, first, layers, scored.rows, allowed, scored.read, best);
    if (of->waits && allowed) core.finish_prefetch(prefetch.nearer, layer.place().index);
}

}  // namespace tiermoe::core
