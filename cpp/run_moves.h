// Random changes of sequences of runs: what `resequence` tries.
#pragma once

#include <random>
#include <utility>

#include "reruns.h"

namespace tightship {

// A move leaves out a run again; puts in one, with what it needs that is not there; does both, where what is
// made again instead was idle where most was in use; lets a first run wait; or leaves out several, and takes
// what is above the limit then away by what costs least.
class RunMoves {
  public:
    RunMoves(const Index& index, std::uint64_t seed);

    double uniform() { return std::uniform_real_distribution<double>(0, 1)(rng_); }
    bool may_run_again(i32 op) const { return again_op_[op]; }

    // Moves are from this sequence on, which `lives` evaluated last.
    void follow(const Sequence& runs, i64 limit, const Lives& lives);

    // Makes `next` of it; false: nothing else came of it.
    bool apply(Sequence& next, Lives& lives);

    // Runs simulated since they were asked for last.
    i64 spent() { return std::exchange(spent_, 0); }

  private:
    const Index& x_;
    std::mt19937_64 rng_;
    std::vector<std::uint8_t> again_op_, later_op_;  // by op: may run again; may wait
    std::vector<i32> maker_;  // by storage: the op that makes it, if that may run again
    const Sequence* now_ = nullptr;
    i64 limit_ = 0, spent_ = 0;
    std::vector<i64> level_;            // by run
    std::vector<i32> again_, crowded_;  // runs that may be left out; those above the limit
    Rows touches_;                      // by storage: twice the run, and one more where that makes it

    i64 below(i64 n) { return static_cast<i64>(rng_() % static_cast<std::uint64_t>(n)); }
    template <class T> T any(const std::vector<T>& of) { return of[below(static_cast<i64>(of.size()))]; }
    bool can_run_again(i32 op) const;
    void find_touches(const Sequence& runs);
    const i32* next_touch(i32 storage, i32 at) const;
    bool there(i32 storage, i32 at) const;
    i32 idle_until(i32 storage, i32 at) const;
    std::pair<i32, i32> idle(i32 at);
    double seconds(i32 storage, i32 at, int& left) const;
    void remake(i32 storage, i32 at, int depth, std::vector<i32>& ops);
    void put_in(Sequence& next, i32 storage, i32 at);
    bool leave_out(Sequence& next);
    bool put_in(Sequence& next);
    bool exchange(Sequence& next);
    bool delay(Sequence& next);
    bool rebuild(Sequence& next, Lives& lives);
    void leave_out_some(Sequence& next);
    bool cheapest(const Sequence& next, const Cost& cost, double noise, i32& storage, i32& at);
};

}  // namespace tightship
