// The core under the sanitizers: random passes on random layouts (whole experts, split ones, replicas), with every order of
// eviction that is native and every native link, and with a link that ends and fails copies in any order. After each step the
// core's invariants hold, each resident segment's bytes are in its slot, and no slot changes that a kernel may still read.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../actors/core/core.hpp"
#include "../../actors/core/instant_driver.hpp"
#include "../../actors/core/orders.hpp"
#include "../../actors/core/stream_link.hpp"
#include "../../actors/core/thread_link.hpp"
#include "../../actors/core/virtual_link.hpp"

using namespace tiermoe::core;

namespace {

std::mt19937_64 random_bits;
std::int64_t world = 0;
std::string step = "start";
bool overrun = false;

std::int64_t below(std::int64_t end) { return static_cast<std::int64_t>(random_bits() % static_cast<std::uint64_t>(end)); }
bool chance(int percent) { return below(100) < percent; }

void need(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "world %lld, %s: %s\n", static_cast<long long>(world), step.c_str(), what.c_str());
    std::_Exit(1);
}

template <typename T>
std::vector<T> some(std::vector<T> of, std::int64_t count) {
    std::shuffle(of.begin(), of.end(), random_bits);
    of.resize(static_cast<std::size_t>(std::min(count, static_cast<std::int64_t>(of.size()))));
    return of;
}

// -- what lies where ------------------------------------------------------------------------------------------------

enum class Kind { whole, replicas, split };

struct Shape {
    Kind kind;
    std::int64_t layers, experts;
    std::int64_t keys() const { return layers * experts; }
};

constexpr std::int64_t kNeurons = 4;

// Slots of random number; `halves`: of split experts, the neurons of the tops of each layer.
Layout layout_of(const Shape& shape) {
    const std::int64_t n = shape.keys();
    Layout made;
    made.layers = shape.layers, made.experts = shape.experts;
    const auto slots = [&] { return 1 + below(chance(30) ? 3 : 2 * shape.experts); };
    if (shape.kind == Kind::whole) {
        made.slots = {slots()};
        made.most = made.slots[0] + below(4);
        // experts of different sizes in one class: the slot has room for the largest
        for (std::int64_t s = 0; s < n; ++s) made.bytes.push_back(16 + 4 * below(8));
    } else if (shape.kind == Kind::replicas) {
        made.parts = 2;
        made.slots = {slots(), slots()};
        for (std::int64_t s = 0; s < 2 * n; ++s) {
            made.class_of.push_back(s >= n);
            made.bytes.push_back(s < n ? 32 + 4 * below(8) : 12);
        }
    } else {
        made.parts = 2;
        made.split = true;
        std::vector<std::int64_t> tops;
        bool bottoms = false;
        for (std::int64_t l = 0; l < shape.layers; ++l) {
            tops.push_back(below(kNeurons + 1));
            made.slots.push_back(tops[l] ? slots() : 0);
            bottoms |= tops[l] < kNeurons;
        }
        made.slots.push_back(bottoms ? slots() : 0);
        for (std::int64_t s = 0; s < 2 * n; ++s) {
            const std::int64_t l = s % n / shape.experts;
            made.class_of.push_back(s < n ? l : shape.layers);
            made.units.push_back(s < n ? tops[l] : kNeurons - tops[l]);
            made.bytes.push_back(16 * made.units.back());
        }
    }
    return made;
}

// The bytes of each segment, as two tensors, and a pool of slots, each of exactly its size.
class Memory {
  public:
    explicit Memory(const Layout& layout) {
        std::vector<std::int64_t> room[2];
        room[0].assign(layout.slots.size(), 1), room[1] = room[0];
        for (std::int64_t s = 0; s < layout.segments(); ++s) {
            const std::int64_t c = layout.class_of.empty() ? 0 : layout.class_of[s];
            const std::int64_t bytes = layout.bytes[s], second = bytes / 8 * 4;
            const bool widen = s % 3 == 0;
            parts_.push_back({made(widen ? (bytes - second) / 2 : bytes - second), made(second), widen});
            class_.push_back(c);
            room[0][c] = std::max(room[0][c], bytes - second);
            room[1][c] = std::max(room[1][c], second);
        }
        for (std::size_t c = 0; c < layout.slots.size(); ++c) {
            const std::int64_t slots = std::max(layout.slots[c], layout.slots.size() == 1 ? layout.most : 0);
            for (std::int64_t i = 0; i < slots; ++i) place_.push_back({static_cast<std::int64_t>(c), i});
            pools_.push_back({std::vector<char>(slots * room[0][c]), std::vector<char>(slots * room[1][c]), room[0][c], room[1][c]});
        }
    }

