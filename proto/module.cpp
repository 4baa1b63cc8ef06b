// Python bindings of the rings and checks. Memory is given as buffer objects, which are held while a call runs, so
// that nobody unmaps them meanwhile; sizes are checked against them. The interpreter lock is released while a call waits.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "checks.hpp"
#include "ring.hpp"

namespace {

using tiermoe::Patience;
using tiermoe::Piece;
using tiermoe::Ring;
using tiermoe::Status;

// A held buffer, released with the scope.
class Held {
  public:
    Held() { view_.obj = nullptr; }
    ~Held() { PyBuffer_Release(&view_); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    bool take(PyObject* object, bool writable = false) {
        const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(object, &view_, flags) == 0) return true;
        view_.obj = nullptr;
        return false;
    }
    unsigned char* data() const { return static_cast<unsigned char*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_;
};

bool expect(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
    return false;
}

#ifdef __linux__

// memory, offset, capacity -> the ring there
bool ring_at(PyObject* const* args, Held& memory, Ring& ring) {
    if (!memory.take(args[0], true)) return false;
    const unsigned long long offset = PyLong_AsUnsignedLongLong(args[1]);
    const unsigned long long capacity = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return false;
    const bool power_of_two = capacity >= 64 && (capacity & (capacity - 1)) == 0;
    const bool aligned = (reinterpret_cast<std::uintptr_t>(memory.data()) + offset) % 64 == 0;
    const std::size_t size = memory.size();
    if (!power_of_two || !aligned || offset > size || capacity > size || size - offset < capacity ||
        size - offset - capacity < tiermoe::RING_HEADER) {
        PyErr_SetString(PyExc_ValueError, "the ring does not lie within its memory");
        return false;
    }
    unsigned char* base = memory.data() + offset;
    ring = {reinterpret_cast<tiermoe::RingHeader*>(base), base + tiermoe::RING_HEADER, capacity};
    return true;
}

bool patience_of(PyObject* const* args, Patience& patience) {
    patience = {PyLong_AsLongLong(args[0]), PyLong_AsLongLong(args[1]), PyLong_AsLongLong(args[2])};
    return !PyErr_Occurred();
}

// A signal may have ended the wait: let its handler run.
PyObject* answer(Status status) {
    if (status == Status::interrupted && PyErr_CheckSignals() != 0) return nullptr;
    return PyLong_FromLong(static_cast<long>(status));
}

// write(memory, offset, capacity, pieces: tuple of buffers, timeout_ns, spin_ns, stall_ns) -> status
PyObject* write(PyObject*, PyObject* const* args, Py_ssize_t count) {
    constexpr Py_ssize_t MOST = 64;
    if (!expect(count, 7)) return nullptr;
    Held memory;
    Ring ring;
    Patience patience;
    if (!ring_at(args, memory, ring) || !patience_of(args + 4, patience)) return nullptr;
    if (!PyTuple_Check(args[3]) || PyTuple_GET_SIZE(args[3]) > MOST) {
        PyErr_SetString(PyExc_TypeError, "pieces must be a tuple of at most 64 buffers");
        return nullptr;
    }
    const Py_ssize_t given = PyTuple_GET_SIZE(args[3]);
    Held held[MOST];
    Piece pieces[MOST];
    for (Py_ssize_t i = 0; i < given; ++i) {
        if (!held[i].take(PyTuple_GET_ITEM(args[3], i))) return nullptr;
        pieces[i] = {held[i].data(), held[i].size()};
    }
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tiermoe::ring_write(ring, pieces, static_cast<std::size_t>(given), patience);
    Py_END_ALLOW_THREADS;
    return answer(status);
}

// What `supply` gives for a message of `length` bytes: a new reference to memory of just that many bytes, None where it
// has none to give, or null with an exception.
PyObject* supplied(PyObject* supply, std::uint64_t length, Held& memory) {
    PyObject* size = PyLong_FromUnsignedLongLong(length);
    if (size == nullptr) return nullptr;
    PyObject* given = PyObject_CallOneArg(supply, size);
    Py_DECREF(size);
    if (given == nullptr || given == Py_None) return given;
    if (memory.take(given, true)) {
        const bool aligned = reinterpret_cast<std::uintptr_t>(memory.data()) % 16 == 0;
        if (memory.size() == length && aligned) return given;
        PyErr_SetString(PyExc_ValueError, "the memory for a message has another size, or is not aligned to 16 bytes");
    }
    Py_DECREF(given);
    return nullptr;
}

// read(memory, offset, capacity, max_bytes, timeout_ns, spin_ns, stall_ns, doze_ns, helps, supply) -> the message, or the
// status where there is none. supply: None, or a function from the number of bytes to the memory that takes them, which is returned
// then; where it gives None, and without it, the message is bytes.
PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 10)) return nullptr;
    Held memory, given;
    Ring ring;
    Patience patience;
    if (!ring_at(args, memory, ring) || !patience_of(args + 4, patience)) return nullptr;
    const unsigned long long max_bytes = PyLong_AsUnsignedLongLong(args[3]);
    patience.doze = PyLong_AsLongLong(args[7]);
    patience.helps = args[8] == Py_True;
    if (PyErr_Occurred()) return nullptr;
    tiermoe::Announced record{0, false};
    Status status = tiermoe::ring_wait(ring, max_bytes, {0, 0, 0}, &record);  // often it is there, or nobody would wait
    if (status == Status::timeout && patience.timeout > 0) {
        Py_BEGIN_ALLOW_THREADS;
        status = tiermoe::ring_wait(ring, max_bytes, patience, &record);
        Py_END_ALLOW_THREADS;
    }
    if (status != Status::ok) return answer(status);
    PyObject* message = args[9] == Py_None ? nullptr : supplied(args[9], record.length, given);
    if (message == nullptr && PyErr_Occurred()) return nullptr;  // the message stays in the ring
    if (message == nullptr || message == Py_None) {
        Py_XDECREF(message);
        message = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(record.length));
        if (message == nullptr) return nullptr;
    }
    auto* into = PyBytes_CheckExact(message) ? reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(message)) : given.data();
    if (record.whole && record.length <= 64 * 1024) {  // shorter than giving the lock away and asking for it back
        status = tiermoe::ring_take(ring, record.length, into, patience);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        status = tiermoe::ring_take(ring, record.length, into, patience);
        Py_END_ALLOW_THREADS;
    }
    if (status == Status::ok) return message;
    Py_DECREF(message);
    return answer(status);
}

