// Runs rings and checks on exact-size heap buffers: messages of all sizes between two threads, checks at every length.
// Exit 0: all as it should be. With an argument it reads past an array instead, to show that the sanitizer would say so.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <thread>

#include "checks.hpp"
#include "ring.hpp"

using namespace tiermoe;

namespace {

int checked = 0;

void expect(bool good, const char* what) {
    ++checked;
    if (good) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
}

// Exactly as many bytes as asked for: a vector may reserve more.
struct Bytes {
    explicit Bytes(std::size_t size) : data(new unsigned char[size]), size(size) {}
    Bytes(const void* from, std::size_t size) : Bytes(size) {
        if (size > 0) std::memcpy(data.get(), from, size);
    }
    std::unique_ptr<unsigned char[]> data;
    std::size_t size;
};

constexpr Patience PATIENT{5000000000, 20000, 5000000000};
constexpr std::size_t CAPACITY = 4096, LONGEST = 10000, MESSAGES = 600;

std::size_t size_of(std::size_t number) { return number * 37 % LONGEST; }

void rings() {
    void* memory = std::aligned_alloc(64, RING_HEADER + CAPACITY);
    std::memset(memory, 0, RING_HEADER + CAPACITY);
    auto* base = static_cast<unsigned char*>(memory);
    const Ring ring{reinterpret_cast<RingHeader*>(base), base + RING_HEADER, CAPACITY};
    std::thread writer([&] {
        for (std::size_t number = 0; number < MESSAGES; ++number) {
            Bytes message(size_of(number));
            std::memset(message.data.get(), static_cast<int>(number % 251), message.size);
            const std::size_t half = message.size / 3;
            const Piece pieces[] = {{message.data.get(), half}, {message.data.get() + half, message.size - half}};
            if (ring_write(ring, pieces, 2, PATIENT) != Status::ok) std::exit(1);
        }
        ring_close(ring);
    });
    for (std::size_t number = 0; number < MESSAGES; ++number) {
        Announced record{0, false};
        expect(ring_wait(ring, LONGEST, PATIENT, &record) == Status::ok, "a message comes");
        expect(record.length == size_of(number), "it has its length");
        Bytes message(record.length);
        expect(ring_take(ring, record.length, message.data.get(), PATIENT) == Status::ok, "it comes whole");
        bool same = true;
        for (std::size_t i = 0; i < message.size; ++i) same = same && message.data[i] == number % 251;
        expect(same, "it has its bytes");
    }
    Announced record{0, false};
    expect(ring_wait(ring, LONGEST, PATIENT, &record) == Status::closed, "a closed ring says so");
    writer.join();
    std::free(memory);
}

void checks() {
    for (std::size_t count = 0; count < 70; ++count) {
        const Bytes zeros(count * 4);
        std::memset(zeros.data.get(), 0, zeros.size);
        expect(all_finite_32(zeros.data.get(), count), "zeros are finite");
        expect(all_finite_16(zeros.data.get(), count * 2, 0x7c00), "zeros are finite");
        auto* numbers = reinterpret_cast<std::int32_t*>(zeros.data.get());
        expect(all_below(numbers, count, 1), "zeros are below 1");
        if (count == 0) continue;
        numbers[count - 1] = 0x7f800000;
        expect(!all_finite_32(zeros.data.get(), count), "the last one counts");
        expect(!all_below(numbers, count, 1), "the last one counts");
    }
}

}  // namespace

int main(int count, char**) {
    if (count > 1) {
        const Bytes whole(64);
        std::memset(whole.data.get(), 0, whole.size);
        return all_finite_16(whole.data.get(), whole.size / 2 + 1, 0x7c00);
    }
    rings();
    checks();
    std::printf("checked %d\n", checked);
}
