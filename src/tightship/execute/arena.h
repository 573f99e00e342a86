// What the allocators of all devices share: scripts, sessions, recordings, the books of arenas, and the
// meter.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace tightship {

constexpr int64_t kHeap = -1;
constexpr size_t kKeptMisses = 8;

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

// ---- arenas

// A block in an arena. ``owners``: 2 while a result lies in the place of an input that is still held.
// ``counted``: not one in the room of a step, which counts as a whole.
struct Placed {
    int64_t size;
    int owners = 1;
    bool counted = true;
};

// What lies where in an arena. Backends derive from it and own the memory.
struct Book {
    char* base = nullptr;
    int64_t size = 0;
    std::mutex mutex;                  // guards what follows
    std::map<int64_t, Placed> blocks;  // by offset: the blocks served and not yet freed
    int64_t live = 0, heap_live = 0, heap_blocks = 0;
    bool held = true;       // by Python
    bool reserved = false;  // whether there is memory

    virtual ~Book() = default;
    virtual void unreserve() = 0;

    bool is_free(int64_t offset, int64_t bytes) const {
        auto next = blocks.lower_bound(offset);
        if (next != blocks.end() && next->first < offset + bytes) return false;
        return next == blocks.begin() || std::prev(next)->first + std::prev(next)->second.size <= offset;
    }

    // The block of just this place, with one owner, or null.
    Placed* at(int64_t offset, int64_t bytes) {
        auto found = blocks.find(offset);
        return found != blocks.end() && found->second.size == bytes && found->second.owners == 1
                   ? &found->second
                   : nullptr;
    }

    // Called with the mutex held after something was given up; the memory goes with the last served block,
    // the counts with the last block of either kind.
    void settle(std::unique_lock<std::mutex>& lock) {
        if (held) return;
        bool dead = blocks.empty() && heap_blocks == 0;
        if (blocks.empty() && reserved) {
            unreserve();
            reserved = false;
        }
        lock.unlock();
        if (dead) delete this;
    }