    void scribble(Slot slot) {
        for (int t : {0, 1}) std::memset(at(slot, t), 0x77, static_cast<std::size_t>(stride(slot, t)));
    }
    void write(Slot slot, Segment s) {
        const auto [first, second] = expected(s);
        std::memcpy(at(slot, 0), first.data(), first.size() + (overrun ? 1 : 0));
        std::memcpy(at(slot, 1), second.data(), second.size());
    }
    bool holds(Slot slot, Segment s) {
        const auto [first, second] = expected(s);
        return !std::memcmp(at(slot, 0), first.data(), first.size()) && !std::memcmp(at(slot, 1), second.data(), second.size());
    }
    // What a GPU's kernel casts: the first tensor of a segment, from bfloat16 to float.
    void widen(Segment s, Slot slot, std::int64_t first, std::int64_t count) {
        for (std::int64_t i = first; i < first + count; ++i) {
            std::memset(at(slot, 0) + 4 * i, 0, 2);
            std::memcpy(at(slot, 0) + 4 * i + 2, parts_[static_cast<std::size_t>(s)].first.data() + 2 * i, 2);
        }
    }
    void move(Slot from, Slot to) {
        for (int t : {0, 1}) std::memcpy(at(to, t), at(from, t), static_cast<std::size_t>(stride(from, t)));
    }
    Places places() {
        Places made;
        made.tensors = 2;
        for (auto& pool : pools_)
            made.homes.push_back({{pool.tensors[0].data(), pool.strides[0]}, {pool.tensors[1].data(), pool.strides[1]}});
        for (std::size_t s = 0; s < parts_.size(); ++s) {
            made.home_of.push_back(static_cast<std::int32_t>(class_[s]));
            const auto& part = parts_[s];
            const auto first = static_cast<std::int64_t>(part.first.size());
            made.sources.push_back({part.first.data(), part.widen ? first / 2 : first, part.widen});
            made.sources.push_back({part.second.data(), static_cast<std::int64_t>(part.second.size()), false});
        }
        for (const auto& [c, i] : place_) made.position.push_back(i);
        return made;
    }

  private:
    struct Part {
        std::vector<char> first, second;
        bool widen;  // the first, from bfloat16
    };
    struct Pool {
        Pool(std::vector<char> a, std::vector<char> b, std::int64_t of_a, std::int64_t of_b)
            : tensors{std::move(a), std::move(b)}, strides{of_a, of_b} {}
        std::vector<char> tensors[2];
        std::int64_t strides[2];
    };

    static std::vector<char> made(std::int64_t bytes) {
        std::vector<char> found(static_cast<std::size_t>(bytes));
        for (char& byte : found) byte = static_cast<char>(random_bits());
        return found;
    }
    char* at(Slot slot, int tensor) {
        const auto [c, i] = place_[slot];
        return pools_[c].tensors[tensor].data() + i * pools_[c].strides[tensor];
    }
    std::int64_t stride(Slot slot, int tensor) { return pools_[place_[slot].first].strides[tensor]; }
    std::pair<std::vector<char>, const std::vector<char>&> expected(Segment s) {
        const Part& part = parts_[s];
        if (!part.widen) return {part.first, part.second};
        std::vector<char> wide(2 * part.first.size());
        for (std::size_t i = 0; i < part.first.size(); i += 2) std::memcpy(&wide[2 * i + 2], &part.first[i], 2);
        return {wide, part.second};
    }

    std::vector<Part> parts_;
    std::vector<std::int64_t> class_;
    std::vector<std::pair<std::int64_t, std::int64_t>> place_;  // of slots: class, place in its pool
    std::vector<Pool> pools_;
};

// -- the link and the order, watched --------------------------------------------------------------------------------

