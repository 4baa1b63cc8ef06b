// Bindings of substitute.hpp. The interpreter lock is kept: experts and buddies are read again after their check, and no
// thread may write to them.
#include "substitute.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <utility>

#include "bindings.hpp"

namespace tiermoe::bindings {
namespace {

void check(const Fault& fault) {
    if (!fault.empty()) throw std::invalid_argument(fault);
}

// The numbers of an array of rows x columns.
template <typename T>
T* sized(const Array<T>& array, const char* name, std::int64_t rows, std::int64_t columns) {
    if (array && array.size() != rows * columns)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.size()) + " items; there must be " +
                                    std::to_string(rows) + " x " + std::to_string(columns));
    return array.data();
}

using Ids = Array<const std::int64_t>;
using Floats = Array<const float>;
using Flags = Array<const std::uint8_t>;

void replaceable(const Ids& ids, const Flags& resident, double beta, const Ids& shard_of, std::int64_t shards,
                 const Array<std::uint8_t>& out) {
    const std::int64_t experts = resident.size();
    check(tiermoe::replaceable(ids.data(), ids.size(), resident.data(), experts, beta, sized(shard_of, "shard_of", 1, experts),
                               shards, sized(out, "out", 1, experts)));
}

std::pair<std::int64_t, std::int64_t> substitute(const Ids& ids, const Floats& weights, const Floats& probabilities,
                                                 const Flags& replace, const Floats& reach,
                                                 const Array<const std::int32_t>& buddies, const Floats& similarity,
                                                 const Array<std::int64_t>& out_ids, const Array<float>& out_weights,
                                                 const Options& options) {
    Substitution of = with(options);
    check(size_fault(of, static_cast<bool>(probabilities)));
    of.ids = sized(ids, "ids", of.tokens, of.top_k);
    of.weights = sized(weights, "weights", of.tokens, of.top_k);
    of.probabilities = sized(probabilities, "probabilities", of.tokens, of.experts);
    of.replace = sized(replace, "replace", 1, of.experts);
    of.reach = sized(reach, "reach", 1, of.experts);
    of.buddies = sized(buddies, "buddies", of.experts, of.ranks);
    of.similarity = sized(similarity, "similarity", of.experts, of.ranks);
    of.out_ids = sized(out_ids, "out_ids", of.tokens, of.top_k);
    of.out_weights = sized(out_weights, "out_weights", of.tokens, of.top_k);
    check(content_fault(of));
    tiermoe::substitute(of);
    return {of.substituted, of.dropped};
}

}  // namespace

void bind_substitute(nb::module_& m) {
    m.def("replaceable", &replaceable, "ids"_a, "resident"_a, "beta"_a, "shard_of"_a.none(), "shards"_a, "out"_a,
          "The distribution gate of BuddyMoE (`kernels.substitute`).\n\n"
          "Raises ValueError: an array is of another kind or size, or an expert or shard does not exist.");
    m.def("substitute", &substitute, "ids"_a, "weights"_a, "probabilities"_a.none(), "replace"_a, "reach"_a, "buddies"_a,
          "similarity"_a, "out_ids"_a, "out_weights"_a, "numbers"_a,
          "Algorithm 1 of BuddyMoE (`kernels.substitute`): pairs replaced and left out.\n\n"
          "Raises ValueError: as `replaceable`, or what is needed is None.");
}

}  // namespace tiermoe::bindings
