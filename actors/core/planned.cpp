// Placement by a planner of misses, and its bindings: each miss is waited for, loaded, or computed near data.
//
//     where (routing known): planner -> who runs what     loaded: background copies     ran: costs, worth, admission
//
// It reads the core's states and the order of eviction in place, gives the planner queues and clocks, and carries its answer
// out. Python is asked whether near-data workers are there, whose they are, and what other GPUs hold; a planner may be
// Python's (`policies.hybrid`). Beginning and end of forwards and sequences: `engine.peers.auto`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../kernels/cpu/planner.hpp"
#include "bindings.hpp"
#include "layer.hpp"
#include "orders.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

using bindings::Array;
using Numbers = std::vector<std::int32_t>;
using Seconds = std::vector<double>;

constexpr std::uint8_t kAbsent = 0, kLoading = 1, kResident = 2;
constexpr std::uint8_t kStaged = 3;      // as the planner sees an expert that is here, in no slot that counts
constexpr double kMissesStep = 0.02;     // weight of a layer in the mean share of misses
constexpr double kWaited = 0.1;          // share of an answer's time from which a wait for it says that the layer ended with it

// What a planner is asked of a layer, as `Planner::plan`.
struct Question {
    int layer;
    const Numbers &needed, &rows;
    double now_s, link_free_s;
    const Numbers& flights;
    const Seconds& arrives_s;
    std::int64_t prompt_tokens;
    const Owners* owners;
    int room;
};

// What decides, and hears of what was seen.
struct Decider {
    virtual Planned plan(const Question& of, std::uint8_t* actions, std::vector<Wanted>& wanted) = 0;
    virtual PlannerCosts costs() = 0;
    virtual void used(int layer, const Numbers& needed) = 0;
    virtual bool admit(std::int32_t key, std::int32_t& victim) = 0;  // victim: -1, or who leaves its slot
    virtual void saw(Part part, double expected_s, double seen_s) = 0;
    virtual void took(double seen_s) = 0;
    virtual void filled() = 0;
    virtual ~Decider() = default;
};

// The planner of `auto`.
class NativeDecider : public Decider {
  public:
    explicit NativeDecider(Planner& planner) : planner_(planner), workers_(static_cast<std::size_t>(planner.experts())) {}
    Planned plan(const Question& of, std::uint8_t* actions, std::vector<Wanted>& wanted) override {
        const Planned found = planner_.plan(
            of.layer, static_cast<int>(of.needed.size()), of.needed.data(), of.rows.data(), of.now_s, of.link_free_s,
            static_cast<int>(of.flights.size()), of.flights.data(), of.arrives_s.data(), actions, workers_.data(),
            static_cast<double>(of.prompt_tokens), of.owners, of.room);
        wanted.clear();
        for (int i = 0; i < planner_.wanted_count(); ++i) wanted.push_back(planner_.wanted(i));
        return found;
    }
    PlannerCosts costs() override { return planner_.costs(); }
    void used(int layer, const Numbers& needed) override {
        planner_.used(layer, static_cast<int>(needed.size()), needed.data());
    }
    bool admit(std::int32_t key, std::int32_t& victim) override {
        victim = -1;
        return planner_.admit(key, victim) != Planner::Admission::refused;
    }
    void saw(Part part, double expected_s, double seen_s) override { planner_.saw(part, expected_s, seen_s); }
    void took(double seen_s) override { planner_.took(seen_s); }
    void filled() override { planner_.filled(); }

  private:
    Planner& planner_;
    std::vector<std::uint8_t> workers_;
};

