// Experts: the table of a layer's tiles, and the launches that run it (kernels/triton/expert_ffn.py).
#pragma once

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "experts.hpp"
#include "ring.hpp"

namespace tiermoe::launch {

constexpr std::int64_t kColumns = 8;  // of a table of tiles: `_COLUMNS` of expert_ffn.py
constexpr std::int64_t kDecodePairs = 64;  // `DECODE_PAIRS` of expert_ffn.py

inline std::vector<Group> groups_of(nb::handle given) {
    const nb::object fast = nb::steal(not_null(PySequence_Fast(given.ptr(), "groups are a sequence")));
    std::vector<Group> groups(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
    for (std::size_t i = 0; i < groups.size(); ++i) {
        PyObject* one = PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(i));
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 5)
            throw nb::type_error("each group is a tuple (start, stop, first, neurons, add)");
        const auto item = [one](Py_ssize_t n) { return number(PyTuple_GET_ITEM(one, n)); };
        groups[i] = {item(0), item(1), item(2), item(3), item(4) != 0};
    }
    return groups;
}

// Experts of up to so many rows: rows of a tile, and the launches with their blocks' columns.
struct RowClass {
    std::int64_t most, tile;
    Launch *up, *down;
    std::int64_t up_columns, down_columns;
};

struct Sizes {  // of the pool: neurons of all slots, and of one; H; items between rows of activations, and what divides them
    std::int64_t pool, slot, width, stride, padded;
};

// A number in 16 bits: of the nearest, the even one.
inline std::uint16_t bfloat16_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>(std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline std::uint16_t float16_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    std::uint32_t found = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
    if (rest < 0x38800000) found = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), 24)));  // small
    if (rest >= 0x477ff000) found = rest > 0x7f800000 ? 0x7e00 : 0x7c00;  // no number, or none so large
    return static_cast<std::uint16_t>(sign | found);
}

struct Tiles {
    struct Phase {
        std::size_t row_class;
        std::int64_t phase;
        std::vector<std::int32_t> rows;  // of the table
    };
    std::vector<Phase> phases;  // by class, then phase
    std::vector<std::int64_t> widest;
    std::int64_t rows = 0, numbers = 0;  // of activations; of the table
};

// The table of tiles. Segments of one expert are in different phases, the added one in the later.
inline Tiles tiles_of(const Group* groups, std::size_t count, std::int64_t pairs, const Sizes& sizes,
               const std::vector<RowClass>& classes) {
    Tiles tiles;
    tiles.widest.assign(classes.size(), -1);
    std::vector<std::uint8_t> seen(static_cast<std::size_t>(pairs) + 1);  // made for each arrival of a prompt
    for (std::size_t i = 0; i < count; ++i) {
        const auto& [start, stop, first, neurons, add] = groups[i];
        if (!(0 <= start && start <= stop && stop <= pairs && 0 <= neurons && neurons <= sizes.slot))
            throw std::invalid_argument("group " + text_of(nb::make_tuple(start, stop, first, neurons)) +
                                        " has more pairs or neurons than there are");
        if (first < 0 || first > sizes.pool - neurons)
            throw std::invalid_argument("neurons " + std::to_string(first) + " to " + std::to_string(first + neurons) +
                                        " are out of range 0 to " + std::to_string(sizes.pool));
        if (start == stop) continue;
        std::size_t row_class = 0;
        while (classes[row_class].most < stop - start) ++row_class;
        const std::int64_t phase = seen[static_cast<std::size_t>(start)]++;
        auto part = tiles.phases.begin();
        while (part != tiles.phases.end() && std::pair(part->row_class, part->phase) < std::pair(row_class, phase)) ++part;
        if (part == tiles.phases.end() || part->row_class != row_class || part->phase != phase)
            part = tiles.phases.insert(part, {row_class, phase, {}});
        tiles.widest[row_class] = std::max(tiles.widest[row_class], neurons);
        const std::int64_t size = classes[row_class].tile;
        for (std::int64_t begin = start; begin < stop; begin += size)
            for (const std::int64_t value : {begin, std::min(size, stop - begin), first, neurons, tiles.rows + begin - start,
                                             std::int64_t{add}, std::int64_t{0}, std::int64_t{0}})
                part->rows.push_back(static_cast<std::int32_t>(value));
        tiles.rows += stop - start;
    }
    for (const auto& part : tiles.phases) tiles.numbers += static_cast<std::int64_t>(part.rows.size());
    return tiles;
}

