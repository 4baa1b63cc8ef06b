// Fetch: what the host reads of a layer, by one kernel and one event (actors/engine/cuda/activations.py).
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "experts.hpp"
#include "launch.hpp"

namespace tiermoe::launch {

// What the host reads of a layer: tensors, and scores of linear routers on the layer's input, written to one pinned buffer
// by one kernel (`_read` of tables.py), and read after one event. One thread.
class Fetch {
  public:
    using Types = std::vector<std::tuple<nb::object, std::size_t, bool>>;  // dtype; bytes of an item; becomes float32

    Fetch(nb::object runtime, const nb::dict& calls, std::uint64_t context, nb::object stream, const std::vector<Launch*>& reads,
          std::int64_t block, std::int64_t scores, nb::object int32, const Types& types, double spin_s)
        : runtime_(std::move(runtime)), stream_(std::move(stream)), int32_(std::move(int32)), context_(reinterpret_cast<void*>(context)),
          reads_(reads), block_(block), per_program_(scores), spin_s_(spin_s) {
        if (!reads.empty() && (reads.size() != kProducts + 1 || block < 1 || scores < 1))
            throw std::invalid_argument("a fetch has a kernel for each number of routers, and blocks");
        const auto at = [&calls](const char* name) { return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(calls[name])); };
        const auto create = reinterpret_cast<int (*)(void**, unsigned)>(at("create"));
        enter_ = reinterpret_cast<SetContext>(at("enter")), destroy_ = reinterpret_cast<Call>(at("destroy"));
        record_ = reinterpret_cast<int (*)(void*, void*)>(at("record")), query_ = reinterpret_cast<Call>(at("query"));
        synchronize_ = reinterpret_cast<Call>(at("synchronize")), text_ = reinterpret_cast<ErrorText>(at("describe"));
        for (const auto& [type, bytes, wide] : types) types_.push_back({type.ptr(), bytes, wide});
        check(enter_(context_));
        check(create(&event_, kUntimed));
    }
    Fetch(const Fetch&) = delete;
    ~Fetch() { destroy_(event_); }  // whatever it says: the device may be gone

