// tiermoe.kernels._launch: launches of compiled Triton kernels without Python (kernels/triton/launch.py).
//
//   Driver    the GPU driver's functions, by address: this module links with neither CUDA nor torch
//   Launch    a kernel: its compiled forms, one for each combination of what Triton specialises
//   Ring      pinned buffers through which small arrays go to the GPU (actors/engine/cuda/tables.py)
//   Fetch     what the host reads of a layer, by one kernel and one event (actors/engine/cuda/activations.py)
//   Experts   the table of a layer's tiles, and the launches that run it (kernels/triton/expert_ffn.py)
//
// The interpreter's lock is kept throughout: a thread that gets it may keep it for milliseconds. What Python does in
// between (a kernel's first launch, a wait for a buffer) may give it up, so no state is half changed there.
#include "experts.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace tiermoe::launch {
namespace {

constexpr std::size_t kMostArgs = 32;
constexpr std::int64_t kColumns = 8;  // of a table of tiles: `_COLUMNS` of expert_ffn.py
constexpr std::int64_t kDecodePairs = 64;  // `DECODE_PAIRS` of expert_ffn.py
constexpr int kNoContext = 201;       // CUDA_ERROR_INVALID_CONTEXT

using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra);
using ErrorText = int (*)(int code, const char** text);
using SetContext = int (*)(void* context);

struct Driver {
    LaunchKernel launch;
    ErrorText text;      // null: codes have none
    SetContext current;  // null: any thread may launch
};

// A number of a kernel in a GPU's place: 0 none, 1 float32, 2 bfloat16, 3 float16.
inline float number_at(const void* of, unsigned kind, std::int64_t i) {
    if (kind == 1) return static_cast<const float*>(of)[i];
    const std::uint32_t half = static_cast<const std::uint16_t*>(of)[i];
    std::uint32_t bits = half << 16;
    if (kind == 3) {
        const std::uint32_t exponent = half >> 10 & 31, rest = (half & 1023) << 13, sign = (half & 0x8000) << 16;
        if (exponent == 0) {  // zero, or too small for its format's usual numbers
            const float small = std::ldexp(static_cast<float>(half & 1023), -24);
            return sign ? -small : small;
        }
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | rest;
    }
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

template <unsigned kind>
float dot(const float* x, const char* w, std::size_t width) {
    constexpr std::size_t lanes = 16;
    float sums[lanes] = {}, sum = 0;
    std::size_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        float found[lanes];
        for (std::size_t j = 0; j < lanes; ++j) found[j] = number_at(w, kind, static_cast<std::int64_t>(i + j));
        for (std::size_t j = 0; j < lanes; ++j) sums[j] += x[i + j] * found[j];
    }
    for (; i < width; ++i) sum += x[i] * number_at(w, kind, static_cast<std::int64_t>(i));
    for (const float lane : sums) sum += lane;
    return sum;
}

// Scores of inputs that stay where they are, so that a router's product, which is a GPU's work, is computed once.
struct Remembered {
    bool on = false;
    std::map<std::tuple<const void*, const void*, std::size_t>, std::vector<float>> scores;  // by hidden, router, rows
} remembered;

// `_read` of tables.py on the host. kinds: of wide, hidden, router, bias, next_router and next_bias, two bits each.
void read_on_host(unsigned kinds, void** parameters) {
    const auto at = [&](std::size_t i) {
        void* found;
        std::memcpy(&found, parameters[i], sizeof found);
        return found;
    };
    const auto count = [&](std::size_t i) {
        std::int32_t found;
        std::memcpy(&found, parameters[i], sizeof found);
        return static_cast<std::size_t>(found);
    };
    const auto kind = [&](unsigned i) { return kinds >> 2 * i & 3; };
    auto* const to = static_cast<char*>(at(0));
    for (std::size_t n = 0; n < 3; ++n)
        if (count(10 + n)) std::memcpy(to + 4 * count(14 + n), at(1 + n), 4 * count(10 + n));
    auto* const wide = reinterpret_cast<float*>(to) + count(17);
    for (std::size_t i = 0; i < count(13); ++i) wide[i] = number_at(at(4), kind(0), static_cast<std::int64_t>(i));
    const std::size_t rows = count(19), width = count(26);
    std::vector<float> x(width);
    for (unsigned n = 0; n < 2; ++n) {
        const unsigned router = kind(2 + 2 * n);
        const std::size_t outputs = count(20 + n), item = router == 1 ? 4 : 2;
        auto* const scores = reinterpret_cast<float*>(to) + count(22 + n);
        std::vector<float>* kept = remembered.on && outputs ? &remembered.scores[{at(5), at(6 + 2 * n), rows}] : nullptr;
        if (kept && !kept->empty()) {
            std::memcpy(scores, kept->data(), kept->size() * sizeof(float));
            continue;
        }
        for (std::size_t row = 0; row < (outputs ? rows : 0); ++row) {
            for (std::size_t i = 0; i < width; ++i) x[i] = number_at(at(5), kind(1), static_cast<std::int64_t>(row * width + i));
            for (std::size_t e = 0; e < outputs; ++e) {
                const char* w = static_cast<const char*>(at(6 + 2 * n)) + item * width * e;
                float sum = router == 1 ? dot<1>(x.data(), w, width) : router == 2 ? dot<2>(x.data(), w, width) : dot<3>(x.data(), w, width);
                if (count(24 + n)) sum += number_at(at(7 + 2 * n), kind(3 + 2 * n), static_cast<std::int64_t>(e));
                scores[row * outputs + e] = sum;
            }
        }
        if (kept) kept->assign(scores, scores + rows * outputs);
    }
}

