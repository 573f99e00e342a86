// CUDA's allocator for torch.cuda.memory.CUDAPluggableAllocator: plain C functions, also a Python module that
// controls them. It serves the k-th request of a planned step at its planned offset of one arena, as
// allocator.h does on the CPU.
//
// Neither torch's nor CUDA's headers are needed: the CUDA runtime is the one that is loaded, found by name.
// Nothing is written to device memory here, so what is known of a block stands in a table of the host. Blocks
// outside of arenas are kept when they are freed and given to the next request of their size on their stream,
// for cudaMalloc and cudaFree wait for the device; when the device has no more memory, all of them are given
// back.
#include <dlfcn.h>

#include <tuple>
#include <unordered_map>

#include "arena.h"

namespace tightship {

constexpr int64_t kAlign = TIGHTSHIP_ALIGNMENT;  // graph.py's for CUDA; native.py passes it

// ---- the CUDA runtime

struct Runtime {
    int (*allocate)(void**, size_t) = nullptr;
    int (*free)(void*) = nullptr;
    int (*get_device)(int*) = nullptr;
    int (*set_device)(int) = nullptr;
    int (*synchronize)() = nullptr;
    int (*last_error)() = nullptr;  // reading an error clears it, or torch would find it later
};

inline Runtime g_runtime;

template <typename Function> bool find(void* library, const char* name, Function& found) {
    found = reinterpret_cast<Function>(dlsym(library, name));
    return found != nullptr;
}

// What is missing, or null. ``path``: the runtime's library by name or path; one that is loaded already is
// used.
inline const char* open_runtime(const char* path) {
    void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!library) return dlerror();
    Runtime& r = g_runtime;
    bool complete = find(library, "cudaMalloc", r.allocate) && find(library, "cudaFree", r.free) &&
                    find(library, "cudaGetDevice", r.get_device) &&
                    find(library, "cudaSetDevice", r.set_device) &&
                    find(library, "cudaDeviceSynchronize", r.synchronize) &&
                    find(library, "cudaGetLastError", r.last_error);
    return complete ? nullptr : dlerror();
}

