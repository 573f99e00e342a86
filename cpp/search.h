// Searches over the engine's eviction decisions.
#pragma once

#include <functional>
#include <vector>

#include "engine.h"

namespace tightship {

using Bits = std::vector<std::uint8_t>;

struct Found {
    Bits evict;
    Cost cost;
    i64 work = 0;  // ops simulated
    bool met = false;
    bool interrupted = false;
};

struct Budget {
    i64 work = 0;           // ops to simulate at most
    double seconds = 0;     // wall clock at most
    std::uint64_t seed = 0;
    std::function<bool(const Found&)> poll;  // told the best so far now and then; true ends the search
};

// Gaps of one role in several layers: a row per role with a gap per layer, -1 for none; rows of one family are
// neighbours and equally long.
struct Twins {
    Rows rows;
    std::vector<i64> family = {0};  // first rows of the families, and how many rows there are
    i64 families() const { return static_cast<i64>(family.size()) - 1; }
};

// Take decisions one group at a time, always at the highest point, by seconds per byte saved there, until the
// peak is within the limit or nothing helps; never keeps a step that raises the peak. Then give back what is not
// needed. Source: XLA's HloRematerialization, turned to gaps; batches keep it near-linear.
Found greedy(Engine& engine, i64 limit, const Bits& start, const Budget& budget);

// The first temperature, in step times, and after how many ops simulated it is a hundredth of it.
struct Cooling {
    double heat = 0;
    i64 span = 0;
};

// Simulated annealing over groups of gaps that belong together (the same tensor of every layer, one layer's
// tensors, single gaps), and over what one layer has that another has not. Energy: extra seconds plus a price on
// bytes above the limit. What it does depends on no limit of work: with more of it, it goes on where it would end.
Found anneal(Engine& engine, const Rows& groups, const Twins& twins, i64 limit, const Bits& start, const Cooling& cooling,
             const Budget& budget);

// Evict row by row, or a part of a row from its front, always what costs the fewest seconds per excess gone, by the
// exact cost of each candidate, until the peak is within the limit. What was tried longest ago counts as it was
// until it comes to the front (Minoux's lazy greedy, 1978), which keeps the candidates tried few.
Found ladder(Engine& engine, const Rows& rows, i64 limit, const Bits& start, const Budget& budget);

// Clear every decision, group by group and then gap by gap, that is not needed to stay within the limit.
Found relax(Engine& engine, const Rows& groups, i64 limit, const Found& start, const Budget& budget);

}  // namespace tightship
