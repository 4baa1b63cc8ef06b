// Decides and accounts for the expert memory of one device. Knows no torch, Python, kernel or GPU.
//
// An expert is a key, layer * E + expert. What is loaded, pinned, run and evicted is a segment: part * N + key, of N
// experts. Part 0 is the whole expert or, where experts are split, its top; part 1 is its bottom, or its replica in fewer
// bits. Slots are numbered over all classes; a segment takes a slot of its own class.
//
//     arrive                           a pass begins: copies land
//     open                             stale prefetches are dropped, the order of eviction hears the routing
//     plan                             who runs here in which order, victims, loads; nothing moves
//     begin                            hits and misses are counted, what is there is pinned
//     load                             victims leave, the first loads are queued
//     next ...                         groups of segments that are there; loads that wait for a slot of these follow
//     close                            the pass's share of the link's time is counted
//
// Compiled with -ffp-contract=off: virtual seconds and scores must not depend on the processor.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tiermoe::core {

using Key = std::int64_t;
using Segment = std::int64_t;
using Slot = std::int64_t;
using Ticket = std::uint64_t;  // of one copy, never given twice; 0: none
using Mark = std::uint64_t;    // all compute issued until it was taken, rising; 0: nothing
using Segments = std::vector<Segment>;

constexpr std::int64_t kSweepPairs = 64;
constexpr double kSweepShare = 0.75;  // `eviction.SWEEP_SHARE`

enum class State : std::uint8_t { absent = 0, loading = 1, resident = 2 };
enum class Cause : std::uint8_t { demand, prefetch, migration, preload };

// A bug: an impossible transition, or a violated invariant.
struct Broken : std::logic_error {
    using std::logic_error::logic_error;
};
// No slot can be freed for a layer.
struct NoSlot : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The link was closed, and a copy is needed.
struct Closed : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A copy that is needed failed.
struct CopyFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Copy {
    Ticket ticket;
    Segment segment;
    Slot slot;
    std::int64_t generation, bytes;
    Cause cause;
    Mark after;  // the slot's last use
    bool back;   // what was in the slot is copied back to the host first
};

// Times of a copy, in seconds of the link's clock. link_s: it was busy; back_s: part of that, for the copy back.
struct Times {
    double start_s = 0.0, end_s = 0.0, link_s = 0.0, back_s = 0.0;
};
enum class Ending : std::uint8_t { under_way, copied, failed, cancelled };

// What is known of a copy only after its segment is in use, or (wait) what the compute of a layer waited for it.
struct Late {
    bool wait;
    std::int64_t layer;  // of a wait
    Segment segment;
    Cause cause;
    Times times;       // of a wait: from when to when
    double writing_s;  // of a wait: its part in which the slot was copied back
};

// What copies: a thread, a disk's readers, a virtual clock, a GPU's streams, or Python (other nodes), which takes the
// interpreter's lock.
class Link {
  public:
    virtual ~Link() = default;
    // Queue these, demand before all else. False: the link is closed, and they are cancelled.
    virtual bool submit(const std::vector<Copy>& copies, bool urgent) = 0;
    virtual void promote(Ticket ticket) = 0;
    // Drop a copy. False: it has begun.
    virtual bool cancel(Ticket ticket) = 0;
    // Share of its bytes that a dropped copy had moved.
    virtual double moved(Ticket) { return 0.0; }
    // A layer begins: enqueue what waits.
    virtual void poll() {}
    // Throws what made a failed copy fail. layer: whose expert it was to bring.
    [[noreturn]] virtual void fail(Ticket, std::int64_t layer) {
        throw CopyFailed("copying an expert of MoE layer " + std::to_string(layer) + " failed");
    }
    // How it has ended as far as the host may see, without waiting; of streams and of Python at the last `poll` or `look`.
    // On a stream a copy that the compute waits for has ended, too; its times come `late`.
    virtual Ending ending(Ticket ticket) = 0;
    virtual void look() {}
    // Compute of the layer issued from now on comes after it. True: the host has waited, so its seconds count.
    virtual bool join(Ticket ticket, std::int64_t layer) = 0;
    // Copies submitted from now on come after it. True: as `join`.
    virtual bool overtake(Ticket ticket) = 0;
    // Whether a layer's copies may make the host wait; where not, its thread keeps the interpreter's lock.
    virtual bool waits() const { return true; }
    // The host waits.
    virtual void wait(Ticket ticket) = 0;
    virtual Mark mark() { return 0; }
    // False: they are not known yet, and come `late`.
    virtual bool times(Ticket ticket, Times& found) = 0;
    // Adds what has become known since the last call, each once.
    virtual void late(std::vector<Late>&) {}
    virtual double now_s() = 0;
    // No longer asked about.
    virtual void forget(Ticket) {}
    virtual std::int64_t pending() = 0;
    virtual void close() = 0;
};

