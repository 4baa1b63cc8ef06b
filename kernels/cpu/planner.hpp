// The planner of `auto`: what happens to each expert that a layer needs, and what the link copies in the background.
//
// The rule, its symbols and its sources are in actors/policies/auto.py. Pure: no clock, no device, no Python; equal calls
// give equal plans. All memory is taken by the constructor. Seconds throughout; an expert is its number in its layer, a
// key is layer * E + expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace tiermoe {

enum class Action : std::uint8_t { run_here = 0, wait = 1, load = 2, near_data = 3, owner = 4 };

// What was measured apart, by `saw`; `near` corrects near_s, `near_busy` near_busy_s, `near_mixed` both.
enum class Part : std::uint8_t { copy = 0, gpu = 1, near = 2, near_busy = 3, near_mixed = 4, message = 5, dense = 6, owner = 7 };

// What is at work in a layer beside the experts that are here: the link, near-data workers, both. Bit 0: the link copies.
enum class Source : std::uint8_t { here = 0, link = 1, near = 2, both = 3 };

// The rule that decodes follow: the planner's own, or with LRU on_demand: every miss over the link; fill: every miss near
// data, and copied behind; split: misses over the link and near data, so that the layer ends first.
enum class Follow : std::uint8_t { own = 0, on_demand = 1, fill = 2, split = 3 };

struct PlannerCosts {
    double copy_s;             // one expert over the link
    double gpu_s, gpu_row_s;   // one expert on the GPU: its first row, and each further one
    double near_s, near_busy_s;  // one expert on a near-data worker while the link is idle, and while it copies
    double free_rows;          // rows of an expert that a near-data worker computes in the time of one
    double message_s;          // one message with work for near-data workers and its answer
    double dense_s;            // a layer's dense part
    double beside = 1.0;       // an expert on the GPU takes so many times as long while near-data workers are at work
};

// Parts of the rule, for ablations; each bit set leaves one out.
enum class Without : std::uint32_t {
    future = 1, values = 2, learning = 4, background = 8, prefetch = 16, residents = 32, correction = 64,
    admission = 128, price = 256, refusal = 512, split = 1024, shadows = 2048,
};

struct Wanted {  // a background copy: of a miss that was computed near data, or of a prompt's next layer
    std::int32_t key;
    std::int32_t victim;  // -1: its layer has a free slot
    double worth_s;
};

// The GPUs that needed experts belong to: [n] each.
struct Owners {
    const std::uint8_t* gpus;  // 0: this one
    const std::uint8_t* held;  // whether it has a slot there; of other GPUs
};

struct Planned {
    double end_s = 0.0;    // when the layer ends, in the caller's time
    double near_s = 0.0;   // of the near-data workers' work, without the message
    double link_s = 0.0;   // when the last demand copy ends
    double owner_s = 0.0;  // until the last other GPU has answered; 0: none is asked
    int loads = 0, near_count = 0, waits = 0;
};

class Planner {
  public:
    static constexpr int kPool = 24, kFeatures = 6, kMaxWorkers = 64, kMaxOwners = 256;
    static constexpr double kDiscount = 0.9;       // gamma: worth of a use one token later
    static constexpr double kKept = 1.0;           // share of a request for which a load of its prompt counts
    static constexpr double kFast = 0.7, kSlow = 0.93;
    static constexpr double kStep = 0.1;           // exponent of a correction of costs, and weight of a seen layer
    static constexpr double kDoubt = 0.5;          // a source is charged this share of its mean error
    // Tries of a source: after so many layers without it, for so much of the time. Each one that finds it as slow as
    // expected doubles the former and halves the latter, at most kRarest times.
    static constexpr int kUnused = 64, kRarest = 5;
    static constexpr double kTries = 0.01;
    // Layers of a try (link, near data, owners), and of one that finds its source faster than expected. One copy says what
    // copies take; a process that was not asked for a while answers late at first.
    static constexpr int kFirst[3] = {1, 4, 4}, kBurst = 16;
    static constexpr double kForgets = 0.02;         // of what is known of a source, for each layer that did without it
    static constexpr double kPromptStep = 0.25;      // weight of a seen layer of a prompt
    static constexpr double kMostSlower = 4.0;       // a layer of a prompt, against its parts; a pause says little
    static constexpr int kDisplaced = 12;            // residents whose worth is compared with what a layer loads
    // Shadows: means of about kWindow tokens, compared every kJudged tokens; the own rule is left for one that has saved
    // kMargin tokens' time. What is known of the own rule is of kOwnWindow tokens that followed it, and fades by kFades at each
    // comparison, so it is tried again, after kTrusted tokens of another rule at the earliest.
    static constexpr int kShadows = 3, kWindow = 64, kOwnWindow = 128, kJudged = 8, kTrusted = 24;
    static constexpr double kMargin = 2.0, kFades = 0.995;
    static constexpr double kLoaded = 0.25;  // of S: what the rule `split` gains by a load
    static constexpr double kRest = 0.5;     // of a request's remaining tokens: those for which its average of use holds
    static constexpr std::uint8_t kLoading = 1, kResident = 2;  // SlotState; 3: staged, here but outside the slots

    // states: [L * E], the caller's, read only: absent 0, loading 1, resident 2, staged 3.
    Planner(int layers, int experts, int top_k, int slots, int workers, const PlannerCosts& costs,
            const std::uint8_t* states, std::uint32_t without)
        : layers_(layers), experts_(experts), slots_(slots), workers_(workers), without_(without), costs_(costs),
          states_(states), fast_(keys(), double(top_k) / experts), slow_(fast_), request_(fast_), popular_(fast_), fresh_(keys(), 0.0),
          value_(keys(), double(top_k) / experts / (1 - kDiscount)), last_(keys(), -1000),
          shadows_{Shadow(keys()), Shadow(keys()), Shadow(keys())},
          saved_(static_cast<std::size_t>(layers), std::min(costs.near_s, costs.copy_s)), missed_(saved_.size(), 0), pooled_(keys(), 0), foreign_(keys(), 0),
          need_(static_cast<std::size_t>(experts), 0), chance_(static_cast<std::size_t>(experts), 0.0),
          share_(static_cast<std::size_t>(experts), 0.0), misses_(static_cast<std::size_t>(experts)),
          hits_(misses_.size()), flights_(misses_.size()), sorted_(misses_.size()), away_(misses_.size()), ranked_(misses_.size()),
          span_(static_cast<std::size_t>(experts) + 1), order_(misses_.size()),
          wanted_(std::max<std::size_t>(kPool, misses_.size())) {
        const double rest = 1 / (1 - kDiscount);
        const double start[kFeatures] = {0.0, 0.0, 0.0, rest, 0.0, 0.0}, fixed[kFeatures] = {0.0, 1.5, 1.0, 7.0, 0.0, 0.0};
        for (int i = 0; i < kFeatures; ++i) {
            first_[i] = start[i];
            weights_[i] = off(Without::learning) ? fixed[i] : start[i];
            target_[i] = kPrior * start[i];
            for (int j = 0; j < kFeatures; ++j) system_[i][j] = i == j ? kPrior : 0.0;
        }
        held_.reserve(static_cast<std::size_t>(experts));
        if (off(Without::values)) std::fill(value_.begin(), value_.end(), 0.0);
    }

    int layers() const { return layers_; }
    int experts() const { return experts_; }
    int slots() const { return slots_; }
    const PlannerCosts& costs() const { return costs_; }
    const double* weights() const { return weights_; }
    double value(std::int32_t key) const { return value_[at(key)]; }
    const double* values() const { return value_.data(); }  // V [L * E], as the next calls change it
    double saved_s(int layer) const { return saved_[at(layer)]; }
    int wanted_count() const { return released_; }
    const Wanted& wanted(int i) const { return wanted_[at(i)]; }

    // Slots of a layer from now on; at most its experts.
    void resize(int slots) {
        slots_ = slots;
        for (Shadow& one : shadows_) std::fill(one.holds.begin(), one.holds.end(), 0);
    }

    // The rule that is followed, and seconds of a token, of late: as seen, and what a simple rule would have taken.
    Follow follows() const { return follows_; }
    double seen_token_s() const { return seen_rate_.mean(); }
    double shadow_token_s(Follow rule) const { return shadows_[static_cast<int>(rule) - 1].rate.mean(); }