    // Enqueue the kernel. routers: (weight [D*E, H], bias [D*E] or None, D, softmax), at most two, of hidden [T, H].
    void enqueue(nb::handle tensors, nb::handle hidden, nb::handle routers) {
        layout_ = nullptr;
        const nb::object given = sequence(tensors), asked = sequence(routers);
        const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(given.ptr()));
        const auto products = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(asked.ptr()));
        if (products > (reads_.empty() ? 0 : kProducts)) throw std::invalid_argument("there are more routers than the kernel takes");
        key_.clear();
        std::vector<nb::object> sources(count);
        for (std::size_t i = 0; i < count; ++i) {
            sources[i] = contiguous(PySequence_Fast_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i)));
            const void* type = dtype(sources[i].ptr());
            std::size_t kind = 0;
            while (kind < types_.size() && types_[kind].type != type) ++kind;
            if (kind == types_.size())
                throw nb::type_error(("the host reads integers and floats of a layer, not " + text_of(sources[i].attr("dtype"))).c_str());
            note(kind, shape_of(sources[i].ptr()));
        }
        Product product[kProducts];
        nb::object input;
        if (products) input = nb::borrow(hidden);
        for (std::size_t i = 0; i < products; ++i) product[i] = product_of(PySequence_Fast_GET_ITEM(asked.ptr(), static_cast<Py_ssize_t>(i)), input);
        auto found = layouts_.find(key_);
        if (found == layouts_.end()) found = layouts_.emplace(key_, lay_out()).first;
        const Layout& layout = found->second;

        std::vector<std::size_t> words, wide;
        for (std::size_t i = 0; i < count; ++i) {
            if (!layout.parts[i].words) continue;
            if (reads_.empty()) {
                nb::find(this).attr("copied")(layout.tensors[i], sources[i]);
            } else {
                (layout.parts[i].wide ? wide : words).push_back(i);
            }
        }
        const std::uint64_t stream = static_cast<std::uint64_t>(number(stream_().ptr()));
        std::size_t next = 0, next_wide = 0;
        bool scored = products == 0;
        while (next < words.size() || next_wide < wide.size() || !scored) {
            Source taken[kWords + 1] = {};
            for (std::size_t n = 0; n < kWords && next < words.size(); ++n) taken[n] = source_of(sources, layout, words[next++]);
            if (next_wide < wide.size()) taken[kWords] = source_of(sources, layout, wide[next_wide++]);
            launch(taken, input, product, scored ? 0 : products, layout, count, stream);
            scored = true;
        }
        int code = record_(event_, reinterpret_cast<void*>(stream));
        if (code == kNoContext && enter_(context_) == 0) code = record_(event_, reinterpret_cast<void*>(stream));  // a new thread
        check(code);
        softmax_.clear();
        for (std::size_t i = 0; i < products; ++i) softmax_.push_back(product[i].softmax);
        layout_ = &layout;
        held_ = std::move(sources);
        held_.push_back(std::move(input));
    }

    // Wait for what was enqueued: poll, and only after some time give up the interpreter's lock.
    void wait() const {
        const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(spin_s_);
        for (;;) {
            const int code = query_(event_);
            if (code != kNotReady) return check(code);
            if (std::chrono::steady_clock::now() > until) break;
        }
        int code;
        {
            nb::gil_scoped_release unlocked;
            code = synchronize_(event_);
        }
        check(code);
    }

    // Copies of what was read, in the order in which it was given: tensors, then scores.
    nb::list take() {
        nb::list found;
        for (const nb::object& array : taken().arrays) found.append(TIERMOE_CALLED(array.ptr(), "copy"));
        return found;
    }

    nb::object reads() const { return reads_.empty() ? nb::none() : nb::object(nb::capsule(&layer_reads_, kLayerReads.c_str())); }

  private:
    static constexpr std::size_t kWords = 3, kProducts = 2, kLayouts = 64;  // decode has few layouts
    static constexpr std::int64_t kAligned = 4, kFirstWords = 1 << 14;      // words
    static constexpr int kNotReady = 600;                                   // CUDA_ERROR_NOT_READY
    static constexpr unsigned kUntimed = 2;                                 // CU_EVENT_DISABLE_TIMING
    using Call = int (*)(void*);

    struct Type {
        const void* type;
        std::size_t bytes;
        bool wide;
    };
    struct Part {
        std::int64_t at, words, columns, bytes;  // the place and size in the buffer; of the last dimension; of an item
        bool wide;
    };
    struct Layout {
        std::vector<Part> parts;
        std::vector<nb::object> tensors, arrays;  // views of the buffer
    };
    struct Product {
        nb::object weight, bias;
        Arg w, b;
        std::int64_t outputs = 0, rows = 0, width = 0;
        bool softmax = false;
    };
    struct Source {
        Arg arg;
        std::int64_t count = 0, at = 0;  // items that the kernel takes, and their place
        nb::object object;
    };

    // What was enqueued and waited for.
    const Layout& taken() {
        if (!layout_) throw std::runtime_error("nothing was enqueued");
        const Layout& layout = *layout_;
        const std::size_t count = layout.parts.size() - softmax_.size();
        for (std::size_t i = 0; i < softmax_.size(); ++i) {
            const Part& part = layout.parts[count + i];
            if (softmax_[i]) soften(reinterpret_cast<float*>(buffer_ + 4 * part.at), part.words, part.columns);
        }
        softmax_.assign(softmax_.size(), false);
        held_.clear();
        return layout;
    }

    // What `LayerReads` says.
    static int read_layer(void* self, PyObject* tensors, PyObject* hidden, PyObject* routers, ReadPart* parts,
                          double (*clock_s)(), double* waited_s) {
        return guarded(-1, [&] {
            Fetch& fetch = *static_cast<Fetch*>(self);
            fetch.enqueue(tensors, hidden, routers);
            const double began_s = clock_s ? clock_s() : 0.0;
            fetch.wait();
            if (clock_s) *waited_s = clock_s() - began_s;
            for (const Part& part : fetch.taken().parts)
                *parts++ = {fetch.buffer_ + 4 * part.at, 4 * part.words / part.bytes, part.bytes};
            return 0;
        });
    }

    void check(int code) const {
        if (!code) return;
        const char* text = nullptr;
        text_(code, &text);
        throw std::runtime_error("the GPU's driver refused to say when a layer's routing is read: " +
                                 std::string(text ? text : "error") + " (" + std::to_string(code) + ")");
    }

    static nb::object sequence(nb::handle of) { return nb::steal(not_null(PySequence_Fast(of.ptr(), "tensors are a sequence"))); }

    void note(std::size_t kind, const nb::object& shape) {
        key_.push_back(static_cast<std::int64_t>(kind));
        key_.push_back(PyTuple_GET_SIZE(shape.ptr()));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.ptr()); ++i) key_.push_back(number(PyTuple_GET_ITEM(shape.ptr(), i)));
    }

    Product product_of(PyObject* given, nb::object& hidden) {
        if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4)
            throw nb::type_error("each router is a tuple (weight, bias, layers, softmax)");
        Product made;
        made.weight = nb::borrow(PyTuple_GET_ITEM(given, 0)), made.bias = nb::borrow(PyTuple_GET_ITEM(given, 1));
        const std::int64_t layers = number(PyTuple_GET_ITEM(given, 2));
        made.softmax = PyTuple_GET_ITEM(given, 3) == Py_True;
        const nb::object of_weight = shape_of(made.weight.ptr());
        hidden = contiguous(hidden);
        const nb::object of_hidden = shape_of(hidden.ptr());
        if (PyTuple_GET_SIZE(of_weight.ptr()) != 2 || PyTuple_GET_SIZE(of_hidden.ptr()) != 2)
            throw std::invalid_argument("a router's weight and the layer's input are matrices");
        made.outputs = number(PyTuple_GET_ITEM(of_weight.ptr(), 0)), made.width = number(PyTuple_GET_ITEM(of_weight.ptr(), 1));
        made.rows = number(PyTuple_GET_ITEM(of_hidden.ptr(), 0));
        if (layers < 1 || made.outputs % layers != 0 || !is_shape(of_hidden.ptr(), made.rows, made.width) || !is_contiguous(made.weight.ptr()))
            throw std::invalid_argument("a router of " + text_of_shape(of_weight) + " for hidden of " + text_of_shape(of_hidden));
        made.w = tensor(made.weight.ptr());
        if (!made.bias.is_none()) made.b = tensor(made.bias.ptr());
        key_.push_back(kScores);
        key_.push_back(made.rows), key_.push_back(layers), key_.push_back(made.outputs / layers);
        return made;
    }

    Layout lay_out() {
        if (layouts_.size() >= kLayouts) layouts_.clear();
        Layout made;
        nb::list wanted;
        std::int64_t end = 0;
        for (std::size_t i = 0; i < key_.size();) {
            const std::int64_t kind = key_[i++];
            const bool scores = kind == kScores;
            std::vector<std::int64_t> shape;
            if (scores) {
                shape = {key_[i], key_[i + 1], key_[i + 2]};
                if (shape[1] == 1) shape.erase(shape.begin() + 1);
                i += 3;
            } else {
                const auto dims = static_cast<std::size_t>(key_[i++]);
                shape.assign(key_.begin() + static_cast<std::ptrdiff_t>(i), key_.begin() + static_cast<std::ptrdiff_t>(i + dims));
                i += dims;
            }
            std::int64_t items = 1;
            for (const std::int64_t size : shape) items *= size;
            const bool wide = !scores && types_[static_cast<std::size_t>(kind)].wide;
            const auto bytes = scores || wide ? 4 : static_cast<std::int64_t>(types_[static_cast<std::size_t>(kind)].bytes);
            made.parts.push_back({end, items * bytes / 4, shape.empty() ? 1 : shape.back(), bytes, wide});
            nb::list dims;
            for (const std::int64_t size : shape) dims.append(size);
            wanted.append(nb::make_tuple(4 * end, items * bytes, scores ? -1 : kind, nb::tuple(dims)));
            end += (items * bytes / 4 + kAligned - 1) / kAligned * kAligned;
        }
        if (!buffer_ || end > words_) {
            layouts_.clear();
            std::int64_t size = std::max(words_, kFirstWords);
            while (size < end) size *= 2;
            target_ = nb::find(this).attr("grown")(4 * size);
            to_ = tensor(target_.ptr()), words_ = size;
            buffer_ = reinterpret_cast<char*>(to_.bits);
        }
        for (const nb::handle view : nb::find(this).attr("views")(wanted)) {
            made.tensors.push_back(nb::borrow(view[0])), made.arrays.push_back(nb::borrow(view[1]));
        }
        return made;
    }

    Source source_of(const std::vector<nb::object>& sources, const Layout& layout, std::size_t i) const {
        const Part& part = layout.parts[i];
        Source found{tensor(sources[i].ptr()), part.words, part.at, sources[i]};
        if (!part.wide) found.arg.type = int32_.ptr();
        return found;
    }

    void launch(Source* taken, const nb::object& hidden, const Product* product, std::size_t products, const Layout& layout,
                std::size_t first_score, std::uint64_t stream) {
        Arg args[kArgs];
        args[0] = to_;
        std::int64_t most = 0;
        for (std::size_t n = 0; n <= kWords; ++n) {
            args[1 + n] = taken[n].count ? taken[n].arg : to_;
            args[10 + n] = integer(taken[n].count), args[14 + n] = integer(taken[n].at);
            most = std::max(most, taken[n].count);
        }
        const std::int64_t copying = (most + block_ - 1) / block_;
        std::int64_t programs = copying;
        args[5] = products ? tensor(hidden.ptr()) : to_;
        args[18] = integer(copying), args[19] = integer(products ? product[0].rows : 0);
        for (std::size_t n = 0; n < kProducts; ++n) {
            const bool used = n < products, biased = used && product[n].b.object;
            args[6 + 2 * n] = used ? product[n].w : to_, args[7 + 2 * n] = biased ? product[n].b : to_;
            args[20 + n] = integer(used ? product[n].outputs : 0);
            args[22 + n] = integer(used ? layout.parts[first_score + n].at : 0);
            args[24 + n] = integer(biased);
            if (used) programs += product[n].rows * ((product[n].outputs + per_program_ - 1) / per_program_);
        }
        args[26] = integer(products ? product[0].width : 16);
        Launch& kernel = *reads_[products];
        const Handle* known = kernel.find(args, kArgs);
        if (!known || known->fallback.is_valid())  // Triton itself launches: words are of a tensor of int32 there
            for (std::size_t n = 0; n < kWords; ++n)
                if (taken[n].count) {
                    taken[n].object = taken[n].object.attr("view")(-1).attr("view")(int32_);
                    args[1 + n].object = taken[n].object.ptr();
                }
        kernel.launch({programs, 1, 1}, args, kArgs, stream);
    }

    static void soften(float* scores, std::int64_t count, std::int64_t columns) {
        for (float* row = scores; row < scores + count; row += columns) {
            const float most = *std::max_element(row, row + columns);
            float sum = 0;
            for (std::int64_t i = 0; i < columns; ++i) sum += row[i] = std::exp(row[i] - most);
            for (std::int64_t i = 0; i < columns; ++i) row[i] /= sum;
        }
    }

    static constexpr std::size_t kArgs = 27;
    static constexpr std::int64_t kScores = -1;  // in a key, in the place of a type
    nb::object runtime_;                         // keeps the driver
    nb::object stream_, int32_, target_;
    void *context_, *event_ = nullptr;
    SetContext enter_;
    Call destroy_, query_, synchronize_;
    int (*record_)(void*, void*);
    ErrorText text_;
    std::vector<Launch*> reads_;
    std::int64_t block_, per_program_, words_ = 0;
    std::vector<Type> types_;
    char* buffer_ = nullptr;
    Arg to_{};
    std::vector<std::int64_t> key_;
    std::map<std::vector<std::int64_t>, Layout> layouts_;
    std::vector<bool> softmax_;  // of what was enqueued
    const Layout* layout_ = nullptr;
    std::vector<nb::object> held_;  // what is read, until it is taken
    double spin_s_;
    const LayerReads layer_reads_{this, read_layer};
};

}  // namespace tiermoe::launch