class Experts {
  public:
    using Class = std::tuple<std::int64_t, std::int64_t, Launch*, std::int64_t, Launch*, std::int64_t>;

    Experts(nb::tuple up, nb::tuple down, nb::object type, const std::vector<Class>& classes,
            const std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>& sizes, nb::object tables,
            nb::object scratch, std::int64_t kept, nb::object stream, nb::tuple dtypes, nb::object int64, nb::object combining,
            std::int64_t block)
        : slots_(nb::make_tuple(up, down, type)), tables_(std::move(tables)), scratch_(std::move(scratch)), stream_(std::move(stream)),
          combining_(std::move(combining)), type_(type.ptr()), ring_(nb::cast<Ring&>(tables_)), kept_rows_(kept), block_(block),
          int64_(int64.ptr()) {
        for (const nb::handle one : up) up_.push_back(tensor(one.ptr()));
        for (const nb::handle one : down) low_.push_back(tensor(one.ptr()));
        if (up_.size() + 8 > kMostArgs || low_.size() + 7 > kMostArgs) throw std::invalid_argument("a kernel takes at most 32 arguments");
        for (const auto& [most, tile, up, up_columns, down_launch, down_columns] : classes) {
            if (tile < 1 || up_columns < 1 || down_columns < 1) throw std::invalid_argument("a block has rows and columns");
            classes_.push_back({most, tile, up, down_launch, up_columns, down_columns});
        }
        if (classes_.empty()) throw std::invalid_argument("there are no classes of rows");
        classes_.back().most = std::numeric_limits<std::int64_t>::max();
        std::tie(sizes_.pool, sizes_.slot, sizes_.width, sizes_.stride, sizes_.padded) = sizes;
        if (sizes_.padded < 1 || block < 1) throw std::invalid_argument("rows of activations are padded to a size");
        for (const nb::handle one : dtypes) dtypes_.push_back(one.ptr());
    }

    // False: not run, since hidden or y has another dtype than the slots.
    bool run(nb::handle hidden, nb::handle pairs, nb::handle groups, std::int64_t top_k, nb::handle y) {
        const Seen order = seen(order_, pairs), out = seen(out_, y);
        const void* type = dtype(hidden.ptr());
        if (type != type_ || out.arg.type != type_) return false;
        refuse(hidden, order, top_k, out);
        const std::vector<Group> given = groups_of(groups);
        const Tiles tiles = tiles_of(given.data(), given.size(), order.items, sizes_, classes_);
        if (tiles.phases.empty()) return true;
        const Rows rows(hidden);
        const std::uint64_t stream = current();
        std::optional<Scratch> larger;
        const Scratch& scratch = scratch_for(tiles, stream, larger);
        put(scratch.table, {}, tiles, stream);
        enqueue(tiles, scratch, rows.arg, order.arg, top_k, out.arg, stream);
        return true;
    }

