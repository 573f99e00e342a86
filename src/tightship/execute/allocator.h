// The CPU allocator behind torch while tightship is loaded: counts every block, records requests, or serves the
// k-th request of a planned step at its planned offset in one arena. Byte counts are requests rounded up to 64.
//
// A heap block is [pad][64-byte Prefix][data]. Its data never starts a page, so that the prefix of any pointer not
// starting a page can be read safely even if another allocator made the block (oneDNN frees such blocks through us).
// An arena block has no prefix: it is recognised by its address, and its size stands in the arena's map.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

namespace tightship {

constexpr int64_t kAlign = 64, kPage = 4096, kHeap = -1;
constexpr uint64_t kMagic = 0x7469676874736869;
constexpr size_t kMaxArenas = 256, kKeptMisses = 8;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- meter: every block allocated since the install, from heap or arena, on any thread

inline std::atomic<int64_t> g_current{0}, g_peak{0}, g_reserved{0};

inline void meter_add(int64_t n) {
  int64_t now = g_current.fetch_add(n, std::memory_order_relaxed) + n;
  int64_t peak = g_peak.load(std::memory_order_relaxed);
  while (now > peak && !g_peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

inline void meter_sub(int64_t n) { g_current.fetch_sub(n, std::memory_order_relaxed); }

// ---- heap blocks

struct Arena;

struct Prefix {
  void* start;       // what alloc_cpu returned
  Arena* owner;      // the arena whose session asked for the block, or null
  uint64_t recording;  // serial of the recording that saw the request, or 0
  int64_t id;        // number of the request in that recording
  int64_t unused[2];
  int64_t size;
  uint64_t magic;    // kMagic ^ address of the data
};
static_assert(sizeof(Prefix) == 64);

inline Prefix* prefix_of(void* data) { return static_cast<Prefix*>(data) - 1; }

inline bool made_here(void* data) {
  auto address = reinterpret_cast<uint64_t>(data);
  return address % kPage != 0 && prefix_of(data)->magic == (kMagic ^ address);
}

inline void* heap_alloc(int64_t size, Arena* owner, uint64_t recording, int64_t id) {
  char* start = static_cast<char*>(c10::alloc_cpu(size + 2 * kAlign));
  char* data = start + kAlign;
  if (reinterpret_cast<uint64_t>(data) % kPage == 0) data += kAlign;
  *prefix_of(data) = {start, owner, recording, id, {0, 0}, size, kMagic ^ reinterpret_cast<uint64_t>(data)};
  meter_add(size);
  return data;
}

// ---- arenas

// Never deleted, so that looking an address up needs no lock; 24 bytes for each arena ever made.
struct Range {
  uint64_t start, size;
  Arena* arena;
};

inline std::atomic<Range*> g_ranges[kMaxArenas];
inline std::atomic<size_t> g_ranges_used{0};
inline std::mutex g_ranges_mutex;

struct Arena {
  char* start = nullptr;
  char* base = nullptr;
  int64_t size = 0;
  size_t slot = 0;
  std::mutex mutex;  // guards what follows
  std::map<int64_t, int64_t> blocks;  // offset -> size of the blocks served and not yet freed
  int64_t live = 0, heap_live = 0, heap_blocks = 0;
  bool held = true;  // by Python

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
    return true;
  }

  void unreserve() {
    g_ranges[slot].store(nullptr);
    c10::free_cpu(start);
    g_reserved -= size;
  }

  bool is_free(int64_t offset, int64_t bytes) const {
    auto next = blocks.lower_bound(offset);
    if (next != blocks.end() && next->first < offset + bytes) return false;
    return next == blocks.begin() || std::prev(next)->first + std::prev(next)->second <= offset;
  }

  // Called with the mutex held after something was given up; the memory goes with the last served block, the
  // counts with the last block of either kind.
  void settle(std::unique_lock<std::mutex>& lock) {
    if (held) return;
    bool free_memory = blocks.empty() && start != nullptr;
    bool dead = blocks.empty() && heap_blocks == 0;
    if (free_memory) {
      unreserve();
      start = nullptr;
    }
    lock.unlock();
    if (dead) delete this;
  }

  void free_block(void* data) {
    std::unique_lock<std::mutex> lock(mutex);
    auto block = blocks.find(static_cast<char*>(data) - base);
    if (block == blocks.end()) return;
    live -= block->second;
    meter_sub(block->second);
    blocks.erase(block);
    settle(lock);
  }

  void free_heap(int64_t bytes) {
    std::unique_lock<std::mutex> lock(mutex);
    live -= bytes;
    heap_live -= bytes;
    --heap_blocks;
    settle(lock);
  }

  void let_go() {
    std::unique_lock<std::mutex> lock(mutex);
    held = false;
    settle(lock);
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

// ---- what one thread is doing

struct Script {
  std::vector<int64_t> sizes, offsets, starts;  // starts: first request of each step, and the number of requests
  int64_t limit = -1, extent = 0;
};

struct Event {
  bool free;
  int64_t id, size;
  void* data;
  int64_t step;
};

struct Recording {
  uint64_t serial;
  int64_t next = 0, step = -1;
  std::vector<Event> events{};
};

struct Miss {
  int64_t step, request, asked, planned;
  const char* kind;
};

// One run of a script on one thread. An arena may see several, one after the other (forward, then backward): what is
// live belongs to the arena, peaks to the session.
struct Session {
  Arena* arena;
  const Script* script;
  int64_t step = -1, next = 0, stop = 0;  // requests [next, stop) are still to come in this step
  bool aside = false;  // the rest of this step is served from the heap, whatever it asks for
  int64_t requests = 0, served = 0, escaped = 0, missed = 0, occupied = 0, steps_short = 0;
  int64_t start = 0, peak = 0, heap_peak = 0, high_water = 0, failed_step = -1;
  std::vector<Miss> misses{};

  void leave_step() { steps_short += next < stop; }

  void miss(const char* kind, int64_t request, int64_t asked, int64_t planned) {
    ++missed;
    if (misses.size() < kKeptMisses) misses.push_back({step, request, asked, planned, kind});
  }

  // The planned offset of the next request, or kHeap where it is planned there or cannot be served as planned.
  int64_t place(int64_t size) {
    if (aside) return ++escaped, kHeap;
    if (next >= stop) return miss("extra", next, size, -1), kHeap;
    int64_t k = next++, planned = script->sizes[k], offset = script->offsets[k];
    if (planned != size) return miss("size", k, size, planned), kHeap;
    if (offset == kHeap) return ++escaped, kHeap;
    if (!arena->is_free(offset, size)) return ++occupied, miss("occupied", k, size, planned), kHeap;
    return ++served, offset;
  }

  // Nothing throws while the mutex is held: reporting an error may wait for the interpreter, and whoever has that
  // may be freeing a block of this arena. Only this thread allocates here, so the placement cannot go stale.
  void* alloc(int64_t size) {
    std::unique_lock<std::mutex> lock(arena->mutex);
    ++requests;
    if (int64_t live = arena->live; script->limit >= 0 && live + size > script->limit) {
      lock.unlock();
      failed_step = step;
      TORCH_CHECK(false, "tightship: budget exceeded at step ", step, ": asked ", size, ", live ", live, ", limit ",
                  script->limit);
    }
    int64_t offset = place(size);
    void* data = arena->base + offset;
    if (offset == kHeap) {
      lock.unlock();
      data = heap_alloc(size, arena, 0, 0);
      lock.lock();
      arena->heap_live += size;
      ++arena->heap_blocks;
      heap_peak = std::max(heap_peak, arena->heap_live);
    } else {
      arena->blocks.emplace(offset, size);
      high_water = std::max(high_water, offset + size);
      meter_add(size);
    }
    arena->live += size;
    peak = std::max(peak, arena->live);
    return data;
  }
};

struct Thread {
  Session* session;
  Recording* recording;
  int64_t paused;
};

inline thread_local Thread t_thread{nullptr, nullptr, 0};
inline std::atomic<uint64_t> g_recordings{0};

inline void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  if (Arena* arena = arena_of(data)) return arena->free_block(data);
  if (!made_here(data)) return c10::free_cpu(data);
  Prefix prefix = *prefix_of(data);
  meter_sub(prefix.size);
  Recording* recording = prefix.recording ? t_thread.recording : nullptr;
  if (recording && recording->serial == prefix.recording)
    recording->events.push_back({true, prefix.id, prefix.size, data, recording->step});
  prefix_of(data)->magic = 0;
  c10::free_cpu(prefix.start);
  if (prefix.owner) prefix.owner->free_heap(prefix.size);
}

inline void* request(int64_t size) {
  Thread& thread = t_thread;
  if (thread.paused || !(thread.session || thread.recording)) return heap_alloc(size, nullptr, 0, 0);
  if (thread.session) return thread.session->alloc(size);
  Recording& recording = *thread.recording;
  void* data = heap_alloc(size, nullptr, recording.serial, recording.next);
  recording.events.push_back({false, recording.next++, size, data, recording.step});
  return data;
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    try {
      if (bytes > static_cast<size_t>(PTRDIFF_MAX) - 4 * kAlign) c10::alloc_cpu(bytes);  // says why and throws
      if (bytes != 0) data = request(round_up(static_cast<int64_t>(bytes), kAlign));
    } catch (c10::Error&) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      throw;
    }
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

}  // namespace tightship
