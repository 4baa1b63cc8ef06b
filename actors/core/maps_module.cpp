// Bindings of fMoE's expert maps.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "maps.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

template <typename T, int Axes>
using Given = nb::ndarray<T, nb::ndim<Axes>, nb::c_contig, nb::device::cpu>;
template <typename Array>
std::string shape(const Array& of) {
    std::string text;
    for (std::size_t axis = 0; axis < of.ndim(); ++axis) text += (axis ? ", " : "(") + std::to_string(of.shape(axis));
    return text + ")";
}

template <typename Array>
bool is(const Array& of, std::initializer_list<std::int64_t> sizes) {
    std::size_t axis = 0;
    for (std::int64_t length : sizes)
        if (static_cast<std::int64_t>(of.shape(axis++)) != length) return false;
    return true;
}

// A map's probabilities by key [L * J], from its priorities p / (l - l_now) (`fmoe.probability_of`).
void expect_map(const bindings::Array<double>& probabilities, const bindings::Array<const std::int32_t>& keys,
                const bindings::Array<const float>& priorities, std::int64_t now, std::int64_t experts, const bindings::Array<std::int64_t>& told) {
    if (keys.size() != priorities.size() || experts < 1 || told.size() * experts < probabilities.size())
        refuse("a map has other priorities than keys, or layers of", experts);
    constexpr double kLeast = 0x1p-150;  // below every positive probability in float32
    for (std::int64_t i = 0; i < keys.size(); ++i) {
        const std::int64_t key = keys[i];
        if (key < 0 || key >= probabilities.size()) continue;
        const auto ahead = static_cast<float>(key / experts + 1 - now);
        const auto found = static_cast<double>(priorities[i] * ahead);
        probabilities.data()[key] = std::max(found, kLeast);
        ++told.data()[key / experts];
    }
}

using Found = std::optional<std::tuple<Made<std::int32_t>, Made<float>, std::int64_t, Made<double>>>;

}  // namespace

void bind_maps(nb::module_& m) {
    nb::class_<MapStore>(m, "MapStore")
        .def("__init__", [](MapStore* made, const Given<float, 2>& embeddings, const Given<float, 3>& maps,
                            const Given<double, 2>& squares, double share) {
            const auto axis = [&](int at) { return static_cast<std::int64_t>(maps.shape(static_cast<std::size_t>(at))); };
            const std::int64_t layers = axis(0), capacity = axis(1), width = static_cast<std::int64_t>(embeddings.shape(1));
            if (!layers || !capacity || !axis(2) || !width || !is(embeddings, {capacity, width}) || !is(squares, {layers, capacity}))
                throw std::invalid_argument("a store has embeddings [C, D], maps [L, C, J] and squares [L, C]");
            new (made) MapStore{layers, axis(2), width, capacity, share, embeddings.data(), maps.data(), squares.data()};
        }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), "embeddings"_a.noconvert(), "maps"_a.noconvert(),
             "squares"_a.noconvert(), "share"_a, "The arrays are read and written in place.")
        .def_ro("count", &MapStore::count)
        .def_ro("generation", &MapStore::generation)
        .def("add", [](MapStore& store, const Given<const float, 1>& embedding, const Given<const float, 2>& map) {
            if (!is(embedding, {store.width}) || !is(map, {store.layers, store.experts}))
                throw std::invalid_argument("an entry of " + shape(embedding) + " and " + shape(map) + " does not fit the store");
            return store.add(embedding.data(), map.data(), nullptr);
        }, "embedding"_a, "map"_a)
        .def("fill", [](MapStore& store, std::int64_t entries) {
            if (entries < 0 || entries > store.capacity) throw std::invalid_argument("the store holds fewer entries");
            store.fill(entries);
        }, "entries"_a, "The arrays hold these entries, but for their squares.");
    nb::class_<MapSearch>(m, "MapSearch")
        .def("__init__", [](MapSearch* made, MapStore& store, const Given<const float, 2>& embeddings) {
            const auto sequences = static_cast<std::int64_t>(embeddings.shape(0));
            if (!sequences || !is(embeddings, {sequences, store.width}))
                throw std::invalid_argument("embeddings of shape " + shape(embeddings) + " are not those of the store");
            new (made) MapSearch(store, embeddings.data(), sequences);
        }, nb::keep_alive<1, 2>(), "store"_a, "embeddings"_a)
        .def_prop_ro("sequences", &MapSearch::sequences)
        .def_prop_ro("complete", &MapSearch::complete, "Whether every layer was seen.")
        .def("match", [](MapSearch& search, bool semantic) -> std::optional<std::pair<std::vector<std::int64_t>, Made<double>>> {
            if (!search.match(semantic)) return std::nullopt;
            return std::pair(search.entries(), owned(std::vector(search.best()), {search.best().size()}));
        }, "semantic"_a, "The most similar entry of each sequence, and its score; semantic: by embedding, without unknown ones.")
        .def("scores", [](const MapSearch& search) {
            std::vector<double> found = search.scores();
            const auto rows = static_cast<std::size_t>(search.sequences());
            const std::size_t columns = found.size() / rows;
            return owned<double, 2>(std::move(found), {rows, columns});
        }, "Cosine of the layers seen with those of each entry [S, n].")
        .def("observe", [](MapSearch& search, std::int64_t layer, const Given<const float, 2>& probabilities) {
            const auto columns = static_cast<std::int64_t>(probabilities.shape(1));
            if (static_cast<std::int64_t>(probabilities.shape(0)) != search.sequences() || !columns || columns % search.store().experts)
                throw std::invalid_argument("probabilities of shape " + shape(probabilities) + " are not those of the sequences");
            search.observe(layer, columns / search.store().experts, probabilities.data());
        }, "layer"_a, "probabilities"_a, "Of this layer and those behind it [S, n * J].")
        .def("forecast", [](MapSearch& search, bool semantic, std::int64_t first, std::int64_t stop, std::int64_t now,
                            std::int64_t top_k, bool dynamic) -> Found {
            MapForecast found;
            if (!search.forecast(semantic, first, stop, now, top_k, dynamic, found)) return std::nullopt;
            const std::size_t keys = found.keys.size();
            return std::tuple(owned(std::move(found.keys), {keys}), owned(std::move(found.priorities), {keys}), found.wanted,
                              owned(std::vector(search.best()), {search.best().size()}));
        }, "semantic"_a, "first"_a, "stop"_a, "now"_a, "top_k"_a, "dynamic"_a,
             "(keys, priorities, how many are wanted, score of each match) of the layers from `first` to before `stop`.")
        .def("commit", &MapSearch::commit);
    m.def("expect_map", &expect_map, "probabilities"_a, "keys"_a, "priorities"_a, "now"_a, "experts"_a, "told"_a,
          "Sets the probabilities of those keys that there are; what is told of their layers [L] changes.\n\n"
          "Raises ValueError: lengths differ.");
}

}  // namespace tiermoe::core