    // Popularity from elsewhere: counts [L * E] of `tokens` tokens.
    void popularity(const std::int64_t* counts, double tokens, int top_k, int batch) {
        known_ = 200.0;
        const double prior = 20.0 * top_k / experts_;
        for (std::size_t k = 0; k < popular_.size(); ++k)
            popular_[k] = together(std::min(0.999, (static_cast<double>(counts[k]) + prior) / (tokens + 20.0)), batch);
    }

    // One action for each of the n needed experts; worker: of those near data, else 0. Afterwards `wanted` has the
    // background copies that may begin, in order, after the demand copies and before the next layer's plan.
    // flight_keys, arrival_s: copies under way. link_free_s: when the link can begin a demand copy. prompt_tokens: 0 in
    // decode; else the layer runs a prompt of so many tokens, from which nothing is learned and behind which nothing is
    // copied: a load is worth what `prompt_end` would keep it for. owners: null: all are of this GPU.
    // room: slots that a prompt's copies for the next layer may take, since they hold nothing of worth.
    Planned plan(int layer, int n, const std::int32_t* needed, const std::int32_t* rows, double now_s,
                 double link_free_s, int flights, const std::int32_t* flight_keys, const double* arrival_s,
                 std::uint8_t* action, std::uint8_t* worker, double prompt_tokens = 0.0, const Owners* owners = nullptr,
                 int room = 0) {
        const bool decode = !(prompt_tokens > 0);
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        planned_base_ = base;
        forget_pool(layer);
        released_ = 0;
        judged_ = false;
        plans_ += decode;
        int hits = 0, flying = 0, missing = 0, away = 0;
        double here_s = 0.0;  // of all hits on the GPU
        for (int i = 0; i < n; ++i) {
            const std::int32_t e = needed[i];
            worker[i] = 0;
            const std::uint8_t state = states_[base + e];
            const double gpu = costs_.gpu_s + (rows[i] - 1) * costs_.gpu_row_s;
            const double work = std::max(1.0, rows[i] / costs_.free_rows);
            foreign_[base + e] = owners && owners->gpus[i];
            if (owners && owners->gpus[i]) {
                action[i] = code(Action::owner);
                const double seconds = owner_ * (gpu + (owners->held[i] ? 0.0 : costs_.copy_s));
                away_[away++] = {i, owners->gpus[i], seconds, work, 0.0, 0.0};
                if (!owners->held[i]) away_[away - 1].value = decode ? value_if_used(base + e) : value_after_prompt(base + e, rows[i], prompt_tokens);
                continue;
            }
            need_[e] = 1;
            if (state >= kResident) {
                action[i] = code(Action::run_here);
                hits_[hits++] = {i, e, gpu, work, 0.0, 0.0};
                here_s += gpu;
            } else if (state == kLoading) {
                action[i] = code(Action::wait);
                double arrives = std::max(now_s, link_free_s);
                for (int f = 0; f < flights; ++f)
                    if (flight_keys[f] == static_cast<std::int32_t>(base) + e) arrives = arrival_s[f];
                flights_[flying++] = {i, e, gpu, work, 0.0, arrives};
            } else {
                action[i] = code(Action::load);
                misses_[missing++] = {i, e, gpu, work, 0.0, 0.0};
                misses_[missing - 1].value = decode ? value_if_used(base + e) : value_after_prompt(base + e, rows[i], prompt_tokens);
            }
        }
        const double saved = saved_[at(layer)];
        sort_misses(missing, saved);
        std::sort(flights_.begin(), flights_.begin() + flying, [](const Need& a, const Need& b) {
            return a.arrives_s != b.arrives_s ? a.arrives_s < b.arrives_s : a.at < b.at;
        });
        if (decode) displaced(layer, std::max(1, missing));
        else displaced_by_prompt(layer, n, needed, rows, prompt_tokens);
        const double least = decode ? share_[0] : 0.0;
        const double filled = off(Without::background) || !decode ? 0.0 : std::min(1.0, done_ / std::max(asked_, 1e-6));
        const double kept = decode ? 1.0 : std::max(1.0, kKept * length_ * (1 - kDiscount));
        const double link0 = std::max(now_s, link_free_s), start = now_s + costs_.message_s;

        // how many copies under way to wait for, and how many misses to load
        const bool busy = link0 > now_s;  // with copies for other layers
        Split best[4];  // without misses, by the link alone, near data alone, by both
        for (int w = flying; w >= 0; --w) {
            if (w < flying && off(Without::refusal)) break;
            if (w < flying - 4 && w > 0) continue;  // the far copies one by one, or none
            fill_spans(missing, flying, w);
            double gpu = now_s + here_s, link = link0, gain = 0.0, runs = here_s;
            for (int i = 0; i < w; ++i) gpu = std::max(gpu, flights_[i].arrives_s) + flights_[i].gpu_s, runs += flights_[i].gpu_s;
            for (int k = 0; k <= missing; ++k) {
                if (k) {
                    if (off(Without::split) && workers_) break;
                    const Need& m = misses_[k - 1];
                    link += costs_.copy_s;
                    gpu = std::max(gpu, link) + m.gpu_s;
                    runs += m.gpu_s;
                    if (decode && follows_ == Follow::split) gain += kLoaded * saved;
                    else if (!off(Without::future) && !(decode && follows_ != Follow::own)) gain += (1 - filled) * kept * saved * more_worth(m.value, share_[k - 1], decode);
                }
                if (span_[k] > 0 && (!workers_ || (decode && follows_ == Follow::on_demand))) continue;
                if (decode && follows_ == Follow::fill && k + w > 0) continue;
                const double near = span_[k] > 0 ? near_end(start, span_[k], link) : now_s;
                const Source by = source(span_[k] > 0, busy || k + w);
                const double parts = std::max(gpu + (span_[k] > 0 ? beside_s(runs) : 0.0), near);
                const double end = (decode ? parts + charge(by) : now_s + (parts - now_s) * slower(by)) - gain;
                if (Split& found = best[(k + w > 0) + 2 * (span_[k] > 0)]; end < found.end) found = {end, k, w};
            }
        }
        const Split& chosen = best[choose(best, now_s, decode)];
        const int loads = chosen.loads, waits = chosen.waits;
        // carry it out
        Planned out;
        out.loads = loads, out.waits = waits;
        double gpu = now_s + here_s, link = link0;
        for (int i = 0; i < waits; ++i) gpu = std::max(gpu, flights_[i].arrives_s) + flights_[i].gpu_s;
        // the GPU's end with h fewer hits: max(now + here - .., tail) in closed form
        double after = 0.0, tail = 0.0;  // tail: the latest arrival with what follows it
        for (int i = 0; i < waits; ++i) tail = std::max(tail, flights_[i].arrives_s) + flights_[i].gpu_s, after += flights_[i].gpu_s;
        for (int i = 0; i < loads; ++i) {
            link += costs_.copy_s;
            gpu = std::max(gpu, link) + misses_[i].gpu_s;
            tail = std::max(tail, link) + misses_[i].gpu_s;
            after += misses_[i].gpu_s;
        }
        std::fill(load_, load_ + std::max(1, workers_), 0.0);
        double span = 0.0;
        for (int i = waits; i < flying; ++i) span = std::max(span, give(flights_[i], action, worker)), ++out.near_count;
        for (int i = missing - 1; i >= loads; --i) span = std::max(span, give(misses_[i], action, worker)), ++out.near_count;
        const double demand = link;
        if (away) run_away(away, now_s, start, demand, gpu, saved, least, kept, decode, busy || loads + waits, span, action, worker, out);
        if (span > 0) gpu += beside_s(here_s + after);
        double near = span > 0 ? near_end(start, span, demand) : now_s;
        const double others = now_s + out.owner_s;
        const double plain = std::max({gpu, near, others});  // without background copies
        const bool near_last = span > 0 && near >= std::max(gpu, others);
        Source by = source(span > 0, busy || loads + waits);

        // V looks ten tokens ahead; the request's average tells of the rest of the request
        const double rest = kRest * std::max(0.0, length_ - static_cast<double>(since_));
        const double rarest = decode && rest > 0 && missing > loads ? use_of_worst(base) : 1.0;
        for (int i = loads; decode && i < missing; ++i) {
            double more = misses_[i].value - least;
            if (more > 0) more = std::max(more, rest * (request_[base + misses_[i].expert] - rarest));
            const double x = saved * more;
            if (follows_ == Follow::fill) pool_newest({static_cast<std::int32_t>(base) + misses_[i].expert, -1, 0.0});
            if (x <= 0 || follows_ != Follow::own) continue;
            asked_ += 0.01;
            if (!off(Without::background)) pool({static_cast<std::int32_t>(base) + misses_[i].expert, -1, x});
        }
        const double next = plain + offset(by) + costs_.dense_s;
        // those that may begin before the next layer's plan, if worth the wait that they may cause
        double t = demand, was = plain;
        const double slow = 1 - costs_.near_s / costs_.near_busy_s;
        int began = 0;
        while (decode && began < pool_count_ && t < next) {
            const double over = std::max(0.0, t + costs_.copy_s - next);
            // the first one lets the link copy in a layer in which it was idle
            const Source then = source(span > 0, true);
            double end = was, price = began ? 0.0 : std::max(0.0, offset(then) - offset(by));
            if (span > 0) end = std::max({gpu, near_end(start, span, demand, demand, t + costs_.copy_s), others});
            if (off(Without::price) || follows_ == Follow::fill) price = 0.0;
            else price += end - was + over * (loads_ * costs_.near_s / (costs_.near_s + costs_.copy_s) + last_near_ * slow);
            if (pool_[began].worth_s < price) break;
            t += costs_.copy_s;
            was = end;
            ++began;
        }
        int moved = 0;
        // last: residents to the near-data workers, while that ends the layer sooner under this link
        if (workers_ && !off(Without::residents) && hits && !(decode && follows_ != Follow::own)) {
            std::sort(hits_.begin(), hits_.begin() + hits, [&](const Need& a, const Need& b) {
                const double x = a.work * costs_.near_s - a.gpu_s, y = b.work * costs_.near_s - b.gpu_s;
                return x != y ? x < y : a.at < b.at;
            });
            double left = here_s;
            // the first one brings a message to a layer that had none
            const double more_s = span > 0 ? 0.0 : std::max(0.0, charge(source(true, busy || loads + waits)) - charge(by));
            int& h = moved;
            for (; h < hits; ++h) {
                const int to = least_loaded();
                const double more = std::max(span, load_[to] + hits_[h].work);
                const double runs = left - hits_[h].gpu_s + after, on_gpu = std::max(now_s + runs, tail) + beside_s(runs);
                const double end = std::max({on_gpu, near_end(start, more, demand, demand, t), others});
                if (end + more_s >= was) break;
                give(hits_[h], action, worker);
                left -= hits_[h].gpu_s;
                span = more, was = end, gpu = on_gpu;
                ++out.near_count;
            }
            here_s = left;
        }
        for (int i = 0; i < began; ++i) released(i, layer);
        if (!decode) {
            const double rest_s = between(layer, now_s, prompt_tokens);
            if (layer + 1 < layers_ && !off(Without::prefetch))
                t = stream(layer + 1, hits, flying, missing, room, rest_s, gpu, others, start, span, demand);
        }

        near = span > 0 ? near_end(start, span, demand, demand, t) : now_s;
        by = source(span > 0, busy || loads + waits + released_);
        planned_ = by, decodes_ = decode, here_s_ = std::max(gpu, others) - now_s, near_s_ = near - now_s;
        out.end_s = decode ? std::max(now_s, now_s + modelled_s() + offset(by)) : now_s + modelled_s() * slower(by);
        out.near_s = span > 0 ? near - start : 0.0;
        out.link_s = demand;
        expected_s_ = out.end_s - now_s;

        if (decode && !since_ && starts_) {  // from here on every rule begins with the same residents
            for (Shadow& one : shadows_)
                for (int e = 0; e < experts_; ++e) one.holds[base + e] = states_[base + e] >= kResident;
            filling_ = 0, link_s_ = 0.0;
        }
        alone_ &= !owners;
        if (decode && alone_) run_shadows(base, n, needed, rows);
        if (!decode) {
            prompt_layer_ = layer, prompt_end_s_ = out.end_s;
            for (int i = 0; i < n; ++i) need_[needed[i]] = 0;
            return out;
        }
        // S: what one more resident would have saved here
        if (missing) {
            const double end = std::max({gpu, span > 0 ? near_end(start, span, demand) : now_s, others});
            const double less = std::max(others, one_less(missing, flying, waits, moved, now_s, link0, start, here_s));
            const double step = std::max(0.05, 1.0 / (1 + ++missed_[at(layer)]));
            saved_[at(layer)] += step * (std::max(0.0, end - less) - saved_[at(layer)]);
        }
        // shares of the time, not of the layers: a copy meets long layers more often
        const double took = expected_s_ + costs_.dense_s;
        layer_s_ += 0.02 * (took - layer_s_);
        const double weight = 0.02 * std::min(10.0, took / std::max(layer_s_, 1e-12));
        last_near_ += weight * ((near_last ? 1.0 : 0.0) - last_near_);
        loads_ += weight * (std::min(loads, 1) - loads_);
        asked_ *= 0.99;
        done_ *= 0.99;
        for (int i = 0; i < n; ++i) need_[needed[i]] = 0;
        return out;
    }