// Order of eviction. Events in the order in which they happened.
class Order {
  public:
    virtual ~Order() = default;
    virtual void admitted(Segment segment) = 0;
    virtual void removed(Segment segment) = 0;
    virtual void used(const Segments& segments) = 0;
    virtual void routed(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens) = 0;
    // The first `count` held ones of a slot class for which allowed [segments] is not 0, or all of them.
    virtual Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) = 0;
};

// Where segments live. Empty class_of: all in one class of `slots[0]`, a unit each.
struct Layout {
    std::int64_t layers = 0, experts = 0, parts = 1;
    std::vector<std::int64_t> class_of;         // [segments]
    std::vector<std::int64_t> slots;            // [classes]
    std::int64_t most = 0;                      // of one class: slots that there may be at some time
    std::vector<std::int64_t> units, bytes;     // [segments]: size in the pool's unit (0: there is no such segment), bytes
    std::vector<std::int64_t> first_unit;       // [slots]: where each begins in the pool; empty: all are of one size
    bool split = false;                         // part 1 is a bottom, and an expert runs on both; else a replica

    std::int64_t keys() const { return layers * experts; }
    std::int64_t segments() const { return parts * keys(); }
};

// Counters of a layer, as `actors.engine.stats.LayerStats` says. Bytes are slot bytes.
#define TIERMOE_LAYER_COUNTS(each)                                                                                         \
    each(hits) each(misses) each(prefetched_hits) each(top_hits) each(low_bit_hits) each(low_bit_misses)                   \
    each(late_prefetches) each(forwards) each(waves) each(bytes_loaded_demand) each(bytes_loaded_prefetch)                 \
    each(bytes_loaded_migration) each(bytes_loaded_low_bit) each(bytes_demanded_decode) each(failed_prefetches)            \
    each(bytes_wasted) each(vacated) each(bytes_premature) each(bytes_written_back) each(writebacks) each(blocked_io_s)    \
    each(writeback_link_s) each(writeback_blocked_s) each(total_io_s) each(link_s) each(io_path_s) each(link_path_s)
struct LayerCounts {
    std::int64_t hits, misses, prefetched_hits, top_hits, low_bit_hits, low_bit_misses, late_prefetches, forwards, waves;
    std::int64_t bytes_loaded_demand, bytes_loaded_prefetch, bytes_loaded_migration, bytes_loaded_low_bit;
    std::int64_t bytes_demanded_decode, failed_prefetches, bytes_wasted, vacated, bytes_premature, bytes_written_back;
    std::int64_t writebacks;
    double blocked_io_s, writeback_link_s, writeback_blocked_s, total_io_s, link_s;
    double io_path_s, link_path_s;  // of blocked_io_s and link_s, of the device with the most in each pass
};
// Over all layers. decode: of forwards that are known to hold no row of a prompt.
struct Totals {
    std::int64_t decode_hits = 0, decode_misses = 0, bytes_preloaded = 0, substituted = 0, dropped = 0;
    double decode_blocked_io_s = 0.0;
};
struct SourceCounts {
    std::int64_t queued, hits, late, wasted, cancelled;
};

// Pauses prefetch while too little of it is used. A window of `window` outcomes, used prefetches and wasted ones (evicted
// or cancelled unused), of which a share below `min_useful` was used, pauses it for `rest` layers; then a new window begins.
// min_useful 0 never pauses.
struct Governor {
    double min_useful = 0.0;
    std::int64_t window = 128, rest = 512;
    std::int64_t used = 0, wasted = 0, resting = 0;  // prefetches of the window; layers left to rest