// In a driver's place, for what the host does beside a GPU: launches nothing, except that a `function` of 1 to 8 is the
// kernel (source, target, count) that copies items of so many bytes, and from kReads on `_read`, of types as above.
constexpr std::uintptr_t kReads = 16;

int launch_nothing(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void** parameters,
                   void**) {
    const auto which = reinterpret_cast<std::uintptr_t>(function);
    if (which >= kReads) {
        read_on_host(static_cast<unsigned>(which - kReads), parameters);
    } else if (which > 0 && which <= 8) {
        void *source, *target;
        std::int32_t count;
        std::memcpy(&source, parameters[0], sizeof source);
        std::memcpy(&target, parameters[1], sizeof target);
        std::memcpy(&count, parameters[2], sizeof count);
        std::memcpy(target, source, which * static_cast<std::size_t>(count));
    }
    return 0;
}

PyObject* not_null(PyObject* found) {
    if (!found) nb::raise_python_error();
    return found;
}

PyObject* name_of(const char* text) { return not_null(PyUnicode_InternFromString(text)); }

nb::object attribute(PyObject* of, const char* text, PyObject*& name) {
    if (!name) name = name_of(text);
    return nb::steal(not_null(PyObject_GetAttr(of, name)));
}

nb::object called(PyObject* of, const char* text, PyObject*& name) {
    if (!name) name = name_of(text);
    return nb::steal(not_null(PyObject_CallMethodNoArgs(of, name)));
}
// The method or attribute of a Python object, whose name is interned once.
#define TIERMOE_ATTRIBUTE(of, text) ([&] { static PyObject* name; return attribute(of, text, name); }())
#define TIERMOE_CALLED(of, text) ([&] { static PyObject* name; return called(of, text, name); }())

std::int64_t number(PyObject* value) {
    const long long found = PyLong_AsLongLong(value);
    if (found == -1 && PyErr_Occurred()) nb::raise_python_error();
    return found;
}

std::uint64_t address(PyObject* tensor) {
    const nb::object found = TIERMOE_CALLED(tensor, "data_ptr");
    const std::uint64_t at = PyLong_AsUnsignedLongLong(found.ptr());
    if (at == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) nb::raise_python_error();
    return at;
}

const void* dtype(PyObject* tensor) { return TIERMOE_ATTRIBUTE(tensor, "dtype").ptr(); }  // torch keeps each forever

enum class Kind : std::uint8_t { tensor, int32, int64, uint64, real };

struct Arg {
    Kind kind;
    std::uint64_t bits;          // an address, a number, or a double
    const void* type = nullptr;  // a tensor's dtype
    PyObject* object = nullptr;  // for Triton's own launch; null: a number
};

Arg integer(std::int64_t value) {
    const bool small = value == static_cast<std::int32_t>(value);
    return {small ? Kind::int32 : Kind::int64, static_cast<std::uint64_t>(value)};
}

Arg tensor(PyObject* object) { return {Kind::tensor, address(object), dtype(object), object}; }

