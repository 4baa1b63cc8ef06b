// Launch: a compiled Triton kernel in all its forms, one for each combination of what Triton specialises; and Driver: the GPU
// driver's functions, by address, since this module links with neither CUDA nor torch.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python.hpp"

namespace tiermoe::launch {

constexpr std::size_t kMostArgs = 32;
constexpr int kNoContext = 201;  // CUDA_ERROR_INVALID_CONTEXT

using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra);
using ErrorText = int (*)(int code, const char** text);
using SetContext = int (*)(void* context);

struct Driver {
    LaunchKernel launch;
    ErrorText text;      // null: codes have none
    SetContext current;  // null: any thread may launch
};

enum class Kind : std::uint8_t { tensor, int32, int64, uint64, real };

struct Arg {
    Kind kind;
    std::uint64_t bits;          // an address, a number, or a double
    const void* type = nullptr;  // a tensor's dtype
    PyObject* object = nullptr;  // for Triton's own launch; null: a number
};

inline Arg integer(std::int64_t value) {
    const bool small = value == static_cast<std::int32_t>(value);
    return {small ? Kind::int32 : Kind::int64, static_cast<std::uint64_t>(value)};
}

inline Arg tensor(PyObject* object) { return {Kind::tensor, address(object), dtype(object), object}; }

inline Arg argument(PyObject* value) {
    if (PyBool_Check(value)) throw nb::type_error("a kernel takes tensors and numbers, not bool");
    if (PyLong_Check(value)) {
        int overflow = 0;
        const long long found = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow) return integer(found);
        const std::uint64_t wide = PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred()) nb::raise_python_error();
        return {Kind::uint64, wide, nullptr, value};
    }
    if (PyFloat_Check(value)) {
        const double real = PyFloat_AS_DOUBLE(value);
        Arg arg{Kind::real, 0, nullptr, value};
        std::memcpy(&arg.bits, &real, sizeof real);
        return arg;
    }
    return tensor(value);
}

// What Triton specialises: a tensor's type and whether 16 divides its address, an integer's width and, unless the kernel
// says that it does not matter, its value. A float's value is never specialised.
struct Key {
    std::size_t count = 0;
    std::uint64_t words[kMostArgs];
    Kind kinds[kMostArgs];
    bool operator==(const Key& other) const {
        return count == other.count && std::memcmp(words, other.words, count * sizeof *words) == 0 &&
               std::memcmp(kinds, other.kinds, count * sizeof *kinds) == 0;
    }
};

struct Hash {
    std::size_t operator()(const Key& key) const {
        std::uint64_t found = 14695981039346656037u;
        for (std::size_t i = 0; i < key.count; ++i) found = (found ^ key.words[i]) * 1099511628211u;
        return found ^ (found >> 29);
    }
};

enum class Packed : std::uint8_t { left_out, eight, four, float32 };  // how an argument is passed; the first: compiled in

struct Handle {
    nb::object fallback;  // (grid, *args); where there is no address
    nb::object keeps;     // the driver
    const Driver* driver = nullptr;
    void *function = nullptr, *context = nullptr;
    unsigned threads = 0, shared = 0;
    std::string packed;        // a `Packed` for each argument
    std::size_t nulls = 0;     // pointers after them that Triton adds for scratch memory that the kernel does not use
    nb::object stream;         // () -> the current stream's address
};

struct Grid {
    std::int64_t x, y, z;
};

class Launch {
  public:
    explicit Launch(const std::vector<std::size_t>& loose) {
        for (const std::size_t i : loose)
            if (i < kMostArgs) loose_ |= std::uint64_t{1} << i;
    }

    std::size_t known() const { return handles_.size(); }

    const Handle* find(const Arg* args, std::size_t count) {
        if (count > kMostArgs) throw nb::type_error("a kernel takes at most 32 arguments");
        Key key;
        key.count = count;
        for (std::size_t i = 0; i < count; ++i) {
            const Arg& arg = args[i];
            key.kinds[i] = arg.kind;
            switch (arg.kind) {
                case Kind::tensor: key.words[i] = reinterpret_cast<std::uintptr_t>(arg.type) | ((arg.bits & 15) == 0); break;
                case Kind::real: key.words[i] = 0; break;
                default: key.words[i] = (loose_ >> i & 1) != 0 ? 0 : arg.bits;
            }
        }
        if (last_ && last_->first == key) return &last_->second;
        const auto found = handles_.find(key);
        if (found == handles_.end()) {
            asked_ = key;
            return nullptr;
        }
        last_ = &*found;
        return &found->second;
    }