    bool allows();  // whether a layer may prefetch; asked once a layer, which counts the pause down
    bool next_allows() const { return resting <= 1; }  // of `allows`
    void pause(std::int64_t layers) { resting = resting > layers + 1 ? resting : layers + 1; }
};

struct Load {
    Segment segment, victim;  // -1: a free slot
    std::int64_t after;       // of the run's first `after` segments
};

struct Plan {
    Segments run;                         // residents, arrivals, then missing ones in load order
    std::int64_t resident = 0, arriving = 0;
    std::vector<Load> loads;              // by `after`
};

// For a timeline: a copy that has landed, or a wait.
struct Seen {
    bool wait;
    std::int64_t layer;
    Segment segment;
    Cause cause;
    double start_s, end_s, link_s;
};

// An expert that changed its slot (`Core::resize`).
struct Move {
    Segment segment;
    Slot from, to;
};

class Core {
  public:
    Core(const Layout& layout, std::shared_ptr<Link> link, std::shared_ptr<Order> order, const Governor& governor,
         bool writeback);

    // -- state --------------------------------------------------------------------------------------------
    const Layout& layout() const { return layout_; }
    std::vector<std::uint8_t>& states() { return states_; }
    std::vector<std::uint8_t>& evictable() { return evictable_; }
    std::vector<std::int32_t>& slots() { return slot_; }
    std::vector<std::int32_t>& pins() { return pins_; }
    // Whether all of these are loading or resident.
    bool there(Segment first, Segment stop) const {
        for (Segment s = first; s < stop; ++s)
            if (!states_[s]) return false;
        return true;
    }
    State state(Segment s) const { return static_cast<State>(states_[s]); }
    std::int64_t layer_of(Segment s) const { return s % layout_.keys() / layout_.experts; }
    std::int64_t class_of(Segment s) const { return layout_.class_of.empty() ? 0 : layout_.class_of[s]; }
    Slot first_slot(std::int64_t slot_class) const { return first_of_[slot_class]; }
    std::int64_t free_of(std::int64_t slot_class) const { return static_cast<std::int64_t>(free_[slot_class].size()); }
    std::int64_t free_slots() const { return free_count_; }
    std::int64_t emptied() const { return emptied_; }
    Link& link() { return *link_; }
    Order& order() { return *order_; }
    Governor& governor() { return governor_; }
    std::vector<LayerCounts>& counts() { return counts_; }
    std::vector<SourceCounts>& sources() { return sources_; }
    std::vector<std::int64_t>& uses() { return uses_; }
    const Totals& totals() const { return totals_; }
    // Prefetches that were queued before count in no source.
    void reset_counts();
    // The routing of the pass was changed: pairs that run on other experts, and that do not run.
    void rerouted(std::int64_t substituted, std::int64_t dropped) {
        totals_.substituted += substituted;
        totals_.dropped += dropped;
    }
    std::int64_t resets() const { return resets_; }  // of the counters
    LayerCounts summed() const;                       // over layers
    // Count the times of copies, and the waits on the device, that were not known when their layers ran and are now.
    void settle_times();
    std::shared_ptr<std::vector<Seen>> seen;  // for a timeline; null: there is none
    bool decode_only = false;

    // -- between passes -----------------------------------------------------------------------------------
    // Other slots, of an empty cache. fill: keys of which the parts 0 are loaded at once, most urgent first.
    void divide(const Layout& layout, const Segments& fill);
    // Load the parts 0 of absent keys into free slots behind demand, most wanted first, which leave last: how many.
    std::int64_t fill(const Segments& keys);
    void migrate(const Segments& keys, bool keep_others);
    void preload(const Segments& keys);
    void flush();
    void wait_all();  // for what is under way, at nobody's cost
    // Nothing is under way: what was not begun is dropped, the rest is waited for.
    void settle();
    // Give the last slots of a cache of one class up, or take them again: who has moved. Experts leave in the order of
    // eviction. Throws Broken, and changes nothing more: a pinned one is in the way.
    std::vector<Move> resize(std::int64_t slots);
    // The routing of a layer is known: cancel its queued prefetches that are not needed.
    void drop_stale(std::int64_t layer, const Segments& needed);
    // Copies that have ended land; a failed one frees its slot. layer: whose pass begins; -1: none does.
    void arrive(std::int64_t layer = -1);