// What every link is asked: in a possible order, and about copies that it knows.
struct Ledger {
    std::shared_ptr<Memory> memory;
    std::set<Slot> read;            // by kernels that may still run
    std::vector<std::uint8_t> unwritten;  // [slots], where experts are copied back
    std::map<Ticket, Copy> known;
    std::int64_t moved_bytes = 0;
    int fails = 0;  // percent
    bool writeback = false, closed = false;
};

// Ends copies in any order, whenever it is asked anything.
class AnyOrder : public Link {
  public:
    explicit AnyOrder(Ledger& ledger) : ledger_(ledger) {}
    bool submit(const std::vector<Copy>& copies, bool) override {
        for (const Copy& copy : copies) jobs_[copy.ticket] = {copy, closed_ ? Phase::ended : Phase::queued, Ending::cancelled};
        go_on();
        return !closed_;
    }
    void promote(Ticket ticket) override { job(ticket), go_on(); }
    bool cancel(Ticket ticket) override {
        go_on();
        Job& of = job(ticket);
        if (of.phase == Phase::queued) of.phase = Phase::ended, of.ending = Ending::cancelled;
        return of.phase == Phase::ended && of.ending == Ending::cancelled;
    }
    double moved(Ticket ticket) override { return job(ticket).copy.bytes % 3 ? 0.5 : 0.0; }
    void poll() override { go_on(); }
    Ending ending(Ticket ticket) override {
        go_on();
        const Job& of = job(ticket);
        return of.phase == Phase::ended ? of.ending : Ending::under_way;
    }
    bool join(Ticket ticket, std::int64_t) override { return finish(ticket); }
    bool overtake(Ticket ticket) override { return finish(ticket); }
    void wait(Ticket ticket) override { finish(ticket); }
    Mark mark() override { return go_on(), ++marks_; }
    bool times(Ticket ticket, Times& found) override {
        job(ticket);
        found = {1.0, 2.0, 1.0, 0.5};
        return chance(70);
    }
    double now_s() override { return go_on(), now_s_ += 1e-3; }
    void forget(Ticket ticket) override {
        need(job(ticket).phase == Phase::ended, "a copy is forgotten while it is under way");
        jobs_.erase(ticket);
    }
    std::int64_t pending() override { return 0; }
    void close() override {
        closed_ = true;
        for (auto& [ticket, of] : jobs_)
            if (of.phase == Phase::queued) of.phase = Phase::ended, of.ending = Ending::cancelled;
    }

  private:
    enum class Phase { queued, begun, ended };
    struct Job {
        Copy copy;
        Phase phase;
        Ending ending;
    };
    Job& job(Ticket ticket) {
        const auto found = jobs_.find(ticket);
        need(found != jobs_.end(), "the link is asked about a copy that it does not know");
        return found->second;
    }
    void go_on() {
        while (chance(40)) {
            std::vector<Job*> left;
            for (auto& [ticket, of] : jobs_)
                if (of.phase != Phase::ended) left.push_back(&of);
            if (left.empty()) return;
            advance(*left[below(static_cast<std::int64_t>(left.size()))]);
        }
    }
    void advance(Job& of) {
        if (of.phase == Phase::queued) {
            of.phase = Phase::begun;
            ledger_.memory->scribble(of.copy.slot);
            return;
        }
        of.phase = Phase::ended;
        of.ending = chance(ledger_.fails) ? Ending::failed : Ending::copied;
        if (of.ending == Ending::copied) ledger_.memory->write(of.copy.slot, of.copy.segment);
    }
    bool finish(Ticket ticket) {
        go_on();
        Job& of = job(ticket);
        while (of.phase != Phase::ended) advance(of);
        return chance(80);
    }

    Ledger& ledger_;
    std::map<Ticket, Job> jobs_;
    Mark marks_ = 0;
    double now_s_ = 0.0;
    bool closed_ = false;
};

class Carrying : public VirtualLink {
  public:
    Carrying(Clock& clock, Ledger& ledger)
        : VirtualLink(clock, [](std::int64_t bytes) { return 1e-3 * static_cast<double>(bytes); }, 1e-3), ledger_(ledger) {}