    // A background copy of a miss has ended.
    void filled() { done_ += 0.01; }

    // The layer has run.
    void used(int layer, int n, const std::int32_t* needed) {
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        for (int i = 0; i < n; ++i) need_[needed[i]] = 1;
        const bool learn = since_ > 0 && !off(Without::learning) && !off(Without::values);
        if (learn) remember(base);
        double *f = &fast_[base], *s = &slow_[base], *q = &request_[base], *p = &popular_[base], *g = &fresh_[base], *v = &value_[base];
        const double *u = need_.data(), by_request = 1 / (80.0 + since_), by_all = 1 / (steps_ + known_);
        const double w0 = weights_[0], w1 = weights_[1], w2 = weights_[2], w3 = weights_[3], w4 = weights_[4], w5 = weights_[5];
        for (int e = 0; e < experts_; ++e) {
            p[e] += (u[e] - p[e]) * by_all;
            f[e] = kFast * f[e] + (1 - kFast) * u[e];
            s[e] = kSlow * s[e] + (1 - kSlow) * u[e];
            q[e] += (u[e] - q[e]) * by_request;
            g[e] = need_[e] > 0 ? 1.0 : kDiscount * g[e];
            v[e] = w0 + w1 * f[e] + w2 * s[e] + w3 * q[e] + w4 * p[e] + w5 * g[e];
        }
        if (learn) accumulate(base);
        for (int i = 0; i < n; ++i) last_[base + needed[i]] = steps_;
        if (off(Without::values) || follows_ != Follow::own)
            for (int e = 0; e < experts_; ++e) v[e] = recent(base + e);
        for (int i = 0; i < n; ++i) need_[needed[i]] = 0;
        if (layer == layers_ - 1) end_token();
    }

    // Prompts of `requests` requests have run; from now on `batch` decode. counts [L * E]: uses in their `tokens` rows.
    // From here on V is what the prompts say of each expert.
    void prompt_end(const std::int64_t* counts, double tokens, int requests, int batch) {
        forget_pool();
        if (since_) length_ += 0.2 * (static_cast<double>(since_) - length_);
        since_ = 0;
        starts_ = requests == batch;
        if (starts_) changed();
        const double others = double(batch - requests) / batch;
        for (int l = 0; l < layers_; ++l) {
            const std::size_t base = static_cast<std::size_t>(l) * experts_;
            for (int e = 0; e < experts_; ++e) {
                const std::size_t k = base + e;
                const double one = use_after_prompt(k, static_cast<double>(counts[k]), tokens, requests, batch);
                const double use = others > 0 ? 1 - (1 - one) * (1 - others * request_[k]) : one;
                fast_[k] = slow_[k] = request_[k] = use;
                fresh_[k] = 0.0;
                if (counts[k] > 0)  // as long ago as it is used every so many tokens
                    last_[k] = std::max<std::int64_t>(last_[k], steps_ - std::max(1L, std::lround(tokens / static_cast<double>(counts[k]))));
                value_[k] = follows_ != Follow::own ? recent(k) : dot(use, use, use, popular_[k], 0.0);
                if (off(Without::values)) {
                    last_[k] = steps_ - std::min(40L, std::max(1L, std::lround(1 / std::max(use, 0.02))));
                    value_[k] = recent(k);
                }
            }
        }
    }

