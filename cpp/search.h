// Searches over the engine's eviction decisions.
#pragma once

#include <functional>
#include <random>
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

// Take decisions one group at a time, always at the highest point, by seconds per byte saved there, until the
// peak is within the limit or nothing helps; never keeps a step that raises the peak. Then give back what is not
// needed. Source: XLA's HloRematerialization, turned to gaps; batches keep it near-linear.
Found greedy(Engine& engine, i64 limit, const Bits& start, const Budget& budget);

// Simulated annealing over groups of gaps that belong together (the same tensor of every layer, one layer's
// tensors, single gaps). Energy: extra seconds plus a price on bytes above the limit. `heat`: the first temperature,
// in step times; the last is a hundredth of it.
Found anneal(Engine& engine, const Rows& groups, i64 limit, const Bits& start, double heat, const Budget& budget);

// Evict row by row, or a part of a row from its front, always what costs the fewest seconds per excess gone, by the
// exact cost of each candidate, until the peak is within the limit. What was tried longest ago counts as it was
// until it comes to the front (Minoux's lazy greedy, 1978), which keeps the candidates tried few.
Found ladder(Engine& engine, const Rows& rows, i64 limit, const Bits& start, const Budget& budget);

// Clear every decision, group by group and then gap by gap, that is not needed to stay within the limit.
Found relax(Engine& engine, const Rows& groups, i64 limit, const Found& start, const Budget& budget);

}  // namespace tightship