  private:
    bool carry(const Copy& copy) override {
        ledger_.memory->scribble(copy.slot);
        if (chance(ledger_.fails)) return false;
        ledger_.memory->write(copy.slot, copy.segment);
        return true;
    }
    Ledger& ledger_;
};

// A GPU whose copies end at once or late, and some of which cannot be enqueued.
int failing = 0;  // percent
Driver driver() {
    static const Driver instant = Instant::driver();
    Driver made = instant;
    made.up = [](std::uint64_t to, const void* from, std::size_t bytes, Driver::Handle stream) {
        return chance(failing) ? 1 : instant.up(to, from, bytes, stream);
    };
    return made;
}

// Before another link: what the core may ask.
class Watched : public Link {
  public:
    Watched(Ledger& ledger, std::shared_ptr<Link> link) : ledger_(ledger), link_(std::move(link)) {}
    bool submit(const std::vector<Copy>& copies, bool urgent) override {
        for (const Copy& copy : copies) {
            need(copy.ticket > last_, "a ticket is given twice");
            last_ = copy.ticket;
            for (const auto& [ticket, other] : ledger_.known)
                need(other.slot != copy.slot, "two copies are under way to one slot");
            need(!ledger_.read.count(copy.slot), "a copy is queued to a slot that a kernel reads");
            std::uint8_t& unwritten = ledger_.unwritten[copy.slot];
            need(copy.back == (ledger_.writeback && unwritten), copy.back ? "what never left is copied back"
                                                                         : "an expert that left is not copied back");
            unwritten = 0;
            ledger_.known[copy.ticket] = copy;
        }
        return link_->submit(copies, urgent);
    }
    void promote(Ticket ticket) override { link_->promote(known(ticket)); }
    bool cancel(Ticket ticket) override { return link_->cancel(known(ticket)); }
    double moved(Ticket ticket) override {
        need(link_->ending(ticket) == Ending::cancelled || link_->ending(ticket) == Ending::failed, "of a copy that goes on");
        const double share = link_->moved(known(ticket));
        ledger_.moved_bytes += std::llrint(share * static_cast<double>(ledger_.known[ticket].bytes));
        return share;
    }
    void poll() override { link_->poll(); }
    Ending ending(Ticket ticket) override { return link_->ending(known(ticket)); }
    bool join(Ticket ticket, std::int64_t layer) override { return link_->join(known(ticket), layer); }
    bool overtake(Ticket ticket) override { return link_->overtake(known(ticket)); }
    void wait(Ticket ticket) override { link_->wait(known(ticket)); }
    Mark mark() override { return link_->mark(); }
    bool times(Ticket ticket, Times& found) override { return link_->times(known(ticket), found); }
    void late(std::vector<Late>& found) override { link_->late(found); }
    void look() override { link_->look(); }
    double now_s() override { return link_->now_s(); }
    void forget(Ticket ticket) override {
        const Copy copy = ledger_.known[known(ticket)];
        const Ending ending = link_->ending(ticket);
        need(ending != Ending::under_way, "a copy is forgotten while it is under way");
        if (ending == Ending::copied) ledger_.moved_bytes += copy.bytes;
        if (ending == Ending::cancelled && copy.back) ledger_.unwritten[copy.slot] = 1;
        ledger_.known.erase(ticket);
        link_->forget(ticket);
    }
    std::int64_t pending() override { return link_->pending(); }
    void close() override { link_->close(); }

  private:
    Ticket known(Ticket ticket) {
        need(ledger_.known.count(ticket) == 1, "the link is asked about a copy that was never queued, or is forgotten");
        return ticket;
    }

    Ledger& ledger_;
    std::shared_ptr<Link> link_;
    Ticket last_ = 0;
};

// Tops of each layer by priority or by last use, and bottoms by last use.
std::shared_ptr<tiermoe::core::Order> split_order(std::int64_t layers, std::int64_t experts, bool by_use) {
    using Kind = tiermoe::Order::Kind;
    std::vector<std::shared_ptr<tiermoe::core::Order>> members;
    for (std::int64_t layer = 0; layer < layers; ++layer)
        members.push_back(std::make_shared<tiermoe::core::WholeOrder>(by_use ? Kind::lru : Kind::lcp, std::int64_t{1}, experts, 0.0, 1.0,
                                                        nullptr, nullptr, nullptr, 0.01));
    members.push_back(std::make_shared<tiermoe::core::WholeOrder>(Kind::lru, layers, experts, 0.0, 1.0));
    return std::make_shared<tiermoe::core::ByClass>(layers, experts, true, members);
}