    enum class Admission { free_slot, instead, refused };
    // Whether an expert that is here, or arrives, takes a slot, after `used`; victim: whose.
    Admission admit(std::int32_t key, std::int32_t& victim) const {
        const int layer = key / experts_;
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        int count = 0, worst = -1;
        double least = std::numeric_limits<double>::infinity();
        for (int e = 0; e < experts_; ++e)
            if (states_[base + e] == kResident && (++count, value_[base + e] < least)) least = value_[base + e], worst = e;
        if (count < slots_) return Admission::free_slot;
        if (worst < 0) return Admission::refused;  // there are no slots
        victim = static_cast<std::int32_t>(base) + worst;
        return off(Without::admission) || value_[at(key)] > least ? Admission::instead : Admission::refused;
    }

    // Correct a cost by what was seen of it, where so much was expected: by (seen / expected)^step. What is seen first
    // weighs more than what follows, since a probe may have met a busy machine.
    void saw(Part part, double expected_s, double seen_s) {
        if (off(Without::correction) || !(expected_s > 0) || !(seen_s > 0)) return;
        const double ratio = seen_s / expected_s;
        // `took` is told what this does not explain
        if (part == Part::near || part == Part::near_busy || part == Part::near_mixed || part == Part::message) near_s_ += seen_s - expected_s;
        const int count = ++counts_[static_cast<int>(part)];
        const double x = std::pow(std::min(10.0, std::max(0.1, ratio)), std::max(kStep, 1.0 / (1 + count)));
        if (part == Part::copy) costs_.copy_s *= x;
        if (part == Part::message) costs_.message_s *= x;
        if (part == Part::near) costs_.near_s *= x;
        if (part == Part::near_busy || part == Part::near_mixed) costs_.near_busy_s *= x;
        if (part == Part::near) costs_.near_busy_s = std::max(costs_.near_busy_s, costs_.near_s);
        if (part == Part::near_busy || part == Part::near_mixed) costs_.near_s = std::min(costs_.near_s, costs_.near_busy_s);
        if (part == Part::owner) owner_ *= x;
        if (part == Part::gpu) costs_.gpu_s *= x, costs_.gpu_row_s *= x;
        if (part == Part::dense) costs_.dense_s *= x;
    }

    // The last planned layer took so long, from its plan to its end; after `saw` of its parts. What they do not explain is
    // its source's: of a decode seconds, of a prompt, whose layers differ by their rows, a share of the time. A prompt's
    // layer that ends sooner says nothing: a GPU's work may be queued still.
    void took(double seen_s) {
        if (!decodes_) {
            if (off(Without::correction) || !(modelled_s() > 0)) return;
            for (Slower& one : slower_) {
                if (&one != &slower_[static_cast<int>(planned_)]) one.by += kForgets * (1.0 - one.by);
                else one.by += std::max(kPromptStep, 1.0 / ++one.layers) * (std::clamp(seen_s / modelled_s(), 1.0, kMostSlower) - one.by);
            }
            return;
        }
        seen_rate_.layers_s += seen_s;
        for (Shadow& one : shadows_) one.rate.layers_s += std::exchange(one.layer_s, 0.0);
        expected_sum_ = 0.999 * expected_sum_ + seen_s;
        error_sum_ = 0.999 * error_sum_ + std::abs(seen_s - expected_s_);
        if (off(Without::correction)) return;
        if (judged_) faster_ |= expected_s_ - seen_s >= loss_s_ / 2;  // at most half of what it was expected to lose
        judged_ = false;
        Seen& seen = seen_[static_cast<int>(planned_)];
        const double error = seen_s - modelled_s() - seen.offset_s, step = std::max(kStep, 1.0 / (seen.layers += 1));
        // a pause of the host says little
        const double most = seen.layers > 8 ? 4 * seen.spread_s + 0.1 * seen_s : std::abs(error);
        seen.offset_s += step * std::min(most, std::max(-most, error));
        seen.spread_s += step * (std::min(most, std::abs(error)) - seen.spread_s);
        // of near data alone and beside the link, the one that is not used forgets by how much it was worse
        if (planned_ == Source::here || planned_ == Source::link) return;
        Seen& other = seen_[static_cast<int>(planned_ == Source::near ? Source::both : Source::near)];
        other.offset_s -= kForgets * std::max(0.0, other.offset_s - seen.offset_s);
        other.spread_s -= kForgets * std::max(0.0, other.spread_s - seen.spread_s);
        other.layers *= 1 - kForgets;
    }
    // Mean error of the predicted time of a layer, as a share of the time.
    double error() const { return expected_sum_ > 0 ? error_sum_ / expected_sum_ : 0.0; }

    // When near-data work of `span` experts of one row, begun at t0, is done, if the link copies until busy_s, and again
    // from again_s to until_s.
    double near_end(double t0, double span, double busy_s) const {
        if (busy_s <= t0) return t0 + span * costs_.near_s;
        const double slow = (busy_s - t0) / costs_.near_busy_s;
        if (slow >= span) return t0 + span * costs_.near_busy_s;
        return busy_s + (span - slow) * costs_.near_s;
    }
    double near_end(double t0, double span, double busy_s, double again_s, double until_s) const {
        const double end = near_end(t0, span, busy_s);
        if (end <= again_s) return end;
        double done = 0.0;
        if (again_s > t0)
            done = std::max(0.0, std::min(busy_s, again_s) - t0) / costs_.near_busy_s +
                   std::max(0.0, again_s - std::max(busy_s, t0)) / costs_.near_s;
        return near_end(std::max(again_s, t0), span - done, until_s);
    }

  private:
    static constexpr double kPrior = 20.0, kPrompt = 16.0;  // weight of the first weights, and of popularity, in tokens
    struct Need { int at; std::int32_t expert; double gpu_s, work, value, arrives_s; };
    struct Ranked { double worth_s; int at; };