// A planner in Python, with the methods of `policies.auto.Auto`.
class PythonDecider : public Decider {
  public:
    explicit PythonDecider(nb::object of) : of_(std::move(of)) {}
    Planned plan(const Question& of, std::uint8_t* actions, std::vector<Wanted>& wanted) override {
        const nb::gil_scoped_acquire lock;
        const std::size_t n = of.needed.size();
        nb::object owners = nb::none();
        if (of.owners)
            owners = nb::make_tuple(array(std::vector<std::uint8_t>(of.owners->gpus, of.owners->gpus + n)),
                                    array(std::vector<std::uint8_t>(of.owners->held, of.owners->held + n)));
        const nb::object found =
            of_.attr("plan")(of.layer, array(of.needed), array(of.rows), of.now_s, of.link_free_s, array(of.flights),
                             array(of.arrives_s), of.prompt_tokens, owners, of.room);
        const nb::object codes = found.attr("actions");
        const Array<const std::uint8_t> chosen(codes);
        if (chosen.size() != static_cast<std::int64_t>(n)) refuse("actions are uint8 [n], not of", chosen.size());
        std::copy(chosen.begin(), chosen.end(), actions);
        wanted.clear();
        for (const nb::handle one : nb::cast<nb::object>(found.attr("wanted"))) {
            const auto [key, victim, worth_s] = nb::cast<std::tuple<std::int32_t, std::optional<std::int32_t>, double>>(one);
            wanted.push_back({key, victim.value_or(-1), worth_s});
        }
        Planned plan;
        plan.near_s = nb::cast<double>(found.attr("near_s"));
        plan.owner_s = nb::cast<double>(found.attr("owner_s"));
        plan.near_count = nb::cast<int>(found.attr("near_data"));
        return plan;
    }
    PlannerCosts costs() override {
        const nb::gil_scoped_acquire lock;
        const auto c = nb::cast<std::vector<double>>(of_.attr("costs"));
        return {c.at(0), c.at(1), c.at(2), c.at(3), c.at(4), c.at(5), c.at(6), c.at(7), c.at(8)};
    }
    void used(int layer, const Numbers& needed) override {
        const nb::gil_scoped_acquire lock;
        of_.attr("used")(layer, array(needed));
    }
    bool admit(std::int32_t key, std::int32_t& victim) override {
        const nb::gil_scoped_acquire lock;
        const auto [admitted, whose] = nb::cast<std::tuple<bool, std::optional<std::int32_t>>>(of_.attr("admit")(key));
        victim = whose.value_or(-1);
        return admitted;
    }
    void saw(Part part, double expected_s, double seen_s) override {
        const nb::gil_scoped_acquire lock;
        of_.attr("saw")(static_cast<int>(part), expected_s, seen_s);
    }
    void took(double seen_s) override {
        const nb::gil_scoped_acquire lock;
        of_.attr("took")(seen_s);
    }
    void filled() override {
        const nb::gil_scoped_acquire lock;
        of_.attr("filled")();
    }

  private:
    template <typename T>
    static Made<T> array(std::vector<T> values) {
        const std::size_t n = values.size();
        return owned(std::move(values), {n});
    }
    nb::object of_;
};

// A sequence's rows in the present forward. uses: of a prompt, where its experts are counted [L, E].
struct Rows {
    std::int64_t start, stop;
    std::unique_ptr<Array<std::int64_t>> uses;
};

class PlannedPlacement : public Placement {
  public:
    // order: the cache's, by worth; null: another one, which decides alone who leaves. pool: of near-data workers, or None.
    // gpus: of keys the names of the other GPUs that run them (None: this one), their numbers, and whether those hold them;
    // None: there are no other GPUs. stats: of the engine. states [L, E]: as the planner sees them. miss, stream: numbers of
    // the sources of background copies: misses, and what a prompt needs next.
    PlannedPlacement(Core& core, WholeOrder* order, nb::object pool, nb::object gpus, nb::object stats, nb::handle states,
                     std::uint8_t miss, std::uint8_t stream)
        : core_(core), order_(order ? order->of.worth() : nullptr), pool_(std::move(pool)), gpus_(std::move(gpus)),
          stats_(std::move(stats)), seen_(states), miss_(miss), stream_(stream),
          experts_(core.layout().experts), filling_(static_cast<std::size_t>(core.layout().keys())),
          actions_(static_cast<std::size_t>(experts_)) {
        if (order && !order_) throw std::invalid_argument("the order is not by worth");
        if (core.layout().parts != 1) throw std::invalid_argument("a planner knows whole experts alone");
        if (seen_.size() != core.layout().keys()) refuse("states are [L, E], not of", seen_.size());
    }