Arg argument(PyObject* value) {
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

void put_array(Ring& ring, nb::handle target, nb::handle array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
    const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> held(&view, PyBuffer_Release);
    const auto bytes = static_cast<std::size_t>(view.len);
    ring.put(tensor(target.ptr()), view.itemsize ? bytes / static_cast<std::size_t>(view.itemsize) : 0, bytes, {},
             [&](char* to) { std::memcpy(to, view.buf, bytes); });
}

bool is_contiguous(PyObject* of) { return TIERMOE_CALLED(of, "is_contiguous").ptr() == Py_True; }

nb::object contiguous(nb::handle of) { return is_contiguous(of.ptr()) ? nb::borrow(of) : of.attr("contiguous")(); }

nb::object shape_of(PyObject* of) {
    nb::object shape = TIERMOE_ATTRIBUTE(of, "shape");
    if (!PyTuple_Check(shape.ptr())) throw nb::type_error("a tensor's shape is a tuple");
    return shape;
}

bool is_shape(PyObject* shape, std::int64_t rows, std::int64_t columns) {
    return PyTuple_GET_SIZE(shape) == 2 && number(PyTuple_GET_ITEM(shape, 0)) == rows &&
           number(PyTuple_GET_ITEM(shape, 1)) == columns;
}

std::string text_of(nb::handle value) { return nb::str(value).c_str(); }

std::string text_of_shape(nb::handle shape) { return text_of(nb::steal(PySequence_Tuple(shape.ptr()))); }

// As functions in C have it.
template <typename Result, typename Call>
Result guarded(Result failed, Call&& call) {
    try {
        return call();
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failed;
}

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

std::vector<Group> groups_of(nb::handle given) {
    const nb::object fast = nb::steal(not_null(PySequence_Fast(given.ptr(), "groups are a sequence")));
    std::vector<Group> groups(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
    for (std::size_t i = 0; i < groups.size(); ++i) {
        PyObject* one = PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(i));
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 5)
            throw nb::type_error("each group is a tuple (start, stop, first, neurons, add)");
        const auto item = [one](Py_ssize_t n) { return number(PyTuple_GET_ITEM(one, n)); };
        groups[i] = {item(0), item(1), item(2), item(3), item(4) != 0};
    }
    return groups;
}

// Experts of up to so many rows: rows of a tile, and the launches with their blocks' columns.
struct RowClass {
    std::int64_t most, tile;
    Launch *up, *down;
    std::int64_t up_columns, down_columns;
};

struct Sizes {  // of the pool: neurons of all slots, and of one; H; items between rows of activations, and what divides them
    std::int64_t pool, slot, width, stride, padded;
};

// A number in 16 bits: of the nearest, the even one.
std::uint16_t bfloat16_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>(std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::uint16_t float16_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    std::uint32_t found = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
    if (rest < 0x38800000) found = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), 24)));  // small
    if (rest >= 0x477ff000) found = rest > 0x7f800000 ? 0x7e00 : 0x7c00;  // no number, or none so large
    return static_cast<std::uint16_t>(sign | found);
}

struct Tiles {
    struct Phase {
        std::size_t row_class;
        std::int64_t phase;
        std::vector<std::int32_t> rows;  // of the table
    };
    std::vector<Phase> phases;  // by class, then phase
    std::vector<std::int64_t> widest;
    std::int64_t rows = 0, numbers = 0;  // of activations; of the table
};

// The table of tiles. Segments of one expert are in different phases, the added one in the later.
Tiles tiles_of(const Group* groups, std::size_t count, std::int64_t pairs, const Sizes& sizes,
               const std::vector<RowClass>& classes) {
    Tiles tiles;
    tiles.widest.assign(classes.size(), -1);
    std::vector<std::int32_t> seen(static_cast<std::size_t>(pairs) + 1);
    for (std::size_t i = 0; i < count; ++i) {
        const auto& [start, stop, first, neurons, add] = groups[i];
        if (!(0 <= start && start <= stop && stop <= pairs && 0 <= neurons && neurons <= sizes.slot))
            throw std::invalid_argument("group " + text_of(nb::make_tuple(start, stop, first, neurons)) +
                                        " has more pairs or neurons than there are");
        if (first < 0 || first > sizes.pool - neurons)
            throw std::invalid_argument("neurons " + std::to_string(first) + " to " + std::to_string(first + neurons) +
                                        " are out of range 0 to " + std::to_string(sizes.pool));
        if (start == stop) continue;
        std::size_t row_class = 0;
        while (classes[row_class].most < stop - start) ++row_class;
        const std::int64_t phase = seen[static_cast<std::size_t>(start)]++;
        auto part = tiles.phases.begin();
        while (part != tiles.phases.end() && std::pair(part->row_class, part->phase) < std::pair(row_class, phase)) ++part;
        if (part == tiles.phases.end() || part->row_class != row_class || part->phase != phase)
            part = tiles.phases.insert(part, {row_class, phase, {}});
        tiles.widest[row_class] = std::max(tiles.widest[row_class], neurons);
        const std::int64_t size = classes[row_class].tile;
        for (std::int64_t begin = start; begin < stop; begin += size)
            for (const std::int64_t value : {begin, std::min(size, stop - begin), first, neurons, tiles.rows + begin - start,
                                             std::int64_t{add}, std::int64_t{0}, std::int64_t{0}})
                part->rows.push_back(static_cast<std::int32_t>(value));
        tiles.rows += stop - start;
    }
    for (const auto& part : tiles.phases) tiles.numbers += static_cast<std::int64_t>(part.rows.size());
    return tiles;
}