    std::size_t keys() const { return static_cast<std::size_t>(layers_) * static_cast<std::size_t>(experts_); }
    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    bool off(Without part) const { return (without_ & static_cast<std::uint32_t>(part)) != 0; }
    static std::uint8_t code(Action action) { return static_cast<std::uint8_t>(action); }
    struct Seen { double offset_s = 0.0, spread_s = 0.0, layers = 0.0; };
    struct Slower { double by = 1.0; int layers = 0; };
    static Source source(bool near, bool copies) { return static_cast<Source>(copies + 2 * near); }
    // Of a source; of near data beside the link, until both were at work, what is known of near data.
    const Seen& known(Source by) const {
        const Seen& found = seen_[static_cast<int>(by)];
        return by == Source::both && !(found.layers > 0) ? seen_[static_cast<int>(Source::near)] : found;
    }
    // Seconds that layers of a source took beyond their parts, on average.
    double offset(Source by) const { return known(by).offset_s; }
    // Its offset, and more the more it errs.
    double charge(Source by) const { return offset(by) + kDoubt * known(by).spread_s; }
    // Seconds more of experts on the GPU that run beside near-data work, since that takes cores or bandwidth.
    double beside_s(double runs_s) const { return (costs_.beside - 1.0) * runs_s; }
    // Seconds of the last planned layer by its parts.
    double modelled_s() const { return std::max({0.0, here_s_, near_s_}); }
    // How many times as long as their parts a prompt's layers of a source take.
    double slower(Source by) const { return slower_[static_cast<int>(by)].by; }
    struct Split { double end = std::numeric_limits<double>::infinity(); int loads = 0, waits = 0; };
    // The split of the least end; in a decode, of the source that is tried.
    int choose(const Split* of, double now_s, bool decode) {
        const auto least = [&](int a, int b) { return of[b].end < of[a].end ? b : a; };
        const int best = least(least(0, 1), least(2, 3));
        if (!decode || best == 0 || off(Without::correction)) return best;
        int found = best;
        for (int i = 0; i < 2; ++i) {
            const int with = i == 0 ? least(1, 3) : least(2, 3);
            const double loss = of[with].end - of[best].end;
            if (std::isfinite(loss) && tries(i, (best >> i) & 1, loss, std::max(0.0, of[best].end - now_s))) found = with;
        }
        return found;
    }
    // Whether a layer of a decode tries source i (link, near data, owners), though that is expected to end it `loss` later;
    // used: it is the best choice. Whether a try's layer ended sooner than expected says `took`.
    bool tries(int i, bool used, double loss, double took_s) {
        Tries& of = tries_[i];
        of.may_s = std::min(of.may_s + kTries * took_s / (1 << of.rarer), kUnused * took_s);
        if (trying_ >= 0 && trying_ != i && plans_ - asked_plan_ > kUnused) trying_ = -1;  // its source is gone
        if (trying_ == i) faster_ |= used, asked_plan_ = plans_;
        if (trying_ == i && tried_ >= (faster_ ? kBurst : kFirst[i])) {
            trying_ = -1;
            of.rarer = faster_ ? 0 : std::min(kRarest, of.rarer + 1);
        }
        of.unused = used ? 0 : of.unused + 1;
        if (trying_ < 0 && of.unused >= kUnused << of.rarer && loss <= of.may_s) trying_ = i, tried_ = 0, faster_ = false, asked_plan_ = plans_;
        if (trying_ != i) return false;
        ++tried_;
        of.unused = 0;
        of.may_s -= loss;
        judged_ = true, loss_s_ = loss;
        return true;
    }
    static double together(double p, int rows) { return rows == 1 ? p : 1 - std::pow(1 - p, rows); }
    double recent(std::size_t k) const { return std::pow(kDiscount, static_cast<double>(steps_ - last_[k])); }
    double dot(double f, double s, double q, double p, double g) const {
        return weights_[0] + weights_[1] * f + weights_[2] * s + weights_[3] * q + weights_[4] * p + weights_[5] * g;
    }
    // V of an expert once it has been used now.
    double value_if_used(std::size_t k) const {
        if (off(Without::values) || follows_ != Follow::own) return 1.0;
        const double q = request_[k], n = 80.0 + since_;
        return dot(kFast * fast_[k] + (1 - kFast), kSlow * slow_[k] + (1 - kSlow), q + (1 - q) / n, popular_[k], 1.0);
    }
    // Use of an expert in a decode step of the prompt's request, from its rows in the prompt and its popularity.
    double use_after_prompt(std::size_t k, double count, double tokens, int requests, int batch) const {
        const double alone = 1 - std::pow(1 - std::min(0.999, popular_[k]), 1.0 / batch);
        return together(std::min((count + kPrompt * requests * alone) / (tokens + kPrompt * requests), 0.99), requests);
    }
    double value_after_prompt(std::size_t k, double count, double tokens) const {
        const double use = use_after_prompt(k, count, tokens, 1, 1);
        return off(Without::values) ? use : dot(use, use, use, popular_[k], 0.0);
    }
    // Misses by what loading them is worth, then as they are needed. Ranks move, not the misses: a third of the time.
    void sort_misses(int missing, double saved) {
        for (int i = 0; i < missing; ++i) ranked_[i] = {misses_[i].value * saved + misses_[i].work * costs_.near_s, i};
        std::sort(ranked_.begin(), ranked_.begin() + missing, [](const Ranked& a, const Ranked& b) {
            return a.worth_s != b.worth_s ? a.worth_s > b.worth_s : a.at < b.at;
        });
        for (int i = 0; i < missing; ++i) sorted_[i] = misses_[ranked_[i].at];
        misses_.swap(sorted_);
    }
    // In share_: the V, least first, of what loads displace, one after the other, those needed now by their V after use;
    // free slots are 0. Exact for kDisplaced; what follows is as the last of these.
    void displaced(int layer, int loads) {
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        const int most = std::min(loads, kDisplaced);
        double v[kDisplaced + 1];
        int held = 0, count = 0;
        for (int e = 0; e < experts_; ++e) {
            if (states_[base + e] != kResident) continue;
            const double x = need_[e] ? value_if_used(base + e) : value_[base + e];
            ++held;
            if (count == most && x >= v[count - 1]) continue;
            int i = count < most ? count++ : count - 1;
            for (; i > 0 && v[i - 1] > x; --i) v[i] = v[i - 1];
            v[i] = x;
        }
        const int free = std::min(std::max(0, slots_ - held), loads);
        std::fill(share_.begin(), share_.begin() + free, 0.0);
        const double rest = held < loads && held == count ? std::numeric_limits<double>::infinity() : count ? v[count - 1] : 0.0;
        for (int i = free; i < loads; ++i) share_[i] = i - free < count ? v[i - free] : rest;
    }
    // In share_: the V, least first, of what the loads of a prompt displace, one after the other; free slots are 0.
    void displaced_by_prompt(int layer, int n, const std::int32_t* needed, const std::int32_t* rows, double tokens) {
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        std::fill(chance_.begin(), chance_.end(), 0.0);
        for (int i = 0; i < n; ++i) chance_[needed[i]] = rows[i];
        int held = 0;
        for (int e = 0; e < experts_ && held < slots_; ++e)
            if (states_[base + e] == kResident) share_[held++] = value_after_prompt(base + e, chance_[e], tokens);
        std::fill(share_.begin() + held, share_.begin() + slots_, 0.0);
        std::sort(share_.begin(), share_.begin() + slots_);
        std::fill(share_.begin() + slots_, share_.end(), std::numeric_limits<double>::infinity());
        std::fill(chance_.begin(), chance_.end(), 0.0);
    }
    // The request's average of use of the resident of least V that is not needed now; 1: there is none.
    double use_of_worst(std::size_t base) const {
        int worst = -1;
        for (int e = 0; e < experts_; ++e)
            if (states_[base + e] == kResident && !(need_[e] > 0) && (worst < 0 || value_[base + e] < value_[base + worst])) worst = e;
        return worst < 0 ? 1.0 : request_[base + worst];
    }

    // What a load gains later over the resident that it displaces. A decode's load takes that one's slot, whatever it was
    // worth, but for what only passes through since the layer needs more than its slots; a prompt's layers take turns.
    static double more_worth(double value, double displaced, bool decode) {
        return decode && std::isfinite(displaced) ? value - displaced : std::max(0.0, value - displaced);
    }