    // The weighted sums [T, H]; none: of another dtype than the kernels'.
    nb::object combine(nb::handle y, nb::handle weights) {
        const nb::object shape = shape_of(weights.ptr());
        if (PyTuple_GET_SIZE(shape.ptr()) != 2) throw std::invalid_argument("weights are [T, K]");
        const std::int64_t tokens = number(PyTuple_GET_ITEM(shape.ptr(), 0)), top_k = number(PyTuple_GET_ITEM(shape.ptr(), 1));
        const Seen rows = seen(out_, y);
        if (!is_shape(rows.shape.ptr(), tokens * top_k, sizes_.width))
            throw std::invalid_argument("y is " + text_of_shape(rows.shape) + " for " + std::to_string(tokens) + " tokens, top-" +
                                        std::to_string(top_k) + " and width " + std::to_string(sizes_.width));
        if (!is_summed(rows.arg.type) || !is_summed(dtype(weights.ptr()))) return nb::none();
        const nb::object sums = rows.contiguous ? nb::borrow(y) : contiguous(y);
        const Rows shares(weights);
        return summed(rows.contiguous ? rows.arg : tensor(sums.ptr()), shares.arg, tokens, top_k, current());
    }

    // What `ExpertLaunches` says.
    bool takes(const LayerRows& rows) const {
        if (dtype(rows.hidden) != type_ || !is_summed(dtype(rows.weights))) return false;
        const nb::object hidden = shape_of(rows.hidden), weights = shape_of(rows.weights);
        if (is_shape(hidden.ptr(), rows.tokens, sizes_.width) && is_shape(weights.ptr(), rows.tokens, rows.top_k)) return true;
        throw std::invalid_argument("hidden is " + text_of_shape(hidden) + " and weights are " + text_of_shape(weights) + " for " +
                                    std::to_string(rows.tokens) + " tokens, top-" + std::to_string(rows.top_k) + " and width " +
                                    std::to_string(sizes_.width));
    }

    // A layer's sums; not valid: the error is kept by `next`. Of few pairs the order goes with the first table.
    nb::object run_layer(const LayerRows& given, const NextGroups& next) {
        const std::int64_t pairs = given.tokens * given.top_k;
        const std::uint64_t stream = current();
        const Rows rows(given.hidden);
        const bool few = pairs <= kDecodePairs;
        std::optional<Scratch> own, larger;
        Scratch& kept = few ? scratch_kept(stream) : own.emplace(scratch_of(scratch_(0, 0, pairs)));
        Pairs order{given.order, given.changed, dtype(given.weights), pairs, few ? kDecodePairs : pairs};
        if (given.zeroed) nb::object(kept.held[4]).attr("zero_")();
        for (;;) {
            Landed landed{};
            if (!next.next(next.self, &landed)) return {};
            if (!landed.count && !landed.replica_count) break;
            if (landed.count) {
                const Tiles tiles = tiles_of(landed.groups, static_cast<std::size_t>(landed.count), pairs, sizes_, classes_);
                const Scratch& scratch = scratch_for(tiles, stream, larger);
                if (order.count && scratch.words.bits != kept.words.bits) put(kept.words, order, {}, stream), order.count = 0;
                put(order.count ? scratch.words : scratch.table, order, tiles, stream);
                order.count = 0;
                enqueue(tiles, scratch, rows.arg, kept.order, given.top_k, kept.y, stream);
            }
            if (landed.replica_count) {
                if (!given.low) throw std::invalid_argument("nothing launches replicas");
                if (order.count) put(kept.words, order, {}, stream), order.count = 0;
                static_cast<Experts*>(given.low->self)->run_slots(landed, rows.arg, kept.order, pairs, given.top_k, kept.y, stream);
            }
        }
        if (order.count && given.changed) put(kept.words, order, {}, stream);  // nothing ran here
        if (!given.changed) {
            const Rows shares(given.weights);
            return summed(kept.y, shares.arg, given.tokens, given.top_k, stream, given.into);
        }
        const Arg& changed = changed_weights(kept, order.room, pairs, given.weights);
        return summed(kept.y, changed, given.tokens, given.top_k, stream, given.into);
    }

