// Anytime exact placement: many short tree searches, each with another preference and perhaps another capacity.
//
// The time such a search takes has a heavy tail: among a handful of preferences one often succeeds at once where
// another does not in hours. So tries are short at first, all preferences get their turn, and what was tried is
// tried again with some disorder and more patience. A try that runs to its end without success proves a bound.
#pragma once

#include "place_tree.h"

namespace tightship::place {

struct ExactLimits {
    i64 work = 0;        // units of Tree::cost
    i64 goal = 0;        // an arena this small is enough
    bool wanted = false;  // there is reason to think that the goal can be reached
    int threads = 1;     // the answer does not depend on it, unless the watch ended the search
    std::uint64_t seed = 0;
};

struct Exact {
    std::vector<i64> offset;
    i64 arena = 0, bound = 0;
    i64 work = 0, nodes = 0;  // units of Tree::cost, and buffers placed; of the tries that count
    std::vector<i32> clash;  // buffers that cannot all be placed below `bound` (empty: the peak load is the bound)
};

// The best placement found, starting from `offset`, which is one. What `clash` proves, it proves with
// all pinned buffers.
Exact place_exactly(const Buffers& buffers, std::vector<i64> offset, const ExactLimits& limits,
                    const Watch& watch);

}  // namespace tightship::place