// Least recently used, of any segments.
class Lru : public tiermoe::core::Order {
  public:
    explicit Lru(const Layout& layout) : layout_(layout) {}
    void admitted(Segment s) override { order_.push_back(s); }
    void removed(Segment s) override { order_.erase(std::find(order_.begin(), order_.end(), s)); }
    void used(const Segments& segments) override {
        for (Segment s : segments) removed(s), admitted(s);
    }
    void routed(std::int64_t, const Segments&, const Segments&, std::int64_t) override {}
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        Segments found;
        for (Segment s : order_)
            if (static_cast<std::int64_t>(found.size()) < count && allowed[s] &&
                (layout_.class_of.empty() ? 0 : layout_.class_of[s]) == slot_class)
                found.push_back(s);
        return found;
    }

  private:
    const Layout layout_;
    std::vector<Segment> order_;
};

// Before another order: what it may hear.
class Heard : public tiermoe::core::Order {
  public:
    Heard(std::shared_ptr<tiermoe::core::Order> order, Ledger& ledger) : order_(std::move(order)), ledger_(ledger) {}
    void admitted(Segment s) override {
        need(held.insert(s).second, "a segment is admitted twice");
        slot[s] = core->slots()[s];
        order_->admitted(s);
    }
    void removed(Segment s) override {
        need(held.erase(s) == 1, "a segment is removed that was not held");
        bool loading = false;
        for (const auto& [ticket, copy] : ledger_.known) loading |= copy.segment == s;
        if (!loading && s < core->layout().keys()) ledger_.unwritten[slot[s]] = 1;
        order_->removed(s);
    }
    void used(const Segments& segments) override {
        for (Segment s : segments) need(held.count(s) == 1, "a segment is used that is not held");
        order_->used(segments);
    }
    void routed(std::int64_t layer, const Segments& keys, const Segments& counts, std::int64_t tokens) override {
        order_->routed(layer, keys, counts, tokens);
    }
    Segments victims(std::int64_t slot_class, std::int64_t count, const std::uint8_t* allowed) override {
        const Segments found = order_->victims(slot_class, count, allowed);
        for (Segment s : found) need(held.count(s) && allowed[s], "a victim is not held, or not allowed");
        return found;
    }
    std::set<Segment> held;
    std::map<Segment, Slot> slot;
    Core* core = nullptr;

  private:
    std::shared_ptr<tiermoe::core::Order> order_;
    Ledger& ledger_;
};

// -- a world --------------------------------------------------------------------------------------------------------

struct Done {
    std::int64_t passes = 0, waves = 0, failures = 0, refused = 0, closed = 0, divides = 0, resizes = 0, written = 0;
};

class World {
  public:
    explicit World(Done& done) : done_(done) {
        shape_ = {static_cast<Kind>(below(3)), 1 + below(4), 1 + below(6)};
        ledger_.writeback = shape_.kind != Kind::split && chance(40);
        ledger_.fails = chance(40) ? 5 : 0;
        const Layout layout = layout_of(shape_);
        remember(layout);
        std::shared_ptr<Link> link;
        switch (below(4)) {
            case 0: link = std::make_shared<AnyOrder>(ledger_); break;
            case 1: link = std::make_shared<Carrying>(clock_, ledger_); break;
            case 2: link = streams_ = streams(); break;
            default:
                ledger_.fails = 0;
                link = thread_ = std::make_shared<ThreadLink>(chance(50) ? 0.0 : 1e7, 1e-6 * static_cast<double>(below(5)));
                thread_->place(ledger_.memory->places());
        }
        watched_ = std::make_shared<Watched>(ledger_, link);
        std::shared_ptr<tiermoe::core::Order> order;
        if (shape_.kind == Kind::whole && chance(80)) {
            constexpr tiermoe::Order::Kind kinds[] = {tiermoe::Order::Kind::lru, tiermoe::Order::Kind::sweep,
                                                      tiermoe::Order::Kind::lfu, tiermoe::Order::Kind::worth};
            order = std::make_shared<WholeOrder>(kinds[below(4)], shape_.layers, shape_.experts, 2.0, 1.01);
        } else if (shape_.kind == Kind::split && chance(80)) {
            order = split_order(shape_.layers, shape_.experts, chance(50));
        } else {
            order = std::make_shared<Lru>(layout);
            own_order_ = true;
        }
        heard_ = std::make_shared<Heard>(order, ledger_);
        core_ = std::make_unique<Core>(layout, watched_, heard_, Governor{0.2, 8, 4}, ledger_.writeback);
        heard_->core = core_.get();
        core_->log = std::make_shared<std::vector<Core::Asked>>();
        core_->seen = std::make_shared<std::vector<Seen>>();
    }