    // Experts in whole slots, into rows of another's y.
    void run_slots(const Landed& landed, const Arg& x, const Arg& order, std::int64_t pairs, std::int64_t top_k, const Arg& out,
                   std::uint64_t stream) {
        std::vector<Group> whole(landed.replicas, landed.replicas + landed.replica_count);
        for (Group& one : whole) one.first *= sizes_.slot, one.neurons = sizes_.slot;
        const Tiles tiles = tiles_of(whole.data(), whole.size(), pairs, sizes_, classes_);
        std::optional<Scratch> larger;
        const Scratch& scratch = scratch_for(tiles, stream, larger);
        put(scratch.table, {}, tiles, stream);
        enqueue(tiles, scratch, x, order, top_k, out, stream);
    }

    nb::capsule launches() const { return nb::capsule(&launches_, kExpertLaunches.c_str()); }

  private:
    struct Scratch {  // of one stream, whose launches follow each other
        nb::object held;
        Arg activations, words, table;  // words: `order`, weights that a rule has changed, and `table` behind them
        Arg order, y;
        std::map<std::pair<const void*, std::int64_t>, std::pair<nb::object, Arg>> weights;  // by dtype and number
    };
    struct Pairs {  // that are still to be brought to the device, into so much room, with weights of a type, or null
        const std::int64_t* order = nullptr;
        const float* weights = nullptr;
        const void* type = nullptr;
        std::int64_t count = 0, room = 0;

        std::size_t weights_at() const { return static_cast<std::size_t>(room) * sizeof *order; }
        std::size_t bytes() const { return count ? weights_at() + static_cast<std::size_t>(room) * sizeof *weights : 0; }
    };
    struct Rows {  // contiguous
        explicit Rows(nb::handle hidden) : held(contiguous(hidden)), arg(tensor(held.ptr())) {}
        nb::object held;
        Arg arg;
    };
    // What a tensor says of itself. Of decode's the last is remembered: layers get the same order of pairs and rows of y.
    struct Seen {
        nb::object object, shape;
        Arg arg;
        std::int64_t items;
        bool contiguous;
    };

    std::uint64_t current() const { return static_cast<std::uint64_t>(number(stream_().ptr())); }

    bool is_summed(const void* type) const { return std::find(dtypes_.begin(), dtypes_.end(), type) != dtypes_.end(); }

    // The launches of a table that is on the device.
    void enqueue(const Tiles& tiles, const Scratch& scratch, const Arg& x, const Arg& order, std::int64_t top_k, const Arg& out,
                 std::uint64_t stream) {
        const Arg h = integer(sizes_.width), stride = integer(sizes_.stride);
        const Arg &activations = scratch.activations, &table = scratch.table;
        std::int64_t first = 0;
        for (auto part = tiles.phases.begin(); part != tiles.phases.end();) {
            const RowClass& c = classes_[part->row_class];
            auto end = part;
            std::int64_t all = 0;
            for (; end != tiles.phases.end() && end->row_class == part->row_class; ++end) all += tiles_in(*end);
            const std::int64_t columns = divided(tiles.widest[part->row_class], sizes_.padded) * sizes_.padded / c.up_columns;
            launch(*c.up, {all, columns, 1}, {x, order}, up_, {activations, table, integer(first), integer(top_k), h, stride}, stream);
            for (; part != end; ++part) {
                launch(*c.down, {tiles_in(*part), divided(sizes_.width, c.down_columns), 1}, {activations, order}, low_,
                       {out, table, integer(first), h, stride}, stream);
                first += tiles_in(*part);
            }
        }
    }

    static void launch(Launch& kernel, const Grid& grid, std::initializer_list<Arg> before, const std::vector<Arg>& slots,
                       std::initializer_list<Arg> after, std::uint64_t stream) {
        Arg args[kMostArgs];
        Arg* end = std::copy(before.begin(), before.end(), args);
        end = std::copy(slots.begin(), slots.end(), end);
        end = std::copy(after.begin(), after.end(), end);
        kernel.launch(grid, args, static_cast<std::size_t>(end - args), stream);
    }

