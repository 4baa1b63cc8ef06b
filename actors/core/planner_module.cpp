// Bindings of the planner of `auto` (kernels/cpu/planner.hpp). Arrays are contiguous; their sizes and numbers are checked here.
#include "../../kernels/cpu/planner.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

constexpr std::int64_t kMostExperts = 4096;  // of a layer: `Planner` samples a quarter

using Ids = Array<const std::int32_t>;
using Longs = Array<const std::int64_t>;
using Bytes = Array<const std::uint8_t>;
// copy, gpu, gpu_row, near, near_busy, free_rows, message, dense, beside
using Costs = std::tuple<double, double, double, double, double, double, double, double, double>;

// Of 0 or more, as an int, as which the planner counts.
int counted(std::int64_t number) {
    if (number < 0 || number > std::numeric_limits<int>::max()) refuse("a count is 0 to 2147483647, not", number);
    return static_cast<int>(number);
}

int layer_of(const Planner& planner, std::int64_t layer) {
    if (layer < 0 || layer >= planner.layers()) refuse("there is no such layer", layer);
    return static_cast<int>(layer);
}

// Experts of one layer; how many.
int checked(const Planner& planner, const Ids& experts) {
    for (const std::int32_t e : experts)
        if (e < 0 || e >= planner.experts()) refuse("there is no such expert", e);
    return counted(experts.size());
}

// Refuses an array of another size than this product.
template <typename T>
void sized(const Array<T>& array, std::initializer_list<std::int64_t> sizes, const char* what) {
    std::int64_t items = 1;
    if (product_fits(sizes))
        for (const std::int64_t size : sizes) items *= size;
    if (!product_fits(sizes) || array.size() != items) refuse(what, array.size());
}

PlannerCosts costs_of(const Costs& given) {
    PlannerCosts costs;
    std::tie(costs.copy_s, costs.gpu_s, costs.gpu_row_s, costs.near_s, costs.near_busy_s, costs.free_rows, costs.message_s,
             costs.dense_s, costs.beside) = given;
    for (const double cost : {costs.copy_s, costs.gpu_s, costs.near_s, costs.near_busy_s, costs.free_rows, costs.beside})
        if (!(cost > 0) || !std::isfinite(cost)) throw std::invalid_argument("a cost is not above 0");
    for (const double cost : {costs.gpu_row_s, costs.message_s, costs.dense_s})
        if (!(cost >= 0) || !std::isfinite(cost)) throw std::invalid_argument("a cost is below 0");
    return costs;
}

void make(Planner* made, std::int64_t layers, std::int64_t experts, std::int64_t top_k, std::int64_t slots, std::int64_t workers,
              const Costs& costs, const Bytes& states, std::uint32_t without) {
    if (layers < 1 || layers > 1 << 20 || experts < 1 || experts > kMostExperts)
        refuse("a planner has 1 layer or more, of 1 to 4096 experts", layers < 1 ? layers : experts);
    check_product({layers, experts}, kMostKeys);  // keys are int32
    if (top_k < 1 || top_k > experts || slots < 0 || slots > experts)
        refuse("top_k and the slots of a layer are at most its experts", top_k < 1 || top_k > experts ? top_k : slots);
    if (workers < 0 || workers > Planner::kMaxWorkers) refuse("a planner knows 0 to 64 near-data workers", workers);
    const PlannerCosts known = costs_of(costs);
    sized(states, {layers, experts}, "states are [L * E], not");
    new (made) Planner(static_cast<int>(layers), static_cast<int>(experts), static_cast<int>(top_k), static_cast<int>(slots),
                       static_cast<int>(workers), known, states.data(), without);
}

// end_s, near_s, link_s, owner_s, loads, near, waits, and key, victim, worth_s of what is wanted
using Copies = std::vector<std::tuple<std::int32_t, std::int32_t, double>>;
using Plan = std::tuple<double, double, double, double, int, int, int, Copies>;

Plan plan(Planner& planner, std::int64_t layer, const Ids& needed, const Ids& rows, double now_s, double link_free_s,
          const Ids& flight_keys, const Array<const double>& arrival_s, const Array<std::uint8_t>& action,
          const Array<std::uint8_t>& worker, double prompt_tokens, const Bytes& gpus, const Bytes& held, std::int64_t room) {
    const int of = layer_of(planner, layer), n = checked(planner, needed);
    const int flights = counted(flight_keys.size()), slots = counted(room);
    if (n > planner.experts()) refuse("more experts are needed than a layer has", n);
    sized(rows, {n}, "rows are int32 [n], not of"), sized(arrival_s, {flights}, "arrivals are float64 [F], not of");
    sized(action, {n}, "actions are uint8 [n], not of"), sized(worker, {n}, "workers are uint8 [n], not of");
    if (gpus) sized(gpus, {n}, "GPUs are uint8 [n], not of"), sized(held, {n}, "what they hold is uint8 [n], not of");
    const Owners owners{gpus.data(), held.data()};
    const Planned found = planner.plan(of, n, needed.data(), rows.data(), now_s, link_free_s, flights, flight_keys.data(),
                                       arrival_s.data(), action.data(), worker.data(), prompt_tokens,
                                       gpus ? &owners : nullptr, slots);
    Plan told{found.end_s, found.near_s, found.link_s, found.owner_s, found.loads, found.near_count, found.waits, {}};
    for (int i = 0; i < planner.wanted_count(); ++i) {
        const Wanted& one = planner.wanted(i);
        std::get<7>(told).emplace_back(one.key, one.victim, one.worth_s);
    }
    return told;
}