    // -- between passes, from Python
    // worths [L, E]: what each expert is worth to the planner, as it changes.
    void plan_by(nb::object planner, nb::handle worths) {
        auto of = std::make_unique<Array<const double>>(worths);
        if (of->size() != core_.layout().keys()) refuse("worths are [L, E], not of", of->size());
        if (Planner* native = nullptr; nb::try_cast(planner, native) && native) {
            if (native->experts() != experts_ || native->layers() != core_.layout().layers)
                throw std::invalid_argument("the planner is of another model");
            decider_ = std::make_unique<NativeDecider>(*native);
        } else {
            decider_ = std::make_unique<PythonDecider>(planner);
        }
        planner_ = std::move(planner);
        worths_ = std::move(of);
    }
    // rows: (start, stop, uses or None) of each sequence; prompt: some are a prompt's.
    void begin(const std::vector<std::tuple<std::int64_t, std::int64_t, nb::object>>& rows, bool prompt, bool all_here) {
        rows_.clear();
        for (const auto& [start, stop, uses] : rows) {
            rows_.push_back({start, stop, nullptr});
            if (uses.is_none()) continue;
            rows_.back().uses = std::make_unique<Array<std::int64_t>>(uses);
            if (rows_.back().uses->size() != core_.layout().keys()) refuse("uses are [L, E], not of", rows_.back().uses->size());
        }
        prompt_ = prompt;
        local = all_here;
        if (local) ended_s_ = 0.0;
    }
    bool local = false;           // every expert of the present forward runs here
    std::optional<double> missed;  // mean share of a decode layer's experts that were not here

    // -- a pass
    const Segments& where(const Layer& layer, const Routed& routed, const Segments& needed, Segments& keep) override {
        if (!decider_) throw Broken("there is no planner yet");
        const int index = static_cast<int>(layer.place().index);
        const Picked& picked = *routed.picked;
        const double now_s = core_.link().now_s();
        away_.clear();
        wanted_.clear();
        planned_ = {};
        streams_ = false;
        if (index && !prompt_) begun(now_s);
        const bool announced = !rows_.empty() && rows_.back().stop == routed.tokens, prompts = announced && prompt_;
        if (prompts) begin_prompt(index, routed, keep);
        if (local) {
            all_at_once(needed, keep);
            return needed;
        }
        look();
        if (prompts && order_) {
            streams_ = true;
            spared_.assign(keep.begin(), keep.end());
            const Key base = layer.key(0), stop = std::min(base + 2 * experts_, core_.layout().keys());
            for (Key key = base; key < stop; ++key) spared_.push_back(key);
        }
        needed_.assign(picked.experts.begin(), picked.experts.end());
        const std::size_t n = needed.size();
        peers_.assign(n, std::string());
        if (!gpus_.is_none()) ask_gpus(needed);
        bool plans = true;
        if (!pool_.is_none()) {
            const nb::gil_scoped_acquire lock;
            plans = nb::cast<bool>(pool_.attr("available"));
        }
        std::size_t near = 0;
        if (plans) near = plan(index, routed, needed, now_s);
        here_.clear();
        for (const bool shares : {true, false})  // other GPUs, then near data
            for (std::size_t i = 0; i < n; ++i)
                if (!peers_[i].empty() && (actions_[i] != static_cast<std::uint8_t>(Action::near_data) || !plans) == shares)
                    send(peers_[i], needed[i]);
        for (std::size_t i = 0; i < n; ++i)
            if (peers_[i].empty()) here_.push_back(needed[i]);
        planned_.learns = announced && !prompt_;
        if (planned_.learns) {
            double absent = 0;
            for (Segment s : needed) absent += core_.states()[s] != kResident;
            const double share = absent / static_cast<double>(n);
            missed = missed ? *missed + kMissesStep * (share - *missed) : share;
        }
        planned_.layer = index, planned_.began_s = now_s, planned_.plans = plans, planned_.announced = announced;
        planned_.here = here_.size(), planned_.near = near, planned_.before = counted(index);
        return away_.empty() ? needed : here_;
    }
    const std::vector<Away>& away() const override { return away_; }
    void loaded(Layer&) override {
        const double now_s = core_.link().now_s(), copy_s = decider_->costs().copy_s;
        double free_s = std::max(link_free_s_, now_s);
        if (planned_.layer >= 0) {
            const Plan& plan = core_.present();
            loaded_.assign(plan.run.begin() + plan.resident, plan.run.end());
            for (Segment s : loaded_)
                if (core_.states()[s] == kLoading && !arrival(s)) arrives(s, free_s += copy_s);
        }
        mine_.clear();
        if (!gpus_.is_none() && !wanted_.empty()) {
            const nb::gil_scoped_acquire lock;
            Segments keys;
            for (const Wanted& one : wanted_) keys.push_back(one.key);
            const nb::list names = nb::cast<nb::list>(gpus_(keys)[0]);
            for (std::size_t i = 0; i < keys.size(); ++i)
                if (names[i].is_none()) mine_.push_back(wanted_[i]);
        } else {
            mine_.assign(wanted_.begin(), wanted_.end());
        }
        queued_.clear();
        if (streams_) {
            stream();
        } else {
            for (const Wanted& one : mine_)
                if (fetch(one)) queued_.push_back(one.key);
        }
        for (Segment s : queued_) arrives(s, free_s += copy_s);
        link_free_s_ = free_s;
    }
    void ran(Layer& layer) override {
        const Pass found = std::exchange(planned_, {});
        if (found.layer < 0 || found.layer != layer.place().index) return;
        ended(found, core_.link().now_s(), !arrivals_.empty());
        if (!found.learns) return;
        decider_->used(found.layer, needed_);
        look();
        again_.clear();
        if (order_)
            for (const std::int32_t e : needed_) {
                const auto& refused = order_->refused();
                if (std::find(refused.begin(), refused.end(), layer.key(e)) != refused.end()) again_.push_back(layer.key(e));
            }
        for (Segment s : loaded_) admit(s);
        for (Segment s : again_) admit(s);
    }