class Experts {
  public:
    using Class = std::tuple<std::int64_t, std::int64_t, Launch*, std::int64_t, Launch*, std::int64_t>;

    Experts(nb::object gate_up, nb::object down, const std::vector<Class>& classes,
            const std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>& sizes, nb::object tables,
            nb::object scratch, std::int64_t kept, nb::object stream, nb::tuple dtypes, nb::object int64, nb::object combining,
            std::int64_t block)
        : gate_up_(std::move(gate_up)), down_(std::move(down)), tables_(std::move(tables)), scratch_(std::move(scratch)),
          stream_(std::move(stream)), combining_(std::move(combining)), up_(tensor(gate_up_.ptr())), low_(tensor(down_.ptr())),
          ring_(nb::cast<Ring&>(tables_)), kept_rows_(kept), block_(block), int64_(int64.ptr()) {
        for (const auto& [most, tile, up, up_columns, down_launch, down_columns] : classes) {
            if (tile < 1 || up_columns < 1 || down_columns < 1) throw std::invalid_argument("a block has rows and columns");
            classes_.push_back({most, tile, up, down_launch, up_columns, down_columns});
        }
        if (classes_.empty()) throw std::invalid_argument("there are no classes of rows");
        classes_.back().most = std::numeric_limits<std::int64_t>::max();
        std::tie(sizes_.pool, sizes_.slot, sizes_.width, sizes_.stride, sizes_.padded) = sizes;
        if (sizes_.padded < 1 || block < 1) throw std::invalid_argument("rows of activations are padded to a size");
        for (const nb::handle one : dtypes) dtypes_.push_back(one.ptr());
    }

    // False: not run, since hidden or y has another dtype than the slots.
    bool run(nb::handle hidden, nb::handle pairs, nb::handle groups, std::int64_t top_k, nb::handle y) {
        const Seen order = seen(order_, pairs), out = seen(out_, y);
        const void* type = dtype(hidden.ptr());
        if (type != up_.type || out.arg.type != up_.type) return false;
        refuse(hidden, order, top_k, out);
        const std::vector<Group> given = groups_of(groups);
        const Tiles tiles = tiles_of(given.data(), given.size(), order.items, sizes_, classes_);
        if (tiles.phases.empty()) return true;
        const Rows rows(hidden);
        const std::uint64_t stream = current();
        std::optional<Scratch> larger;
        const Scratch& scratch = scratch_for(tiles, stream, larger);
        put(scratch.table, {}, tiles, stream);
        enqueue(tiles, scratch, rows.arg, order.arg, top_k, out.arg, stream);
        return true;
    }

    // The weighted sums [T, H]; none: of another dtype than the kernels'.
    nb::object combine(nb::handle y, nb::handle weights) {
        const nb::object shape = shape_of(weights.ptr());
        if (PyTuple_GET_SIZE(shape.ptr()) != 2) throw std::invalid_argument("weights are [T, K]");
        const std::int64_t tokens = number(PyTuple_GET_ITEM(shape.ptr(), 0)), top_k = number(PyTuple_GET_ITEM(shape.ptr(), 1));
        const Seen rows = seen(out_, y);
        if (!is_shape(rows.shape.ptr(), tokens * top_k, sizes_.width))
            throw std::invalid_argument("y is " + text_of_shape(rows.shape) + " for " + std::to_string(tokens) + " tokens, top-" +
                                        std::to_string(top_k) + " and width " + std::to_string(sizes_.width));
        if (!is_summed(rows.arg.type) || !is_summed(dtype(weights.ptr()))) return nb::none();
        const nb::object sums = rows.contiguous ? nb::borrow(y) : contiguous(y);
        const Rows shares(weights);
        return summed(rows.contiguous ? rows.arg : tensor(sums.ptr()), shares.arg, tokens, top_k, current());
    }

    // What `ExpertLaunches` says.
    bool takes(const LayerRows& rows) const {
        if (dtype(rows.hidden) != up_.type || !is_summed(dtype(rows.weights))) return false;
        const nb::object hidden = shape_of(rows.hidden), weights = shape_of(rows.weights);
        if (is_shape(hidden.ptr(), rows.tokens, sizes_.width) && is_shape(weights.ptr(), rows.tokens, rows.top_k)) return true;
        throw std::invalid_argument("hidden is " + text_of_shape(hidden) + " and weights are " + text_of_shape(weights) + " for " +
                                    std::to_string(rows.tokens) + " tokens, top-" + std::to_string(rows.top_k) + " and width " +
                                    std::to_string(sizes_.width));
    }

