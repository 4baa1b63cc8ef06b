// The link under ThreadSanitizer and AddressSanitizer: one thread asks, promotes, cancels and waits while it copies.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "link.hpp"

using tiermoe::Copy;
using tiermoe::Link;
using tiermoe::Piece;

int main(int argc, char** argv) {
    constexpr int kCopies = 400, kCount = 257;
    std::vector<std::vector<std::uint16_t>> sources(kCopies, std::vector<std::uint16_t>(kCount));
    std::vector<std::vector<float>> targets(kCopies, std::vector<float>(kCount, -1.0f));
    const bool overrun = argc > 1 && !std::strcmp(argv[1], "overrun");
    int done = 0, cancelled = 0, wrong = 0;
    {
        Link link(4e8, 2e-6);
        std::vector<std::shared_ptr<Copy>> copies;
        for (int i = 0; i < kCopies; ++i) {
            for (auto& value : sources[i]) value = static_cast<std::uint16_t>(0x3f80 + i % 64);
            auto copy = std::make_shared<Copy>();
            copy->prefetch = i % 3 == 0;
            copy->pieces.push_back({targets[i].data(), sources[i].data(), kCount + (overrun ? 1 : 0),
                                    Piece::Kind::widen_bfloat16});
            copies.push_back(copy);
            link.submit({copy});
            if (i % 3 == 0) link.promote(copies[i / 2]);
            if (i % 7 == 0) link.cancel(copies[i]);
            if (i % 11 == 0) link.wait(*copies[i / 2]);
        }
        for (int i = 0; i < kCopies; ++i) {
            link.wait(*copies[i]);
            (copies[i]->state == Copy::done ? done : cancelled) += 1;
            std::uint32_t bits;
            std::memcpy(&bits, &targets[i][kCount - 1], sizeof(bits));
            const bool copied = bits == static_cast<std::uint32_t>(0x3f80 + i % 64) << 16;
            if (copied != (copies[i]->state == Copy::done)) ++wrong;
        }
        std::vector<std::shared_ptr<Copy>> late;
        for (int i = 0; i < 3; ++i) late.push_back(std::make_shared<Copy>());
        link.submit(late);
        link.close();
        if (link.submit(late)) ++wrong;
    }
    std::printf("checked %d done, %d cancelled, %d wrong\n", done, cancelled, wrong);
    return wrong || done + cancelled != kCopies ? 1 : 0;
}