    // Enqueue the kernel. stream: the current one; none: it is asked for.
    void launch(const Grid& grid, const Arg* args, std::size_t count, std::optional<std::uint64_t> stream = {}) {
        const Handle* handle = find(args, count);
        if (!handle) {
            begin(grid, args, count);
        } else if (handle->fallback.is_valid()) {
            call(handle->fallback, grid, args, count);
        } else if (grid.x > 0 && grid.y > 0 && grid.z > 0) {
            enqueue(*handle, grid, args, count, stream);
        }
    }

  private:
    static nb::object call(nb::handle function, const Grid& grid, const Arg* args, std::size_t count) {
        nb::list given;
        given.append(nb::make_tuple(grid.x, grid.y, grid.z));
        for (std::size_t i = 0; i < count; ++i) {
            if (args[i].object)
                given.append(nb::handle(args[i].object));
            else
                given.append(static_cast<std::int64_t>(args[i].bits));
        }
        return nb::steal(not_null(PyObject_CallObject(function.ptr(), nb::tuple(given).ptr())));
    }

    // The first launch for a key is Triton's own, which compiles.
    void begin(const Grid& grid, const Arg* args, std::size_t count) {
        const Key key = asked_;
        const nb::object found = call(nb::find(this).attr("first"), grid, args, count);
        Handle handle;
        if (nb::isinstance<nb::tuple>(found)) {
            auto [driver, function, context, threads, shared, packed, nulls, stream] =
                nb::cast<std::tuple<nb::object, std::uint64_t, std::uint64_t, unsigned, unsigned, nb::bytes, std::size_t, nb::object>>(
                    found);
            if (packed.size() != count || count + nulls > kMostArgs) throw nb::type_error("it packs other arguments");
            handle.driver = nb::cast<const Driver*>(driver);
            handle.keeps = driver, handle.stream = stream;
            handle.function = reinterpret_cast<void*>(function), handle.context = reinterpret_cast<void*>(context);
            handle.threads = threads, handle.shared = shared, handle.nulls = nulls;
            handle.packed.assign(packed.c_str(), packed.size());
        } else {
            handle.fallback = found;
        }
        handles_.emplace(key, std::move(handle));  // another thread may have been here
    }

    static void enqueue(const Handle& handle, const Grid& grid, const Arg* args, std::size_t count,
                        std::optional<std::uint64_t> stream) {
        std::uint64_t values[kMostArgs];
        void* parameters[kMostArgs];
        std::size_t used = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const auto packed = static_cast<Packed>(handle.packed[i]);
            if (packed == Packed::left_out) continue;
            values[used] = args[i].bits;  // of four bytes the lower are read
            if (packed == Packed::float32) {
                double real;
                std::memcpy(&real, &args[i].bits, sizeof real);
                const auto narrow = static_cast<float>(real);
                std::memcpy(&values[used], &narrow, sizeof narrow);
            }
            parameters[used] = &values[used];
            ++used;
        }
        for (std::size_t i = 0; i < handle.nulls; ++i, ++used) values[used] = 0, parameters[used] = &values[used];
        if (!stream) stream = static_cast<std::uint64_t>(number(handle.stream().ptr()));
        const auto size = [](std::int64_t value) { return static_cast<unsigned>(value); };
        const Driver& driver = *handle.driver;
        const auto launched = [&] {
            return driver.launch(handle.function, size(grid.x), size(grid.y), size(grid.z), handle.threads, 1, 1, handle.shared,
                                 reinterpret_cast<void*>(*stream), parameters, nullptr);
        };
        int code = launched();
        if (code == kNoContext && driver.current && driver.current(handle.context) == 0) code = launched();  // a new thread
        if (code == 0) return;
        const char* text = nullptr;
        if (driver.text) driver.text(code, &text);
        throw std::runtime_error("the GPU's driver refused a kernel: " + std::string(text ? text : "error") + " (" +
                                 std::to_string(code) + ")");
    }

    std::uint64_t loose_ = 0;
    std::unordered_map<Key, Handle, Hash> handles_;
    const std::pair<const Key, Handle>* last_ = nullptr;
    Key asked_;
};

}  // namespace tiermoe::launch
