// Bindings of the native orders of eviction: what policies in Python and the planner of misses ask them, and what they tell
// them. The core calls them without Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "../../kernels/cpu/sizes.hpp"
#include "bindings.hpp"
#include "orders.hpp"
#include "python.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::core {
namespace {

// By key.
template <typename T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

void check_keys(const Segments& keys, std::int64_t end) {
    for (Segment s : keys)
        if (s < 0 || s >= end) refuse("there is no such expert", s);
}

template <typename T>
T* of_keys(const std::optional<Array<T>>& given, std::int64_t keys) {
    if (given && static_cast<std::int64_t>(given->size()) != keys) refuse("an array is not by key, of which there are", keys);
    return given ? given->data() : nullptr;
}

void check_sizes(std::int64_t layers, std::int64_t experts, std::int64_t parts) {
    if (layers < 1 || experts < 1) refuse("a model has layers and experts", std::min(layers, experts));
    if (!product_fits({layers, experts, parts}, kMostKeys)) refuse("a model has fewer experts than", kMostKeys);
}

constexpr std::array kKinds = {"lru", "lru-sweep", "lfu", "expert-map", "importance", "worth", "lcp"};  // `Order::Kind`

void make(WholeOrder* made, const std::string& kind, std::int64_t layers, std::int64_t experts, double least, double growth,
          const std::optional<Array<const double>>& probabilities, const std::optional<Array<const std::int64_t>>& told,
          Importance* state, double rate) {
    using Kind = tiermoe::Order::Kind;
    check_sizes(layers, experts, 1);
    const auto number = std::find(kKinds.begin(), kKinds.end(), kind) - kKinds.begin();
    const auto of = static_cast<Kind>(number);
    const bool fits = !state || (state->layers == layers && state->experts == experts);
    if (of > Kind::lcp || !fits || (of == Kind::map) != probabilities.has_value() ||
        probabilities.has_value() != told.has_value() || (of == Kind::importance) != (state != nullptr))
        refuse("there is no such order", number);
    new (made) WholeOrder(of, layers, experts, least, growth, of_keys(probabilities, layers * experts),
                          of_keys(told, layers), state, rate);
}

void change(NativeOrder& order, Segment s, bool in) {
    check_keys({s}, order.segments());
    if (order.holds(s) == in) refuse(in ? "a segment has a slot" : "a segment has no slot", s);
    in ? order.admitted(s) : order.removed(s);
}

void routed(NativeOrder& order, const Segments& keys, const Segments& counts, std::int64_t tokens) {
    check_keys(keys, order.keys());
    if (keys.size() != counts.size()) refuse("counts are not those of the experts", static_cast<std::int64_t>(counts.size()));
    if (keys.empty()) return order.routed(0, keys, counts, tokens);
    const std::int64_t layer = keys[0] / order.experts();
    for (Segment key : keys)
        if (key / order.experts() != layer) refuse("not an expert of the layer", key);
    order.routed(layer, keys, counts, tokens);
}

void make_classes(ByClass* made, std::int64_t layers, std::int64_t experts, bool split, std::vector<std::shared_ptr<Order>> members) {
    check_sizes(layers, experts, 2);
    if (static_cast<std::int64_t>(members.size()) != (split ? layers + 1 : 2)) refuse("each class of slots has an order, not", static_cast<std::int64_t>(members.size()));
    for (std::size_t i = 0; i < members.size(); ++i) {
        const auto* native = dynamic_cast<const NativeOrder*>(members[i].get());
        const std::int64_t segments = split && i + 1 < members.size() ? experts : layers * experts;
        if (!members[i] || (native && native->segments() != segments)) refuse("an order is not of its class's segments, of which there are", segments);
    }
    new (made) ByClass(layers, experts, split, std::move(members));
}

// Orders of Python hear of what has happened, which else comes before they are asked.
void tell(Order& order) {
    if (auto* python = dynamic_cast<PythonOrder*>(&order)) python->tell();
    if (auto* classes = dynamic_cast<ByClass*>(&order))
        for (const auto& member : classes->members) tell(*member);
}

Worth& worth(WholeOrder& order) {
    if (!order.of.worth()) refuse("the order is not by worth, and has so many experts", order.of.keys());
    return *order.of.worth();
}

}  // namespace

