// The best plan of a small graph: every order, eviction, repetition and (asked for) place, as paths through
// states.
//
// A state is which ops have run, and of each storage which contents are there, and where. Runs of ops lead
// from one to the next; what is in the way of an op goes. Paths are followed in the order of their seconds of
// recomputation (Dijkstra), those furthest ahead first among equals, so that the first that ends is the best.
#pragma once

#include <limits>

#include "replay.h"

namespace tightship {

// What an op takes from the allocator while it runs, beyond what it defines: bytes from tick `first` to
// `last`.
struct Temporary {
    i64 size;
    i32 first, last;
};

struct StateProblem {
    const Program& p;
    Rows before;                                      // by op: what runs before it in every order
    std::vector<std::vector<Temporary>> temporaries;  // by op
    std::vector<std::vector<i32>> first;              // by op, parallel to p.defines: tick of the request
    i64 limit = 0;                                    // bytes, those of the caller's storages included
    bool place = false;                               // everything has an offset within the limit
    bool hand_out = false;  // what is kept lies elsewhere, and counts from the start
};

struct StateLimits {
    i64 work = 0;                                             // runs of ops tried at most
    double cutoff = std::numeric_limits<double>::infinity();  // seconds that a path takes at most
    Watch watch;
};

struct StatePath {
    bool found = false;
    bool all = false;  // everything was tried that could be better: the best, or there is none
    i64 work = 0;
    double extra = 0;
    std::vector<Step> steps;
};

constexpr i64 kMostStateOps = 64;

StatePath search_states(const StateProblem& problem, const StateLimits& limits);

}  // namespace tightship
