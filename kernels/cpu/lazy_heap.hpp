// Keys by rising value, then by stamp, where values mostly rise: a key may stand where it stood before its value rose, and
// after it was removed, until it comes to the front.
//
// A use makes an expert more worth keeping, so most keys come to the front once in many uses, and a use costs nothing here.
// No call looks at all keys; what a victim costs grows with the logarithm of their number, in one array.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace tiermoe {

class LazyHeap {
  public:
    struct Rank {
        double value;  // a number
        std::int64_t stamp;  // 0 or more
    };

    LazyHeap() = default;
    explicit LazyHeap(std::int64_t keys) : keys_(static_cast<std::size_t>(keys)) {}

    // A key comes. Its place is found when somebody asks who is first: by then it has been used.
    void come(std::int64_t key) {
        Key& of = keys_[key];
        live_ += !of.here;
        of = {kNew, of.entry + 1, true};
        if (new_.size() > 2 * live_ + 64) {  // mostly dead ones, while nobody asks
            new_.erase(std::remove_if(new_.begin(), new_.end(), [this](const Entry& one) { return !alive(one); }), new_.end());
        }
        new_.push_back({0, static_cast<std::int32_t>(key), of.entry});
    }
    // The rank of a key that is here falls to this one, unless its place says less; one that rises needs no call.
    void lower(std::int64_t key, const Rank& rank) {
        Key& of = keys_[key];
        if (!of.here) return come(key);
        if (rank.value < of.value) place({order_of(rank), static_cast<std::int32_t>(key), ++of.entry}, rank.value);
    }
    void remove(std::int64_t key) {
        live_ -= keys_[key].here;
        keys_[key].here = false;
    }
    void clear() {
        heap_.clear();
        front_.clear();
        new_.clear();
        live_ = 0;
        for (Key& key : keys_) key.here = false;
    }
    // The first `count` keys of which `may` [keys] is not 0 (null: of all) by their present ranks, ties by key. reach(key):
    // none later than its present rank, which falls only as `lower` is told. present(key): its rank.
    template <typename Reach, typename Present>
    void first(std::int64_t count, const std::uint8_t* may, const Reach& reach, const Present& present,
               std::vector<std::int64_t>& found) {
        found.clear();
        known_.clear();
        for (const Entry& one : new_)
            if (alive(one)) {
                const Rank rank = reach(one.key);
                place({order_of(rank), one.key, one.entry}, rank.value);
            }
        new_.clear();
        std::size_t read = 0, kept = 0;  // of front_, whose entries up to `kept` and from `read` on stay
        while (static_cast<std::int64_t>(found.size()) < count) {
            const bool ahead = read < front_.size() && (heap_.empty() || !(heap_[0] < front_[read]));
            if (!ahead && heap_.empty() && known_.empty()) break;
            if (!known_.empty() && !(ahead ? front_[read] < known_.back() : !heap_.empty() && heap_[0] < known_.back())) {
                found.push_back(known_.back().key);
                known_.pop_back();
                continue;
            }
            Entry next = ahead ? front_[read] : heap_[0];
            const bool here = alive(next);
            if (here) {
                const Rank rank = reach(next.key);
                if (const Ordered risen = order_of(rank); next.rank < risen) {
                    next.rank = risen;
                    keys_[next.key].value = rank.value;
                    if (ahead) {
                        ++read;
                        push(next);
                    } else {
                        sink(next);
                    }
                    continue;
                }
            }
            if (ahead)
                ++read;
            else
                pop();
            if (!here) continue;
            if (kept == read) {  // no entry has gone: make room
                front_.insert(front_.begin() + static_cast<std::ptrdiff_t>(read), next);
                ++read;
            } else {
                front_[kept] = next;
            }
            ++kept;
            if (may && !may[next.key]) continue;
            const Entry now{order_of(present(next.key)), next.key, next.entry};
            if (next < now)
                known_.insert(std::lower_bound(known_.begin(), known_.end(), now, [](auto& a, auto& b) { return b < a; }), now);
            else
                found.push_back(next.key);
        }
        front_.erase(front_.begin() + static_cast<std::ptrdiff_t>(kept), front_.begin() + static_cast<std::ptrdiff_t>(read));
        while (front_.size() > kFront) {
            push(front_.back());
            front_.pop_back();
        }
    }

  private:
    static constexpr std::size_t kWide = 4, kFront = 64;
    static constexpr double kNew = -std::numeric_limits<double>::infinity();
    // A rank as one number, so that comparing two is no branch.
    __extension__ using Ordered = unsigned __int128;
    static Ordered order_of(const Rank& rank) {
        const double value = rank.value + 0.0;  // of two zeros the positive one
        std::uint64_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits ^= bits >> 63 ? ~std::uint64_t{0} : std::uint64_t{1} << 63;
        return Ordered{bits} << 64 | static_cast<std::uint64_t>(rank.stamp);
    }
    struct Key {
        double value = 0.0;      // of its entry
        std::int32_t entry = 0;  // its number; those before are dead
        bool here = false;
    };
    struct Entry {
        Ordered rank;
        std::int32_t key, entry;
        bool operator<(const Entry& other) const {
            return rank < other.rank || (rank == other.rank && key < other.key);
        }
    };

    void place(const Entry& one, double value) {
        keys_[one.key].value = value;
        if (heap_.size() > 2 * live_ + 64) drop_dead();
        push(one);
    }
    bool alive(const Entry& one) const { return keys_[one.key].here && keys_[one.key].entry == one.entry; }
    void push(const Entry& one) {
        std::size_t at = heap_.size();
        heap_.push_back(one);
        for (; at && one < heap_[(at - 1) / kWide]; at = (at - 1) / kWide) heap_[at] = heap_[(at - 1) / kWide];
        heap_[at] = one;
    }
    // In place of the first.
    void sink(const Entry& one) {
        std::size_t at = 0;
        for (std::size_t least; (least = at * kWide + 1) < heap_.size(); at = least) {
            const std::size_t end = std::min(least + kWide, heap_.size());
            for (std::size_t below = least + 1; below < end; ++below) least = heap_[below] < heap_[least] ? below : least;
            if (!(heap_[least] < one)) break;
            heap_[at] = heap_[least];
        }
        heap_[at] = one;
    }
    void pop() {
        const Entry last = heap_.back();
        heap_.pop_back();
        if (!heap_.empty()) sink(last);
    }
    void drop_dead() {
        heap_.erase(std::remove_if(heap_.begin(), heap_.end(), [this](const Entry& one) { return !alive(one); }), heap_.end());
        std::sort(heap_.begin(), heap_.end());
    }

    std::vector<Key> keys_;
    std::vector<Entry> heap_, front_;  // front: those that came first of late, in order
    std::vector<Entry> new_, known_;   // without a place yet; by their present ranks, the first last, of one call
    std::size_t live_ = 0;
};

}  // namespace tiermoe
