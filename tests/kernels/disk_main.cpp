// The disk's readers under the sanitizers: random copies that are asked for, overtaken, dropped, waited for and closed in any
// order, from files of which one is cut short. Each copy that is done has its bytes and no others.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../../actors/core/disk_link.hpp"

using namespace tiermoe::core;

namespace {

constexpr std::int64_t kBytes = 5 << 20, kSegments = 12;
constexpr char kPoison = 0x5a;

std::mt19937_64 random_bits(1);
std::int64_t below(std::int64_t end) { return static_cast<std::int64_t>(random_bits() % static_cast<std::uint64_t>(end)); }

void need(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

struct Disk {
    std::string path;
    int descriptor;
    char* at;  // nobody may read here
    std::vector<char> bytes;

    Disk() : path("/tmp/tiermoe-disk-XXXXXX"), descriptor(mkstemp(path.data())), bytes(kBytes) {
        for (char& one : bytes) one = static_cast<char>(random_bits());
        need(write(descriptor, bytes.data(), bytes.size()) == kBytes, "the file is written");
        at = static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    ~Disk() { munmap(at, kBytes), close(descriptor), unlink(path.c_str()); }
    DiskLink::File file() const { return {path, descriptor, at, kBytes}; }
};

// Of a segment: where its two tensors lie in which file, and the slot that it alone takes.
struct Segment2 {
    const Disk* of;
    std::int64_t offset[2], count[2];
    std::vector<char> slot[2];
    bool cut;  // it ends behind the file's end
};

struct World {
    Disk whole, cut;
    std::vector<Segment2> segments;
    std::unique_ptr<DiskLink> link;
    std::map<Ticket, std::int64_t> under_way;
    Ticket tickets = 0;
    std::int64_t done = 0, failed = 0, dropped = 0;

    World() : segments(kSegments) {
        const std::int64_t end = kBytes / 2 + below(5000);
        need(!ftruncate(cut.descriptor, end), "the file is cut short");
        link = std::make_unique<DiskLink>(std::vector<DiskLink::File>{cut.file(), whole.file()}, 1 + static_cast<int>(below(4)));
        Places places;
        places.tensors = 2;
        for (std::int64_t s = 0; s < kSegments; ++s) {
            Segment2& one = segments[static_cast<std::size_t>(s)];
            one.of = below(4) ? &whole : &cut;
            one.cut = false;
            places.homes.emplace_back();
            for (int i = 0; i < 2; ++i) {
                one.count[i] = 1 + below(below(3) ? 9000 : 3 << 20);
                one.offset[i] = below(kBytes - one.count[i] + 1);
                one.cut |= one.of == &cut && one.offset[i] + one.count[i] > end;
                one.slot[i].assign(static_cast<std::size_t>(one.count[i]), kPoison);
                places.homes.back().push_back({one.slot[i].data(), one.count[i]});
                places.sources.push_back({one.of->at + one.offset[i], one.count[i], false});
            }
            places.home_of.push_back(static_cast<std::int32_t>(s));
            places.position.push_back(0);
        }
        link->place(std::move(places));
    }

    void check(Ticket ticket) {
        const Segment2& one = segments[static_cast<std::size_t>(under_way.at(ticket))];
        const Ending ending = link->ending(ticket);
        if (ending == Ending::copied) {
            need(!one.cut, "what the file does not have was read");
            for (int i = 0; i < 2; ++i)
                need(!std::memcmp(one.slot[i].data(), one.of->bytes.data() + one.offset[i], one.slot[i].size()), "other bytes");
            Times times;
            need(link->times(ticket, times) && times.start_s <= times.end_s && times.link_s >= 0, "times");
            ++done;
        } else if (ending == Ending::failed) {
            need(one.cut, "a copy failed");
            try {
                link->fail(ticket, 0);
            } catch (const ReadFailed& error) {
                need(std::strstr(error.what(), "ends at byte"), "the failure is named");
            }
            ++failed;
        } else {
            need(ending == Ending::cancelled, "it has ended");
            ++dropped;
        }
        under_way.erase(ticket);
        link->forget(ticket);
    }

    void run() {
        for (int step = 0; step < 60; ++step) {
            if (under_way.empty() || below(2)) {
                std::vector<Copy> copies;
                for (std::int64_t s = 0; s < kSegments; ++s) {
                    const bool busy = std::any_of(under_way.begin(), under_way.end(), [&](auto& one) { return one.second == s; });
                    if (busy || below(3)) continue;
                    for (auto& slot : segments[static_cast<std::size_t>(s)].slot) std::fill(slot.begin(), slot.end(), kPoison);
                    copies.push_back({++tickets, s, s, 0, 0, Cause::demand, 0, false});
                    under_way[tickets] = s;
                }
                need(link->submit(copies, below(2)), "it is open");
                continue;
            }
            auto chosen = under_way.begin();
            std::advance(chosen, below(static_cast<std::int64_t>(under_way.size())));
            const Ticket ticket = chosen->first;
            switch (below(4)) {
                case 0: link->promote(ticket); break;
                case 1: if (link->cancel(ticket)) check(ticket); break;
                case 2: link->wait(ticket), check(ticket); break;
                default: if (link->ending(ticket) != Ending::under_way) check(ticket);
            }
        }
        if (below(2)) link->close();
        while (!under_way.empty()) link->wait(under_way.begin()->first), check(under_way.begin()->first);
        need(!link->pending(), "nothing is under way");
        link->close();
        need(!link->submit({{++tickets, 0, 0, 0, 0, Cause::demand, 0, false}}, true), "it is closed");
        need(link->ending(tickets) == Ending::cancelled, "a closed link drops copies");
    }
};

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "overrun")) {
        std::vector<char> bytes(8);
        return *(bytes.data() + 8 + below(1));
    }
    std::int64_t done = 0, failed = 0, dropped = 0;
    for (int i = 0; i < 12; ++i) {
        World world;
        world.run();
        done += world.done, failed += world.failed, dropped += world.dropped;
    }
    need(done && failed && dropped, "each ending is there");
    std::printf("checked %lld copies, %lld failures, %lld dropped\n", (long long)done, (long long)failed, (long long)dropped);
}
