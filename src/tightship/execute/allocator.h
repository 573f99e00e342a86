// The CPU allocator behind torch while tightship is loaded: counts every block, records requests, or serves
// the k-th request of a planned step at its planned offset in one arena. Byte counts are requests rounded up
// to kAlign.
//
// A heap block is [pad][64-byte Prefix][data]. Its data never starts a page, so that the prefix of any
// pointer not starting a page can be read safely even if another allocator made the block (oneDNN frees such
// blocks through us). An arena block has no prefix: it is recognized by its address, and its size stands in
// the arena's map.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "arena.h"

namespace at {
C10_IMPORT bool in_parallel_region();  // ATen/Parallel.h, which takes seconds to compile
}

namespace tightship {

constexpr int64_t kAlign = TIGHTSHIP_ALIGNMENT;  // graph.py's for the CPU; native.py passes it
constexpr int64_t kPage = 4096;
constexpr uint64_t kMagic = 0x7469676874736869;
constexpr size_t kMaxArenas = 1 << 16;  // of graphs that torch.compile makes there may be thousands

// ---- heap blocks

struct Prefix {
    void* start;         // what alloc_cpu returned
    Book* owner;         // the arena whose session asked for the block, or null
    uint64_t recording;  // serial of the recording that saw the request, or 0
    int64_t id;          // number of the request in that recording
    int64_t unused[2];
    int64_t size;
    uint64_t magic;  // kMagic ^ address of the data
};
static_assert(sizeof(Prefix) == 64);

inline Prefix* prefix_of(void* data) { return static_cast<Prefix*>(data) - 1; }

inline bool made_here(void* data) {
    auto address = reinterpret_cast<uint64_t>(data);
    return address % kPage != 0 && prefix_of(data)->magic == (kMagic ^ address);
}

inline void* heap_alloc(int64_t size, Book* owner, uint64_t recording, int64_t id) {
    char* start = static_cast<char*>(c10::alloc_cpu(size + 2 * kAlign));
    char* data = start + kAlign;
    if (reinterpret_cast<uint64_t>(data) % kPage == 0) data += kAlign;
    *prefix_of(data) = {start, owner, recording, id, {0, 0}, size, kMagic ^ reinterpret_cast<uint64_t>(data)};
    meter_add(size);
    return data;
}

// ---- arenas

struct Arena;

// Never deleted, so that looking an address up needs no lock; 24 bytes for each arena ever made.
struct Range {
    uint64_t start, size;
    Arena* arena;
};

inline std::atomic<Range*> g_ranges[kMaxArenas];
inline std::atomic<size_t> g_ranges_used{0};
inline std::mutex g_ranges_mutex;

struct Arena final : Book {
    char* start = nullptr;
    size_t slot = 0;

    bool reserve(int64_t bytes) {
        size = round_up(bytes, kAlign);
        std::lock_guard<std::mutex> guard(g_ranges_mutex);
        while (slot < kMaxArenas && g_ranges[slot].load(std::memory_order_relaxed) != nullptr) ++slot;
        if (slot == kMaxArenas) return false;
        start = static_cast<char*>(c10::alloc_cpu(size + kPage));
        base = start + (round_up(reinterpret_cast<int64_t>(start), kPage) - reinterpret_cast<int64_t>(start));
        g_ranges[slot].store(new Range{reinterpret_cast<uint64_t>(base), static_cast<uint64_t>(size), this});
        if (slot >= g_ranges_used.load()) g_ranges_used.store(slot + 1);
        g_reserved += size;
        return reserved = true;
    }

    void unreserve() override {
        g_ranges[slot].store(nullptr);
        c10::free_cpu(start);
        g_reserved -= size;
    }
};

// A block in an arena keeps it, so the answer for a live block cannot change while it is looked for.
inline Arena* arena_of(void* data) {
    size_t used = g_ranges_used.load(std::memory_order_acquire);
    for (size_t i = 0; i < used; ++i) {
        Range* range = g_ranges[i].load(std::memory_order_acquire);
        if (range && reinterpret_cast<uint64_t>(data) - range->start < range->size) return range->arena;
    }
    return nullptr;
}

// ---- torch's allocator

inline void release(void* data) {
    if (data == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(data);
    if (Arena* arena = arena_of(data)) return arena->free_block(data);
    if (!made_here(data)) return c10::free_cpu(data);
    Prefix prefix = *prefix_of(data);
    meter_sub(prefix.size);
    Recording* recording = prefix.recording ? t_thread.recording : nullptr;
    if (prefix.recording && prefix.id == kWorker) t_worker.gives(prefix.size, prefix.recording);
    else if (recording && recording->serial == prefix.recording)
        recording->events.push_back({true, prefix.id, prefix.size, data, recording->step});
    prefix_of(data)->magic = 0;
    c10::free_cpu(prefix.start);
    if (prefix.owner) prefix.owner->free_heap(prefix.size);
}

inline void* request(int64_t size) {
    Thread& thread = t_thread;
    if (thread.paused || !(thread.session || thread.recording)) {
        uint64_t watched = g_watched.load(std::memory_order_relaxed);
        if (watched == 0 || thread.paused || !at::in_parallel_region())
            return heap_alloc(size, nullptr, 0, 0);
        t_worker.takes(size, watched);
        return heap_alloc(size, nullptr, watched, kWorker);
    }
    if (Session* session = thread.session)
        return session->alloc(size, [&](int64_t n) { return heap_alloc(n, session->arena, 0, 0); });
    Recording& recording = *thread.recording;
    void* data = heap_alloc(size, nullptr, recording.serial, recording.next);
    recording.events.push_back({false, recording.next++, size, data, recording.step});
    return data;
}

struct ArenaAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = nullptr;
        try {
            if (bytes > static_cast<size_t>(PTRDIFF_MAX) - 4 * kAlign)
                c10::alloc_cpu(bytes);  // says why and throws
            if (bytes != 0) data = request(round_up(static_cast<int64_t>(bytes), kAlign));
        } catch (c10::Error&) {
            c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
            throw;
        }
        c10::profiledCPUMemoryReporter().New(data, bytes);
        return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* dest, const void* src, size_t count) const override {
        default_copy_data(dest, src, count);
    }
};

}  // namespace tightship
