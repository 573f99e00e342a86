// The eviction engine: what a set of eviction decisions costs, exactly, at storage level.
//
// Minimized by the searches above it: seconds of recomputation subject to peak bytes <= limit.
//
// A decision is one number per *gap*: a stay of a storage between two consecutive touches, after its last
// write (before it, a copy may be made of what is there so far, and nothing else). kKeep stays. kEvict, kPass
// and kDrop end the residence at the first touch; the storage is restored just before the next touch, or
// earlier when a recomputation needs it, by running its recipe (every op that writes it, in order) again.
// What a recipe reads is restored first, recursively. What was restored for a recomputation stays until its
// next touch; with kPass only if that touch is within the horizon (so that recomputing through several layers
// does not fill memory with all of them), with kDrop not even then; otherwise it is dropped as soon as
// nothing under way needs it. After its last touch, what several ops read stays for all recomputations before
// one op, and with kDrop in its last gap for one of them. What cannot be made again and is read by a recipe
// stays until the last recomputation that reads it: a first pass finds out until when, a second one counts.
// What no op touches any more, but much can be made of, has one more gap, with kKeep or kStay
// (`Index::stay`). With `until_written`, what a recipe reads in a version that is written over is made by the
// first of its writers, where it is not there or nobody else needs it there, and leaves when it was read; and
// results may be evicted until the end, where they are restored in the order of `ending`. With `brief`, what
// several ops read stays only until the op has run for which the one that read it was run.
//
// In-place reuse is no decision: where an op may write a result over an input whose stay ends with that very
// run, it does, and the bytes count once.
#pragma once

#include <limits>

#include "copies.h"
#include "trace.h"

namespace tightship {

class Engine {
  public:
    explicit Engine(Program program) : x_(std::move(program)), copies_(x_, s_) { begin_tracing(); }
    Engine(const Engine&) = delete;

    const Index& index() const { return x_; }
    void set_horizon(i32 positions) { horizon_ = positions; }
    void set_host_limit(i64 bytes) { copies_.host_limit = bytes; }

    // Cost of the decisions (one byte per gap); gives up (valid = false) beyond `cutoff` extra seconds.
    Cost evaluate(const Bits& decisions, i64 limit, double cutoff = std::numeric_limits<double>::infinity());

    // The same for decisions that differ in `changes` from those of the run followed: only what lies between
    // the first position where that matters and the first one behind the last where all is as it was is run.
    // `follow` begins with a run; `accept` goes on with the one that was evaluated last. Sums may differ in
    // the last bits.
    void follow(const Bits& decisions, i64 limit);
    Cost evaluate_near(const Bits& decisions, const Changes& changes, i64 limit,
                       double cutoff = std::numeric_limits<double>::infinity());
    void accept();

    // From now on `evaluate` counts this against its cutoff too: seconds per byte of the peak above the
    // limit, and per byte of excess. Lets a search stop early in what it would reject.
    void price_excess(double peak, double excess) { peak_price_ = peak, excess_price_ = excess; }

    // Whether the op at a position does not run there but when it is needed, by the decisions evaluated last.
    bool late(i32 position) const { return late_[position]; }

    // Bytes in use at each position (the most over the op and the recomputations before it).
    std::vector<i64> profile(const Bits& decisions);
    std::vector<Step> emit(const Bits& decisions, i64 limit);

  private:
    // A recipe under way: the op of it that is to run, and how many of that op's reads are there (-1: not
    // begun).
    struct Restoring {
        i32 storage;
        const i32 *writer, *end;
        i64 read;
        bool ok;
    };
    enum class Way { there, lost, recipe };  // restored; cannot be; its recipe has to run first

    const Index x_;
    Replay s_;
    Copies copies_;
    double cutoff_ = 0, peak_price_ = 0, excess_price_ = 0;
    i32 horizon_ = 0;

    std::vector<std::uint8_t> late_;     // by position: does not run at its place
    std::vector<std::uint8_t> waiting_;  // by op: not run at its place, and not yet run
    i64 waits_ = 0;                      // how many of those there are
    std::vector<i32> reused_;  // by the op that runs: storage read, storage that takes its place, ...
    // Restored, without a next touch, but read by several: kept until the op has run; with the number of
    // recipes under way when an op read it.
    std::vector<std::pair<i32, std::size_t>> held_;
    std::vector<Restoring> restoring_;
    bool lost_anchor_ = false;  // the last run failed for want of something that can't be recomputed
    bool extended_ = false;     // lives are extended to until_
    bool scouting_ = false;     // first pass: nothing of that kind is freed, until_ is filled in
    bool ending_ = false;       // past the last op: restoring what must be there at the end
    bool closing_ = false;      // and of what is there by then every result stays
    std::vector<i32> until_;    // by storage: position up to which it stays, -1: its last touch
    std::vector<std::vector<i32>> leaving_;  // by position: storages whose extended life ends there

    i64 stride_ = 0;                         // positions between two marks; 0: no run is followed
    Trace base_, tried_;                     // the run followed, and the one evaluated last
    std::vector<std::vector<i32>> touched_;  // by mark: the next touch of each storage
    i64 from_mark_ = 0, joined_ = -1;  // where the last one left the run followed, and came back (-1: never)
    i32 join_from_ = 0;
    bool tracing_ = false;

    void begin_tracing();
    bool at_mark(i32 position);
    std::pair<i32, i32> reach(const Bits& decisions, const Changes& changes) const;
    void resume(const Trace& trace, i64 mark);
    void keep_lives();
    void join();

    void defer();
    bool wanted_at_once(i32 storage) const;
    Cost attempt();
    Cost with_longer_lives(i64 mark = 0);
    void extend(i64 mark);
    void run();
    void begin_run();
    void run_from(i32 position);
    bool too_many_runs() const;
    void compute(i32 position);
    void pass_over(i32 position);
    void depart_all(i32 position);
    void depart(i32 storage, i32 position);
    bool restore(i32 storage, i32 version);
    Way begin_restore(i32 storage, i32 version);
    bool passing(i32 storage) const;
    bool gone(i32 storage, i32 version, i32 readers);
    Way go_on(Way last);
    bool restore_reads();
    bool begin_replay(Restoring& r);
    void arrive(Restoring& r, bool there);
    void end_replay(const Restoring& r);
    void recompute(i32 op, i32 wanted);
    bool skips(i32 op, i32 wanted, i32 read) const;
    bool beyond_cutoff() const;
    void release(std::size_t depth = 0);
    bool passes(i32 storage) const;
    bool held(i32 storage) const;
    bool departs(i32 storage, i32 position) const;
    void take_places(i32 op, i32 position, i32 wanted);
    i64 made(i32 op) const;
    // Whether an op still touches it, or it is to stay for longer than that.
    bool has_touch(i32 s) const {
        const i64 left = x_.touches.size(s) - s_.touch[s];
        return left > 1 || (left == 1 && (x_.stay[s] < 0 || s_.decisions[x_.stay[s]] == kStay));
    }
};

}  // namespace tightship