    // span_[k]: work of the busiest worker if the first k misses are loaded, the first w copies waited for, and the first
    // `moved` residents are near data, too.
    void fill_spans(int missing, int flying, int w, int moved = 0) {
        std::fill(load_, load_ + std::max(1, workers_), 0.0);
        double span = 0.0;
        const auto add = [&](double work) {
            double& load = load_[least_loaded()];
            load += work;
            span = std::max(span, load);
        };
        for (int i = 0; i < moved; ++i) add(hits_[i].work);
        for (int i = w; i < flying; ++i) add(flights_[i].work);
        span_[missing] = span;
        for (int k = missing - 1; k >= 0; --k) {
            add(misses_[k].work);
            span_[k] = span;
        }
    }
    int least_loaded() const {
        int found = 0;
        for (int i = 1; i < workers_; ++i)
            if (load_[i] < load_[found]) found = i;
        return found;
    }
    double give(const Need& m, std::uint8_t* action, std::uint8_t* worker) {
        const int to = least_loaded();
        action[m.at] = code(Action::near_data);
        worker[m.at] = static_cast<std::uint8_t>(to);
        return load_[to] += m.work;
    }
    // The experts of other GPUs: each on its owner, or near data. From the GPU that ends last one after the other goes near
    // data, those that it has to load first, then those of least work, while it ends there before its GPU would. So many
    // go as end the layer soonest, plus what those are worth later that their owners would have loaded. Sets `owner_s`;
    // span: of near data.
    void run_away(int away, double now_s, double start, double demand, double gpu, double saved, double least, double kept,
                  bool decode, bool copies, double& span, std::uint8_t* action, std::uint8_t* worker, Planned& out) {
        std::sort(away_.begin(), away_.begin() + away, [](const Need& a, const Need& b) {  // expert: its owner
            const double x = a.gpu_s / a.work, y = b.gpu_s / b.work;  // what it spares there for its work
            return a.expert != b.expert ? a.expert < b.expert : x != y ? x > y : a.at < b.at;
        });
        double before[kMaxWorkers];
        std::copy(load_, load_ + std::max(1, workers_), before);
        const double had = span;
        int best = 0;
        double least_end = std::numeric_limits<double>::infinity(), end_without = 0.0;
        // moves at most `most` of them; notes the best number
        const auto move = [&](int most) {
            std::copy(before, before + std::max(1, workers_), load_);
            span = had;
            int owners = 0, moved = 0;
            for (int i = 0; i < away; ++i) {
                if (!i || away_[i].expert != away_[i - 1].expert) owner_next_[owners] = i, owner_load_[owners++] = 0.0;
                owner_load_[owners - 1] += away_[i].gpu_s;
                owner_stop_[owners - 1] = i + 1;
                away_[i].arrives_s = 0.0;  // 1 + its near-data worker
            }
            for (double forgone = 0.0;; ++moved) {
                const int g = static_cast<int>(std::max_element(owner_load_, owner_load_ + owners) - owner_load_);
                out.owner_s = owner_load_[g] > 0 ? owner_ * costs_.message_s + owner_load_[g] : 0.0;
                const double others = now_s + out.owner_s;
                const double end = std::max({gpu, others, span > 0 ? near_end(start, span, demand) : now_s}) + forgone +
                                   (span > 0 && !(had > 0) ? std::max(0.0, charge(source(true, copies)) - charge(source(false, copies))) : 0.0);
                if (!moved) end_without = end;
                if (end < least_end) least_end = end, best = moved;
                if (!workers_ || moved == most || !(others > gpu)) break;
                Need& m = away_[owner_next_[g]];
                const int to = least_loaded();
                if (near_end(start, load_[to] + m.work, demand) >= others) break;
                span = std::max(span, load_[to] += m.work);
                m.arrives_s = 1 + to;
                if (!off(Without::future)) forgone += kept * saved * std::max(0.0, m.value - least);
                owner_load_[g] = ++owner_next_[g] == owner_stop_[g] ? 0.0 : owner_load_[g] - m.gpu_s;
            }
            return moved;
        };
        int moved = move(away);
        if (decode && best == away && !off(Without::correction)) {  // nothing would measure the owners
            if (tries(2, false, end_without - least_end, std::max(0.0, least_end - now_s))) best = 0;
        } else if (decode) {
            tries(2, true, 0.0, std::max(0.0, least_end - now_s));
        }
        if (moved != best) move(best);
        for (int i = 0; i < away; ++i) {
            if (away_[i].arrives_s == 0) continue;
            action[away_[i].at] = code(Action::near_data);
            worker[away_[i].at] = static_cast<std::uint8_t>(away_[i].arrives_s - 1);
        }
        out.near_count += best;
    }
    // The best end of this layer if the last of the misses had been resident.
    double one_less(int missing, int flying, int waits, int moved, double now_s, double link0, double start, double here_s) {
        const int count = missing - 1;
        fill_spans(count, flying, waits, moved);
        double runs = here_s + misses_[count].gpu_s, gpu = now_s + runs, link = link0, best = std::numeric_limits<double>::infinity();
        for (int i = 0; i < waits; ++i) gpu = std::max(gpu, flights_[i].arrives_s) + flights_[i].gpu_s, runs += flights_[i].gpu_s;
        for (int k = 0; k <= count; ++k) {
            if (k) {
                if (off(Without::split) && workers_) break;
                link += costs_.copy_s;
                gpu = std::max(gpu, link) + misses_[k - 1].gpu_s;
                runs += misses_[k - 1].gpu_s;
            }
            if (!workers_ && span_[k] > 0) continue;
            best = std::min(best, std::max(gpu + (span_[k] > 0 ? beside_s(runs) : 0.0), span_[k] > 0 ? near_end(start, span_[k], link) : now_s));
        }
        return best;
    }

    // -- shadows: what simple rules would have taken, on caches of their own

    // Of a rule, seconds of this token's layers so far; means of about kWindow tokens: all, and those since the last change;
    // and the sum over about kOwnWindow tokens that followed the own rule.
    struct Rate {
        double layers_s = 0.0, sum_s = 0.0, tokens = 0.0, since_s = 0.0, since = 0.0, own_s = 0.0;
        void token(bool own) {
            if (own) own_s = (1.0 - 1.0 / kOwnWindow) * own_s + layers_s;
            const double keeps = 1.0 - 1.0 / kWindow;
            sum_s = keeps * sum_s + layers_s, tokens = keeps * tokens + 1.0;
            since_s = keeps * since_s + layers_s, since = keeps * since + 1.0, layers_s = 0.0;
        }
        double mean() const { return tokens > 0 ? sum_s / tokens : 0.0; }
        double since_mean() const { return since > 0 ? since_s / since : 0.0; }
        void changed() { since_s = since = 0.0; }
    };
    struct Shadow {  // an LRU of each layer, whose stamps are `last_`
        explicit Shadow(std::size_t keys) : holds(keys, 0) {}
        std::vector<std::uint8_t> holds;  // [L * E]
        Rate rate;
        double layer_s = 0.0;             // of the last plan
    };
    // A layer of a decode on each shadow.
    void run_shadows(std::size_t base, int n, const std::int32_t* needed, const std::int32_t* rows) {
        for (const Follow rule : {Follow::on_demand, Follow::fill, Follow::split}) {
            Shadow& of = shadows_[static_cast<int>(rule) - 1];
            double here_s = 0.0, gpu_s = 0.0, work = 0.0;  // of hits; of one expert; near data
            int missing = 0;
            for (int i = 0; i < n; ++i) {
                gpu_s = costs_.gpu_s + (rows[i] - 1) * costs_.gpu_row_s;
                if (of.holds[base + needed[i]]) here_s += gpu_s;
                else work += std::max(1.0, rows[i] / costs_.free_rows), order_[at(missing++)] = needed[i];
            }
            int loads = rule == Follow::fill ? 0 : missing;
            double took_s = here_s;
            if (missing) {
                if (rule == Follow::fill)
                    for (int i = 0; i < missing; ++i) enqueue(static_cast<std::int32_t>(base) + order_[at(i)]);
                const double fills_s = rule == Follow::fill ? filling_ * costs_.copy_s - link_s_ : 0.0;
                const double gain_s = rule == Follow::split ? kLoaded * saved_[base / static_cast<std::size_t>(experts_)] : 0.0;
                double least = std::numeric_limits<double>::infinity();
                for (int k = rule == Follow::split ? 0 : loads, most = loads; k <= most; ++k) {
                    const double end = shadow_end(here_s, gpu_s, missing, k, work * (missing - k) / missing, fills_s);
                    if (end - k * gain_s < least) least = end - k * gain_s, took_s = end, loads = k;
                }
            }
            of.layer_s = took_s;
            for (int i = 0; i < loads; ++i) of.holds[base + order_[at(i)]] = 1;
            evict_oldest(of, base);
            if (rule == Follow::fill) copy_behind(of, took_s + costs_.dense_s);
        }
    }
    // When a layer ends that loads k of its misses, `work` of which is near data, while the link copies for fills_s.
    double shadow_end(double here_s, double gpu_s, int missing, int k, double work, double fills_s) const {
        if (k < missing && !workers_) return std::numeric_limits<double>::infinity();
        const double link_s = k ? k * costs_.copy_s : fills_s;
        const double runs = here_s + k * gpu_s;
        const double gpu = (k ? std::max(runs, link_s + gpu_s) : here_s) + (k < missing ? beside_s(runs) : 0.0);
        const double near = k < missing ? near_end(costs_.message_s, work / workers_, link_s) : 0.0;
        return std::max(gpu, near) + std::max(0.0, offset(source(k < missing, link_s > 0)));
    }
    void enqueue(std::int32_t key) {
        if (std::find(queue_, queue_ + filling_, key) != queue_ + filling_) return;
        if (filling_ == kPool) std::copy(queue_ + 2, queue_ + filling_--, queue_ + 1);  // the first one is under way
        queue_[filling_++] = key;
    }
    void copy_behind(Shadow& of, double seconds) {
        link_s_ = filling_ ? link_s_ + seconds : 0.0;
        int arrived = 0;
        for (; arrived < filling_ && link_s_ >= costs_.copy_s; ++arrived) {
            link_s_ -= costs_.copy_s;
            const int layer = queue_[arrived] / experts_;
            of.holds[at(queue_[arrived])] = 1;
            if (arrived + 1 == filling_ || link_s_ < costs_.copy_s || queue_[arrived + 1] / experts_ != layer)
                evict_oldest(of, at(layer * experts_));
        }
        filling_ -= arrived;
        if (!filling_) link_s_ = 0.0;  // it was idle
        std::copy(queue_ + arrived, queue_ + arrived + filling_, queue_);
    }
    void evict_oldest(Shadow& of, std::size_t base) {
        int held = 0;
        for (int e = 0; e < experts_; ++e) held += of.holds[base + e];
        if (held <= slots_) return;
        held_.clear();
        for (int e = 0; e < experts_; ++e)
            if (of.holds[base + e]) held_.emplace_back(last_use(base, e), e);
        const auto stay = held_.begin() + (held - slots_);
        std::nth_element(held_.begin(), stay - 1, held_.end());
        for (auto one = held_.begin(); one != stay; ++one) of.holds[base + one->second] = 0;
    }
    std::int64_t last_use(std::size_t base, int e) const {
        return base == planned_base_ && need_[at(e)] > 0 ? steps_ : last_[base + e];
    }
    // Every kJudged tokens: follow the rule that takes least, if it has saved kMargin tokens' time since the last change, and
    // pays for moving to its residents within kWindow tokens. While another rule is followed, the own one is put at so much of
    // the best shadow as it took when it was followed.
    void judge() {
        if (!(seen_rate_.layers_s > 0)) return;  // no layer was planned
        const bool own = follows_ == Follow::own, settles = settling_ > 0;
        seen_rate_.token(own);
        for (Shadow& one : shadows_) one.rate.token(own);
        if (settles) --settling_, changed();
        if (off(Without::shadows) || !workers_ || !alone_ || steps_ % kJudged != 0 || settles) return;
        const int now = static_cast<int>(follows_) - 1;
        const auto takes_s = [&](int i) { return own ? shadows_[i].rate.since_mean() : shadows_[i].rate.mean(); };
        int best = 0;
        double least_s = shadows_[0].rate.own_s;
        for (int i = 1; i < kShadows; ++i) {
            if (takes_s(i) < takes_s(best)) best = i;
            least_s = std::min(least_s, shadows_[i].rate.own_s);
        }
        const double tokens = own ? seen_rate_.since : kWindow;
        double now_s = own ? seen_rate_.since_mean() : takes_s(now);
        const double gain_s = now_s - takes_s(best);
        fade_ = own ? 1.0 : kFades * fade_;
        if (!own && seen_rate_.since >= kTrusted) {
            now_s *= std::max(1.0, seen_rate_.since_mean() / shadows_[now].rate.since_mean());
            if (fade_ * seen_rate_.own_s / least_s * takes_s(best) < now_s) return follow(Follow::own);
        }
        if (best != now && gain_s * tokens > kMargin * now_s && gain_s * kWindow > move_s(best)) follow(static_cast<Follow>(best + 1));
    }
    // Of the experts in use that a rule would hold: each is a miss once.
    double move_s(int shadow) const {
        int moves = 0;
        const std::vector<std::uint8_t>& holds = shadows_[shadow].holds;
        for (std::size_t k = 0; k < holds.size(); ++k) moves += holds[k] && states_[k] == 0 && steps_ - last_[k] <= kJudged;
        const bool on_link = static_cast<Follow>(shadow + 1) == Follow::on_demand;
        return moves * (on_link ? costs_.copy_s : std::min(costs_.copy_s, costs_.near_busy_s / workers_));
    }
    void follow(Follow rule) {
        follows_ = rule;
        settling_ = rule == Follow::own ? 0 : kJudged;
        changed();
        forget_pool();
        if (rule != Follow::own)  // else `used` does it, layer by layer
            for (std::size_t k = 0; k < value_.size(); ++k) value_[k] = recent(k);
    }
    void changed() {
        seen_rate_.changed();
        for (Shadow& one : shadows_) one.rate.changed();
    }