// close(memory, offset, capacity)
PyObject* close(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Held memory;
    Ring ring;
    if (!ring_at(args, memory, ring)) return nullptr;
    tiermoe::ring_close(ring);
    Py_RETURN_NONE;
}

#endif  // __linux__

// finite(buffer, exponent): whether no number of the buffer is infinite or NaN. exponent: bits of the exponent, which
// also say how wide a number is: 0x7c00 float16, 0x7f80 bfloat16, 0x7f800000 float32.
PyObject* finite(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Held buffer;
    if (!buffer.take(args[0])) return nullptr;
    const unsigned long exponent = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    bool good;
    if (buffer.size() > 64 * 1024) {
        Py_BEGIN_ALLOW_THREADS;
        good = exponent > 0xffff ? tiermoe::all_finite_32(buffer.data(), buffer.size() / 4)
                                 : tiermoe::all_finite_16(buffer.data(), buffer.size() / 2,
                                                          static_cast<std::uint16_t>(exponent));
        Py_END_ALLOW_THREADS;
    } else {
        good = exponent > 0xffff ? tiermoe::all_finite_32(buffer.data(), buffer.size() / 4)
                                 : tiermoe::all_finite_16(buffer.data(), buffer.size() / 2,
                                                          static_cast<std::uint16_t>(exponent));
    }
    return PyBool_FromLong(good);
}

// below(values i32, limit): whether 0 <= every value < limit
PyObject* below(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Held values;
    if (!values.take(args[0])) return nullptr;
    const long long limit = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    return PyBool_FromLong(tiermoe::all_below(reinterpret_cast<const std::int32_t*>(values.data()), values.size() / 4,
                                              limit));
}

// batch_fault(experts i32 [N], bits u8 [N], starts i32 [N + 1], rows i32 [P], tokens, max_experts) -> BatchFault
PyObject* batch_fault(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 6)) return nullptr;
    Held experts, bits, starts, rows;
    if (!experts.take(args[0]) || !bits.take(args[1]) || !starts.take(args[2]) || !rows.take(args[3])) return nullptr;
    const long long tokens = PyLong_AsLongLong(args[4]);
    const long long max_experts = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return nullptr;
    const std::size_t n = experts.size() / 4;
    if (bits.size() != n || starts.size() != (n + 1) * 4) {
        PyErr_SetString(PyExc_ValueError, "bits and starts do not go with experts");
        return nullptr;
    }
    const auto i32 = [](const Held& held) { return reinterpret_cast<const std::int32_t*>(held.data()); };
    return PyLong_FromLong(static_cast<long>(tiermoe::check_batch(i32(experts), bits.data(), i32(starts), n, i32(rows),
                                                                  rows.size() / 4, tokens, max_experts)));
}

PyMethodDef methods[] = {
#ifdef __linux__
    {"write", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(write)), METH_FASTCALL, "See ring.hpp."},
    {"read", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(read)), METH_FASTCALL, "See ring.hpp."},
    {"close", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(close)), METH_FASTCALL, "See ring.hpp."},
#endif
    {"finite", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(finite)), METH_FASTCALL, "See checks.hpp."},
    {"below", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(below)), METH_FASTCALL, "See checks.hpp."},
    {"batch_fault", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(batch_fault)), METH_FASTCALL,
     "See checks.hpp."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ring", "Rings and checks of tiermoe's channel.", -1, methods,
                          nullptr,               nullptr, nullptr,                                  nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ring() { return PyModule_Create(&definition); }
