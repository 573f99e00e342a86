// A plan as the sequence of its runs: every op once, and again before something that reads what it made.
//
// Nothing else is decided. What a run makes stays until the last run that reads it, or until it is made
// again; runs again of which nothing is read are not there. So each sequence has one cost, whatever decided
// it, and can be changed run by run: one left out, and its result takes bytes instead of time; one put in,
// the other way round.
#pragma once

#include <limits>
#include <vector>

#include "search.h"

namespace tightship {

struct Run {
    i32 op;
    bool again;
};

using Sequence = std::vector<Run>;

// Ops as they run, each for the first time where it comes first.
Sequence sequence_of(const std::vector<i32>& ops, i64 count);

// What a cost is compared with: seconds of recomputation, for each byte of the peak above the limit and for
// each of excess so many more, are not above `cutoff`.
struct Prices {
    i64 limit = std::numeric_limits<i64>::max();
    double cutoff = std::numeric_limits<double>::infinity(), peak = 0, excess = 0;
};

// What is in memory along a sequence, by a walk from its end.
class Lives {
  public:
    explicit Lives(const Index& index);

    // Not valid beyond the cutoff, and where a run reads what was not made yet, or another version than the
    // op did at first. `peak_at` is a run.
    Cost evaluate(const Sequence& runs, const Prices& prices);

    // Of the sequence evaluated last: which runs again are in vain, and bytes in use at each run.
    const std::vector<std::uint8_t>& dead() const { return dead_; }
    const std::vector<i64>& levels() const { return level_; }

    // The sequence evaluated last, and its levels, without the runs in vain.
    void drop_dead(Sequence& runs);

    // None for a sequence that is not valid.
    std::vector<Step> emit(const Sequence& runs);

  private:
    const Index& x_;
    std::vector<i64> made_;  // by op: bytes of all it makes, and of what it needs beside that
    std::vector<i32> nth_;   // parallel to the program's `mutates`: the version that the op makes of it
    std::vector<std::uint8_t> tracked_;  // by storage: runs see several versions of it
    std::vector<i32> versioned_;         // those
    std::vector<std::uint8_t> need_,
        last_need_;                          // by storage: read later, and not made again before; at the end
    std::vector<i32> expect_, last_expect_;  // by storage: the version that is read next; -1: any
    std::vector<i32> ended_, kept_;          // by storage: the run it was read by last; of which it stays
    std::vector<i64> level_;
    std::vector<std::uint8_t> dead_;
    i64 live_ = 0, last_live_ = 0, open_ = 0, last_open_ = 0;  // bytes; storages that are needed
    bool valid_ = true;
    std::vector<Step>* steps_ = nullptr;  // filled in if not null, the last one first
    Step step_{};                         // then: of the run under way, and what leaves after it
    std::vector<i32> gone_;

    void begin();
    bool wanted(i32 op) const;
    void sees(i32 storage, i32 version);
    void make(Run run, i32 at);
    void read(Run run, i32 at);
    i64 taken(i32 op, i32 at);
    void walk(Run run, i32 at, Cost& cost, const Prices& prices);
    void note(Run run);
};

// Without the runs that are marked.
void drop(Sequence& runs, const std::vector<std::uint8_t>& which);

struct Resequenced {
    Sequence runs;
    Cost cost;
    i64 work = 0;  // runs simulated
};

// Simulated annealing over sequences, from one on: runs left out and put in, one for another, parts left out
// and made anew, first runs later. Of the best, runs that are not needed to stay within the limit are left
// out.
Resequenced resequence(const Index& index, const Sequence& runs, i64 limit, const Cooling& cooling,
                       std::uint64_t seed, const Budget& budget);

}  // namespace tightship