    // A layer's sums; not valid: the error is kept by `next`. Of few pairs the order goes with the first table.
    nb::object run_layer(const LayerRows& given, const NextGroups& next) {
        const std::int64_t pairs = given.tokens * given.top_k;
        const std::uint64_t stream = current();
        const Rows rows(given.hidden);
        const bool few = pairs <= kDecodePairs;
        std::optional<Scratch> own, larger;
        Scratch& kept = few ? scratch_kept(stream) : own.emplace(scratch_of(scratch_(0, 0, pairs)));
        Pairs order{given.order, given.changed, dtype(given.weights), pairs, few ? kDecodePairs : pairs};
        for (;;) {
            const Group* groups = nullptr;
            std::int64_t count = 0;
            if (!next.next(next.self, &groups, &count)) return {};
            if (!count) break;
            const Tiles tiles = tiles_of(groups, static_cast<std::size_t>(count), pairs, sizes_, classes_);
            const Scratch& scratch = scratch_for(tiles, stream, larger);
            if (order.count && scratch.words.bits != kept.words.bits) put(kept.words, order, {}, stream), order.count = 0;
            put(order.count ? scratch.words : scratch.table, order, tiles, stream);
            order.count = 0;
            enqueue(tiles, scratch, rows.arg, kept.order, given.top_k, kept.y, stream);
        }
        if (!given.changed) {
            const Rows shares(given.weights);
            return summed(kept.y, shares.arg, given.tokens, given.top_k, stream);
        }
        return summed(kept.y, changed_weights(kept, order.room, pairs, given.weights), given.tokens, given.top_k, stream);
    }

    nb::capsule launches() const { return nb::capsule(&launches_, kExpertLaunches.c_str()); }

  private:
    struct Scratch {  // of one stream, whose launches follow each other
        nb::object held;
        Arg activations, words, table;  // words: `order`, weights that a rule has changed, and `table` behind them
        Arg order, y;
        std::map<std::pair<const void*, std::int64_t>, std::pair<nb::object, Arg>> weights;  // by dtype and number
    };
    struct Pairs {  // that are still to be brought to the device, into so much room, with weights of a type, or null
        const std::int64_t* order = nullptr;
        const float* weights = nullptr;
        const void* type = nullptr;
        std::int64_t count = 0, room = 0;

        std::size_t weights_at() const { return static_cast<std::size_t>(room) * sizeof *order; }
        std::size_t bytes() const { return count ? weights_at() + static_cast<std::size_t>(room) * sizeof *weights : 0; }
    };
    struct Rows {  // contiguous
        explicit Rows(nb::handle hidden) : held(contiguous(hidden)), arg(tensor(held.ptr())) {}
        nb::object held;
        Arg arg;
    };
    // What a tensor says of itself. Of decode's the last is remembered: layers get the same order of pairs and rows of y.
    struct Seen {
        nb::object object, shape;
        Arg arg;
        std::int64_t items;
        bool contiguous;
    };

    std::uint64_t current() const { return static_cast<std::uint64_t>(number(stream_().ptr())); }

    bool is_summed(const void* type) const { return std::find(dtypes_.begin(), dtypes_.end(), type) != dtypes_.end(); }

    // The launches of a table that is on the device.
    void enqueue(const Tiles& tiles, const Scratch& scratch, const Arg& x, const Arg& order, std::int64_t top_k, const Arg& out,
                 std::uint64_t stream) {
        const Arg h = integer(sizes_.width), stride = integer(sizes_.stride);
        const Arg &activations = scratch.activations, &table = scratch.table;
        std::int64_t first = 0;
        for (auto part = tiles.phases.begin(); part != tiles.phases.end();) {
            const RowClass& c = classes_[part->row_class];
            auto end = part;
            std::int64_t all = 0;
            for (; end != tiles.phases.end() && end->row_class == part->row_class; ++end) all += tiles_in(*end);
            const std::int64_t columns = divided(tiles.widest[part->row_class], sizes_.padded) * sizes_.padded / c.up_columns;
            const Arg of_up[] = {x, order, up_, activations, table, integer(first), integer(top_k), h, stride};
            c.up->launch({all, columns, 1}, of_up, 9, stream);
            for (; part != end; ++part) {
                const Arg of_down[] = {activations, order, low_, out, table, integer(first), h, stride};
                c.down->launch({tiles_in(*part), divided(sizes_.width, c.down_columns), 1}, of_down, 8, stream);
                first += tiles_in(*part);
            }
        }
    }