    // -- one pass -----------------------------------------------------------------------------------------
    // keys: those needed, as `Routing.experts`; low: of these, those that run on their replica (part 1). Returns the
    // segments that the pass needs.
    const Segments& open(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens,
                         const Segments& low);
    // here: the segments that run on this device. keep: residents that leave last. Throws NoSlot.
    const Plan& plan(const Segments& here, const Segments& keep);
    void begin();  // hits and misses are counted, what is there is pinned, late prefetches become demand
    void load();
    // The next stretch of `Plan::run` that is there, as [first, stop); empty: all are given. Issues the loads that take
    // slots of what has run: the compute of all that was given before is issued. Throws what made a copy fail, or Closed.
    std::pair<std::int64_t, std::int64_t> next();
    // peer_*: of the other device with the most in this pass.
    void close(double peer_blocked_s = 0.0, double peer_link_s = 0.0);
    void abandon() noexcept;
    const Plan& present() const { return plan_; }

    // -- ahead --------------------------------------------------------------------------------------------
    // Queue loads of absent experts, most wanted first, but for victims in `keep`: how many. source: its number.
    // urgent: behind the demand that there is, and before all else.
    std::int64_t prefetch(const Segments& keys, const Segments& keep, std::uint8_t source, bool urgent = false);
    // In a pass that sweeps, as those of a long prompt do: queue the next layer's absent experts as urgently as demand,
    // without asking which it will need. False: it does not sweep, and nothing has changed.
    bool stream(std::uint8_t source);
    // Whether a pass of so many pairs probably sweeps: it has `kSweepPairs` for each expert. It does where it needs
    // `kSweepShare` of its layer's experts, too.
    bool may_sweep(std::int64_t pairs) const { return pairs >= kSweepPairs * layout_.experts; }
    // Keys of the experts that are this device's; others are not streamed, and a pass that needs none of them sweeps among
    // these. Not called: all are.
    void owns(const Segments& keys);
    // Wait, at the cost of `layer`, for these experts' copies under way.
    void finish_prefetch(const Segments& keys, std::int64_t layer);
    // Evict until so many slots are free before `layer` runs, or these.
    void vacate(std::int64_t slots, std::int64_t layer);
    void leave(const Segments& victims, std::int64_t layer);

    // -- for others -----------------------------------------------------------------------------------------
    std::string check() const;  // empty: all invariants hold
    Segments under_way() const;  // oldest copy first
    // Seconds that the last copy of each segment took, as far as known [segments].
    std::vector<double>& took_s() { return took_s_; }
    Segments segments_of(const Segments& keys) const;

    // -- what was asked of the link, for tests ----------------------------------------------------------------
    struct Asked {
        char what;  // d, p, m: queued; ^: promoted; x, -: cancelled or not; w: waited for
        Segment segment;
        Slot slot;
    };
    std::shared_ptr<std::vector<Asked>> log;  // several cores may have one

  private:
    struct Flight {
        Ticket ticket;  // 0: it has ended
        Segment segment;
        Slot slot;
        std::int64_t generation, layer;
        Cause cause;
        Mark after;
        bool back;
    };
    // Copies under way, oldest first; found by their segment without a search.
    class Flights {
      public:
        void size(std::size_t segments) { place_.assign(segments, -1), all_.clear(), live_ = 0; }
        Flight* find(Segment s) { return place_[s] < 0 ? nullptr : &all_[static_cast<std::size_t>(place_[s])]; }
        const Flight* find(Segment s) const { return const_cast<Flights*>(this)->find(s); }
        void add(const Flight& f);
        void erase(Segment s) {
            all_[static_cast<std::size_t>(place_[s])].ticket = 0;
            place_[s] = -1;
            if (!--live_) all_.clear();
        }
        std::size_t count() const { return live_; }
        template <typename Each>
        void each(const Each& of) const {
            for (const Flight& f : all_)
                if (f.ticket) of(f);
        }

      private:
        std::vector<Flight> all_;
        std::vector<std::int32_t> place_;  // [segments]; -1: none
        std::size_t live_ = 0;
    };
    // Takes segments out of `evictable_` while in scope.
    class Kept;

