// The program that is planned, and all that is known of it before the first decision: touches, gaps between
// them and what may be decided there. Constant during a search.
#pragma once

#include <algorithm>
#include <vector>

#include "watch.h"

namespace tightship {

// Rows of integers, one after the other.
struct Rows {
    std::vector<i64> start;  // n + 1
    std::vector<i32> item;
    const i32* begin(i64 row) const { return item.data() + start[row]; }
    const i32* end(i64 row) const { return item.data() + start[row + 1]; }
    i64 size(i64 row) const { return start[row + 1] - start[row]; }
    i64 count() const { return static_cast<i64>(start.size()) - 1; }
    bool has(i64 row, i32 x) const { return std::find(begin(row), end(row), x) != end(row); }
    struct Row {
        const i32 *first, *last;
        const i32* begin() const { return first; }
        const i32* end() const { return last; }
    };
    Row operator[](i64 row) const { return {begin(row), end(row)}; }
};

struct Program {
    i64 ops = 0, storages = 0;
    Rows reads, needs, defines, mutates, updates;      // by op: storages; needs is parallel to reads
    std::vector<i64> extra;                            // by op: bytes beyond its results while it runs
    std::vector<double> time, again;                   // by op: seconds, the first time and run again
    std::vector<std::uint8_t> pure;                    // by op
    std::vector<std::uint8_t> fixed;                   // by op: others wait for it, so it may not run later
    std::vector<i64> size;                             // by storage: bytes
    std::vector<std::uint8_t> owned, kept;             // by storage: the caller's; must be there at the end
    std::vector<i32> order;                            // ops as they are to run
    std::vector<i64> packed;                           // by storage: bytes when packed, 0: cannot be
    std::vector<double> pack, unpack, offload, fetch;  // by storage: seconds
    std::vector<double> lost;        // by storage: seconds that a copy of it takes from the ops
    std::vector<std::uint8_t> may;   // by storage: decisions allowed, a bit each (1 << Decision)
    std::vector<std::uint8_t> must;  // by storage: those allowed across the boundary, 0: as `may`
    i32 boundary = 0;                // a position
    Rows overwrites;                 // by op: storage read, storage defined, and so on in pairs
    std::vector<i32> ending;         // storages as results are restored at the end
    bool until_written = false;      // recipes run when what they read has been written over, too
    bool brief = false;  // what several recomputations read waits for those of one op, not for all
};

// kStay: in a gap past the last touch, where kKeep is to leave with that touch.
enum Decision : std::uint8_t { kKeep, kEvict, kPass, kDrop, kPack, kOffload, kStay, kDecisions };

// Whether it leaves and is recomputed.
inline bool recomputed(std::uint8_t decision) { return decision >= kEvict && decision <= kDrop; }

using Bits = std::vector<std::uint8_t>;  // a decision per gap

struct Gap {
    i32 storage, from, to;  // touches at these positions of the order; to == ops means the end
};

struct Index {
    explicit Index(Program program);

    Program p;
    std::vector<Gap> gaps;
    std::vector<std::uint8_t> allowed;  // by gap: a bit per decision
    Rows touches;                       // by storage: positions
    std::vector<i32> gap_of;            // parallel to touches.item: the gap that begins there, or -1
    Rows writers;                       // by storage: ops
    std::vector<i32> last_write;        // by storage: index of the touch that writes it last
    // By storage: the gap past its last touch in which it may stay for what is recomputed from it, or -1. It
    // ends with a last row in `touches`, at which no op touches it; by position, what ends there.
    std::vector<i32> stay;
    Rows stay_ends;
    std::vector<std::uint8_t> replayable, shared;  // by storage: can be recomputed; is read by several ops
    // By storage: the last position at which it can be made again, as what its recipe reads is written over
    // there; `ops` where it is replayable, -1 where it never can be.
    std::vector<i32> until;
    // By storage: it can be recomputed, all that its recipe reads being final; and earlier versions of it can
    // be made, too, by the first of its writers.
    std::vector<std::uint8_t> settled, versioned;
    std::vector<i32> seen;      // parallel to touches.item: the version that is seen there
    std::vector<i32> movable;   // positions of ops that may run later, ascending
    std::vector<i32> by_end;    // gaps that may be offloaded, the last to end first; empty: nothing may be
    std::vector<double> start;  // by position: when it begins if nothing is recomputed
    i64 static_bytes = 0;
    double base_time = 0;

    bool allows(i32 gap, std::uint8_t to) const { return allowed[gap] >> to & 1; }
    std::uint8_t least(i32 gap) const;  // the first decision that is allowed
    // Whether a storage is to be made again for what needs it within a gap.
    bool absent(i32 gap, std::uint8_t to) const {
        return recomputed(to) || (to == kKeep && stay[gaps[gap].storage] == gap);
    }

  private:
    void find_touches();
    bool writes_alone(i64 s) const;
    bool sees_final(i64 s) const;
    i32 replays_until(i64 s, const std::vector<i32>& at) const;
    void find_gaps();
    void find_stays();
    void find_offloads();
    void find_movable();
};

}  // namespace tightship