    // y: contiguous, of a type that is summed, as the weights, which are contiguous, too.
    nb::object summed(const Arg& y, const Arg& weights, std::int64_t tokens, std::int64_t top_k, std::uint64_t stream) {
        nb::object out = fresh(tokens, nb::handle(y.object), y.type);
        if (tokens > 0) {
            const Arg args[] = {y, weights, tensor(out.ptr()), integer(top_k), integer(sizes_.width)};
            sums_of(top_k).launch({tokens, divided(sizes_.width, block_), 1}, args, 5, stream);
        }
        return out;
    }

    Launch& sums_of(std::int64_t top_k) {
        auto found = sums_.find(top_k);
        if (found == sums_.end()) found = sums_.emplace(top_k, combining_(top_k)).first;
        return nb::cast<Launch&>(found->second);
    }

    Seen seen(std::optional<Seen>& last, nb::handle of) const {
        if (last && last->object.is(of)) return *last;
        Seen found{nb::borrow(of), shape_of(of.ptr()), tensor(of.ptr()), 1, is_contiguous(of.ptr())};
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(found.shape.ptr()); ++i)
            found.items *= number(PyTuple_GET_ITEM(found.shape.ptr(), i));
        if (found.items <= kept_rows_ * sizes_.width) last = found;
        return found;
    }

    // [tokens, H] of y's type. `empty_like` takes half of what `new_empty` does.
    nb::object fresh(std::int64_t tokens, nb::handle y, const void* type) {
        const auto key = std::pair(tokens, type);
        const auto like = likes_.find(key);
        if (like == likes_.end()) {
            nb::object made = y.attr("new_empty")(nb::make_tuple(tokens, sizes_.width));
            if (tokens <= kDecodePairs) likes_[key] = made;
            return made;
        }
        if (!empty_like_.is_valid()) empty_like_ = nb::module_::import_("torch").attr("empty_like");
        return nb::steal(not_null(PyObject_CallOneArg(empty_like_.ptr(), like->second.ptr())));
    }

    static std::int64_t divided(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }
    static std::int64_t tiles_in(const Tiles::Phase& part) { return static_cast<std::int64_t>(part.rows.size()) / kColumns; }

    void refuse(nb::handle hidden, const Seen& pairs, std::int64_t top_k, const Seen& y) const {
        const std::int64_t width = sizes_.width, count = pairs.items;
        const nb::object of_hidden = shape_of(hidden.ptr());
        if (top_k < 1 || !is_shape(of_hidden.ptr(), count / top_k, width))
            throw std::invalid_argument("hidden is " + text_of_shape(of_hidden) + " for " + std::to_string(count) + " pairs, top-" +
                                        std::to_string(top_k) + " and width " + std::to_string(width));
        if (pairs.arg.type != int64_ || !pairs.contiguous)
            throw std::invalid_argument("pairs must be contiguous int64, not " + text_of(pairs.object.attr("dtype")) +
                                        " with strides " + text_of(pairs.object.attr("stride")()));
        if (!y.contiguous || !is_shape(y.shape.ptr(), count, width))
            throw std::invalid_argument("y must be contiguous [" + std::to_string(count) + ", " + std::to_string(width) + "], not " +
                                        text_of_shape(y.shape));
        if (count > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("there are more pairs than int32 counts");
    }

    static Scratch scratch_of(nb::object made) {
        const nb::object activations = made[0], words = made[1], table = made[2], order = made[3], y = made[4];
        return {made, tensor(activations.ptr()), tensor(words.ptr()), tensor(table.ptr()), tensor(order.ptr()), tensor(y.ptr()), {}};
    }

    Scratch& scratch_kept(std::uint64_t stream) {
        if (const auto found = kept_.find(stream); found != kept_.end()) return found->second;
        return kept_.emplace(stream, scratch_of(scratch_(kept_rows_, kept_rows_ * kColumns, kDecodePairs))).first->second;
    }

    // larger: for one that is not kept.
    Scratch& scratch_for(const Tiles& tiles, std::uint64_t stream, std::optional<Scratch>& larger) {
        if (tiles.rows <= kept_rows_ && tiles.numbers <= kept_rows_ * kColumns) return scratch_kept(stream);
        return larger.emplace(scratch_of(scratch_(tiles.rows, tiles.numbers, 0)));
    }

    // Weights in their type, of which the host knows how it rounds.
    void write(char* to, const Pairs& pairs) const {
        const auto count = static_cast<std::size_t>(pairs.count);
        if (pairs.type == dtypes_[0]) {
            std::memcpy(to, pairs.weights, count * sizeof *pairs.weights);
            return;
        }
        const auto rounded = pairs.type == dtypes_[1] ? bfloat16_of : float16_of;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint16_t value = rounded(pairs.weights[i]);
            std::memcpy(to + i * sizeof value, &value, sizeof value);
        }
    }

    // Those that were brought with the pairs.
    static const Arg& changed_weights(Scratch& scratch, std::int64_t room, std::int64_t count, nb::handle like) {
        const auto key = std::pair(dtype(like.ptr()), count);
        auto found = scratch.weights.find(key);
        if (found == scratch.weights.end()) {
            const auto first = [](nb::handle of, std::int64_t start, std::int64_t stop) -> nb::object {
                return of[nb::slice(nb::int_(start), nb::int_(stop), nb::none())];
            };
            const nb::object words = first(scratch.held[1], 2 * room, 2 * room + count);
            const nb::object made = first(words.attr("view")(like.attr("dtype")), 0, count);
            found = scratch.weights.emplace(key, std::pair(made, tensor(made.ptr()))).first;
        }
        return found->second.second;
    }

    // Brings pairs, and a table behind them, to the device.
    void put(const Arg& target, const Pairs& pairs, const Tiles& tiles, std::uint64_t stream) {
        const std::size_t before = pairs.bytes(), bytes = before + static_cast<std::size_t>(tiles.numbers) * sizeof(std::int32_t);
        ring_.put(target, bytes / sizeof(std::int32_t), bytes, stream, [&](char* to) {
            if (pairs.count) std::memcpy(to, pairs.order, static_cast<std::size_t>(pairs.count) * sizeof *pairs.order);
            if (pairs.count && pairs.weights) write(to + pairs.weights_at(), pairs);
            to += before;
            for (const auto& part : tiles.phases) {
                std::memcpy(to, part.rows.data(), part.rows.size() * sizeof(std::int32_t));
                to += part.rows.size() * sizeof(std::int32_t);
            }
        });
    }

    static int takes_rows(void* self, const LayerRows& rows) {
        return guarded(-1, [&] { return static_cast<Experts*>(self)->takes(rows) ? 1 : 0; });
    }

    static PyObject* run_rows(void* self, const LayerRows& rows, const NextGroups& next) {
        return guarded(static_cast<PyObject*>(nullptr), [&] {
            return static_cast<Experts*>(self)->run_layer(rows, next).release().ptr();
        });
    }

    nb::object gate_up_, down_, tables_, scratch_, stream_, combining_;
    Arg up_, low_;  // of these, which never move
    std::optional<Seen> order_, out_;
    Ring& ring_;
    std::vector<RowClass> classes_;
    std::vector<const void*> dtypes_;
    Sizes sizes_{};
    std::int64_t kept_rows_, block_;
    const void* int64_;
    std::map<std::uint64_t, Scratch> kept_;
    std::map<std::int64_t, nb::object> sums_;  // the launch for each top-k
    nb::object empty_like_;
    std::map<std::pair<std::int64_t, const void*>, nb::object> likes_;  // results of these shapes, for their shape
    const ExpertLaunches launches_{this, takes_rows, run_rows};
};

}  // namespace
}  // namespace tiermoe::launch

