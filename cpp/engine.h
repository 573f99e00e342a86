// The eviction engine: what a set of eviction decisions costs, exactly, at storage level.
//
// Minimised by the searches above it: seconds of recomputation subject to peak bytes <= limit. Memory is counted
// as tightship.simulate counts it (that Python replay is the definition; tests hold the two equal): resident
// storages, plus everything the running op defines, plus its workspace.
//
// A decision is one number per *gap*: a stay of a storage between two consecutive touches, after its last write (before
// it, a copy may be made of what is there so far, and nothing else).
// kKeep stays. kEvict, kPass and kDrop end the residence at the first touch; the storage is restored just before the next
// touch, or earlier when a recomputation needs it, by running its recipe (every op that writes it, in order)
// again. What a recipe reads is restored first, recursively. What was restored for a recomputation stays until
// its next touch; with kPass only if that touch is within the horizon (so that recomputing through several layers
// does not fill memory with all of them), with kDrop not even then; otherwise, and without a next touch, it is dropped as soon
// as nothing under way needs it. What cannot be made again and is read by a recipe stays until
// the last recomputation that reads it: a first pass finds out until when, a second one counts.
//
// In-place reuse is no decision: where an op may write a result over an input whose stay ends with that very run, it
// does, and the bytes count once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

namespace tightship {

using i32 = std::int32_t;
using i64 = std::int64_t;

// Rows of integers, one after the other.
struct Rows {
    std::vector<i64> start;  // n + 1
    std::vector<i32> item;
    const i32* begin(i64 row) const { return item.data() + start[row]; }
    const i32* end(i64 row) const { return item.data() + start[row + 1]; }
    i64 size(i64 row) const { return start[row + 1] - start[row]; }
};

inline bool contains(const Rows& rows, i64 row, i32 x) {
    return std::find(rows.begin(row), rows.end(row), x) != rows.end(row);
}

struct Program {
    i64 ops = 0, storages = 0;
    Rows reads, needs, defines, mutates, updates;  // by op: storages; needs is parallel to reads
    std::vector<i64> extra;                        // by op: bytes beyond its results while it runs
    std::vector<double> time;                      // by op: seconds
    std::vector<std::uint8_t> pure;                // by op
    std::vector<std::uint8_t> fixed;               // by op: others wait for it, so it may not run later
    std::vector<i64> size;                         // by storage: bytes
    std::vector<std::uint8_t> owned, kept;         // by storage: the caller's; must be there at the end
    std::vector<i32> order;                        // ops as they are to run
    std::vector<i64> packed;                       // by storage: bytes when packed, 0: cannot be
    std::vector<double> pack, unpack, offload, fetch;  // by storage: seconds
    std::vector<double> lost;                      // by storage: seconds that a copy of it takes from the ops
    std::vector<std::uint8_t> may;                 // by storage: decisions allowed, a bit each (1 << Decision)
    std::vector<std::uint8_t> must;                // by storage: those allowed across the boundary, 0: as `may`
    i32 boundary = 0;                              // a position
    Rows overwrites;                               // by op: storage read, storage defined, and so on in pairs
};

enum Decision : std::uint8_t { kKeep, kEvict, kPass, kDrop, kPack, kOffload, kDecisions };

// Whether it leaves and is made again.
inline bool recomputed(std::uint8_t decision) { return decision >= kEvict && decision <= kDrop; }

struct Gap {
    i32 storage, from, to;  // touches at these positions of the order; to == ops means the end
};

struct Cost {
    bool valid = true;
    i64 peak = 0;
    i32 peak_at = -1;      // position whose op (or a recomputation before it) is at the peak
    double extra = 0;      // seconds of recomputation
    double excess = 0;     // sum over runs of bytes above the limit
    i64 runs = 0;          // ops run again
    i64 host = 0;          // most bytes copied out at once
};

enum StepKind : std::uint8_t { kCompute, kRecompute, kFree, kOffloadStep, kFetch, kCompress, kDecompress };
enum Form : std::uint8_t { kFull, kPacked, kHost };

struct Step {
    std::uint8_t kind;
    i32 op;
    std::vector<i32> storages;
    std::uint8_t form = kFull;
    std::uint8_t stream = 0;
    std::vector<i32> waits = {};
    std::vector<i32> reuses = {};  // storage read, storage that takes its place, and so on
};

class Engine {
  public:
    explicit Engine(Program program);

    const std::vector<Gap>& gaps() const { return gaps_; }
    const Program& program() const { return p_; }
    i64 static_bytes() const { return static_bytes_; }
    double base_time() const { return base_time_; }
    void set_horizon(i32 positions) { horizon_ = positions; }

    // Cost of the decisions in `evict` (one byte per gap); gives up (valid = false) beyond `cutoff` extra seconds.
    Cost evaluate(const std::uint8_t* evict, i64 limit, double cutoff = std::numeric_limits<double>::infinity());

    // From now on `evaluate` counts this against its cutoff too: seconds per byte of the peak above the limit, and
    // per byte of excess. Lets a search stop early in what it would reject.
    void price_excess(double peak, double excess) { peak_price_ = peak, excess_price_ = excess; }

    // By storage: whether it can be made again.
    const std::vector<std::uint8_t>& replayable() const { return replayable_; }

    // Bytes in use at each position (the most over the op and the recomputations before it).
    std::vector<i64> profile(const std::uint8_t* evict);
    std::vector<Step> emit(const std::uint8_t* evict, i64 limit);

    // Whether a gap may be decided so; the first decision that it may.
    bool allowed(i32 gap, std::uint8_t to) const { return allowed_[gap] >> to & 1; }
    std::uint8_t least(i32 gap) const;
    const std::vector<std::uint8_t>& allowed() const { return allowed_; }
    void set_host_limit(i64 bytes) { host_limit_ = bytes; }

