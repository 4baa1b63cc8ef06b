// Bindings of the throttled link. A copy is a capsule; whoever holds it keeps the buffers alive until it is done.
#include <new>
#include <system_error>

#include "bindings.hpp"
#include "link.hpp"

namespace tiermoe::bindings {
namespace {

constexpr const char* kLink = "tiermoe.kernels.Link";
constexpr const char* kCopy = "tiermoe.kernels.Copy";
using Shared = std::shared_ptr<Copy>;

void delete_link(PyObject* capsule) {
    Link* link = link_of(capsule);
    Py_BEGIN_ALLOW_THREADS;
    delete link;
    Py_END_ALLOW_THREADS;
}
void delete_copy(PyObject* capsule) { delete static_cast<Shared*>(PyCapsule_GetPointer(capsule, kCopy)); }

}  // namespace

Link* link_of(PyObject* capsule) { return static_cast<Link*>(PyCapsule_GetPointer(capsule, kLink)); }

const Shared* copy_of(PyObject* capsule) { return static_cast<Shared*>(PyCapsule_GetPointer(capsule, kCopy)); }

PyObject* copy_capsule(std::shared_ptr<Copy> copy) {
    auto* held = new Shared(std::move(copy));
    PyObject* capsule = PyCapsule_New(held, kCopy, delete_copy);
    if (!capsule) delete held;
    return capsule;
}

namespace {

// link(bytes_per_s, latency_s) -> capsule
PyObject* link(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    const double bytes_per_s = PyFloat_AsDouble(args[0]), latency_s = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (!(bytes_per_s >= 0) || !(latency_s >= 0)) {
        PyErr_SetString(PyExc_ValueError, "rate and latency of a link are not negative");
        return nullptr;
    }
    Link* made = nullptr;
    try {
        made = new Link(bytes_per_s, latency_s);
    } catch (const std::system_error& error) {
        PyErr_SetString(PyExc_OSError, error.what());
        return nullptr;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    PyObject* capsule = PyCapsule_New(made, kLink, delete_link);
    if (!capsule) delete made;
    return capsule;
}

bool read_pieces(PyObject* tuple, std::vector<Piece>& pieces) {
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a copy is a tuple of (target, source, count, widen)");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
        PyObject* item = PyTuple_GET_ITEM(tuple, i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4) {
            PyErr_SetString(PyExc_TypeError, "a piece is a tuple (target, source, count, widen)");
            return false;
        }
        Piece piece;
        piece.target = address<void>(PyTuple_GET_ITEM(item, 0));
        piece.source = address<const void>(PyTuple_GET_ITEM(item, 1));
        piece.count = PyLong_AsLongLong(PyTuple_GET_ITEM(item, 2));
        const int widen = PyObject_IsTrue(PyTuple_GET_ITEM(item, 3));
        if (PyErr_Occurred()) return false;
        if (!check_product({piece.count})) return false;
        piece.kind = widen ? Piece::Kind::widen_bfloat16 : Piece::Kind::bytes;
        pieces.push_back(piece);
    }
    return true;
}

// link_submit(link, copies: list[tuple[piece, ...]], prefetch) -> list of capsules; None: the link is closed
PyObject* link_submit(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 3)) return nullptr;
    Link* link = link_of(args[0]);
    if (!link) return nullptr;
    if (!PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "copies must be a list");
        return nullptr;
    }
    const int prefetch = PyObject_IsTrue(args[2]);
    if (prefetch < 0) return nullptr;
    std::vector<Shared> copies;
    PyObject* out = PyList_New(0);
    if (!out) return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
        auto copy = std::make_shared<Copy>();
        copy->prefetch = prefetch != 0;
        if (!read_pieces(PyList_GET_ITEM(args[1], i), copy->pieces)) {
            Py_DECREF(out);
            return nullptr;
        }
        PyObject* capsule = copy_capsule(copy);
        if (!capsule || PyList_Append(out, capsule) < 0) {
            Py_XDECREF(capsule);
            Py_DECREF(out);
            return nullptr;
        }
        Py_DECREF(capsule);
        copies.push_back(std::move(copy));
    }
    if (link->submit(copies)) return out;
    Py_DECREF(out);
    Py_RETURN_NONE;
}

// link_promote(link, copy)
PyObject* link_promote(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Link* link = link_of(args[0]);
    const Shared* copy = link ? copy_of(args[1]) : nullptr;
    if (!copy) return nullptr;
    link->promote(*copy);
    Py_RETURN_NONE;
}

// link_cancel(link, copy) -> bool
PyObject* link_cancel(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Link* link = link_of(args[0]);
    const Shared* copy = link ? copy_of(args[1]) : nullptr;
    if (!copy) return nullptr;
    return PyBool_FromLong(link->cancel(*copy));
}

// link_wait(link, copy)
PyObject* link_wait(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    Link* link = link_of(args[0]);
    const Shared* copy = link ? copy_of(args[1]) : nullptr;
    if (!copy) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    link->wait(**copy);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// link_pending(link) -> int
PyObject* link_pending(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Link* link = link_of(args[0]);
    return link ? PyLong_FromLongLong(link->pending()) : nullptr;
}

// link_close(link)
PyObject* link_close(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    Link* link = link_of(args[0]);
    if (!link) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    link->close();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// copy_ended(copy) -> bool
PyObject* copy_ended(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    const Shared* copy = copy_of(args[0]);
    return copy ? PyBool_FromLong((*copy)->state >= Copy::done) : nullptr;
}

// copy_times(copy) -> (start_s, end_s, link_s) of a copy that is done; None: it was cancelled
PyObject* copy_times(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect(count, 1)) return nullptr;
    const Shared* copy = copy_of(args[0]);
    if (!copy) return nullptr;
    if ((*copy)->state != Copy::done) Py_RETURN_NONE;
    return Py_BuildValue("(ddd)", (*copy)->start_s, (*copy)->end_s, (*copy)->link_s);
}

}  // namespace

PyMethodDef link_methods[] = {
    {"link", fast(link), METH_FASTCALL, "A link that copies at a stated rate; see link.hpp."},
    {"link_submit", fast(link_submit), METH_FASTCALL, "Queue copies."},
    {"link_promote", fast(link_promote), METH_FASTCALL, "Give a queued prefetch the priority of demand."},
    {"link_cancel", fast(link_cancel), METH_FASTCALL, "Drop a copy that has not started."},
    {"link_wait", fast(link_wait), METH_FASTCALL, "Until a copy is done or cancelled."},
    {"link_pending", fast(link_pending), METH_FASTCALL, "Copies queued or under way."},
    {"link_close", fast(link_close), METH_FASTCALL, "End after the copy under way."},
    {"copy_ended", fast(copy_ended), METH_FASTCALL, "Whether a copy is done or cancelled."},
    {"copy_times", fast(copy_times), METH_FASTCALL, "When a copy ran."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace tiermoe::bindings