  private:
    // Of a layer: answers of near-data workers, seconds of their kernels, and of waits for them, for copies and for other GPUs.
    struct Counted {
        double calls = 0, kernels_s = 0, near_wait_s = 0, copy_wait_s = 0, owner_wait_s = 0;
    };
    // A layer between its plan and its end; layer -1: there is none. plans: the planner was asked. near: experts that are
    // computed near data. announced: the sequences of its rows are known. learns: they all decode.
    struct Pass {
        int layer = -1;
        double began_s = 0.0;
        bool plans = false, announced = false, learns = false;
        std::size_t here = 0, near = 0;
        double near_s = 0.0, owner_s = 0.0;  // as planned
        Counted before;
    };
    struct Arrival {
        Segment segment;
        double at_s;
    };

    std::uint8_t state(Segment s) const { return core_.states()[s]; }
    Arrival* arrival(Segment s) {
        for (Arrival& one : arrivals_)
            if (one.segment == s) return &one;
        return nullptr;
    }
    void arrives(Segment s, double at_s) {
        if (Arrival* one = arrival(s)) one->at_s = at_s;
        else arrivals_.push_back({s, at_s});
    }
    void send(const std::string& peer, Segment s) {
        auto to = std::find_if(away_.begin(), away_.end(), [&](const Away& one) { return one.peer == peer; });
        if (to == away_.end()) to = away_.insert(to, {peer, {}, {}});
        to->segments.push_back(s);
        to->bits.push_back(0);
    }

