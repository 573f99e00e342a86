// Improvement of a large placement, a few dozen buffers at a time: exact search in windows of time and bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "place.h"

namespace tightship::place {

struct WindowLimits {
    i64 work = 0;  // units of Tree::cost
    i64 goal = 0;  // an arena this small is enough
    std::uint64_t seed = 0;
};

struct Windows {
    std::vector<i64> offset;
    i64 work = 0, nodes = 0;  // units of Tree::cost, and buffers placed
};

// Offsets no worse than those given, which are a placement. Aims at arenas below the present one; every buffer that
// reaches above the aim is freed together with others around it, and all of them are placed anew below the aim
// between those that stay.
Windows place_in_windows(const Buffers& buffers, std::vector<i64> offset, const WindowLimits& limits,
                         const Watch& watch);

}  // namespace tightship::place