void bind_orders(nb::module_& m) {
    nb::class_<Order>(m, "Order")
        .def("tell", &tell, "Orders of Python hear of what has happened, which else comes before they are asked.");
    nb::class_<PythonOrder, Order>(m, "PythonOrder")
        .def(nb::init<nb::object, std::int64_t>(), "policy"_a, "segments"_a, "segments: how many the cache has.");
    nb::class_<NativeOrder, Order>(m, "NativeOrder", "What a cache tells an order, and who leaves.")
        .def("admitted", [](NativeOrder& order, Segment key) { change(order, key, true); }, "key"_a)
        .def("removed", [](NativeOrder& order, Segment key) { change(order, key, false); }, "key"_a)
        .def("used", [](NativeOrder& order, const Segments& keys) {
            check_keys(keys, order.segments());
            for (Segment s : keys)
                if (!order.holds(s)) refuse("a segment has no slot", s);
            order.used(keys);
        }, "keys"_a)
        .def("routed", &routed, "keys"_a, "counts"_a, "tokens"_a)
        .def_prop_ro("segments", &NativeOrder::segments)
        .def_prop_ro("classes", &NativeOrder::classes, "Of slots.")
        .def("victims", [](NativeOrder& order, std::int64_t slot_class, std::int64_t count, const Array<const std::uint8_t>& may) {
            if (slot_class < 0 || slot_class >= order.classes()) refuse("there is no such slot class", slot_class);
            return order.victims(slot_class, count, of_keys(std::optional(may), order.segments()));
        }, "slot_class"_a, "count"_a, "may"_a, "Of the segments with slots of a class that may leave [segments] the first.");
    nb::class_<WholeOrder, NativeOrder>(m, "WholeOrder")
        .def("__init__", &make, nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), "kind"_a, "layers"_a,
             "experts"_a, "least"_a = 0.0, "growth"_a = 1.0, "probabilities"_a.none().noconvert() = nb::none(),
             "told"_a.none().noconvert() = nb::none(), "importance"_a.none() = nb::none(), "rate"_a = 0.0,
             "kind: lru, lru-sweep, lfu, expert-map, importance, worth or lcp. probabilities [keys], told [layers] and what the state of importance has are read in place.")
        .def("priority", [](const WholeOrder& order, Segment key) {
            check_keys({key}, order.of.keys());
            return order.of.priority(key);
        }, "key"_a, "By which experts are ranked, the highest first.")
        .def("bind", [](WholeOrder& order, std::int64_t share, const Array<const double>& worths) {
            Worth& of = worth(order);
            if (share < 0 || share > kMostKeys) refuse("a share of the slots is 0 or more, not", share);
            of.bind(share, of_keys(std::optional(worths), order.of.keys()));
        }, "share"_a, "worths"_a.noconvert(), "worths [keys] are read in place.")
        .def("prompt", [](WholeOrder& order, const std::optional<Array<std::int64_t>>& uses) {
            worth(order).prompt(of_keys(uses, order.of.keys()));
        }, "uses"_a.none().noconvert(), "uses [keys] are read, and added to, in place.")
        .def("refuse", [](WholeOrder& order, Segment key) {
            check_keys({key}, order.of.keys());
            worth(order).refuse(key);
        }, "key"_a)
        .def("admit", [](WholeOrder& order, Segment key) {
            check_keys({key}, order.of.keys());
            worth(order).readmit(key);
        }, "key"_a)
        .def_prop_ro("refused", [](WholeOrder& order) { return worth(order).refused(); })
        .def_prop_rw("layer", [](WholeOrder& order) { return worth(order).layer(); }, [](WholeOrder& order, std::int64_t layer) {
            if (layer < 0 || layer >= order.of.layers()) refuse("there is no such layer", layer);
            worth(order).at_work(layer);
        }, "The layer at work.")
        .def("settled", [](WholeOrder& order) { return worth(order).settled(); })
        .def("note", [](WholeOrder& order) { worth(order).note(); })
        .def("noted", [](WholeOrder& order) {
            nb::list found;
            std::int64_t layer = 0;
            for (const auto& experts : worth(order).take_noted()) {
                if (!experts.empty())
                    found.append(nb::make_tuple(layer, nb::bytes(reinterpret_cast<const char*>(experts.data()),
                                                                 sizeof(std::int32_t) * experts.size())));
                ++layer;
            }
            return found;
        }, "(layer, int32 experts) of what was used since `note`, layers in rising order.");
    nb::class_<ByClass, NativeOrder>(m, "ByClass")
        .def("__init__", &make_classes, "layers"_a, "experts"_a, "split"_a, "members"_a,
             "members: orders of the tops of each layer and of bottoms, if split; else of whole experts and of replicas. Each\n"
             "numbers its segments from 0.");
}

}  // namespace tiermoe::core
