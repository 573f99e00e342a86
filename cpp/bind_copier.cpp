// Python bindings of the threads that copy between memory and a file.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cerrno>

#include "copier.h"
#include "staged.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

// OSError with what a copy failed with, if it did.
void raise_error(int error) {
    if (!error) return;
    if (error < 0) {
        PyErr_SetString(PyExc_OSError, "the file for what is offloaded is shorter than it was");
    } else {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    throw nb::python_error();
}

// Raises OSError with what the copy, or one that it came after, failed with.
void result(const std::shared_ptr<Copy>& copy) {
    if (!copy->done.load(std::memory_order_acquire)) {
        nb::gil_scoped_release free;
        copy->wait();
    }
    raise_error(copy->error);
}

void settle(const Staged& staged) { raise_error(staged.take_error()); }

}  // namespace

void bind_copier(nb::module_& m) {
    nb::class_<Copy>(m, "Copy")
        .def_prop_ro("done", [](const Copy& c) { return c.done.load(std::memory_order_acquire); })
        .def("result", &result);
    nb::class_<Copier>(m, "Copier")
        .def(nb::init<int>(), nb::arg("file"))
        .def("begin", &Copier::begin, nb::arg("stream"), nb::arg("out"), nb::arg("address"), nb::arg("size"),
             nb::arg("offset"), nb::arg("after"))
        .def("drain", &Copier::drain, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Copier::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Staged>(m, "Staged")
        .def(nb::init<int>(), nb::arg("file"))
        .def("job", &Staged::job, nb::arg("out"), nb::arg("address"), nb::arg("size"), nb::arg("offset"))
        .def("settle", &settle);
}
