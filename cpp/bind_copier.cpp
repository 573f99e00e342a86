// Python bindings of the threads that copy between memory and a file.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "bind_arrays.h"
#include "copier.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

// OSError with what a copy failed with, if it did.
void raise_error(int error, const char* doing) {
    if (!error) return;
    if (error < 0) {
        PyErr_SetString(PyExc_OSError, "the file for what is offloaded is shorter than it was");
    } else {
        const std::string said = std::string(doing) + " failed: " + std::strerror(error);
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error, said.c_str()).ptr());
    }
    throw nb::python_error();
}

void check_range(std::int64_t size, std::int64_t offset) {
    check::number("size", size, 0, check::kMost, "must be from 0 to 2^62");
    check::number("offset", offset, 0, check::kMost, "must be from 0 to 2^62");
}

// Raises OSError with what the copy, or one that it came after, failed with.
void result(const std::shared_ptr<Copy>& copy) {
    if (!copy->done.load(std::memory_order_acquire)) {
        nb::gil_scoped_release free;
        copy->wait();
    }
    raise_error(copy->error, copy->out ? "writing offloaded bytes to their file"
                                       : "reading offloaded bytes from their file");
}

std::shared_ptr<Copy> begin(Copier& copier, int stream, bool out, std::uintptr_t address, std::int64_t size,
                            std::int64_t offset, std::vector<std::shared_ptr<Copy>> after) {
    check_range(size, offset);
    if (copier.forked())
        throw std::runtime_error(
            "the copies of a process are made by its threads, which a forked child has not");
    for (const auto& copy : after)
        if (!copy) check::refuse("after has None", "must be copies");
    return copier.begin(stream, out, address, size, offset, std::move(after));
}

std::pair<std::uintptr_t, std::uintptr_t> job(const Staged& staged, bool out, std::uintptr_t address,
                                              std::int64_t size, std::int64_t offset) {
    check_range(size, offset);
    return staged.job(out, address, size, offset);
}

void settle(const Staged& staged) {
    raise_error(staged.take_error(), "copying offloaded bytes to or from their file");
}

}  // namespace

void bind_copier(nb::module_& m) {
    nb::class_<Copy>(m, "Copy")
        .def_prop_ro("done", [](const Copy& c) { return c.done.load(std::memory_order_acquire); })
        .def("result", &result);
    nb::class_<Copier>(m, "Copier")
        .def(nb::init<int>(), nb::arg("file"))
        .def("begin", &begin, nb::arg("stream"), nb::arg("out"), nb::arg("address"), nb::arg("size"),
             nb::arg("offset"), nb::arg("after"))
        .def("drain", &Copier::drain, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Copier::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Staged>(m, "Staged")
        .def(nb::init<int>(), nb::arg("file"))
        .def("job", &job, nb::arg("out"), nb::arg("address"), nb::arg("size"), nb::arg("offset"))
        .def("settle", &settle);
}
