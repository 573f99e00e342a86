// arena.h for Python: what the modules of all devices have in common. Only the C API is used, so that they
// compile in seconds; allocator.py is the typed face. Whoever includes this has defined kAlign, the bytes
// that sizes and offsets are multiples of.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

#include "arena.h"

namespace {

using namespace tightship;

template <typename Type> Type* unwrap(PyObject* capsule, const char* name) {
    return static_cast<Type*>(PyCapsule_GetPointer(capsule, name));
}

PyObject* fail(PyObject* kind, const char* text) { return PyErr_SetString(kind, text), nullptr; }

PyObject* meter_current(PyObject*, PyObject*) { return PyLong_FromLongLong(g_current); }
PyObject* meter_peak(PyObject*, PyObject*) { return PyLong_FromLongLong(g_peak); }
PyObject* meter_reset_peak(PyObject*, PyObject*) { return PyLong_FromLongLong(g_peak.exchange(g_current)); }
PyObject* reserved(PyObject*, PyObject*) { return PyLong_FromLongLong(g_reserved); }

PyObject* capsule_of(Book* arena) {
    return PyCapsule_New(arena, "arena", [](PyObject* self) { unwrap<Book>(self, "arena")->let_go(); });
}

PyObject* arena_info(PyObject*, PyObject* capsule) {
    auto* arena = unwrap<Book>(capsule, "arena");
    if (!arena) return nullptr;
    std::lock_guard<std::mutex> guard(arena->mutex);
    return Py_BuildValue("LLL", static_cast<long long>(reinterpret_cast<int64_t>(arena->base)),
                         static_cast<long long>(arena->size), static_cast<long long>(arena->live));
}

bool read_int64(PyObject* object, std::vector<int64_t>& out) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return false;
    bool fits = view.itemsize == 8 && view.format && (view.format[0] == 'q' || view.format[0] == 'l');
    auto* first = static_cast<int64_t*>(view.buf);
    if (fits) out.assign(first, first + view.len / 8);
    PyBuffer_Release(&view);
    if (!fits) PyErr_SetString(PyExc_TypeError, "expected a contiguous buffer of int64");
    return fits;
}

const char* fault_of(Script& script) {
    static const std::string uneven = "an offset is neither -1 nor a multiple of " + std::to_string(kAlign);
    auto requests = static_cast<int64_t>(script.sizes.size());
    if (script.offsets.size() != script.sizes.size()) return "sizes and offsets differ in length";
    if (!script.over.empty() && script.over.size() != script.sizes.size())
        return "sizes and over differ in length";
    if (script.starts.empty() || script.starts.front() != 0 || script.starts.back() != requests)
        return "step_start must begin with 0 and end with the number of requests";
    for (size_t s = 1; s < script.starts.size(); ++s)
        if (script.starts[s] < script.starts[s - 1]) return "step_start decreases";
    for (int64_t k = 0; k < requests; ++k) {
        if (script.sizes[k] <= 0) return "a size is not positive";
        script.sizes[k] = round_up(script.sizes[k], kAlign);
        if (script.offsets[k] < kHeap || (script.offsets[k] != kHeap && script.offsets[k] % kAlign))
            return uneven.c_str();
        if (script.offsets[k] != kHeap)
            script.extent = std::max(script.extent, script.offsets[k] + script.sizes[k]);
    }
    return nullptr;
}

PyObject* script_create(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 5) return fail(PyExc_TypeError, "expected sizes, offsets, step_start, limit, over");
    auto script = std::make_unique<Script>();
    script->limit = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return nullptr;
    if (!read_int64(args[0], script->sizes) || !read_int64(args[1], script->offsets) ||
        !read_int64(args[2], script->starts) || !read_int64(args[4], script->over))
        return nullptr;
    if (const char* fault = fault_of(*script)) return fail(PyExc_ValueError, fault);
    return PyCapsule_New(script.release(), "script",
                         [](PyObject* self) { delete unwrap<Script>(self, "script"); });
}

