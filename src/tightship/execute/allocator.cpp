// The CPU's allocator as a Python module.
#include "allocator.h"

#include "module.h"

namespace {

PyObject* install(PyObject*, PyObject*) {
    static ArenaAllocator* allocator = nullptr;
    if (!allocator) c10::SetCPUAllocator(allocator = new ArenaAllocator, 100);
    return PyBool_FromLong(c10::GetCPUAllocator() == allocator);
}

PyObject* arena_create(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2) return fail(PyExc_TypeError, "expected bytes, device");
    int64_t bytes = PyLong_AsLongLong(args[0]);
    if (PyErr_Occurred()) return nullptr;
    if (bytes < 0 || bytes > PTRDIFF_MAX - 2 * kPage)
        return fail(PyExc_ValueError, "arena size out of range");
    auto arena = std::make_unique<Arena>();
    try {
        if (arena->reserve(bytes)) return capsule_of(arena.release());
        return fail(PyExc_RuntimeError, "too many arenas at once");
    } catch (c10::Error& error) {
        return fail(PyExc_MemoryError, error.what_without_backtrace());
    }
}

PyMethodDef methods[] = {
    {"install", install, METH_NOARGS, "Becomes torch's CPU allocator; false if another one outranks it."},
    {"arena_create", fast(arena_create), METH_FASTCALL, "A capsule holding an arena of so many bytes."},
    TIGHTSHIP_METHODS{nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tightship_allocator", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tightship_allocator() { return PyModule_Create(&module); }
