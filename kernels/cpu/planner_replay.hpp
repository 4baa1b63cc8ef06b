// Decode and prompts of recorded or synthetic routing on a stated machine: discrete events, with the planner itself or a
// rival's rule. For `tiermoe bench auto`; the rules are documented in benchmarks/auto_cells.py.
//
// One virtual clock. A layer begins when its routing is known (T0) and ends when the GPU and the near-data worker have;
// the next T0 is that end and the dense time. The link copies one expert at a time, is never interrupted, and takes
// demand before background; background copies that have not begun are decided again at every T0. A copy of the planner
// takes its victim's slot when it begins, and the planner is told no predictions, as in the engine. The experts that
// rivals load and prefetch pass through staging slots outside the budget, so a prefetch evicts nothing until it is used.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "planner.hpp"

namespace tiermoe {

enum class Rule : int { on_demand, next_gate, ktransformers, llama_cpp_cache, freetoken, hybrimoe, context_cpu, planner };

struct Routing {  // of `steps` decode steps of `batch` requests together, in rounds that each begin with prompts
    int layers, experts, top_k, batch, steps, rounds, widest, ranks, prompt_tokens;
    const std::int32_t *needed, *rows;  // [steps, layers, widest], the first `count` of each
    const std::int32_t* count;          // [steps, layers]
    const std::int32_t* predicted;      // [steps, layers, batch, ranks], by the router of the layer on the input before
    const float* share;                 // [steps, layers, experts]: `policies.auto.router_shares`
    const std::int64_t* prompts;        // [rounds, layers, experts]: uses in the prompts of each round
    const std::int64_t* popular;        // [layers, experts]: uses in other requests' `popular_tokens` tokens
    double popular_tokens;
};

struct Replayed {  // seconds of the counted rounds; experts by what happened to them; of the planner, its error
    double decode_s = 0, prompt_s = 0, error = 0;
    std::int64_t tokens = 0, prompts = 0, needed = 0, hits = 0, loads = 0, near = 0, waits = 0, fills = 0, prefetches = 0;
};

class Replay {
  public:
    // truth: the machine; belief: what the planner starts from. start: residents are chosen after each prompt.
    // planner_s: the planner's own time, before each layer. first: steps that are not counted.
    Replay(const Routing& routing, Rule rule, int slots, const PlannerCosts& truth, const PlannerCosts& belief,
           std::uint32_t without, bool start, double planner_s, int first)
        : r_(routing), rule_(rule), slots_(slots), c_(truth), start_(start), own_s_(rule == Rule::planner ? planner_s : 0.0),
          first_(first), n_(routing.layers * routing.experts), state_(at(n_), 0), held_(at(routing.layers) + 1, 0),
          next_(at(n_ + routing.layers + 1)), prev_(next_), last_(at(n_), -1), score_(at(n_), 0.0),
          action_(at(routing.experts)), worker_(at(routing.experts)),
          order_(at(routing.experts)), wanted_(at(routing.experts), 0),
          ids_(at(routing.experts)), counts_(at(routing.experts)),
          planner_(routing.layers, routing.experts, routing.top_k, slots, 1, belief, state_.data(), without) {
        for (int i = 0; i < n_ + r_.layers + 1; ++i) next_[at(i)] = prev_[at(i)] = i;
        if (rule_ == Rule::planner) planner_.popularity(r_.popular, r_.popular_tokens, r_.top_k, r_.batch);
        for (int l = 0; l < r_.layers; ++l) keep_most(l, r_.popular + at(l) * at(r_.experts));
    }

    Replayed run() {
        const int round = r_.steps / r_.rounds;
        for (int s = 0; s < r_.steps; ++s) {
            counted_ = s >= first_;
            if (s % round == 0) {
                const double begun = now_;
                prompt(r_.prompts + at(s / round) * at(n_));
                if (counted_) out_.prompt_s += now_ - begun, out_.prompts += r_.batch;
            }
            const double begun = now_;
            for (int l = 0; l < r_.layers; ++l) decode(s, l);
            if (counted_) out_.decode_s += now_ - begun, ++out_.tokens;
        }
        out_.error = planner_.error();
        return out_;
    }

  private:
    static constexpr std::uint8_t kAbsent = 0, kLoading = 1, kResident = 2, kStaged = 3;
    struct Queued { std::int32_t key; bool prefetch; std::int32_t victim = -1; };

    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    bool fixed() const { return rule_ == Rule::ktransformers || rule_ == Rule::context_cpu; }
    bool on_link_only() const { return rule_ == Rule::on_demand || rule_ == Rule::next_gate; }
    bool planned() const { return rule_ == Rule::planner; }