    // Counts the rows of prompts; keep: the residents that this layer's loads spare.
    void begin_prompt(std::int64_t index, const Routed& routed, Segments& keep) {
        const Picked& picked = *routed.picked;
        if (!local)  // else the order has counted them
            for (std::size_t i = 0; i < picked.experts.size(); ++i)
                for (std::int64_t p = picked.starts[i]; p < picked.starts[i + 1]; ++p) {
                    const std::int64_t row = picked.order[p] / routed.top_k;
                    for (const Rows& of : rows_)
                        if (of.uses && row >= of.start && row < of.stop) ++of.uses->data()[index * experts_ + picked.experts[i]];
                }
        if (order_) keep = order_->settled();
    }
    // Less residents that are kept, those of least worth, so that the layer's misses find slots side by side. In turns each
    // expert runs alone. What leaves is at most what one layer needs beyond its share: the layers behind it take these slots
    // from one another.
    void all_at_once(const Segments& needed, Segments& keep) const {
        std::int64_t slots = 0;
        for (std::int64_t count : core_.layout().slots) slots += count;
        const auto kept = static_cast<std::int64_t>(keep.size());
        const std::int64_t less = static_cast<std::int64_t>(needed.size()) - (slots - kept);  // none of these is kept
        if (less <= 0 || less > kept) return;
        const double* worth = worths_->data();
        std::sort(keep.begin(), keep.end(), [&](Segment a, Segment b) { return worth[a] != worth[b] ? worth[a] < worth[b] : a < b; });
        keep.erase(keep.begin(), keep.begin() + static_cast<std::ptrdiff_t>(less));
    }
    // Reads the residency: refused experts are staged, and background copies that have arrived are judged.
    void look() {
        std::copy_n(core_.states().begin(), seen_.size(), seen_.data());
        if (order_)
            for (std::int64_t key : order_->refused())
                if (seen_[key] == kResident) seen_.data()[key] = kStaged;
        for (const Arrival& one : arrivals_) {
            if (state(one.segment) == kLoading) continue;
            const double took_s = core_.took_s()[one.segment];
            if (took_s >= 0.0) decider_->saw(Part::copy, decider_->costs().copy_s, took_s);
        }
        const auto ended = [&](Segment s) { return state(s) != kLoading; };
        arrivals_.erase(std::remove_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& one) { return ended(one.segment); }),
                        arrivals_.end());
        if (!background_) return;
        for (Segment s = 0; s < static_cast<Segment>(filling_.size()); ++s) {
            if (!filling_[s] || !ended(s)) continue;
            filling_[s] = 0;
            --background_;
            if (state(s) != kResident) continue;
            decider_->filled();
            admit(s);
        }
    }
    // Lets the planner say whether an expert that has come stays.
    void admit(Segment s) {
        if (!order_ || state(s) != kResident) return;
        seen_.data()[s] = kStaged;  // it counts for no slot while it is judged
        std::int32_t victim = -1;
        if (!decider_->admit(static_cast<std::int32_t>(s), victim)) return order_->refuse(s);
        order_->readmit(s);
        seen_.data()[s] = kResident;
        if (victim < 0) return;
        order_->refuse(victim);
        seen_.data()[victim] = kStaged;
    }
    // The other GPUs that run experts: their owners, which are not lost.
    void ask_gpus(const Segments& needed) {
        const nb::gil_scoped_acquire lock;
        const auto [names, owners, held] =
            nb::cast<std::tuple<std::vector<std::optional<std::string>>, std::vector<std::uint8_t>, std::vector<bool>>>(gpus_(needed));
        owners_.assign(owners.begin(), owners.end());
        held_.assign(held.begin(), held.end());
        for (std::size_t i = 0; i < needed.size(); ++i) {
            if (names[i]) peers_[i] = *names[i];
            else owners_[i] = 0;
        }
    }
    // How many are near data; sets `peers_` of those.
    std::size_t plan(int index, const Routed& routed, const Segments& needed, double now_s) {
        rows_of_.assign(routed.picked->counts.begin(), routed.picked->counts.end());
        flights_.clear();
        times_.clear();
        if (arrivals_.empty()) link_free_s_ = now_s;
        for (const Arrival& one : arrivals_) {
            flights_.push_back(static_cast<std::int32_t>(one.segment));
            times_.push_back(std::max(one.at_s, now_s));
        }
        const bool others = std::any_of(peers_.begin(), peers_.end(), [](const std::string& name) { return !name.empty(); });
        const Owners owners{owners_.data(), held_.data()};
        const Planned found = decider_->plan({index, needed_, rows_of_, now_s, std::max(now_s, link_free_s_), flights_, times_,
                                              prompt_ ? routed.tokens : 0, others ? &owners : nullptr, room(needed)},
                                             actions_.data(), wanted_);
        planned_.near_s = found.near_s, planned_.owner_s = found.owner_s;
        if (!found.near_count || pool_.is_none()) return 0;
        const nb::gil_scoped_acquire lock;
        std::size_t near = 0;
        nb::list keys;
        for (std::size_t i = 0; i < needed.size(); ++i)
            if (actions_[i] == static_cast<std::uint8_t>(Action::near_data)) keys.append(needed[i]);
        const nb::object names = pool_.attr("choose")(keys);
        if (names.is_none()) {  // the last one was lost just now
            std::replace(actions_.begin(), actions_.end(), static_cast<std::uint8_t>(Action::near_data), static_cast<std::uint8_t>(Action::load));
            return 0;
        }
        for (std::size_t i = 0; i < needed.size(); ++i)
            if (actions_[i] == static_cast<std::uint8_t>(Action::near_data)) peers_[i] = nb::cast<std::string>(names[near++]);
        return near;
    }
    // Slots that a prompt's copies for the next layer may take, behind this layer's loads.
    int room(const Segments& needed) const {
        if (!streams_) return 0;
        std::vector<std::uint8_t> spared(static_cast<std::size_t>(seen_.size()));
        for (Segment s : spared_) spared[s] = 1;
        std::int64_t free = core_.free_slots();
        for (std::int64_t key = 0; key < seen_.size(); ++key) free += seen_[key] >= kResident && !spared[key];
        for (std::size_t i = 0; i < needed.size(); ++i) free -= seen_[needed[i]] == kAbsent && peers_[i].empty();
        return static_cast<int>(std::max<std::int64_t>(0, free));
    }
    // Queues loads, without the interpreter's lock: a victim may be under way.
    bool prefetch(const Segments& keys, const Segments& keep, std::uint8_t source) {
        struct Unlocked {
            PyThreadState* held = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
            ~Unlocked() {
                if (held) PyEval_RestoreThread(held);
            }
        } unlocked;
        return core_.prefetch(keys, keep, source) > 0;
    }
    // Queues a prompt's copies for the next layer, most wanted first; in `queued_` those that found a slot.
    void stream() {
        Segments absent;
        for (const Wanted& one : mine_)
            if (state(one.key) == kAbsent) absent.push_back(one.key);
        if (absent.empty()) return;
        const std::int64_t at_work = order_->at_work(absent[0] / experts_);
        prefetch(absent, spared_, stream_);
        order_->at_work(at_work);
        for (Segment s : absent)
            if (state(s) != kAbsent) queued_.push_back(s);
    }
    // Queues a background copy.
    bool fetch(const Wanted& one) {
        if (state(one.key) != kAbsent) return false;
        if (!order_) return prefetch({one.key}, {}, miss_);
        const std::int64_t at_work = order_->at_work(one.key / experts_);
        if (one.victim >= 0) order_->refuse(one.victim);
        const bool queued = prefetch({one.key}, {}, miss_);
        order_->at_work(at_work);
        if (queued) background_ += !std::exchange(filling_[one.key], std::uint8_t{1});
        else if (one.victim >= 0) order_->readmit(one.victim);
        return queued;
    }

    // -- times

    // A decode's layer begins, and is not the first.
    void begun(double now_s) {
        if (0.0 < ended_s_ && ended_s_ < now_s) decider_->saw(Part::dense, decider_->costs().dense_s, now_s - ended_s_);
    }
    // So far. Of layers without peers the waits for these do not change.
    Counted counted(std::int64_t layer) const {
        Counted found;
        found.copy_wait_s = core_.counts()[layer].blocked_io_s;
        if (away_.empty()) return found;
        const nb::gil_scoped_acquire lock;
        const nb::object stats = stats_.attr("layers")[layer];
        found.calls = nb::cast<double>(stats.attr("ndp_calls"));
        found.kernels_s = nb::cast<double>(stats.attr("ndp_measured_s"));
        found.near_wait_s = nb::cast<double>(stats.attr("ndp_wait_s"));
        found.owner_wait_s = nb::cast<double>(stats.attr("shard_wait_s"));
        return found;
    }
    // A layer has ended. copies: some are under way, for this layer or others.
    void ended(const Pass& of, double now_s, bool copies) {
        ended_s_ = now_s;
        if (!of.plans) return;
        if (of.learns) correct(of, now_s - of.began_s, copies || !loaded_.empty());
        if (of.announced) decider_->took(now_s - of.began_s);
    }
    // Corrects the costs by what a layer of a decode, which took so long, says of each part apart: near-data work by the
    // workers' kernels, a message by the time from the plan to its answer without those where the layer waited for it, other
    // GPUs by the time to their answers, an expert here by the rest of the layer, which is at most that.
    void correct(const Pass& of, double seen_s, bool copies) {
        const Counted now = counted(of.layer), &then = of.before;
        const double calls = now.calls - then.calls, kernels_s = now.kernels_s - then.kernels_s;
        const double near_wait_s = now.near_wait_s - then.near_wait_s;
        const double owners_s = seen_s - near_wait_s;  // near-data workers are waited for behind other GPUs
        const double owner_wait_s = now.owner_wait_s - then.owner_wait_s;
        if (of.owner_s > 0.0 && (owner_wait_s > kWaited * of.owner_s || owners_s < of.owner_s))
            decider_->saw(Part::owner, of.owner_s, owners_s);
        if (of.near && calls > 0 && kernels_s >= 0.0) {
            const double kernel_s = kernels_s / calls, message_s = seen_s - kernel_s;
            decider_->saw(copies ? Part::near_mixed : Part::near, of.near_s, kernel_s);
            // taking an answer that has come is a short wait, too: then the layer's time is that of its experts here; what
            // copies cost beside near data is their source's (`took`)
            const double expected_s = decider_->costs().message_s;
            if ((near_wait_s > kWaited * message_s && !copies) || message_s < expected_s)
                decider_->saw(Part::message, expected_s, message_s);
        } else if (!of.near && of.here) {
            const double here_s = (seen_s - (now.copy_wait_s - then.copy_wait_s)) / static_cast<double>(of.here);
            const double expected_s = decider_->costs().gpu_s;
            if (here_s < expected_s) decider_->saw(Part::gpu, expected_s, here_s);
        }
    }

    Core& core_;
    Worth* const order_;
    const nb::object pool_, gpus_, stats_;
    const Array<std::uint8_t> seen_;
    const std::uint8_t miss_, stream_;
    const std::int64_t experts_;
    nb::object planner_;  // of `decider_`
    std::unique_ptr<Decider> decider_;
    std::unique_ptr<Array<const double>> worths_;
    // the present forward
    std::vector<Rows> rows_;
    bool prompt_ = false;
    double ended_s_ = 0.0;  // the last planned layer's end; 0: it is of an earlier forward's kind
    // copies under way: when each is expected, and those in the background
    std::vector<Arrival> arrivals_;
    double link_free_s_ = 0.0;
    std::vector<std::uint8_t> filling_;
    std::size_t background_ = 0;
    // the present pass
    Pass planned_;
    std::vector<Away> away_;
    std::vector<Wanted> wanted_, mine_;  // mine: of this GPU
    bool streams_ = false;               // a prompt's copies ahead displace none of `spared_`
    Segments spared_, here_, loaded_, queued_, again_;
    Numbers needed_, rows_of_, flights_;
    Seconds times_;
    std::vector<std::uint8_t> actions_, owners_, held_;
    std::vector<std::string> peers_;  // of needed experts: who else runs each
};

}  // namespace