  private:
    struct State {
        std::vector<std::uint8_t> resident;
        std::vector<i32> version, touch;  // touch: index of the next touch of each storage
        std::vector<std::uint8_t> packed, host;  // by storage: in this form
        std::vector<std::uint8_t> late;   // by op: not run at its place, and not yet run
        i64 waiting = 0;                  // how many of those there are
        i64 live = 0;
        Cost cost;
        i32 position = 0;
    };

    // A recipe under way: the op of it that is to run, and how many of that op's reads are there (-1: not begun).
    struct Restoring {
        i32 storage;
        const i32* writer;
        i64 read;
        bool ok;
    };
    enum class Way { there, lost, recipe };  // restored; cannot be; its recipe has to run first

    Program p_;
    std::vector<Gap> gaps_;
    Rows touches_;                     // by storage: positions
    Rows writers_;                     // by storage: ops
    std::vector<i32> last_write_;      // by storage: index of the touch that writes it last
    std::vector<std::uint8_t> replayable_, shared_;
    std::vector<i32> movable_;         // positions of ops that may run later, ascending
    std::vector<std::uint8_t> late_;   // by position: does not run at its place
    std::vector<i32> gap_of_;          // parallel to touches_.item: the gap that begins there, or -1
    i64 static_bytes_ = 0;
    double base_time_ = 0;
    std::vector<std::uint8_t> allowed_;  // by gap: a bit per decision
    std::vector<i32> by_end_;            // gaps that may be copied out, the last to end first
    std::vector<double> start_;          // by position: when it begins if nothing is recomputed
    bool copies_ = false;                // whether anything may be copied out
    i64 host_limit_ = std::numeric_limits<i64>::max();

    State s_;
    double now_ = 0, sent_ = 0, fetched_ = 0;  // the clocks of the three streams
    i64 host_live_ = 0;
    std::vector<double> ready_;                // by storage: when its copy out, or back, is done
    std::vector<std::uint8_t> coming_;         // by storage: 1 fetched, 2 copied out for nothing; and not yet waited for
    std::deque<i32> leaving_now_;              // copied out, bytes not yet given back
    std::vector<std::vector<i32>> fetches_;    // by position: gaps whose fetches are to be issued there
    std::vector<i32> late_fetches_;            // gaps: no room where they were to be issued
    std::vector<std::uint8_t> crowded_;        // by position: bytes above the limit there, in this attempt
    std::vector<i32> room_until_;              // by position: the next one that an earlier attempt found crowded
    bool early_ = false;                       // something was fetched before it was read, in this attempt
    std::vector<i32> reused_;                  // by the op that runs: storage read, storage that takes its place, ...
    std::vector<i32> landed_;                  // waited for: their copies can go
    std::vector<i32> offload_step_, fetch_step_;
    std::vector<i32> pin_;
    i32 horizon_ = 0;
    std::vector<i32> held_;  // restored, without a next touch, but read by several: kept until the op has run
    const std::uint8_t* evict_ = nullptr;
    i64 limit_ = 0;
    double cutoff_ = 0, peak_price_ = 0, excess_price_ = 0;
    std::vector<Restoring> restoring_;
    std::vector<Step>* out_ = nullptr;
    std::vector<i64>* line_ = nullptr;
    bool lost_anchor_ = false;               // the last run failed for want of something that can't be made again
    bool extended_ = false;                  // lives are extended to until_
    bool scouting_ = false;                  // first pass: nothing of that kind is freed, until_ is filled in
    bool ending_ = false;                    // past the last op: restoring what must be there at the end
    std::vector<i32> until_;                 // by storage: position up to which it stays, -1: its last touch
    std::vector<std::vector<i32>> leaving_;  // by position: storages whose extended life ends there

    void index();
    void find_gaps();
    void find_movable();
    void defer();
    bool wanted_at_once(i32 storage) const;
    bool recipe_is_replayable(i64 s) const;
    void reset();
    Cost attempt();
    void extend();
    void run();
    void compute(i32 position);
    void pass_over(i32 position);
    void depart(i32 storage, i32 position);
    bool restore(i32 storage);
    Way begin_restore(i32 storage);
    Way go_on(Way last);
    bool restore_reads();
    bool begin_replay(Restoring& r);
    void arrive(Restoring& r, bool there);
    void end_replay(const Restoring& r);
    void recompute(i32 op, i32 wanted);
    bool skips(i32 op, i32 wanted, i32 read) const;
    void find_copies();
    Cost attempt_with_copies();
    void schedule();
    void pack(i32 storage);
    void unpack(i32 storage);
    void send(i32 storage);
    void settle();
    void make_room(i64 bytes);
    void give_back(std::size_t which = 0);
    void stay(i32 storage);
    void fetch(i32 storage);
    void issue(i32 position);
    void clear_copies();
    void land(const i32* begin, const i32* end);
    void land_all();
    bool fits(i32 storage, i32 position) const;
    std::vector<i32> arrivals(const i32* begin, const i32* end);
    void wait_for(double time);
    void spend(double seconds);
    std::vector<i32> last_compute() const;
    void use(i64 bytes, i32 position);
    bool beyond_cutoff() const;
    void leave(i32 storage);
    void release();
    bool passes(i32 storage) const;
    bool departs(i32 storage, i32 position) const;
    void take_places(i32 op, i32 position, i32 wanted);
    bool has_touch(i32 s) const { return s_.touch[s] < touches_.size(s); }
};

}  // namespace tightship