    void run() {
        if (chance(50)) attempt("preload", [&] { core_->preload(some(keys(), 1 + below(shape_.keys()))); });
        const std::int64_t steps = 5 + below(40), closing = chance(25) ? below(steps) : steps;
        std::thread closer;
        for (std::int64_t i = 0; i < steps; ++i) {
            if (i == closing) {
                ledger_.closed = true;
                if (thread_ && chance(70)) {
                    closer = std::thread([this, wait = below(200)] {
                        std::this_thread::sleep_for(std::chrono::microseconds(wait));
                        thread_->close();
                    });
                } else {
                    attempt("close the link", [&] { watched_->close(); });
                }
            }
            clock_.now_s += 1e-3 * static_cast<double>(below(60));
            chance(75) ? pass(below(shape_.layers)) : between();
        }
        if (closer.joinable()) closer.join();
        if (!ledger_.closed) {
            attempt("flush", [&] { core_->flush(); });
            need(core_->free_slots() == slots(), "slots are in use after all has left");
            balance();
        }
        for (const LayerCounts& c : core_->counts()) done_.waves += c.waves - c.forwards, done_.written += c.writebacks;
    }

  private:
    Segments keys() const {
        Segments found;
        for (Key key = 0; key < shape_.keys(); ++key) found.push_back(key);
        return found;
    }
    Segments keys_of(std::int64_t layer) const {
        Segments found;
        for (std::int64_t e = 0; e < shape_.experts; ++e) found.push_back(layer * shape_.experts + e);
        return found;
    }
    std::int64_t slots() const {
        std::int64_t found = 0;
        for (std::int64_t count : core_->layout().slots) found += count;
        return found;
    }
    void remember(const Layout& layout) {
        ledger_.memory = std::make_shared<Memory>(layout);
        std::int64_t count = layout.most;
        for (std::int64_t slots : layout.slots) count += slots;
        ledger_.unwritten.assign(static_cast<std::size_t>(count), 0);
    }

    // A step of the core, after which all must hold, however it ended. False: it threw.
    template <typename F>
    bool attempt(const char* name, F f) {
        step = name;
        bool ran = false;
        try {
            f();
            ran = true;
        } catch (const Closed&) {
            need(ledger_.closed, "closed, by nobody");
            ++done_.closed;
        } catch (const NoSlot&) {
            ++done_.refused;
        } catch (const std::runtime_error& error) {
            need(ledger_.fails > 0, error.what());
            ++done_.failures;
        } catch (const std::exception& error) {
            need(false, error.what());
        }
        if (!ran) {
            ledger_.read.clear();
            core_->abandon();
        }
        verify();
        return ran;
    }

    void verify() {
        const std::string broken = core_->check();
        need(broken.empty(), broken);
        const auto& states = core_->states();
        for (std::size_t s = 0; s < states.size(); ++s) {
            need((states[s] != 0) == (heard_->held.count(static_cast<Segment>(s)) == 1), "the order holds other segments");
            if (states[s] == 2)
                need(ledger_.memory->holds(core_->slots()[s], static_cast<Segment>(s)), "a resident segment's bytes are others");
        }
        need(ledger_.known.size() == core_->under_way().size(), "the link keeps copies that nobody asks about");
    }