    // -- background copies: the best kPool, kept until their layer comes

    void forget_pool(int layer = -1) {
        int kept = 0;
        for (int i = 0; i < pool_count_; ++i) {
            const std::int32_t key = pool_[i].key;
            if (layer >= 0 && key / experts_ != layer && states_[at(key)] == 0) pool_[kept++] = pool_[i];
            else pooled_[at(key)] = 0;
        }
        pool_count_ = kept;
    }
    void pool(const Wanted& one) {
        if (pooled_[at(one.key)]) return;
        if (pool_count_ == kPool) {
            if (pool_[kPool - 1].worth_s >= one.worth_s) return;
            pooled_[at(pool_[--pool_count_].key)] = 0;
        }
        int i = pool_count_++;
        for (; i > 0 && pool_[i - 1].worth_s < one.worth_s; --i) pool_[i] = pool_[i - 1];
        pool_[i] = one;
        pooled_[at(one.key)] = 1;
    }
    // Behind those that are there; the oldest leaves a full pool.
    void pool_newest(const Wanted& one) {
        if (pooled_[at(one.key)]) return;
        if (pool_count_ == kPool) {
            pooled_[at(pool_[0].key)] = 0;
            std::copy(pool_ + 1, pool_ + pool_count_--, pool_);
        }
        pool_[pool_count_++] = one;
        pooled_[at(one.key)] = 1;
    }

    // -- prompts: a layer's experts are streamed ahead while the link would be idle

    // Seconds between a layer's end and the next one's plan in a prompt of so many tokens: dense parts grow with them.
    double between(int layer, double now_s, double tokens) {
        if (layer > 0 && prompt_layer_ == layer - 1) {
            const double each = std::max(0.0, now_s - prompt_end_s_) / tokens;
            prompt_dense_s_ += (prompt_dense_s_ > 0 ? 0.2 : 1.0) * (each - prompt_dense_s_);
        }
        return std::max(costs_.dense_s, prompt_dense_s_ * tokens);
    }
    // When a layer of a prompt ends after its plan if it has so many hits and misses, all alike, by the best split.
    double uniform_s(double hits, double missing, double gpu_s, double work) const {
        double best = std::numeric_limits<double>::infinity();
        const double workers = std::max(1, workers_);
        for (int k = 0; k <= missing + 0.999; ++k) {
            const double loads = std::min<double>(k, missing), rest = missing - loads;
            if (rest > 0 && !workers_) continue;
            if (rest > 0 && off(Without::split) && k) break;
            const double link = loads * costs_.copy_s;
            const double runs = (hits + loads) * gpu_s;
            const double gpu = std::max(runs, loads > 0 ? link + gpu_s : 0.0) + (rest > 0 ? beside_s(runs) : 0.0);
            const double near = rest > 0 ? near_end(costs_.message_s, std::max(1.0, rest / workers) * work, link) : 0.0;
            best = std::min(best, std::max(gpu, near));
        }
        return best;
    }
    // Where a prompt uses most experts, the next layer's are copied while this layer and the dense part run, as many as
    // come in time and find room, if the next layer ends so much sooner that it pays for what near data here loses.
    // Returns until when the link copies.
    double stream(int layer, int hits, int flying, int missing, int room, double rest_s, double gpu, double others,
                  double start, double span, double demand) {
        const int uses = hits + flying + missing;
        const double used = static_cast<double>(uses) / experts_;
        if (used <= 0.5) return demand;
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        int absent = 0;
        for (int e = 0; e < experts_; ++e)
            if (states_[base + e] == 0 && !foreign_[base + e]) order_[absent++] = e;
        double gpu_s = 0.0, work = 0.0;  // of an expert of this layer, on average
        for (const auto& [list, count] : {std::pair{&hits_, hits}, std::pair{&flights_, flying}, std::pair{&misses_, missing}})
            for (int i = 0; i < count; ++i) gpu_s += (*list)[at(i)].gpu_s / uses, work += (*list)[at(i)].work / uses;
        const auto ends = [&](double t) { return std::max({gpu, span > 0 ? near_end(start, span, t) : 0.0, others}); };
        const double plain = ends(demand), next = plain + rest_s;
        const int fit = static_cast<int>(std::min(static_cast<double>(absent), std::max(0.0, (next - demand) / costs_.copy_s)));
        const int copies = std::min(room, fit);
        if (copies < 1) return demand;
        const double until = demand + copies * costs_.copy_s;
        const double here = (experts_ - absent) * used, lacks = absent * used, come = copies * used;
        const double saves = uniform_s(here, lacks, gpu_s, work) - uniform_s(here + come, lacks - come, gpu_s, work);
        if (!(saves > ends(until) - plain)) return demand;
        const double* v = &value_[base];
        std::partial_sort(order_.begin(), order_.begin() + copies, order_.begin() + absent,
                          [v](std::int32_t a, std::int32_t b) { return v[a] != v[b] ? v[a] > v[b] : a < b; });
        for (int i = 0; i < copies; ++i)
            wanted_[at(released_++)] = {static_cast<std::int32_t>(base) + order_[at(i)], -1, saves / copies};
        return until;
    }

