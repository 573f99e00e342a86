// Searches over the engine's eviction decisions.
#pragma once

#include <functional>
#include <vector>

#include "engine.h"

namespace tightship {

struct Found {
    Bits evict;
    Cost cost;
    i64 work = 0;  // ops simulated
    bool met = false;
    bool interrupted = false;
};

struct Budget {
    i64 work = 0;                                   // ops to simulate at most
    Watch watch;                                    // the time limit, and Ctrl-C
    std::function<bool(const Found&)> report = {};  // told the best so far now and then; true ends the search
};

// Stops a search at its work limit (reproducible), or when the watch says so (a bound only).
class Meter {
  public:
    Meter(const Engine& engine, const Budget& budget)
        : ops_(std::max<i64>(1, engine.index().p.ops)), budget_(budget) {}
    i64 work() const { return work_; }
    void spend(const Cost& cost) { work_ += ops_ + cost.runs, ++calls_; }
    void spend_on(i64 ops) { work_ += ops; }  // looked at, not simulated
    bool over(const Found& best) {
        if (stopped_ || work_ >= budget_.work) return true;
        if (calls_ - asked_ < std::max<i64>(1, 20000 / ops_)) return false;
        asked_ = calls_;
        return stopped_ = budget_.watch() || (budget_.report && budget_.report(best));
    }

  private:
    i64 ops_, work_ = 0, calls_ = 0, asked_ = 0;
    const Budget& budget_;
    bool stopped_ = false;
};

// Whether a is within the limit and b is not, or faster, or above the limit by less.
bool better(const Cost& a, const Cost& b, i64 limit);

// What annealing takes bytes above the limit for, in step times that one whole limit of them is worth: more
// while less than a fifth of the states are within it, less while more than three fifths are, so that the
// walk stays about the limit, however steep time is there (after Gendreau, Hertz and Laporte, 1994).
class ExcessPrice {
  public:
    double value() const { return price_; }
    // Count a state. Whether the price may be another one since.
    bool turn(bool within) {
        inside_ += within;
        if (++states_ % kTurns) return false;
        if (inside_ < kTurns / 5) price_ = std::min(kDearest, price_ * kStep);
        if (inside_ > 3 * kTurns / 5) price_ = std::max(kCheapest, price_ / kStep);
        inside_ = 0;
        return true;
    }

  private:
    static constexpr i64 kTurns = 200;
    static constexpr double kStep = 1.1, kCheapest = 0.05, kDearest = 1000;
    double price_ = 2.0;
    i64 states_ = 0, inside_ = 0;
};

// The start of a search with its cost; and takes what is better than the best so far.
Found begin(Engine& engine, i64 limit, const Bits& start);
bool offer(Found& best, const Bits& evict, const Cost& cost, i64 limit);

// Gaps of one role in several layers: a row per role with a gap per layer, -1 for none; rows of one family
// are neighbors and equally long.
struct IsomorphicLayers {
    Rows rows;
    std::vector<i64> family = {0};  // first rows of the families, and how many rows there are
    i64 families() const { return static_cast<i64>(family.size()) - 1; }
};

// Take decisions one group at a time, always at the highest point, by seconds per byte saved there, until the
// peak is within the limit or nothing helps; never keeps a step that raises the peak. Then give back what is
// not needed. Source: XLA's HloRematerialization, turned to gaps; batches keep it near-linear.
Found greedy(Engine& engine, i64 limit, const Bits& start, const Budget& budget);

// Evict in batches what takes the most away of all that is above the limit, wherever that is, by seconds per
// byte and position: what it takes to restore a storage follows from what is there then, and what its recipe
// reads is kept in turn. Of a batch, those parts are taken that hold half of what they promise, by their
// exact cost. Recipes may be longer from turn to turn, and what others read is evicted as well where nothing
// else is left. A few hundred replays, however irregular the graph.
Found cover(Engine& engine, i64 limit, const Bits& start, const Budget& budget);

// The first temperature, in step times, and after how many ops simulated it is a hundredth of it.
struct Cooling {
    double heat = 0;
    i64 span = 0;
};

// Simulated annealing over groups of gaps that belong together (the same tensor of every layer, one layer's
// tensors, single gaps), and over what one layer has that another has not. Energy: extra seconds plus a price
// on bytes above the limit. `exchanges`: the part of the moves after which one tensor of a layer has what
// another one had. What it does depends on no limit of work: with more of it, it goes on where it
// would end.
Found anneal(Engine& engine, const Rows& groups, const IsomorphicLayers& layers, i64 limit, const Bits& start,
             const Cooling& cooling, double exchanges, std::uint64_t seed, const Budget& budget);

// Evict row by row, or a part of a row from its front, always what costs the fewest seconds per excess gone,
// by the exact cost of each candidate, until the peak is within the limit. What was tried longest ago counts
// as it was until it comes to the front (Minoux's lazy greedy, 1978), which keeps the candidates tried few.
Found lazy_greedy(Engine& engine, const Rows& rows, i64 limit, const Bits& start, const Budget& budget);

// Clear every decision, group by group and then gap by gap, that is not needed to stay within the limit.
Found relax(Engine& engine, const Rows& groups, i64 limit, const Bits& start, const Budget& budget);

// For each storage whether it is one to keep, of those made before position `boundary` and read at it or
// later: minimizes bytes kept + bytes_per_second * seconds of ops to recompute, over all sets from which the
// rest can be made (exactly: a closure problem, solved as a minimum cut). Ops that only feed what is read
// after the boundary cost nothing: they can run there. Empty where the watch stopped it.
std::vector<std::uint8_t> priced_cut(const Index& index, i32 boundary, double bytes_per_second,
                                     const Watch& watch);

}  // namespace tightship