    void pass(std::int64_t layer) {
        core_->decode_only = chance(50);
        if (!attempt("arrive", [&] { core_->arrive(layer); })) return;
        const Segments wanted = some(keys_of(layer), 1 + below(shape_.experts));
        Segments counts, low, here;
        for (std::size_t i = 0; i < wanted.size(); ++i) counts.push_back(1 + below(3));
        if (shape_.kind == Kind::replicas) low = some(wanted, below(static_cast<std::int64_t>(wanted.size()) + 1));
        if (!attempt("open", [&] { here = core_->open(layer, wanted, counts, 4, low); })) return;
        if (chance(20)) here = some(here, below(static_cast<std::int64_t>(here.size()) + 1));  // peers run the others
        Segments keep;
        for (std::size_t s = 0; s < core_->states().size(); ++s)
            if (core_->states()[s] == 2 && chance(20)) keep.push_back(static_cast<Segment>(s));
        if (!attempt("plan", [&] { core_->plan(here, chance(50) ? keep : Segments{}); })) return;
        const Plan& plan = core_->present();
        Segments planned = plan.run, asked = here;
        std::sort(planned.begin(), planned.end()), std::sort(asked.begin(), asked.end());
        need(planned == asked, "the plan runs other segments");
        if (!attempt("begin", [&] { core_->begin(); })) return;
        if (!attempt("load", [&] { core_->load(); })) return;
        while (chance(50))
            if (!ahead(layer)) return;
        const std::int64_t stop_at = chance(5) ? below(3) : 1000;
        Segments given;
        for (std::int64_t i = 0;; ++i) {
            if (i == stop_at) {
                ledger_.read.clear();
                core_->abandon();
                step = "abandon";
                return verify();
            }
            std::pair<std::int64_t, std::int64_t> stretch;
            ledger_.read.clear();
            if (!attempt("next", [&] { stretch = core_->next(); })) return;
            if (stretch.first == stretch.second) break;
            for (std::int64_t at = stretch.first; at < stretch.second; ++at) {
                const Segment s = core_->present().run[at];
                given.push_back(s);
                need(core_->state(s) == State::resident && core_->pins()[s] > 0, "what runs is not there, or not pinned");
                ledger_.read.insert(core_->slots()[s]);
            }
            if (chance(10) && !ahead(layer)) return;
        }
        need(given == core_->present().run, "what was given is not the plan");
        if (!attempt("close", [&] { core_->close(1e-3, 1e-3); })) return;
        for (std::int32_t pins : core_->pins()) need(pins == 0, "a pin stays after the pass");
        ++done_.passes;
    }

    bool ahead(std::int64_t layer) {
        if (shape_.layers == 1) return true;
        const std::int64_t other = (layer + 1 + below(shape_.layers - 1)) % shape_.layers;
        const Segments wanted = some(keys_of(other), 1 + below(shape_.experts));
        switch (below(4)) {
            case 0: return attempt("finish_prefetch", [&] { core_->finish_prefetch(wanted, layer); });
            case 1:
                if (shape_.kind == Kind::split) return true;
                return attempt("vacate", [&] { core_->vacate(below(6), other); });
            case 2: {
                Segments leaving;
                for (std::size_t s = 0; s < static_cast<std::size_t>(shape_.keys()); ++s)
                    if (core_->evictable()[s] && chance(20)) leaving.push_back(static_cast<Segment>(s));
                return attempt("leave", [&] { core_->leave(leaving, other); });
            }
            default: {
                Segments asked = wanted;
                if (shape_.kind == Kind::replicas)
                    for (Segment& s : asked) s += chance(30) ? shape_.keys() : 0;
                return attempt("prefetch", [&] {
                    core_->prefetch(asked, some(keys(), below(3)), static_cast<std::uint8_t>(1 + below(3)));
                });
            }
        }
    }

    void between() {
        const Segments wanted = some(keys(), 1 + below(shape_.keys()));
        switch (below(8)) {
            case 0: attempt("migrate", [&] { core_->migrate(wanted, chance(50)); }); break;
            case 1: attempt("flush", [&] { core_->flush(); }); break;
            case 2: attempt("settle", [&] { core_->settle(); }); break;
            case 3:
                if (shape_.kind == Kind::whole) resize();
                break;
            case 4:
                if (!own_order_) divide(wanted);
                break;
            case 5: attempt("settle times", [&] { core_->settle_times(); }); break;
            case 6: attempt("arrive", [&] { core_->arrive(); }); break;
            default: {
                Segments absent;
                for (Segment s : wanted) {
                    bool there = false;
                    for (Segment part : core_->segments_of({s})) there |= core_->state(part) != State::absent;
                    if (!there) absent.push_back(s);
                }
                attempt("preload", [&] { core_->preload(absent); });
            }
        }
    }