void bind_placement(nb::module_& m) {
    nb::class_<Placement>(m, "Placement", "Who runs a layer's experts.");
    nb::class_<Spared, Placement>(m, "Spared", "Everything runs on this device; `keys` are residents that leave last.")
        .def(nb::init<>())
        .def_prop_rw("keys", [](const Spared& of) { return of.keys; }, [](Spared& of, Segments keys) { of.keys = std::move(keys); });
    nb::class_<PlannedPlacement, Placement>(m, "PlannedPlacement", "As a planner of misses says.")
        .def(nb::init<Core&, WholeOrder*, nb::object, nb::object, nb::object, nb::handle, std::uint8_t, std::uint8_t>(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "core"_a, "order"_a.none(), "pool"_a.none(), "gpus"_a.none(),
             "stats"_a, "states"_a, "miss"_a, "stream"_a)
        .def("plan_by", &PlannedPlacement::plan_by, "planner"_a, "worths"_a,
             "A `Planner`, or an object with the methods of `policies.auto.Auto`. worths [L, E] are read in place.")
        .def("begin", &PlannedPlacement::begin, "rows"_a, "prompt"_a, "local"_a,
             "A forward begins. rows: start, stop and uses of each sequence; uses [L, E]: of a prompt, added to in place.")
        .def_rw("local", &PlannedPlacement::local)
        .def_ro("missed", &PlannedPlacement::missed);
}

}  // namespace tiermoe::core