// A session and what it needs from Python to stay alive.
struct Running {
    Session session;
    PyObject *arena, *script;
    Running(Book* a, const Script* s, PyObject* arena_capsule, PyObject* script_capsule)
        : session{a, s}, arena(Py_NewRef(arena_capsule)), script(Py_NewRef(script_capsule)) {}
    ~Running() {
        Py_DECREF(arena);
        Py_DECREF(script);
    }
};

thread_local Running* t_running = nullptr;

PyObject* begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2) return fail(PyExc_TypeError, "expected arena, script");
    auto* arena = unwrap<Book>(args[0], "arena");
    auto* script = arena ? unwrap<Script>(args[1], "script") : nullptr;
    if (!script) return nullptr;
    if (t_thread.session || t_thread.recording)
        return fail(PyExc_RuntimeError, "this thread is already replaying or recording");
    if (script->extent > arena->size) return fail(PyExc_ValueError, "the script does not fit in the arena");
    t_running = new Running(arena, script, args[0], args[1]);
    Session& session = t_running->session;
    std::lock_guard<std::mutex> guard(arena->mutex);
    session.start = session.peak = arena->live;
    session.heap_peak = arena->heap_live;
    t_thread.session = &session;
    Py_RETURN_NONE;
}

PyObject* seek(PyObject*, PyObject* number) {
    int64_t step = PyLong_AsLongLong(number);
    if (step == -1 && PyErr_Occurred()) return nullptr;
    if (Session* session = t_thread.session) {
        const auto& starts = session->script->starts;
        if (step < 0 || step + 1 >= static_cast<int64_t>(starts.size()))
            return fail(PyExc_ValueError, "no such step in the script");
        session->leave_step();
        session->step = step;
        session->next = starts[step];
        session->stop = starts[step + 1];
    } else if (t_thread.recording) {
        t_thread.recording->step = step;
    } else {
        return fail(PyExc_RuntimeError, "this thread is neither replaying nor recording");
    }
    Py_RETURN_NONE;
}

PyObject* aside(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2) return fail(PyExc_TypeError, "expected bytes, slack");
    int64_t bytes = PyLong_AsLongLong(args[0]), slack = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (Session* session = t_thread.session) session->set_aside(bytes, slack);
    Py_RETURN_NONE;
}

PyObject* open_room(PyObject*, PyObject* loose) {
    if (Session* session = t_thread.session) session->open_room(loose == Py_True);
    Py_RETURN_NONE;
}

PyObject* settle(PyObject*, PyObject*) {
    Session* session = t_thread.session;
    return PyLong_FromLongLong(session ? session->settle() : 0);
}

PyObject* tuple_of(const Miss& miss) {
    long long step = miss.step, request = miss.request, asked = miss.asked, planned = miss.planned;
    return Py_BuildValue("LLLLs", step, request, asked, planned, miss.kind);
}

PyObject* tuple_of(const Event& event) {
    long long id = event.id, size = event.size, data = reinterpret_cast<int64_t>(event.data),
              step = event.step;
    return Py_BuildValue("sLLLL", event.free ? "free" : "alloc", id, size, data, step);
}

template <typename Item> PyObject* list_of(const std::vector<Item>& items) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(items.size()));
    for (size_t i = 0; list && i < items.size(); ++i) {
        PyObject* item = tuple_of(items[i]);
        if (item) PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
        else Py_CLEAR(list);
    }
    return list;
}

PyObject* dict_of(const Session& session, int64_t live) {
    const std::pair<const char*, int64_t> counts[] = {{"requests", session.requests},
                                                      {"served", session.served},
                                                      {"escaped", session.escaped},
                                                      {"misses", session.missed},
                                                      {"occupied", session.occupied},
                                                      {"short", session.steps_short},
                                                      {"start", session.start},
                                                      {"peak", session.peak},
                                                      {"heap_peak", session.heap_peak},
                                                      {"high_water", session.high_water},
                                                      {"live", live},
                                                      {"failed_step", session.failed_step}};
    PyObject* misses = list_of(session.misses);
    PyObject* dict = misses ? Py_BuildValue("{sN}", "first_misses", misses) : nullptr;
    for (const auto& [name, count] : counts) {
        PyObject* number = dict ? PyLong_FromLongLong(count) : nullptr;
        if (!number || PyDict_SetItemString(dict, name, number)) Py_CLEAR(dict);
        Py_XDECREF(number);
    }
    return dict;
}