    // The i-th of the pool may begin: name its victim, another one than those before it.
    void released(int i, int current) {
        Wanted one = pool_[i];
        const int layer = one.key / experts_;
        const std::size_t base = static_cast<std::size_t>(layer) * experts_;
        int count = 0;
        double least = std::numeric_limits<double>::infinity();
        for (int e = 0; e < experts_; ++e) {
            if (states_[base + e] != kResident) continue;
            ++count;
            if (!(value_[base + e] < least) || (layer == current && need_[e])) continue;
            bool taken = false;
            for (int j = 0; j < released_; ++j) taken |= wanted_[at(j)].victim == static_cast<std::int32_t>(base) + e;
            if (!taken) least = value_[base + e], one.victim = static_cast<std::int32_t>(base) + e;
        }
        int coming = 0;
        for (int j = 0; j < released_; ++j) coming += wanted_[at(j)].key / experts_ == layer;
        if (count + coming < slots_) one.victim = -1;
        wanted_[at(released_++)] = one;
    }

    // -- the learned worth of being resident: least-squares temporal differences over averages of use

    void remember(std::size_t base) {
        sampled_ = 0;
        for (int e = static_cast<int>((4 - steps_ % 4) % 4); e < experts_; e += 4) {
            const std::size_t k = base + e;
            double* v = before_[sampled_++ % kSamples];
            v[0] = 1.0, v[1] = fast_[k], v[2] = slow_[k], v[3] = request_[k], v[4] = popular_[k], v[5] = fresh_[k];
        }
    }
    void accumulate(std::size_t base) {
        double add[kFeatures][kFeatures] = {}, to[kFeatures] = {};
        int i = 0;
        for (int e = static_cast<int>((4 - steps_ % 4) % 4); e < experts_; e += 4) {
            const std::size_t k = base + e;
            const double* v = before_[i++ % kSamples];
            const double d[kFeatures] = {v[0] - kDiscount, v[1] - kDiscount * fast_[k], v[2] - kDiscount * slow_[k],
                                         v[3] - kDiscount * request_[k], v[4] - kDiscount * popular_[k], v[5] - kDiscount * fresh_[k]};
            const double u = need_[e];
            for (int a = 0; a < kFeatures; ++a) {
                to[a] += v[a] * u;
                for (int b = 0; b < kFeatures; ++b) add[a][b] += v[a] * d[b];
            }
        }
        for (int a = 0; a < kFeatures; ++a) {
            target_[a] += to[a];
            for (int b = 0; b < kFeatures; ++b) system_[a][b] += add[a][b];
        }
    }
    void end_token() {
        if (steps_ % 4 == 3 && !off(Without::learning)) {
            solve();
            for (int a = 0; a < kFeatures; ++a) {
                target_[a] = 0.99 * target_[a] + 0.01 * kPrior * first_[a];
                for (int b = 0; b < kFeatures; ++b) system_[a][b] = 0.99 * system_[a][b] + (a == b ? 0.01 * kPrior : 0.0);
            }
        }
        ++steps_;
        ++since_;
        judge();
    }
    void solve() {  // weights_ = system_^-1 target_, by elimination with row exchange
        double m[kFeatures][kFeatures], x[kFeatures];
        std::copy(&system_[0][0], &system_[0][0] + kFeatures * kFeatures, &m[0][0]);
        std::copy(target_, target_ + kFeatures, x);
        for (int i = 0; i < kFeatures; ++i) {
            int p = i;
            for (int r = i + 1; r < kFeatures; ++r)
                if (std::abs(m[r][i]) > std::abs(m[p][i])) p = r;
            std::swap(x[i], x[p]);
            for (int k = 0; k < kFeatures; ++k) std::swap(m[i][k], m[p][k]);
            if (std::abs(m[i][i]) < 1e-12) return;
            for (int r = i + 1; r < kFeatures; ++r) {
                const double f = m[r][i] / m[i][i];
                for (int k = i; k < kFeatures; ++k) m[r][k] -= f * m[i][k];
                x[r] -= f * x[i];
            }
        }
        for (int i = kFeatures - 1; i >= 0; --i) {
            for (int k = i + 1; k < kFeatures; ++k) x[i] -= m[i][k] * x[k];
            x[i] /= m[i][i];
        }
        std::copy(x, x + kFeatures, weights_);
    }

    static constexpr int kSamples = 1024;  // a quarter of 4,096 experts
    int layers_, experts_, slots_, workers_;
    std::uint32_t without_;
    PlannerCosts costs_;
    const std::uint8_t* states_;
    std::vector<double> fast_, slow_, request_, popular_, fresh_, value_;  // [L * E]: phi, and V
    std::vector<std::int64_t> last_;                               // [L * E]: step of the last use
    Shadow shadows_[kShadows];  // by Follow - 1
    std::vector<double> saved_;                                    // [L]: S
    std::vector<int> missed_;                                      // [L]: decode layers with misses
    std::vector<std::uint8_t> pooled_, foreign_;                   // [L * E]; foreign: of another GPU when last needed
    std::vector<double> need_, chance_, share_;                    // [E]
    std::vector<Need> misses_, hits_, flights_, sorted_, away_;
    std::vector<Ranked> ranked_;
    std::vector<double> span_;
    std::vector<std::int32_t> order_;
    std::vector<std::pair<std::int64_t, int>> held_;  // [E]: of a shadow's layer, last use and expert
    Rate seen_rate_;
    Follow follows_ = Follow::own;
    bool alone_ = true;           // no expert was another GPU's: the shadows know one GPU
    bool starts_ = false;         // all that decode began with the last prompts
    int settling_ = 0;            // tokens until the residents are taken to be the followed rule's
    double fade_ = 1.0;           // of what is known of the own rule
    std::int32_t queue_[kPool];   // of the shadow that fills: copies that have not ended, and what the link did of them
    int filling_ = 0;
    double link_s_ = 0.0;
    std::size_t planned_base_ = 0;
    double load_[kMaxWorkers] = {};
    Wanted pool_[kPool];
    std::vector<Wanted> wanted_;
    int prompt_layer_ = -1;               // the last one of a prompt that was planned, and its expected end
    double prompt_end_s_ = 0.0, prompt_dense_s_ = 0.0;  // the dense part of a prompt's token
    int pool_count_ = 0, released_ = 0;
    double first_[kFeatures], weights_[kFeatures], target_[kFeatures], system_[kFeatures][kFeatures];
    double before_[kSamples][kFeatures];
    int sampled_ = 0;
    double known_ = 20.0, asked_ = 0.1, done_ = 0.05, last_near_ = 0.5, loads_ = 0.5, length_ = 64.0, layer_s_ = 0.0;
    std::int64_t steps_ = 0, since_ = 0;
    double expected_s_ = 0.0, expected_sum_ = 0.0, error_sum_ = 0.0;
    Seen seen_[4];                        // by Source, of decodes
    Slower slower_[4];                    // of prompts
    Source planned_ = Source::here;
    bool decodes_ = true;                 // the last plan is a decode's
    double here_s_ = 0.0, near_s_ = 0.0;  // of the last plan: until the GPUs and near data end, by their parts alone
    struct Tries { double may_s = 0.0; int unused = 0, rarer = 0; };  // may_s: what tries may still cost
    Tries tries_[3];                      // of link, near data, owners
    int trying_ = -1, tried_ = 0;         // the source that is tried, and for how many layers by now
    std::int64_t plans_ = 0, asked_plan_ = 0;  // layers of decodes, and the last one that could go on with the try
    bool judged_ = false, faster_ = false;  // the last plan is a try's; the try had a layer that ended sooner than expected
    double loss_s_ = 0.0;                 // what the last layer of a try was expected to lose
    double owner_ = 1.0;                  // seconds of a message to other GPUs and of their experts, over those expected
    double owner_load_[kMaxOwners] = {};  // of the other GPUs that this layer asks
    int owner_next_[kMaxOwners] = {}, owner_stop_[kMaxOwners] = {};
    int counts_[8] = {};                  // by Part: how often it was seen
};

}  // namespace tiermoe