    void lay_out(const Layout& layout);
    // Throws Broken unless all of these are from `first` to before `stop`.
    void expect(const Segments& given, Segment first, Segment stop) const;
    void expect_layer(std::int64_t layer) const;
    void expect_open() const;
    bool has(Segment s) const { return layout_.units.empty() || layout_.units[s] > 0; }
    std::int64_t bytes_of(Segment s) const { return layout_.bytes[s]; }
    LayerCounts& of(std::int64_t layer) { return counts_[layer]; }
    const Flight& flight(Segment s) const { return *flights_.find(s); }
    bool loading(Segment s) const { return state(s) == State::loading; }
    // slots and copies
    const std::vector<Copy>& reserve(const Segments& segments, Cause cause);  // until the next
    void submit(const std::vector<Copy>& copies, bool urgent);
    Segments load_behind(const Segments& keys);
    const Segments& make_room(const Segments& absent, const std::uint8_t* allowed);  // until the next
    void into_segments(const Segments& keys, Segments& found) const;
    void evict(const Segments& segments, std::int64_t layer);  // layer -1: the segment's own
    bool displaced(Segment s, std::int64_t layer);
    void publish(const Flight& f);
    void landed(const Flight& f);
    void land(Segment s);
    bool drop(Segment s);
    void finish(Segment s);
    void land_needed(Segment s, std::int64_t layer);
    std::int64_t land_behind(std::int64_t first, std::int64_t stop);
    void await(const Flight& f, std::int64_t layer, bool overtaken);
    void release(Segment s);
    void forget(Segment s);
    void drop_failed(Segment s);
    [[noreturn]] void fail(Segment s);
    void drop_slot(Segment s);
    void pin(Segment s);
    void unpin(Segment s);
    // plan
    Segments victims(std::int64_t slot_class, std::int64_t count, const Segments& mine, const Segments& kept);
    void plan_class(std::int64_t slot_class, const Segments& run, const Segments& missing, const Segments& keep,
                    std::vector<Load>& loads);
    void issue(std::int64_t after);
    void ran(std::int64_t first, std::int64_t stop);
    // counting
    void count_begin();
    bool take_pending(Segment s, std::int64_t SourceCounts::* outcome);

    Layout layout_;
    std::shared_ptr<Link> link_;
    std::shared_ptr<Order> order_;
    const bool writeback_;
    std::vector<double> took_s_;
    std::vector<std::uint8_t> states_, evictable_, pending_, vacant_, unwritten_;
    std::vector<std::int32_t> slot_, pins_;
    std::vector<std::vector<Slot>> free_;  // of each class, the lowest last
    std::vector<Slot> first_of_;           // of each class
    std::int64_t slots_ = 0;  // of all classes
    std::vector<std::int64_t> generation_;
    std::int64_t emptied_ = 0, free_count_ = 0;
    Flights flights_;
    Ticket tickets_ = 0;
    Governor governor_;
    std::vector<LayerCounts> counts_;
    std::vector<SourceCounts> sources_;
    std::vector<std::int64_t> uses_;
    Totals totals_;
    std::int64_t resets_ = 0;
    // the present pass
    std::int64_t layer_ = -1, given_ = 0, done_ = 0;
    double blocked_s_ = 0.0, link_s_ = 0.0;  // of its layer when it began
    bool late_ = false;  // some loads wait for slots of the pass
    bool sweeps_ = false;  // it does
    std::vector<std::uint8_t> others_;  // [keys], 1 where another device owns it; empty: none does
    Segments needed_;
    Plan plan_;
    // of one call, so that none allocates
    Segments ended_, stale_, here_, ran_, fit_, wanted_, absent_, kept_, loads_, leaving_, missing_, class_run_, class_missing_;
    std::vector<Copy> copies_;
    std::vector<Late> late_times_;
    std::vector<std::uint8_t> may_, flags_, classes_;  // [segments]; [experts], 0 between calls; [classes]
    std::vector<std::int64_t> room_;                   // [classes]
    std::vector<std::int32_t> place_;                  // [segments]: of those of the plan in its run
    std::vector<std::uint8_t> vacated_;                // [layers]: some of its experts are in `vacant_`
};

}  // namespace tiermoe::core