    // y: contiguous, of a type that is summed, as the weights, which are contiguous, too. into: as of `LayerRows`.
    nb::object summed(const Arg& y, const Arg& weights, std::int64_t tokens, std::int64_t top_k, std::uint64_t stream,
                      nb::handle into = {}) {
        nb::object out = into.is_valid() ? nb::borrow(into) : fresh(tokens, nb::handle(y.object), y.type);
        if (tokens > 0) {
            const Arg args[] = {y, weights, tensor(out.ptr()), integer(top_k), integer(sizes_.width)};
            sums_of(top_k).launch({tokens, divided(sizes_.width, block_), 1}, args, 5, stream);
        }
        return out;
    }

    Launch& sums_of(std::int64_t top_k) {
        auto found = sums_.find(top_k);
        if (found == sums_.end()) found = sums_.emplace(top_k, combining_(top_k)).first;
        return nb::cast<Launch&>(found->second);
    }

    Seen seen(std::optional<Seen>& last, nb::handle of) const {
        if (last && last->object.is(of)) return *last;
        Seen found{nb::borrow(of), shape_of(of.ptr()), tensor(of.ptr()), 1, is_contiguous(of.ptr())};
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(found.shape.ptr()); ++i)
            found.items *= number(PyTuple_GET_ITEM(found.shape.ptr(), i));
        if (found.items <= kept_rows_ * sizes_.width) last = found;
        return found;
    }

    // [tokens, H] of y's type. `empty_like` takes half of what `new_empty` does.
    nb::object fresh(std::int64_t tokens, nb::handle y, const void* type) {
        const auto key = std::pair(tokens, type);
        const auto like = likes_.find(key);
        if (like == likes_.end()) {
            nb::object made = y.attr("new_empty")(nb::make_tuple(tokens, sizes_.width));
            if (tokens <= kDecodePairs) likes_[key] = made;
            return made;
        }
        if (!empty_like_.is_valid()) empty_like_ = nb::module_::import_("torch").attr("empty_like");
        return nb::steal(not_null(PyObject_CallOneArg(empty_like_.ptr(), like->second.ptr())));
    }

    static std::int64_t divided(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }
    static std::int64_t tiles_in(const Tiles::Phase& part) { return static_cast<std::int64_t>(part.rows.size()) / kColumns; }

    void refuse(nb::handle hidden, const Seen& pairs, std::int64_t top_k, const Seen& y) const {
        const std::int64_t width = sizes_.width, count = pairs.items;
        const nb::object of_hidden = shape_of(hidden.ptr());
        if (top_k < 1 || !is_shape(of_hidden.ptr(), count / top_k, width))
            throw std::invalid_argument("hidden is " + text_of_shape(of_hidden) + " for " + std::to_string(count) + " pairs, top-" +
                                        std::to_string(top_k) + " and width " + std::to_string(width));
        if (pairs.arg.type != int64_ || !pairs.contiguous)
            throw std::invalid_argument("pairs must be contiguous int64, not " + text_of(pairs.object.attr("dtype")) +
                                        " with strides " + text_of(pairs.object.attr("stride")()));
        if (!y.contiguous || !is_shape(y.shape.ptr(), count, width))
            throw std::invalid_argument("y must be contiguous [" + std::to_string(count) + ", " + std::to_string(width) + "], not " +
                                        text_of_shape(y.shape));
        if (count > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("there are more pairs than int32 counts");
    }

    static Scratch scratch_of(nb::object made) {
        const nb::object activations = made[0], words = made[1], table = made[2], order = made[3], y = made[4];
        return {made, tensor(activations.ptr()), tensor(words.ptr()), tensor(table.ptr()), tensor(order.ptr()), tensor(y.ptr()), {}};
    }

    Scratch& scratch_kept(std::uint64_t stream) {
        if (const auto found = kept_.find(stream); found != kept_.end()) return found->second;
        return kept_.emplace(stream, scratch_of(scratch_(kept_rows_, kept_rows_ * kColumns, kDecodePairs))).first->second;
    }

    // larger: for one that is not kept.
    Scratch& scratch_for(const Tiles& tiles, std::uint64_t stream, std::optional<Scratch>& larger) {
        if (tiles.rows <= kept_rows_ && tiles.numbers <= kept_rows_ * kColumns) return scratch_kept(stream);
        return larger.emplace(scratch_of(scratch_(tiles.rows, tiles.numbers, 0)));
    }

    // Weights in their type, of which the host knows how it rounds.
    void write(char* to, const Pairs& pairs) const {
        const auto count = static_cast<std::size_t>(pairs.count);
        if (pairs.type == dtypes_[0]) {
            std::memcpy(to, pairs.weights, count * sizeof *pairs.weights);
            return;
        }
        const auto rounded = pairs.type == dtypes_[1] ? bfloat16_of : float16_of;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint16_t value = rounded(pairs.weights[i]);
            std::memcpy(to + i * sizeof value, &value, sizeof value);
        }
    }

    // Those that were brought with the pairs.
    static const Arg& changed_weights(Scratch& scratch, std::int64_t room, std::int64_t count, nb::handle like) {
        const auto key = std::pair(dtype(like.ptr()), count);
        auto found = scratch.weights.find(key);
        if (found == scratch.weights.end()) {
            const auto first = [](nb::handle of, std::int64_t start, std::int64_t stop) -> nb::object {
                return of[nb::slice(nb::int_(start), nb::int_(stop), nb::none())];
            };
            const nb::object words = first(scratch.held[1], 2 * room, 2 * room + count);
            const nb::object made = first(words.attr("view")(like.attr("dtype")), 0, count);
            found = scratch.weights.emplace(key, std::pair(made, tensor(made.ptr()))).first;
        }
        return found->second.second;
    }

    // Brings pairs, and a table behind them, to the device.
    void put(const Arg& target, const Pairs& pairs, const Tiles& tiles, std::uint64_t stream) {
        const std::size_t before = pairs.bytes(), bytes = before + static_cast<std::size_t>(tiles.numbers) * sizeof(std::int32_t);
        ring_.put(target, bytes / sizeof(std::int32_t), bytes, stream, [&](char* to) {
            if (pairs.count) std::memcpy(to, pairs.order, static_cast<std::size_t>(pairs.count) * sizeof *pairs.order);
            if (pairs.count && pairs.weights) write(to + pairs.weights_at(), pairs);
            to += before;
            for (const auto& part : tiles.phases) {
                std::memcpy(to, part.rows.data(), part.rows.size() * sizeof(std::int32_t));
                to += part.rows.size() * sizeof(std::int32_t);
            }
        });
    }

    static int takes_rows(void* self, const LayerRows& rows) {
        return guarded(-1, [&] { return static_cast<Experts*>(self)->takes(rows) ? 1 : 0; });
    }

    static PyObject* run_rows(void* self, const LayerRows& rows, const NextGroups& next) {
        return guarded(static_cast<PyObject*>(nullptr), [&] {
            return static_cast<Experts*>(self)->run_layer(rows, next).release().ptr();
        });
    }

    nb::object slots_, tables_, scratch_, stream_, combining_;
    std::vector<Arg> up_, low_;  // of the slots, which never move
    const void* type_;  // of rows
    std::optional<Seen> order_, out_;
    Ring& ring_;
    std::vector<RowClass> classes_;
    std::vector<const void*> dtypes_;
    Sizes sizes_{};
    std::int64_t kept_rows_, block_;
    const void* int64_;
    std::map<std::uint64_t, Scratch> kept_;
    std::map<std::int64_t, nb::object> sums_;  // the launch for each top-k
    nb::object empty_like_;
    std::map<std::pair<std::int64_t, const void*>, nb::object> likes_;  // results of these shapes, for their shape
    const ExpertLaunches launches_{this, takes_rows, run_rows};
};

}  // namespace tiermoe::launch