    void resize() {
        const std::int64_t most = std::max(core_->layout().most, core_->layout().slots[0]);
        attempt("resize", [&] {
            for (const Move& move : core_->resize(1 + below(most))) {
                ledger_.memory->move(move.from, move.to);
                heard_->slot[move.segment] = move.to;
            }
        });
        ++done_.resizes;
    }

    void divide(const Segments& fill) {
        // the pool changes place: nothing may be under way to the old one
        if (!attempt("settle", [&] { core_->settle(); }) || !attempt("flush", [&] { core_->flush(); })) return;
        const Layout layout = layout_of(shape_);
        remember(layout);
        if (thread_) thread_->place(ledger_.memory->places());
        if (streams_) streams_->place(ledger_.memory->places());
        attempt("divide", [&] { core_->divide(layout, shape_.kind == Kind::split ? fill : Segments{}); });
        ++done_.divides;
    }

    std::shared_ptr<StreamLink> streams() {
        Instant::late = chance(50);
        failing = ledger_.fails;
        const auto stream = [](std::uintptr_t number) { return reinterpret_cast<Driver::Handle>(number); };
        const StreamLink::Calls calls{
            [] { return reinterpret_cast<std::uintptr_t>(Instant::compute); },
            [this](bool, Segment s, Slot slot, std::int64_t, std::int64_t first, std::int64_t count) {
                ledger_.memory->widen(s, slot, first, count);
            },
            [this](std::int64_t bytes) {
                scratch_.emplace_back(static_cast<std::size_t>(bytes));
                return reinterpret_cast<std::uintptr_t>(scratch_.back().data());
            }};
        auto made = std::make_shared<StreamLink>(driver(), stream(2), stream(3), 8 + below(200), calls, nullptr);
        made->place(ledger_.memory->places());
        return made;
    }

    // Every queued prefetch has come to one end, and every byte is counted once.
    void balance() {
        for (const SourceCounts& c : core_->sources())
            need(c.queued == c.hits + c.late + c.wasted + c.cancelled, "a prefetch is lost, or counted twice");
        std::int64_t bytes = core_->totals().bytes_preloaded;
        for (const LayerCounts& c : core_->counts())
            bytes += c.bytes_loaded_demand + c.bytes_loaded_prefetch + c.bytes_loaded_migration;
        need(bytes == ledger_.moved_bytes, "the counters say " + std::to_string(bytes) + " bytes, the link " +
                                               std::to_string(ledger_.moved_bytes));
    }

    Done& done_;
    Shape shape_;
    Ledger ledger_;
    Clock clock_;
    std::shared_ptr<ThreadLink> thread_;
    std::shared_ptr<StreamLink> streams_;
    std::list<std::vector<char>> scratch_;
    std::shared_ptr<Watched> watched_;
    std::shared_ptr<Heard> heard_;
    std::unique_ptr<Core> core_;
    bool own_order_ = false;
};

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGABRT, [](int) {
        std::fprintf(stderr, "world %lld, %s\n", static_cast<long long>(world), step.c_str());
        std::_Exit(1);
    });
    std::int64_t worlds = 300, first = 0;
    if (argc > 1 && !std::strcmp(argv[1], "overrun")) overrun = true;
    else if (argc > 1) first = std::atoll(argv[1]), worlds = first + (argc > 2 ? std::atoll(argv[2]) : 1);
    Done done;
    for (world = first; world < worlds; ++world) {
        random_bits.seed(static_cast<std::uint64_t>(world));
        World(done).run();
    }
    std::printf("checked %lld passes, %lld waves, %lld failures, %lld without a slot, %lld closed, %lld divides, %lld resizes, "
                "%lld written back\n",
                (long long)done.passes, (long long)done.waves, (long long)done.failures, (long long)done.refused,
                (long long)done.closed, (long long)done.divides, (long long)done.resizes, (long long)done.written);
}