void used(Planner& planner, std::int64_t layer, const Ids& needed) {
    const int of = layer_of(planner, layer), n = checked(planner, needed);
    planner.used(of, n, needed.data());
}

void prompt_end(Planner& planner, const Longs& counts, double tokens, std::int64_t requests, std::int64_t batch) {
    sized(counts, {planner.layers(), planner.experts()}, "counts are int64 [L, E], not of");
    if (counted(requests) < 1 || counted(batch) < requests)
        refuse("prompts are of 1 request or more of the batch, not", requests);
    if (!(tokens >= 0)) refuse("a prompt has 0 tokens or more", static_cast<std::int64_t>(tokens));
    planner.prompt_end(counts.data(), tokens, static_cast<int>(requests), static_cast<int>(batch));
}

void popularity(Planner& planner, const Longs& counts, double tokens, std::int64_t top_k, std::int64_t batch) {
    sized(counts, {planner.layers(), planner.experts()}, "counts are int64 [L, E], not of");
    const int k = counted(top_k);
    if (counted(batch) < 1 || !(tokens >= 0)) refuse("popularity needs a batch of 1 or more, not", batch);
    planner.popularity(counts.data(), tokens, k, static_cast<int>(batch));
}

void resize(Planner& planner, std::int64_t slots) {
    if (slots < 0 || slots > planner.experts()) refuse("the slots of a layer are at most its experts", slots);
    planner.resize(static_cast<int>(slots));
}

std::int32_t key_of(const Planner& planner, std::int64_t key) {
    if (key < 0 || key >= std::int64_t{1} * planner.layers() * planner.experts()) refuse("there is no such expert", key);
    return static_cast<std::int32_t>(key);
}

std::pair<bool, std::int32_t> admit(Planner& planner, std::int64_t key) {
    std::int32_t victim = -1;
    const bool admitted = planner.admit(key_of(planner, key), victim) != Planner::Admission::refused;
    return {admitted, admitted ? victim : -1};
}

double worth(const Planner& planner, std::int64_t key) {
    return planner.value(key_of(planner, key)) * planner.saved_s(static_cast<int>(key / planner.experts()));
}

void saw(Planner& planner, std::int64_t part, double expected_s, double seen_s) {
    if (part < 0 || part > 7) refuse("there is no such part of the costs", part);
    planner.saw(static_cast<Part>(part), expected_s, seen_s);
}

}  // namespace

void bind_planner(nb::module_& m) {
    nb::class_<Planner>(m, "Planner",
        "The planner of `auto` (kernels/cpu/planner.hpp), which actors/policies/auto.py documents. Arrays are contiguous; each\n"
        "method raises ValueError for numbers out of range and arrays of another size.")
        .def("__init__", &make, nb::keep_alive<1, 8>(), "layers"_a, "experts"_a, "top_k"_a, "slots"_a, "workers"_a, "costs"_a,
          "states"_a, "without"_a,
          "costs: copy, gpu, gpu_row, near, near_busy, free_rows, message, dense, beside. states [L, E] are read in place.")
        .def("plan", &plan, "layer"_a, "needed"_a, "rows"_a, "now_s"_a, "link_free_s"_a, "flight_keys"_a,
          "arrival_s"_a, "action"_a, "worker"_a, "prompt_tokens"_a, "gpus"_a.none(), "held"_a.none(), "room"_a,
          "end_s, near_s, link_s, owner_s, loads, near, waits, and key, victim, worth_s of each background copy.")
        .def("used", &used, "layer"_a, "needed"_a, "A layer has run.")
        .def("prompt_end", &prompt_end, "counts"_a, "tokens"_a, "requests"_a, "batch"_a,
          "Prompts have run: V is what they say of each expert.")
        .def("popularity", &popularity, "counts"_a, "tokens"_a, "top_k"_a, "batch"_a, "Popularity from elsewhere.")
        .def("resize", &resize, "slots"_a, "Another number of slots.")
        .def("admit", &admit, "key"_a, "Whether an expert takes a slot, and whose; -1: of none.")
        .def("worth", &worth, "key"_a, "Seconds that keeping an expert is worth: S of its layer times V.")
        .def("values", [](const Planner& planner) { return reinterpret_cast<std::uintptr_t>(planner.values()); },
          "The address of V, float64 [L, E], which lives as long as the planner.")
        .def("saw", &saw, "part"_a, "expected_s"_a, "seen_s"_a, "Correct a part of the costs.")
        .def("took", &Planner::took, "seen_s"_a, "A layer's seen time.")
        .def("filled", &Planner::filled, "A background copy of a miss has ended.")
        .def("costs", [](const Planner& planner) -> Costs {
        const PlannerCosts& c = planner.costs();
        return {c.copy_s, c.gpu_s, c.gpu_row_s, c.near_s, c.near_busy_s, c.free_rows, c.message_s, c.dense_s, c.beside};
    }, "Costs as corrected.")
        .def("followed", [](const Planner& planner) {
        return std::make_tuple(static_cast<int>(planner.follows()), planner.seen_token_s(), planner.shadow_token_s(Follow::on_demand),
                               planner.shadow_token_s(Follow::fill), planner.shadow_token_s(Follow::split));
    }, "The rule that is followed (0: its own), seconds of a token as seen, and of on-demand, fill and split.")
        .def("error", &Planner::error, "Mean error of predicted layer times, as a share of the time.");
}

}  // namespace tiermoe::bindings