class OnDevice {
  public:
    explicit OnDevice(int device) {
        g_runtime.get_device(&before_);
        if (before_ != device) g_runtime.set_device(device);
        changed_ = before_ != device;
    }
    ~OnDevice() {
        if (changed_) g_runtime.set_device(before_);
    }
    OnDevice(const OnDevice&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

// ---- blocks

using Stream = void*;

struct Block {
    int64_t size;
    int device;
    Stream stream;
    Book* owner = nullptr;   // the arena it lies in, or whose session asked for it
    bool placed = false;     // in the arena
    bool shared = false;     // used on another stream, too
    uint64_t recording = 0;  // serial of the recording that saw the request, or 0
    int64_t id = 0;
};

inline std::mutex g_mutex;  // guards the two tables; never held while another lock is taken
inline std::unordered_map<void*, Block> g_blocks;
inline std::map<std::tuple<int, Stream, int64_t>, std::vector<void*>> g_spare;
inline std::atomic<int64_t> g_kept{0};  // bytes of spare blocks

inline void give_back_spare() {
    decltype(g_spare) spare;
    {
        std::lock_guard<std::mutex> guard(g_mutex);
        spare.swap(g_spare);
        g_kept = 0;
    }
    for (auto& [key, blocks] : spare) {
        OnDevice here(std::get<0>(key));
        for (void* data : blocks) g_runtime.free(data);
    }
}

inline void* from_device(int64_t size, int device) {
    OnDevice here(device);
    void* data = nullptr;
    if (g_runtime.allocate(&data, size) == 0) return data;
    g_runtime.last_error();
    give_back_spare();
    if (g_runtime.allocate(&data, size) == 0) return data;
    g_runtime.last_error();
    throw std::runtime_error("tightship: CUDA out of memory: device " + std::to_string(device) + " has no " +
                             std::to_string(size) + " bytes left");
}

inline void* spare_or_new(int64_t size, int device, Stream stream) {
    {
        std::lock_guard<std::mutex> guard(g_mutex);
        auto found = g_spare.find({device, stream, size});
        if (found != g_spare.end() && !found->second.empty()) {
            void* data = found->second.back();
            found->second.pop_back();
            g_kept -= size;
            return data;
        }
    }
    return from_device(size, device);
}

inline void enter(void* data, const Block& block) {
    std::lock_guard<std::mutex> guard(g_mutex);
    g_blocks[data] = block;
}

// ---- arenas

struct Arena final : Book {
    int device;
    Stream stream = nullptr;  // of the last session
    bool used = false;

    Arena(int64_t bytes, int on) : device(on) {
        size = round_up(bytes, kAlign);
        if (size) base = static_cast<char*>(from_device(size, device));
        g_reserved += size;
        reserved = true;
    }

    void unreserve() override {
        OnDevice here(device);
        if (size) g_runtime.free(base);  // waits for the device
        g_reserved -= size;
    }
};

// ---- requests

inline void* heap_block(int64_t size, int device, Stream stream, Book* owner, uint64_t recording,
                        int64_t id) {
    void* data = spare_or_new(size, device, stream);
    enter(data, {size, device, stream, owner, false, false, recording, id});
    meter_add(size);
    return data;
}

// Bytes of an arena are shared in the order of one stream: the one a session begins on.
inline void* in_session(Session& session, int64_t size, int device, Stream stream) {
    auto* arena = static_cast<Arena*>(session.arena);
    if (device != arena->device) return heap_block(size, device, stream, nullptr, 0, 0);
    if (session.requests == 0) {
        if (arena->used && arena->stream != stream) {
            OnDevice here(device);
            g_runtime.synchronize();
        }
        arena->stream = stream;
        arena->used = true;
    }
    const char* astray = stream == arena->stream ? nullptr : "stream";
    auto from_heap = [&](int64_t n) { return heap_block(n, device, stream, arena, 0, 0); };
    void* data = session.alloc(size, from_heap, astray);
    char* at = static_cast<char*>(data);
    if (at >= arena->base && at < arena->base + arena->size) enter(data, {size, device, stream, arena, true});
    return data;
}

inline void* request(int64_t size, int device, Stream stream) {
    Thread& thread = t_thread;
    if (thread.paused || !(thread.session || thread.recording))
        return heap_block(size, device, stream, nullptr, 0, 0);
    if (thread.session) return in_session(*thread.session, size, device, stream);
    Recording& recording = *thread.recording;
    void* data = heap_block(size, device, stream, nullptr, recording.serial, recording.next);
    recording.events.push_back({false, recording.next++, size, data, recording.step});
    return data;
}

inline void release(void* data) {
    Block block;
    {
        std::lock_guard<std::mutex> guard(g_mutex);
        auto found = g_blocks.find(data);
        if (found == g_blocks.end()) return;
        block = found->second;
        g_blocks.erase(found);
        if (!block.placed && !block.shared) {
            g_spare[{block.device, block.stream, block.size}].push_back(data);
            g_kept += block.size;
        }
    }
    if (block.shared) {  // the other stream may still be using it
        OnDevice here(block.device);
        g_runtime.synchronize();
        if (!block.placed) g_runtime.free(data);
    }
    if (block.placed) return block.owner->free_block(data);
    meter_sub(block.size);
    Recording* recording = block.recording ? t_thread.recording : nullptr;
    if (recording && recording->serial == block.recording)
        recording->events.push_back({true, block.id, block.size, data, recording->step});
    if (block.owner) block.owner->free_heap(block.size);
}

}  // namespace tightship

// ---- what torch calls

extern "C" {

__attribute__((visibility("default"))) void* ts_malloc(ssize_t size, int device, void* stream) {
    return size > 0 ? tightship::request(tightship::round_up(size, tightship::kAlign), device, stream)
                    : nullptr;
}

__attribute__((visibility("default"))) void ts_free(void* data, ssize_t, int, void*) {
    if (data) tightship::release(data);
}

__attribute__((visibility("default"))) void ts_record_stream(void* data, void* stream) {
    std::lock_guard<std::mutex> guard(tightship::g_mutex);
    auto found = tightship::g_blocks.find(data);
    if (found != tightship::g_blocks.end() && found->second.stream != stream) found->second.shared = true;
}
}

#include "module.h"

namespace {

PyObject* open_library(PyObject*, PyObject* path) {
    const char* text = PyUnicode_AsUTF8(path);
    if (!text) return nullptr;
    const char* fault = open_runtime(text);
    return fault ? fail(PyExc_OSError, fault) : Py_NewRef(Py_None);
}

PyObject* arena_create(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2) return fail(PyExc_TypeError, "expected bytes, device");
    int64_t bytes = PyLong_AsLongLong(args[0]), device = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return nullptr;
    if (bytes < 0 || bytes > PTRDIFF_MAX - kAlign) return fail(PyExc_ValueError, "arena size out of range");
    try {
        return capsule_of(new Arena(bytes, static_cast<int>(device)));
    } catch (std::runtime_error& error) {
        return fail(PyExc_MemoryError, error.what());
    }
}

// Torch calls ts_malloc from C++, which may throw; a test calls this from Python, which may not.
PyObject* try_malloc(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3) return fail(PyExc_TypeError, "expected bytes, device, stream");
    long long size = PyLong_AsLongLong(args[0]), device = PyLong_AsLongLong(args[1]),
              stream = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    try {
        return PyLong_FromVoidPtr(ts_malloc(size, static_cast<int>(device), reinterpret_cast<void*>(stream)));
    } catch (std::runtime_error& error) {
        return fail(PyExc_RuntimeError, error.what());
    }
}

PyObject* spare(PyObject*, PyObject*) { return PyLong_FromLongLong(g_kept); }
PyObject* empty_spare(PyObject*, PyObject*) {
    give_back_spare();
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"open", open_library, METH_O, "Uses the CUDA runtime of this name or path."},
    {"arena_create", fast(arena_create), METH_FASTCALL,
     "A capsule holding an arena of so many bytes on a device."},
    {"try_malloc", fast(try_malloc), METH_FASTCALL,
     "ts_malloc(bytes, device, stream), its error as an exception."},
    {"spare", spare, METH_NOARGS, "Bytes of free blocks kept for later requests."},
    {"empty_spare", empty_spare, METH_NOARGS, "Gives the free blocks back to the device."},
    TIGHTSHIP_METHODS{nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tightship_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tightship_cuda() { return PyModule_Create(&module); }