PyObject* end(PyObject*, PyObject*) {
    std::unique_ptr<Running> running(t_running);
    if (!running) return fail(PyExc_RuntimeError, "this thread is not replaying");
    t_running = nullptr;
    t_thread.session = nullptr;
    Session& session = running->session;
    session.leave_step();
    int64_t live = (std::lock_guard<std::mutex>(session.arena->mutex), session.arena->live);
    return dict_of(session, live);
}

PyObject* record_begin(PyObject*, PyObject*) {
    if (t_thread.session || t_thread.recording)
        return fail(PyExc_RuntimeError, "this thread is already replaying or recording");
    t_thread.recording = new Recording{++g_recordings};
    t_thread.recording->events.reserve(4096);
    g_beside = 0;
    g_watched = t_thread.recording->serial;
    Py_RETURN_NONE;
}

PyObject* record_end(PyObject*, PyObject*) {
    std::unique_ptr<Recording> recording(t_thread.recording);
    if (!recording) return fail(PyExc_RuntimeError, "this thread is not recording");
    t_thread.recording = nullptr;
    uint64_t serial = recording->serial;
    bool last = g_watched.compare_exchange_strong(serial, 0);
    PyObject* events = list_of(recording->events);
    if (!events) return nullptr;
    return Py_BuildValue("NL", events, static_cast<long long>(last ? g_beside.load() : 0));
}

PyObject* pause_thread(PyObject*, PyObject*) { return PyLong_FromLongLong(++t_thread.paused); }
PyObject* resume_thread(PyObject*, PyObject*) {
    if (t_thread.paused == 0) return fail(PyExc_RuntimeError, "this thread is not paused");
    return PyLong_FromLongLong(--t_thread.paused);
}

template <typename Function> PyCFunction fast(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// The rows of a module's method table that are the same everywhere.
#define TIGHTSHIP_METHODS                                                                                   \
    {"meter_current", meter_current, METH_NOARGS, "Bytes of all live blocks allocated since the install."}, \
        {"meter_peak", meter_peak, METH_NOARGS, "The most meter_current() was since the last reset."},      \
        {"meter_reset_peak", meter_reset_peak, METH_NOARGS,                                                 \
         "Sets the peak to the current level; returns the old peak."},                                      \
        {"reserved", reserved, METH_NOARGS, "Bytes of all arenas not yet released."},                       \
        {"arena_info", arena_info, METH_O, "(base address, size, bytes live)."},                            \
        {"script_create", fast(script_create), METH_FASTCALL,                                               \
         "A capsule from sizes, offsets, step_start, limit, over."},                                        \
        {"begin", fast(begin), METH_FASTCALL, "Starts replaying a script in an arena on this thread."},     \
        {"seek", seek, METH_O, "The requests that follow are those of this step."},                         \
        {"aside", fast(aside), METH_FASTCALL,                                                               \
         "The rest of the step is served from the heap, as if planned there."},                             \
        {"open_room", open_room, METH_O, "What the step asks for lies in its one planned block."},          \
        {"settle", settle, METH_NOARGS, "What was set aside or given room has run; blocks left in it."},    \
        {"end", end, METH_NOARGS, "Stops replaying; a dict of counts."},                                    \
        {"record_begin", record_begin, METH_NOARGS, "Starts logging this thread's blocks."},                \
        {"record_end", record_end, METH_NOARGS,                                                             \
         "Stops; (kind, id, bytes, address, step) in order, bytes of workers."},                            \
        {"pause", pause_thread, METH_NOARGS, "This thread's requests become plain heap; nests."},           \
        {"resume", resume_thread, METH_NOARGS, "Undoes one pause."},

}  // namespace