    // -- residents: lists in order of last use, one a layer; freetoken: one for all

    int list_of(int key) const { return rule_ == Rule::freetoken ? r_.layers : key / r_.experts; }
    void take_out(int key) {
        next_[at(prev_[at(key)])] = next_[at(key)];
        prev_[at(next_[at(key)])] = prev_[at(key)];
    }
    void touch(int key) {  // to the recent end
        const int head = n_ + list_of(key), p = prev_[at(head)];
        next_[at(p)] = key, prev_[at(key)] = p, next_[at(key)] = head, prev_[at(head)] = key;
    }
    void remove(int key) {
        take_out(key);
        --held_[at(list_of(key))];
        state_[at(key)] = kAbsent;
    }
    void insert(int key) {
        state_[at(key)] = kResident;
        ++held_[at(list_of(key))];
        touch(key);
    }
    int capacity(int list) const { return list == r_.layers ? slots_ * r_.layers : slots_; }
    // A loaded expert takes a slot by the rule's own order.
    void admit(int key) {
        if (state_[at(key)] == kResident) return;
        if (planned()) {
            std::int32_t victim = -1;
            const auto found = planner_.admit(key, victim);
            if (found == Planner::Admission::refused) {
                state_[at(key)] = kAbsent;
                return;
            }
            if (found == Planner::Admission::instead) remove(victim);
        } else if (const int list = list_of(key); held_[at(list)] >= capacity(list)) {
            int victim = next_[at(n_ + list)];
            if (rule_ == Rule::hybrimoe) {  // the least score
                const int base = key / r_.experts * r_.experts;
                double least = std::numeric_limits<double>::infinity();
                for (int k = base; k < base + r_.experts; ++k)
                    if (state_[at(k)] == kResident && score_[at(k)] < least) least = score_[at(k)], victim = k;
            }
            remove(victim);
        }
        insert(key);
    }
    // The residents of a layer become those most used by these counts, popularity deciding ties; the most recent is the
    // most used. allowed: only those; null: any.
    void keep_most(int layer, const std::int64_t* counts, const std::uint8_t* allowed = nullptr) {
        const int base = layer * r_.experts;
        const std::int64_t* popular = r_.popular + base;
        std::vector<int> order;
        for (int e = 0; e < r_.experts; ++e)
            if (!allowed || allowed[e]) order.push_back(e);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
            return counts[a] != counts[b] ? counts[a] > counts[b] : popular[a] > popular[b];
        });
        order.resize(std::min(order.size(), at(slots_)));
        replace(layer, order);
    }
    void replace(int layer, const std::vector<int>& order) {
        const int base = layer * r_.experts;
        for (int k = base; k < base + r_.experts; ++k) {
            if (state_[at(k)] == kResident) remove(k);
            state_[at(k)] = kAbsent;
        }
        for (auto e = order.rbegin(); e != order.rend(); ++e) insert(base + *e);
    }

    // -- the link

    void arrived() {
        const int key = flying_.key;
        under_way_ = false;
        state_[at(key)] = kAbsent;
        if (flying_.prefetch) {
            if (counted_) ++out_.prefetches;
            state_[at(key)] = kStaged;
            return;
        }
        if (counted_) ++out_.fills;
        if (planned()) planner_.filled();
        admit(key);
    }
    // Copies that begin before `until`.
    void advance(double until) {
        std::size_t head = 0;
        while (true) {
            if (under_way_ && link_free_ <= until) arrived();
            while (head < queue_.size() && state_[at(queue_[head].key)] != kAbsent) ++head;
            if (under_way_ || head >= queue_.size() || std::max(link_free_, submit_) >= until) break;
            link_free_ = std::max(link_free_, submit_) + c_.copy_s;
            flying_ = queue_[head++];
            if (flying_.victim >= 0 && state_[at(flying_.victim)] == kResident) remove(flying_.victim);
            under_way_ = true;
            state_[at(flying_.key)] = kLoading;
        }
        queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head));
    }

    // -- prompts: a layer's experts with all their rows at once; nothing is copied behind it

    void prompt(const std::int64_t* counts) {
        queue_.clear();
        const int tokens = r_.prompt_tokens * r_.batch;
        advance(now_ + 1e6);  // what is under way lands; it is not waited for
        link_free_ = std::min(link_free_, now_);
        std::vector<std::uint8_t> here(at(n_), 0);
        for (int l = 0; l < r_.layers; ++l) {
            now_ += c_.dense_s + own_s_;
            const int base = l * r_.experts;
            int n = 0, hits = 0, misses = 0;
            for (int e = 0; e < r_.experts; ++e) {
                if (state_[at(base + e)] == kResident) here[at(base + e)] = 1;
                if (const std::int64_t rows = counts[base + e]; rows > 0)
                    ids_[at(n)] = e, counts_[at(n++)] = static_cast<std::int32_t>(rows);
            }
            double work = 0.0;
            int loads = 0;
            if (planned()) {
                planner_.plan(l, n, ids_.data(), counts_.data(), now_, now_, 0, nullptr, nullptr,
                                                   action_.data(), worker_.data(), tokens);
                for (int i = 0; i < n; ++i) {
                    if (action_[at(i)] == code(Action::near_data)) work += rows_work(counts_[at(i)]);
                    if (action_[at(i)] == code(Action::load)) here[at(base + ids_[at(i)])] = 1, ++loads;
                    hits += action_[at(i)] == code(Action::run_here);
                }
            } else {
                for (int i = 0; i < n; ++i)
                    if (here[at(base + ids_[at(i)])]) ++hits;
                    else order_[at(misses++)] = i;
                std::sort(order_.begin(), order_.begin() + misses, [&](int a, int b) {
                    return counts_[at(a)] != counts_[at(b)] ? counts_[at(a)] > counts_[at(b)] : a < b;
                });
                loads = rule_ == Rule::context_cpu || on_link_only() ? misses : best_split(hits, misses);
                for (int i = 0; i < misses; ++i)
                    if (i < loads) here[at(base + ids_[at(order_[at(i)])])] = 1;
                    else work += rows_work(counts_[at(order_[at(i)])]);
            }
            now_ = ran(now_, hits, loads, work, now_);
        }
        link_free_ = now_;
        if (planned() && start_) planner_.prompt_end(counts, tokens, r_.batch, r_.batch);
        if (rule_ == Rule::ktransformers) return;
        for (int l = 0; l < r_.layers; ++l) {
            const int base = l * r_.experts;
            if (planned() && start_) {  // those of greatest worth that are here
                std::vector<int> order;
                for (int e = 0; e < r_.experts; ++e)
                    if (here[at(base + e)]) order.push_back(e);
                std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return planner_.value(base + a) > planner_.value(base + b); });
                order.resize(std::min(order.size(), at(slots_)));
                replace(l, order);
            } else if (start_ || rule_ == Rule::context_cpu) {
                keep_most(l, counts + base, here.data() + base);
            } else {  // as after any layer
                for (int e = 0; e < r_.experts; ++e)
                    if (here[at(base + e)]) admit(base + e);
            }
        }
    }
    // Of misses in `order_` by rows, how many to load so that the layer ends first.
    int best_split(int hits, int misses) {
        double work = 0.0, best = std::numeric_limits<double>::infinity();
        for (int i = 0; i < misses; ++i) work += rows_work(counts_[at(order_[at(i)])]);
        int found = 0;
        for (int k = 0; k <= misses; ++k) {
            if (k) work -= rows_work(counts_[at(order_[at(k - 1)])]);
            const double end = ran(0.0, hits, k, k == misses ? 0.0 : work, 0.0);
            if (end < best) best = end, found = k;
        }
        return found;
    }
    double rows_work(double rows) const { return std::max(1.0, rows / c_.free_rows); }
    static std::uint8_t code(Action action) { return static_cast<std::uint8_t>(action); }
    // When a layer ends that has only demand copies.
    double ran(double t0, int hits, int loads, double work, double link0) const {
        double gpu = t0 + hits * c_.gpu_s, link = link0;
        for (int i = 0; i < loads; ++i) link += c_.copy_s, gpu = std::max(gpu, link) + c_.gpu_s;
        return work > 1e-12 ? std::max(gpu, near_end(t0 + c_.message_s, work, link, link, link)) : gpu;
    }
    double near_end(double t0, double span, double busy_s, double again_s, double until_s) const {
        return clock_.near_end(t0, span, busy_s, again_s, until_s);
    }

    // -- a layer of a decode step

    void decode(int s, int l) {
        now_ += c_.dense_s;
        const double t0 = now_ + own_s_;
        advance(t0);
        const std::size_t step = at(s) * at(r_.layers) + at(l);
        const int n = r_.count[step], base = l * r_.experts;
        const std::int32_t *needed = r_.needed + step * at(r_.widest), *rows = r_.rows + step * at(r_.widest);
        for (int i = 0; i < n; ++i) wanted_[at(needed[i])] = 1;
        if (rule_ != Rule::llama_cpp_cache)  // a queued copy of a needed expert: it is a miss now
            queue_.erase(std::remove_if(queue_.begin(), queue_.end(), [&](const Queued& q) {
                return q.key / r_.experts == l && (q.prefetch || wanted_[at(q.key % r_.experts)]);
            }), queue_.end());
        const double link0 = under_way_ ? std::max(t0, link_free_) : t0, lands = link_free_;
        int hits = 0, misses = 0, fly = -1;
        for (int i = 0; i < n; ++i) {
            const int key = base + needed[i];
            if (state_[at(key)] >= kResident) ++hits;
            else if (state_[at(key)] == kLoading) fly = i;
            else order_[at(misses++)] = i;
            if (state_[at(key)] == kResident && !fixed()) take_out(key), touch(key);
        }
        bool wait = fly >= 0;
        int loads = 0;
        double work = 0.0, expected = 0.0;
        if (planned()) {
            const std::int32_t flight = fly >= 0 ? base + needed[fly] : -1;
            const Planned plan = planner_.plan(l, n, needed, rows, t0, link0, fly >= 0, &flight, &lands, action_.data(), worker_.data());
            hits = misses = 0;
            for (int i = 0; i < n; ++i) {
                const auto a = static_cast<Action>(action_[at(i)]);
                if (a == Action::run_here) ++hits;
                if (a == Action::load) order_[at(loads++)] = i;
                if (a == Action::near_data) work += rows_work(rows[i]), ++misses;
            }
            wait = plan.waits > 0;
            misses += loads;
            expected = plan.near_s;
            queue_.clear();
            for (int i = 0; i < planner_.wanted_count(); ++i)
                queue_.push_back({planner_.wanted(i).key, planner_.wanted(i).prefetch, planner_.wanted(i).victim});
            for (int i = 0; i < loads; ++i) make_room(l);
        } else {
            loads = rival(base, needed, rows, misses, link0, t0, wait);
            for (int i = loads; i < misses; ++i) work += rows_work(rows[order_[at(i)]]);
            if (fly >= 0 && !wait) work += rows_work(rows[fly]);
        }
        double gpu = t0 + hits * c_.gpu_s, link = link0;
        if (wait) gpu = std::max(gpu, lands) + c_.gpu_s;
        for (int i = 0; i < loads; ++i) link += c_.copy_s, gpu = std::max(gpu, link) + c_.gpu_s;
        if (!planned()) rival_background(s, l, misses, link, gpu, work, t0);
        submit_ = link;
        if (loads) {
            if (under_way_ && !(wait && flying_.key == base + needed[fly])) arrived();  // before the first demand copy
            else if (under_way_) under_way_ = false, state_[at(flying_.key)] = kStaged;
            link_free_ = link;
        } else if (wait) {
            under_way_ = false;
            state_[at(flying_.key)] = kStaged;
        } else if (fly >= 0) {
            flying_.prefetch = false;  // computed near data: when it comes, it is judged as a fill
        }
        const double until = submit_ + static_cast<double>(queue_.size()) * c_.copy_s;
        const double start = t0 + c_.message_s;
        const double near = work > 1e-12 ? near_end(start, work, link, submit_, until) : t0;
        now_ = std::max(gpu, near);
        if (counted_)
            out_.needed += n, out_.hits += hits, out_.loads += loads, out_.waits += wait, out_.near += n - hits - loads - wait;
        if (planned()) {
            if (work > 1e-12) planner_.saw(Part::near_mixed, expected, near - start);
            planner_.took(now_ - t0);
            if (loads || under_way_) planner_.saw(Part::copy, planner_.costs().copy_s, c_.copy_s);
            planner_.used(l, n, needed, r_.share + step * at(r_.experts));
        }
        for (int i = 0; i < n; ++i) last_[at(base + needed[i])] = s;
        if (!fixed()) {
            for (int i = 0; i < loads; ++i) {
                const int key = base + needed[order_[at(i)]];
                if (state_[at(key)] != kResident) admit(key);
            }
            for (int i = 0; i < n; ++i)
                if (state_[at(base + needed[i])] == kStaged) admit(base + needed[i]);
        }
        for (int e = 0; e < r_.experts; ++e)
            if (state_[at(base + e)] == kStaged) state_[at(base + e)] = kAbsent;
        if (rule_ == Rule::hybrimoe) {
            for (int e = 0; e < r_.experts; ++e) score_[at(base + e)] *= 0.9;
            for (int i = 0; i < n; ++i) score_[at(base + needed[i])] += 0.1;
        }
        for (int i = 0; i < n; ++i) wanted_[at(needed[i])] = 0;
    }

    // As in the engine, a demand load takes the slot of the resident of least worth that is not needed now.
    void make_room(int layer) {
        if (held_[at(layer)] < slots_) return;
        int victim = -1;
        for (int k = layer * r_.experts; k < (layer + 1) * r_.experts; ++k)
            if (state_[at(k)] == kResident && !wanted_[at(k % r_.experts)] && (victim < 0 || planner_.value(k) < planner_.value(victim))) victim = k;
        if (victim >= 0) remove(victim);
    }
    // How many of the misses in `order_` a rival loads, the first ones; wait: whether for the copy under way.
    int rival(int base, const std::int32_t* needed, const std::int32_t* rows, int misses, double link0, double t0, bool& wait) {
        if (on_link_only()) return misses;
        if (fixed() || rule_ == Rule::llama_cpp_cache) {
            wait = false;
            return 0;
        }
        if (rule_ == Rule::freetoken) {  // the most recently used first; shares by standalone rates
            std::stable_sort(order_.begin(), order_.begin() + misses, [&](int a, int b) {
                return last_[at(base + needed[a])] > last_[at(base + needed[b])];
            });
            const double share = c_.near_s / c_.copy_s;
            if (share >= 1) return misses;
            const int low = static_cast<int>(misses * share);
            const auto longer = [&](int k) { return std::max(k * c_.copy_s, (misses - k) * c_.near_s); };
            return low < misses && longer(low + 1) < longer(low) ? low + 1 : low;
        }
        // hybrimoe: each miss where it ends first, the CPU from the lightest load, by standalone rates
        std::stable_sort(order_.begin(), order_.begin() + misses, [&](int a, int b) { return rows[a] > rows[b]; });
        double link = link0, near = t0 + c_.message_s;
        int first = 0, last = misses - 1;
        while (first <= last) {
            const double more = rows_work(rows[order_[at(last)]]) * c_.near_s;
            if (near + more <= link + c_.copy_s + c_.gpu_s) near += more, --last;
            else link += c_.copy_s, ++first;
        }
        return first;
    }
    void rival_background(int s, int l, int misses, double link, double gpu, double work, double t0) {
        const std::size_t step = at(s) * at(r_.layers) + at(l);
        const int base = l * r_.experts;
        const auto queued = [&](int key) {
            return std::any_of(queue_.begin(), queue_.end(), [key](const Queued& q) { return q.key == key; });
        };
        if (rule_ == Rule::llama_cpp_cache) {
            const std::size_t most = at(std::max(2, r_.top_k * r_.batch));
            for (int i = 0; i < misses; ++i) {
                const int key = base + r_.needed[step * at(r_.widest) + at(order_[at(i)])];
                if (queued(key)) continue;
                if (queue_.size() >= most) queue_.erase(queue_.begin());
                queue_.push_back({key, false});
            }
        }
        if ((rule_ != Rule::next_gate && rule_ != Rule::hybrimoe) || l + 1 >= r_.layers) return;
        const double near = work > 1e-12 ? near_end(t0 + c_.message_s, work, link, link, link) : t0;
        double room = rule_ == Rule::next_gate ? 1e9 : (std::max(gpu, near) + c_.dense_s - link) / c_.copy_s;
        for (int k = 0; k < r_.top_k; ++k)
            for (int b = 0; b < r_.batch; ++b) {
                const int key = base + r_.experts + r_.predicted[((step + 1) * at(r_.batch) + at(b)) * at(r_.ranks) + at(k)];
                if (room < 1 || state_[at(key)] != kAbsent || queued(key)) continue;
                queue_.push_back({key, true});
                room -= 1;
            }
    }

    Routing r_;
    Rule rule_;
    int slots_;
    PlannerCosts c_;
    bool start_;
    double own_s_;
    int first_, n_;
    std::vector<std::uint8_t> state_;  // [n]: as `Planner` reads it
    std::vector<int> held_, next_, prev_;
    std::vector<int> last_;
    std::vector<double> score_;
    std::vector<std::uint8_t> action_, worker_;
    std::vector<int> order_;
    std::vector<std::uint8_t> wanted_;
    std::vector<std::int32_t> ids_, counts_;
    Planner planner_;
    Planner clock_ = Planner(1, 1, 1, 0, 1, c_, nullptr, 0);  // the machine's own arithmetic of near-data work
    std::vector<Queued> queue_;
    Queued flying_{};
    bool under_way_ = false, counted_ = false;
    double now_ = 0.0, link_free_ = 0.0, submit_ = 0.0;
    Replayed out_;
};

}  // namespace tiermoe
