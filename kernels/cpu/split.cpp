#include "split.hpp"

#include <algorithm>
#include <utility>

#include "dense.hpp"
#include "rank.hpp"

namespace tiermoe {

Split::Split(Loads& loads, SplitOrder& order, std::uint8_t* marks)
    : loads_(loads), order_(order), marks_(marks), counts_(static_cast<std::size_t>(order.layers())) {}

bool Split::plan(SplitPass& of) {
    if (!loads_.flights().empty()) {
        if (!loads_.land_ended(of.index)) return false;
        loads_.drop_stale(of.index, of.counts.data());
        for (std::int64_t key : loads_.take_dropped()) {
            order_.removed(key);
            if (const std::uint8_t source = std::exchange(marks_[key], std::uint8_t{0})) {
                ++judged_.wasted;
                ++sources_[source].cancelled;
            }
        }
    }
    const std::int64_t whole = loads_.whole();
    std::vector<std::int64_t> by[3];
    for (std::int64_t expert : of.used)
        for (std::int64_t key : {of.key(expert), whole + of.key(expert)})
            if (loads_.units(key)) by[2 - static_cast<int>(loads_.state(key))].push_back(key);
    of.resident = static_cast<std::int64_t>(by[0].size());
    of.arriving = static_cast<std::int64_t>(by[1].size());
    of.run = std::move(by[0]);
    for (int i : {1, 2}) of.run.insert(of.run.end(), by[i].begin(), by[i].end());
    of.loads = std::move(by[2]);
    of.victims.clear();
    of.turns.clear();
    if (!make_room(of, of.index) || !make_room(of, order_.layers())) return false;
    std::sort(of.turns.begin(), of.turns.end(), [](const Turn& a, const Turn& b) { return a.after < b.after; });
    for (const Turn& turn : of.turns)
        of.loads.erase(std::find(of.loads.begin(), of.loads.end(), of.run[turn.at]));
    return true;
}

// Victims for the missing segments of a slot class and, where they are too few, turns on the class's own segments. False:
// a copy under way would have to go, or there is no slot at all.
bool Split::make_room(SplitPass& of, std::int64_t slot_class) const {
    const auto used = [&](std::int64_t key) { return loads_.layer_of(key) == of.index && of.counts[key % of.experts]; };
    std::vector<std::size_t> own;
    std::int64_t lacking = -loads_.free_slots(slot_class);
    for (std::size_t i = 0; i < of.run.size(); ++i)
        if (loads_.class_of(of.run[i]) == slot_class) {
            own.push_back(i);
            lacking += loads_.state(of.run[i]) == SlotState::absent;
        }
    const auto going = order_.first(slot_class, lacking,
                                    [&](std::int64_t key) { return loads_.may_evict(key) && !used(key); });
    of.victims.insert(of.victims.end(), going.begin(), going.end());
    lacking -= static_cast<std::int64_t>(going.size());
    if (lacking <= 0) return true;
    for (const Flight& flight : loads_.flights())
        if (loads_.class_of(flight.key) == slot_class && !used(flight.key) && !loads_.pinned(flight.key)) return false;
    const std::size_t first = own.size() - static_cast<std::size_t>(lacking);
    for (std::size_t i = 0; first && first + i < own.size(); ++i) of.turns.push_back({own[i] + 1, own[first + i]});
    return first > 0;
}

bool Split::begin(SplitPass& of) {
    std::vector<std::int64_t> keys, counts;
    for (std::int64_t expert : of.used) {
        keys.push_back(of.key(expert));
        counts.push_back(of.counts[expert]);
    }
    order_.routed(of.index, keys.data(), counts.data(), static_cast<std::int64_t>(keys.size()), of.tokens);
    count(of);
    const auto here = static_cast<std::size_t>(of.resident + of.arriving);
    for (std::size_t i = 0; i < here; ++i) loads_.pin(of.run[i]);
    for (auto i = static_cast<std::size_t>(of.resident); i < here; ++i)
        if (const Flight* flight = loads_.flight(of.run[i]); flight && flight->prefetch) loads_.promote(*flight);
    return load(of, of.loads, of.victims);
}

bool Split::load(const SplitPass& of, const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& victims) {
    evicted(victims);
    const bool open = loads_.start(keys, victims, false);
    for (std::int64_t key : keys) {
        order_.admitted(key);
        loads_.pin(key);
        if (of.decode) counts_[of.index].demanded += loads_.units(key);
    }
    return open;
}

void Split::count(SplitPass& of) {
    SplitCounts& counts = counts_[of.index];
    const std::int64_t whole = loads_.whole();
    std::vector<std::uint8_t> lacking(static_cast<std::size_t>(of.experts)), prefetched(lacking), late(lacking);
    const auto resident = static_cast<std::size_t>(of.resident);
    for (std::size_t i = resident; i < of.run.size(); ++i) lacking[of.run[i] % of.experts] = 1;
    for (std::size_t i = 0; i < resident; ++i) {
        const std::int64_t key = of.run[i];
        counts.top_hits += key < whole && lacking[key % of.experts];
        if (const std::uint8_t source = std::exchange(marks_[key], std::uint8_t{0})) {
            prefetched[key % of.experts] = 1;
            ++judged_.used;
            ++sources_[source].hits;
        }
    }
    for (std::size_t i = resident; i < resident + static_cast<std::size_t>(of.arriving); ++i) {
        const std::int64_t key = of.run[i];
        const Flight* flight = loads_.flight(key);
        if (!flight || !flight->prefetch) continue;
        if (const std::uint8_t source = std::exchange(marks_[key], std::uint8_t{0})) ++sources_[source].late;
        ++judged_.used;
        late[key % of.experts] = 1;
    }
    ++counts.forwards;
    counts.waves += 1 + static_cast<std::int64_t>(of.turns.size());
    for (std::int64_t expert : of.used) {
        ++(lacking[expert] ? counts.misses : counts.hits);
        counts.prefetched_hits += prefetched[expert] && !lacking[expert];
        counts.late += late[expert];
    }
}

void Split::evicted(const std::vector<std::int64_t>& keys) {
    for (std::int64_t key : keys) {
        order_.removed(key);
        if (const std::uint8_t source = std::exchange(marks_[key], std::uint8_t{0})) {
            ++judged_.wasted;
            ++sources_[source].wasted;
            counts_[loads_.layer_of(key)].wasted += loads_.units(key);
        }
    }
}

bool Split::prefetch(SplitPass& of, const float* hidden) {
    const Probe& probe = of.probe;
    const auto experts = static_cast<std::size_t>(of.experts);
    std::vector<float> scores(static_cast<std::size_t>(of.tokens) * experts);
    const std::int64_t soft = probe.by_votes ? 0 : of.experts;
    router_scores(hidden, of.tokens, probe.weight, of.width, of.experts, probe.bias, soft, scores.data());
    Ranked found = rank_experts(of.tokens, of.experts, probe.top, probe.by_votes,
                                [&](std::int64_t t, std::vector<double>& row) {
                                    const float* from = scores.data() + static_cast<std::size_t>(t) * experts;
                                    row.assign(from, from + experts);
                                });
    if (!probe.by_votes) found = positive(std::move(found));
    of.scores.assign(found.best.begin(), found.best.end());
    std::vector<std::int64_t> keys;
    for (int expert : found.experts) keys.push_back(probe.layer * of.experts + expert);
    return queue(keys, probe.source);
}

// `ExpertCache.prefetch` of these experts of one layer.
bool Split::queue(const std::vector<std::int64_t>& experts, std::uint8_t source) {
    const std::int64_t whole = loads_.whole(), bottoms = order_.layers();
    std::vector<std::int64_t> absent, victims, fit;
    std::vector<std::uint8_t> kept(static_cast<std::size_t>(order_.experts()));
    const std::int64_t layer = experts.empty() ? 0 : experts.front() / order_.experts();
    for (std::int64_t expert : experts) {
        kept[expert % order_.experts()] = 1;
        for (std::int64_t key : {expert, whole + expert})
            if (loads_.units(key) && loads_.state(key) == SlotState::absent) absent.push_back(key);
    }
    const auto goes = [&](std::int64_t key) {
        return loads_.may_evict(key) && !(loads_.layer_of(key) == layer && kept[key % order_.experts()]);
    };
    for (std::int64_t slot_class : {layer, bottoms}) {
        std::int64_t room = loads_.free_slots(slot_class), wanted = 0;
        for (std::int64_t key : absent) wanted += loads_.class_of(key) == slot_class;
        const auto going = order_.first(slot_class, wanted - room, goes);
        room += static_cast<std::int64_t>(going.size());
        victims.insert(victims.end(), going.begin(), going.end());
        for (std::int64_t key : absent)
            if (loads_.class_of(key) == slot_class && room-- > 0) fit.push_back(key);
    }
    std::vector<std::int64_t> ordered;
    for (std::int64_t key : absent)
        if (std::find(fit.begin(), fit.end(), key) != fit.end()) ordered.push_back(key);
    if (ordered.empty()) return true;
    evicted(victims);
    for (std::int64_t key : ordered) {
        marks_[key] = source;
        order_.admitted(key);
    }
    sources_[source].queued += static_cast<std::int64_t>(ordered.size());
    return loads_.start(ordered, victims, true);
}

void Split::ready(SplitPass& of) {
    of.cancelled = false;
    of.copies.assign(of.run.size(), nullptr);
    of.groups.clear();
    std::vector<std::int64_t> place(static_cast<std::size_t>(of.experts), -1), slots;
    for (std::size_t i = 0; i < of.used.size(); ++i) place[of.used[i]] = static_cast<std::int64_t>(i);
    for (std::int64_t key : of.run) slots.push_back(loads_.slot(key));
    for (const Turn& turn : of.turns) slots[turn.at] = slots[turn.after - 1];
    std::vector<std::uint8_t> begun(static_cast<std::size_t>(of.experts));
    for (std::size_t i = 0; i < of.run.size(); ++i) {
        const std::int64_t key = of.run[i], expert = key % of.experts, at = place[expert];
        if (i >= static_cast<std::size_t>(of.resident))
            if (const Flight* flight = loads_.flight(key)) of.copies[i] = flight->copy;
        of.groups.push_back({of.starts[at], of.starts[at + 1], loads_.first_unit(slots[i]), loads_.units(key),
                             std::exchange(begun[expert], std::uint8_t{1}) != 0});
    }
    size_rows(of);
}

void Split::run(SplitPass& of, std::size_t at, std::size_t stop, const float* hidden, double (*now)()) {
    const std::size_t resident = std::min(stop, static_cast<std::size_t>(of.resident));
    const auto there = [&](std::size_t i) { return !of.copies[i] || of.copies[i]->state == Copy::done; };
    for (std::size_t end; at < stop; at = end) {
        if (of.copies[at]) of.waited_s += loads_.await(*of.copies[at]);
        if ((of.cancelled = !there(at))) return;
        end = at < resident ? resident : at + 1;
        if (at >= resident)
            while (end < stop && there(end)) ++end;
        const double start_s = now();
        run_groups(of, hidden, at, end);
        of.kernels_s += now() - start_s;
    }
}

void Split::combine(SplitPass& of, const float* weights, float* out, double (*now)()) {
    const double start_s = now();
    combine_f32(of.y.data(), weights, of.tokens, of.top_k, of.width, out);
    of.kernels_s += now() - start_s;
}

void Split::end(SplitPass& of, std::size_t at, std::size_t stop) {
    for (std::size_t i = at; i < stop; ++i) {
        if (of.copies[i]) loads_.land(of.run[i], of.index);
        loads_.unpin(of.run[i]);
        order_.used(of.run[i]);
    }
}

void Split::take(SplitPass& of, const Turn& turn) {
    load(of, {of.run[turn.at]}, {of.run[turn.after - 1]});
    of.copies[turn.at] = loads_.flight(of.run[turn.at])->copy;  // cancelled where the link is closed
}

}  // namespace tiermoe
