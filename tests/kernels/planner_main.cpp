// The planner of `auto` on random layers under the sanitizers: every action is possible, nothing is touched outside the
// arrays. With the argument `overrun` it reads the state of an expert that there is not.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "planner.hpp"

using tiermoe::Action;
using tiermoe::Part;
using tiermoe::Planner;

namespace {

void check(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

int runs(std::mt19937& rng, std::uint32_t without) {
    const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    const int layers = 1 + below(4), experts = 1 + below(24), top_k = 1 + below(experts), slots = below(experts + 1);
    const int workers = below(4);
    const auto cost = [&] { return 1e-6 * (1 + below(1000)); };
    const tiermoe::PlannerCosts costs{cost(), cost(), cost(), cost(), cost(), 1.0 + below(8), cost(), cost()};
    std::vector<std::uint8_t> states(static_cast<std::size_t>(layers * experts));
    auto planner = std::make_unique<Planner>(layers, experts, top_k, slots, workers, costs, states.data(), without);
    int planned = 0;
    for (int step = 0; step < 12; ++step) {
        for (int l = 0; l < layers; ++l) {
            int held = 0;
            for (int e = 0; e < experts; ++e) {
                std::uint8_t& state = states[static_cast<std::size_t>(l * experts + e)];
                state = static_cast<std::uint8_t>(below(4));
                if (state == Planner::kResident && ++held > slots) state = 0;
            }
            std::vector<std::int32_t> needed, rows, flights;
            std::vector<double> arrivals;
            for (int e = 0; e < experts; ++e) {
                if (below(3) == 0) continue;
                needed.push_back(e);
                rows.push_back(1 + below(40));
                if (states[static_cast<std::size_t>(l * experts + e)] == Planner::kLoading && below(2))
                    flights.push_back(l * experts + e), arrivals.push_back(1.0 + cost());
            }
            const int n = static_cast<int>(needed.size());
            std::vector<std::uint8_t> action(needed.size()), worker(needed.size());
            std::vector<std::uint8_t> gpus(needed.size()), held_there(needed.size());
            const bool owned = below(2) == 0;
            for (auto& one : gpus) one = static_cast<std::uint8_t>(owned ? below(4) : 0);
            for (auto& one : held_there) one = static_cast<std::uint8_t>(below(2));
            const tiermoe::Owners owners{gpus.data(), held_there.data()};
            const auto found = planner->plan(l, n, needed.data(), rows.data(), 1.0, 1.0 + cost(), static_cast<int>(flights.size()),
                                             flights.data(), arrivals.data(), action.data(), worker.data(), below(4) ? 0.0 : 64.0,
                                             owned ? &owners : nullptr, below(2 * experts));
            check(std::isfinite(found.end_s) && found.end_s >= 1.0, "a layer ends before it begins, or never");
            for (std::size_t i = 0; i < needed.size(); ++i) {
                const std::uint8_t state = states[static_cast<std::size_t>(l * experts + needed[i])];
                const auto a = static_cast<Action>(action[i]);
                check(a == Action::near_data ? worker[i] < workers : worker[i] == 0, "there is no such worker");
                check(a != Action::owner || gpus[i] > 0, "an expert has no other owner");
                if (gpus[i] > 0) {
                    check(a == Action::owner || a == Action::near_data, "an expert of another GPU runs here");
                    continue;
                }
                check(a != Action::run_here || state >= 2, "an expert runs that is not here");
                check(a != Action::wait || state == 1, "a copy is waited for that is not under way");
                check(a != Action::load || state == 0, "an expert is loaded that is here");
            }
            for (int i = 0; i < planner->wanted_count(); ++i) {
                const auto& one = planner->wanted(i);
                check(states[static_cast<std::size_t>(one.key)] == 0, "a copy is wanted of what is here");
                check(one.victim < 0 || states[static_cast<std::size_t>(one.victim)] == Planner::kResident, "a victim has no slot");
                check(one.victim < 0 || one.victim / experts == one.key / experts, "a victim is of another layer");
            }
            planner->used(l, n, needed.data());
            for (int e = 0; e < experts; ++e) {
                std::int32_t victim = -1;
                if (planner->admit(l * experts + e, victim) == Planner::Admission::instead)
                    check(states[static_cast<std::size_t>(victim)] == Planner::kResident, "a victim has no slot");
            }
            for (std::size_t key = 0; key < states.size(); ++key)
                check(std::isfinite(planner->values()[key]), "an expert has no worth");
            for (int part = 0; part < 8; ++part) planner->saw(static_cast<Part>(part), cost(), cost());
            planner->took(cost());
            ++planned;
        }
        std::vector<std::int64_t> counts(states.size());
        for (auto& one : counts) one = below(30);
        if (step % 5 == 4) planner->prompt_end(counts.data(), 64, 1, 1 + below(3));
    }
    return planned;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::strcmp(argv[1], "overrun") == 0) {
        std::vector<std::uint8_t> states(7);  // of 8 experts
        Planner planner(1, 8, 1, 2, 1, {1, 1, 0, 1, 1, 1, 0, 0}, states.data(), 0);
        std::int32_t victim = 0;
        return static_cast<int>(planner.admit(0, victim)) + victim > 100;
    }
    std::mt19937 rng(7);
    int planned = 0;
    for (int i = 0; i < 400; ++i) planned += runs(rng, i % 3 ? 0 : 1u << (i / 3 % 11));
    std::printf("checked %d layers\n", planned);
    return 0;
}
