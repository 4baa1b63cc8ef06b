// The parts of a layer's pass that are Python's: methods of a `engine.layer.Pass`, which the first of them makes. What is here
// takes the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "layer.hpp"
#include "routing.hpp"

namespace tiermoe::core {

namespace nb = nanobind;

class PythonParts : public Parts {
  public:
    // begin: makes the present pass; refers weakly to what holds the layer, since no collector sees what the core holds.
    explicit PythonParts(nb::object begin) : begin_(std::move(begin)) {}

    void routed(Layer& layer) override {
        const nb::gil_scoped_acquire lock;
        pass(layer).attr("routed")(routing(layer));
    }
    const Segments& place(Layer& layer, const Segments& needed, Segments& keep, bool& away) override {
        const nb::gil_scoped_acquire lock;
        nb::object kept, here;
        std::tie(here, kept, away) =
            nb::cast<std::tuple<nb::object, nb::object, bool>>(pass(layer).attr("place")(routing(layer), needed));
        here_ = nb::cast<Segments>(here);
        bool absent = false;  // else nobody leaves
        for (Segment s : here_) absent |= layer.core().state(s) == State::absent;
        if (absent)
            for (const nb::handle key : kept) keep.push_back(nb::cast<Key>(key));
        return here_;
    }
    void send(Layer& layer) override {
        const nb::gil_scoped_acquire lock;
        nb::object& of = pass(layer);
        if (const Placement* placement = layer.placement()) {
            nb::list remote;
            for (const Away& to : placement->away()) remote.append(nb::make_tuple(to.peer, to.segments, to.bits));
            of.attr("routing") = routing(layer);
            of.attr("remote") = remote;
        }
        of.attr("send")();
    }
    const float* scores(Layer& layer, std::int64_t router, std::int64_t count) override {
        const nb::gil_scoped_acquire lock;
        const auto found = nb::cast<nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(pass(layer).attr("scores")(router));
        if (static_cast<std::int64_t>(found.size()) != count) throw std::invalid_argument("a router has other experts");
        scores_.assign(found.data(), found.data() + count);
        return scores_.data();
    }
    Segments lost() override {
        const nb::gil_scoped_acquire lock;
        return nb::cast<Segments>(pass_.attr("lost")());
    }
    void kernels(Layer& layer, const std::vector<Group>& groups, const std::vector<Group>& replicas, float* y) override {
        const nb::gil_scoped_acquire lock;
        pass(layer).attr("run_into")(reinterpret_cast<std::uintptr_t>(y), routing(layer), of_python(groups), slots(replicas));
    }
    std::pair<double, double> add() override {
        const nb::gil_scoped_acquire lock;
        if (!summed_) pass_.attr("add")(out.is_valid() ? out : nb::none());
        return nb::cast<std::pair<double, double>>(pass_.attr("peer_s")());
    }
    void ran() override {
        if (!pass_.is_valid()) return;
        const nb::gil_scoped_acquire lock;
        pass_.attr("ran")();
    }
    void over() noexcept override {
        if (!pass_.is_valid()) return;
        const nb::gil_scoped_acquire lock;
        pass_.reset(), routing_.reset(), out.reset();
        rerouted = summed_ = false;
    }

    // With the lock. The present pass; a view that it makes has the routing as a native rule has left it.
    nb::object& pass(const Layer& layer) {
        if (pass_.is_valid()) return pass_;
        pass_ = begin_();
        if (layer.under_way() && layer.routed().weights != layer.given().weights) {
            const Routed& routed = layer.routed();
            const auto tokens = static_cast<std::size_t>(routed.tokens), top_k = static_cast<std::size_t>(routed.top_k);
            pass_.attr("changed")(owned<std::int64_t, 2>({routed.ids, routed.ids + tokens * top_k}, {tokens, top_k}),
                                  owned<float, 2>({routed.weights, routed.weights + tokens * top_k}, {tokens, top_k}));
        }
        return pass_;
    }
    // With the lock. As it runs.
    nb::object& routing(const Layer& layer) {
        if (!routing_.is_valid()) {
            const Routed& routed = layer.routed();
            routing_ = nb::cast(Routing(*routed.picked, layer.place().index, routed.tokens, routed.top_k));
        }
        return routing_;
    }
    void routing(nb::object made) { routing_ = std::move(made); }
    // With the lock. All of the plan and the sums, by Python's kernels.
    nb::object compute(Layer& layer) {
        nb::object of = pass(layer);
        of.attr("begin")(routing(layer));
        while (layer.next()) {
            const Picked& picked = *layer.routed().picked;
            of.attr("run")(of_python(picked.found()), slots(picked.replicas));
        }
        summed_ = true;
        return of.attr("combine")();
    }

    nb::object out;         // the sums, where an executor makes a tensor of its own
    bool rerouted = false;  // the routing is what a rule in Python has left

  private:
    static nb::list of_python(const std::vector<Group>& groups) {
        nb::list made;
        for (const Group& g : groups) made.append(nb::make_tuple(g.start, g.stop, g.first, g.neurons, g.add));
        return made;
    }
    static nb::list slots(const std::vector<Group>& replicas) {
        nb::list made;
        for (const Group& g : replicas) made.append(nb::make_tuple(g.start, g.stop, g.first));
        return made;
    }

    const nb::object begin_;
    nb::object pass_, routing_;  // of the present pass
    Segments here_;
    std::vector<float> scores_;
    bool summed_ = false;
};

// A rule in Python: the routing that it leaves runs, some of it perhaps on low-bit replicas.
struct PythonRule : LayerRule {
    explicit PythonRule(PythonParts& of) : of(of) {}
    bool native() const override { return false; }
    void apply(Layer& layer, const Given& given, Routed& routed) override {
        const nb::gil_scoped_acquire lock;
        const nb::object found = of.pass(layer).attr("reroute")();
        if (found.is_none()) return;
        using Ids = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
        using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
        const auto [left, shares, low] = nb::cast<std::tuple<Ids, Weights, nb::object>>(found);
        if (static_cast<std::int64_t>(left.shape(0)) != given.tokens || shares.shape(0) != left.shape(0) ||
            shares.shape(1) != left.shape(1) || left.shape(1) < 1)
            throw std::invalid_argument("a rule leaves each row some experts, with their weights");
        ids.assign(left.data(), left.data() + left.size());
        weights.assign(shares.data(), shares.data() + shares.size());
        routed.ids = ids.data(), routed.weights = weights.data(), routed.top_k = static_cast<std::int64_t>(left.shape(1));
        for (const nb::handle key : low) routed.low.push_back(nb::cast<Key>(key));
        of.rerouted = true;
    }
    PythonParts& of;
    std::vector<std::int64_t> ids;
    std::vector<float> weights;
};

// What looks ahead in Python. It sees the routing as the model picked it.
struct PythonAhead : LayerAhead {
    explicit PythonAhead(PythonParts& of) : of(of) {}
    bool native() const override { return false; }
    void run(Layer& layer, const Given&, std::vector<double>&) override {
        const nb::gil_scoped_acquire lock;
        of.pass(layer).attr("ahead")();
    }
    PythonParts& of;
};

}  // namespace tiermoe::core