    void free_block(void* data) {
        std::unique_lock<std::mutex> lock(mutex);
        auto block = blocks.find(static_cast<char*>(data) - base);
        if (block == blocks.end() || --block->second.owners > 0) return;
        if (block->second.counted) {
            live -= block->second.size;
            meter_sub(block->second.size);
        }
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

// ---- what one thread is doing

struct Script {
    std::vector<int64_t> sizes, offsets,
        starts;  // starts: first request of each step, and the number of requests
    std::vector<int64_t>
        over;  // by request: whether it takes the place of an input, which may still be there
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

// One run of a script on one thread. An arena may see several, one after the other (forward, then backward):
// what is live belongs to the arena, peaks to the session.
struct Session {
    Book* arena;
    const Script* script;
    int64_t step = -1, next = 0, stop = 0;  // requests [next, stop) are still to come in this step
    int64_t taken = -1;                     // the request of this step that took an input's place
    bool aside = false;  // the rest of this step is served from the heap, whatever it asks for
    int64_t floor = 0,
            quiet = -1;  // aside: live when that began, and up to where it raises no peak (-1: any does)
    int64_t room = 0, room_at = kHeap;  // the block that all requests of this step lie in, if it has one
    int64_t requests = 0, served = 0, escaped = 0, missed = 0, occupied = 0, steps_short = 0;
    int64_t start = 0, peak = 0, heap_peak = 0, high_water = 0, failed_step = -1;
    std::vector<Miss> misses{};

    // An input whose place was taken is let go of within its step: what still holds it would see other
    // contents.
    void leave_step() {
        steps_short += next < stop;
        if (taken >= 0) {
            std::lock_guard<std::mutex> guard(arena->mutex);
            auto block = arena->blocks.find(script->offsets[taken]);
            if (block != arena->blocks.end() && block->second.owners > 1) {
                --served;
                miss("held", taken, script->sizes[taken], script->sizes[taken]);
            }
        }
        settle();
        taken = quiet = -1;
        aside = false;
    }

    // The rest of this step is served from the heap. With ``bytes`` of them planned it counts as so many, and
    // ``slack`` more may be there, for blocks that it takes the place of and that are none of this arena's.
    void set_aside(int64_t bytes, int64_t slack) {
        next = stop;
        aside = true;
        if (bytes < 0) return;
        std::lock_guard<std::mutex> guard(arena->mutex);
        floor = arena->live;
        quiet = floor + bytes + slack;
        peak = std::max(peak, floor + bytes);
    }

    // This step has one request planned: whatever it asks for lies in that block, which counts as a whole.
    // ``loose``: what does not fit goes to the heap, as if planned there.
    void open_room(bool loose) {
        if (stop - next != 1) return;
        int64_t k = next, size = script->sizes[k], offset = script->offsets[k];
        if (offset == kHeap) return set_aside(size, 0);
        std::lock_guard<std::mutex> guard(arena->mutex);
        ++next;
        ++requests;
        if (!arena->is_free(offset, size)) return ++occupied, miss("occupied", k, size, size);
        ++served;
        aside = loose;
        room = size;
        room_at = offset;
        high_water = std::max(high_water, offset + size);
        arena->live += size;
        meter_add(size);
        peak = std::max(peak, arena->live);
    }

    // The first hole of the room that is large enough, or kHeap.
    int64_t hole(int64_t size) const {
        if (room_at == kHeap) return kHeap;
        int64_t at = room_at, end = room_at + room;
        for (auto block = arena->blocks.lower_bound(at); block != arena->blocks.end(); ++block) {
            if (block->first >= end || block->first - at >= size) break;
            at = block->first + block->second.size;
        }
        return at + size <= end ? at : kHeap;
    }

    // What was set aside, or given room, has run: what it has left in the heap takes the place of what it let
    // go of. Returns how many blocks it has left in its room.
    int64_t settle() {
        int64_t left = 0;
        std::lock_guard<std::mutex> guard(arena->mutex);
        if (quiet >= 0) arena->live = floor;
        if (room_at != kHeap) {
            arena->live -= room;
            meter_sub(room);
            auto block = arena->blocks.lower_bound(room_at);
            for (; block != arena->blocks.end() && block->first < room_at + room; ++block, ++left) {
                block->second.counted = true;
                arena->live += block->second.size;
                meter_add(block->second.size);
            }
        }
        quiet = -1;
        room = 0;
        room_at = kHeap;
        return left;
    }

    void miss(const char* kind, int64_t request, int64_t asked, int64_t planned) {
        ++missed;
        if (misses.size() < kKeptMisses) misses.push_back({step, request, asked, planned, kind});
    }

    // The planned offset of the next request, or kHeap where it is planned there or cannot be served as
    // planned.
    // ``astray``: why the block cannot lie in the arena, whatever was planned; or null.
    int64_t place(int64_t size, const char* astray) {
        if (aside) return ++escaped, kHeap;
        if (next >= stop) return miss("extra", next, size, -1), kHeap;
        int64_t k = next++, planned = script->sizes[k], offset = script->offsets[k];
        if (planned != size) return miss("size", k, size, planned), kHeap;
        if (offset == kHeap) return ++escaped, kHeap;
        if (astray) return miss(astray, k, size, planned), kHeap;
        if (taken == k) return ++served, offset;
        if (!arena->is_free(offset, size)) return ++occupied, miss("occupied", k, size, planned), kHeap;
        return ++served, offset;
    }

    // The block of the input whose place the next request takes, or null where none lies there.
    Placed* beneath(int64_t size) {
        if (aside || next >= stop || script->over.empty() || !script->over[next] ||
            script->sizes[next] != size || script->offsets[next] == kHeap)
            return nullptr;
        Placed* under = arena->at(script->offsets[next], size);
        if (under) taken = next;
        return under;
    }

    // Nothing throws while the mutex is held: reporting an error may wait for the interpreter, and whoever
    // has that may be freeing a block of this arena. Only this thread allocates here, so the placement cannot
    // go stale.
    // ``from_heap(size)`` gives a block that `Book::free_heap` will be told of.
    template <typename Heap> void* alloc(int64_t size, Heap from_heap, const char* astray = nullptr) {
        std::unique_lock<std::mutex> lock(arena->mutex);
        if (int64_t at = astray ? kHeap : hole(size); at != kHeap) {
            arena->blocks.emplace(at, Placed{size, 1, false});
            return arena->base + at;
        }
        ++requests;
        Placed* under = astray ? nullptr : beneath(size);
        int64_t more = under ? 0 : size;
        if (int64_t live = arena->live; script->limit >= 0 && live + more > script->limit) {
            lock.unlock();
            failed_step = step;
            throw std::runtime_error("tightship: budget exceeded at step " + std::to_string(step) +
                                     ": asked " + std::to_string(size) + ", live " + std::to_string(live) +
                                     ", limit " + std::to_string(script->limit));
        }
        int64_t offset = place(size, astray);
        void* data = arena->base + offset;
        if (offset == kHeap) {
            lock.unlock();
            data = from_heap(size);
            lock.lock();
            arena->heap_live += size;
            ++arena->heap_blocks;
            heap_peak = std::max(heap_peak, arena->heap_live);
        } else if (under) {
            under->owners = 2;
        } else {
            arena->blocks.emplace(offset, Placed{size});
            high_water = std::max(high_water, offset + size);
            meter_add(size);
        }
        arena->live += more;
        if (arena->live > quiet) peak = std::max(peak, arena->live);
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

// What workers of a parallel kernel ask for while another thread records: the sum of the most that each held
// at once, for the recording begun last. Their blocks carry its serial, and kWorker for a number.
constexpr int64_t kWorker = -1;
inline std::atomic<uint64_t> g_watched{0};  // its serial, 0: none
inline std::atomic<int64_t> g_beside{0};

struct Worker {
    uint64_t recording;
    int64_t level, most;

    void takes(int64_t size, uint64_t serial) {
        if (recording != serial) *this = {serial, 0, 0};
        level += size;
        if (level <= most) return;
        g_beside += level - most;
        most = level;
    }
    void gives(int64_t size, uint64_t serial) {
        if (recording == serial) level -= size;
    }
};

inline thread_local Worker t_worker{0, 0, 0};

}  // namespace tightship