NB_MODULE(_launch, m) {
    using namespace tiermoe::launch;
    m.doc() = "Launches of compiled Triton kernels from native code (kernels/triton/launch.cpp).";
    nb::set_leak_warnings(false);  // at the interpreter's end kernels may still be there
    m.def("nothing", [] { return reinterpret_cast<std::uint64_t>(&launch_nothing); },
          "The address of a function in the place of a driver's that launches nothing but copies and reads.");
    m.def("remember", [](bool on) { if (on != remembered.on) remembered = {on, {}}; }, "on"_a,
          "Whether that function computes the scores of an input and a router once, as long as both stay where they are.");
    nb::class_<Driver>(m, "Driver", "Functions of the GPU's driver by address: cuLaunchKernel, cuGetErrorString, cuCtxSetCurrent; 0: none.")
        .def("__init__", [](Driver* made, std::uint64_t launch, std::uint64_t text, std::uint64_t current) {
            if (!launch) throw std::invalid_argument("a driver launches");
            new (made) Driver{reinterpret_cast<LaunchKernel>(launch), reinterpret_cast<ErrorText>(text),
                              reinterpret_cast<SetContext>(current)};
        }, "launch"_a, "text"_a = 0, "current"_a = 0);
    nb::class_<Launch>(m, "Launch", R"(A kernel's compiled forms. loose: numbers of its integers that Triton does not specialise.

A subclass has `first(grid, *args)`, which launches once and returns a function (grid, *args), or (driver, function,
context, threads, shared, packed, nulls, () -> stream).)")
        .def(nb::init<const std::vector<std::size_t>&>(), "loose"_a)
        .def_prop_ro("known", &Launch::known)
        .def("__call__", [](Launch& launch, const std::tuple<std::int64_t, std::int64_t, std::int64_t>& grid, nb::args given) {
            Arg args[kMostArgs];
            const std::size_t count = given.size();
            if (count > kMostArgs) throw nb::type_error("a kernel takes at most 32 arguments");
            for (std::size_t i = 0; i < count; ++i) args[i] = argument(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i)));
            launch.launch({std::get<0>(grid), std::get<1>(grid), std::get<2>(grid)}, args, count);
        }, nb::sig("def __call__(self, grid: tuple[int, int, int], /, *args: typing.Any) -> None"));
    nb::class_<Ring>(m, "Ring", "Pinned buffers, taken in turn. A subclass has `turned`, `read_by_this_stream`, `grown`, `copied`, `source`.")
        .def(nb::init<const std::vector<std::uint64_t>&, std::size_t, std::size_t, Launch*, std::int64_t, nb::object>(), "buffers"_a,
             "nbytes"_a, "sections"_a, "copy"_a.none(), "block"_a, "stream"_a.none(), nb::keep_alive<1, 5>())
        .def("write", put_array, "target"_a, "array"_a, "Bring a contiguous array to a tensor, for later work on the current stream.");
    nb::class_<Fetch>(m, "Fetch", R"(What the host reads of a layer, in one pinned buffer, by one kernel and one event; for one thread.

A subclass has `grown(nbytes)`, a new buffer as int32; `views(parts)`, of each (place, bytes, number of its type or
-1 for scores, shape) a tensor and an array on it; and `copied(target, source)`, called where there is no kernel.

Args:
    runtime: kept, for it keeps the driver. calls, context: of the driver, as of `_core.Driver`.
    stream: gives the address of the current one.
    reads: the kernels with 0, 1 and 2 routers; empty: there are none. block, scores: of a program.
    types: dtype, bytes of an item, and whether it arrives as float32. spin_s: of a wait, before it gives up the lock.)")
        .def(nb::init<nb::object, const nb::dict&, std::uint64_t, nb::object, const std::vector<Launch*>&, std::int64_t, std::int64_t,
                      nb::object, const Fetch::Types&, double>(),
             "runtime"_a, "calls"_a, "context"_a, "stream"_a, "reads"_a, "block"_a, "scores"_a, "int32"_a, "types"_a, "spin_s"_a,
             nb::keep_alive<1, 6>())
        .def("enqueue", &Fetch::enqueue, "tensors"_a, "hidden"_a.none(), "routers"_a,
             "Read tensors, and the scores of routers (weight [D*E, H], bias, D, softmax) of hidden [T, H].")
        .def("wait", &Fetch::wait, "Wait for what was enqueued; after some time without the interpreter's lock.")
        .def("take", &Fetch::take, nb::sig("def take(self) -> list[typing.Any]"),
             "Arrays of what was read: of tensors, then of scores [T, E], of several layers [T, D, E].")
        .def_prop_ro("reads", &Fetch::reads, nb::sig("def reads(self) -> typing_extensions.CapsuleType | None"),
                     "`LayerReads` of `kernels/triton/experts.hpp`, of this object; None: there is no kernel.");
    nb::class_<Experts>(m, "Experts", R"(The launches that run experts.

classes: (most rows, rows of a tile, gate_up, its columns, down, its columns), ascending. sizes: neurons of the pool
and of a slot, H, items of a row of activations, and what divides them. tables: a `Ring`. scratch: (rows, numbers of a
table, pairs) -> activations, words for pairs, weights and table, the table, the pairs, rows of y. kept: rows up to which these
are kept, for each stream. combining: top_k -> the launch that sums, whose program has `block` columns.)")
        .def(nb::init<nb::object, nb::object, const std::vector<Experts::Class>&,
                      const std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>&, nb::object, nb::object,
                      std::int64_t, nb::object, nb::tuple, nb::object, nb::object, std::int64_t>(),
             "gate_up"_a, "down"_a, "classes"_a, "sizes"_a, "tables"_a, "scratch"_a, "kept"_a, "stream"_a, "dtypes"_a, "int64"_a,
             "combining"_a, "block"_a, nb::keep_alive<1, 4>())
        .def("run", &Experts::run, "hidden"_a, "pairs"_a, "groups"_a, "top_k"_a, "y"_a)
        .def("combine", &Experts::combine, "y"_a, "weights"_a,
             nb::sig("def combine(self, y: typing.Any, weights: typing.Any) -> typing.Any"))
        .def_prop_ro("launches", &Experts::launches, "`ExpertLaunches` of `kernels/triton/experts.hpp`, of this object.");
}
