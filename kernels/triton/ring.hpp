// Ring: pinned buffers through which small arrays go to the GPU (actors/engine/cuda/tables.py).
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "launch.hpp"

namespace tiermoe::launch {

// Buffers are taken in turn. They form sections: one that is left is marked by an event on each stream that read from it,
// and is entered again only when these are done.
class Ring {
  public:
    Ring(const std::vector<std::uint64_t>& buffers, std::size_t bytes, std::size_t sections, Launch* copy, std::int64_t block,
         nb::object stream)
        : copy_(copy), block_(block), stream_(std::move(stream)) {
        if (buffers.empty() || sections < 1 || (copy && block < 1)) throw std::invalid_argument("a ring has buffers and sections");
        for (const std::uint64_t at : buffers) buffers_.push_back({reinterpret_cast<char*>(at), bytes});
        per_ = (buffers.size() + sections - 1) / sections;
        sections_.resize((buffers.size() + per_ - 1) / per_);
    }

    // Brings `bytes` bytes, which `fill` writes, to a tensor of `items` items on the device, for later work on this stream.
    template <typename Fill>
    void put(const Arg& target, std::size_t items, std::size_t bytes, std::optional<std::uint64_t> stream, Fill&& fill) {
        if (items == 0) return;
        if (!stream && copy_) stream = static_cast<std::uint64_t>(number(stream_().ptr()));
        const std::size_t at = take();
        Section& section = sections_[at / per_];
        const Held held(section);
        if (buffers_[at].size < bytes) {
            std::size_t size = std::max<std::size_t>(buffers_[at].size, 1);
            while (size < bytes) size *= 2;  // so that prompts that grow do not renew it each time
            buffers_[at].at = reinterpret_cast<char*>(nb::cast<std::uint64_t>(nb::find(this).attr("grown")(at, size)));
            buffers_[at].size = size;
        }
        fill(buffers_[at].at);
        if (!copy_ || std::find(section.streams.begin(), section.streams.end(), *stream) == section.streams.end()) {
            nb::find(this).attr("read_by_this_stream")(at / per_);
            if (copy_) section.streams.push_back(*stream);
        }
        const nb::handle object(target.object);
        if (!copy_) {
            nb::find(this).attr("copied")(at, bytes, object);
            return;
        }
        const auto count = static_cast<std::int64_t>(items);
        Arg args[] = {{Kind::tensor, reinterpret_cast<std::uintptr_t>(buffers_[at].at), target.type}, target, integer(count)};
        nb::object source;
        const Handle* known = copy_->find(args, 3);
        if (!known || known->fallback.is_valid()) {
            source = nb::find(this).attr("source")(at, bytes, object);
            args[0].object = source.ptr();
        }
        copy_->launch({(count + block_ - 1) / block_, 1, 1}, args, 3, stream);
    }

  private:
    struct Buffer {
        char* at;
        std::size_t size;
    };
    struct Section {
        std::size_t held = 0;  // buffers taken whose copy is not enqueued yet
        std::vector<std::uint64_t> streams;
    };
    struct Held {
        explicit Held(Section& section) : of(section) { ++of.held; }
        Held(const Held&) = delete;
        ~Held() { --of.held; }
        Section& of;
    };

    static void let_others_run() {
        nb::gil_scoped_release unlocked;
        std::this_thread::yield();
    }

    std::size_t take() {
        while (turning_) let_others_run();
        if (next_ % per_ == 0) {
            const std::size_t entered = next_ / per_, left = (entered + sections_.size() - 1) % sections_.size();
            turning_ = true;
            struct Turned {
                bool& turning;
                ~Turned() { turning = false; }
            } turned{turning_};
            while (sections_[left].held > 0) let_others_run();
            nb::find(this).attr("turned")(left, entered);
            sections_[left].streams.clear();
        }
        const std::size_t at = next_;
        next_ = (next_ + 1) % buffers_.size();
        return at;
    }

    Launch* copy_;
    std::int64_t block_;
    nb::object stream_;
    std::vector<Buffer> buffers_;
    std::vector<Section> sections_;
    std::size_t per_ = 1, next_ = 0;
    bool turning_ = false;
};

inline void put_array(Ring& ring, nb::handle target, nb::handle array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
    const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&view, PyBuffer_Release);
    const auto bytes = static_cast<std::size_t>(view.len);
    ring.put(tensor(target.ptr()), view.itemsize ? bytes / static_cast<std::size_t>(view.itemsize) : 0, bytes, {},
             [&](char* to) { std::memcpy(to, view.buf, bytes); });
}

}  // namespace tiermoe::launch
