// Minimum cut of a network with integer capacities: Dinic's maximum flow (1970); and what is reached along
// edges.
#pragma once

#include <vector>

#include "watch.h"

namespace tightship {

// Edge i leads from tail[i] to head[i]. Capacities are not negative, and the sum of those that leave the
// source or enter the sink with a finite meaning stays far below 2^62; larger ones count as endless.
struct Network {
    static constexpr i64 kEndless = i64{1} << 60;
    std::vector<i32> tail, head;
    std::vector<i64> capacity;

    void edge(i32 from, i32 to, i64 room) {
        tail.push_back(from), head.push_back(to), capacity.push_back(room);
    }
};

struct Cut {
    i64 value = 0;  // capacity of the cut; where the watch stopped it, of a flow: no cut has less
    std::vector<std::uint8_t> near;  // by node: on the source's side of the cut nearest to the source
    bool complete = true;            // false: the watch stopped it, and `near` is empty
};

Cut min_cut(i32 nodes, const Network& network, i32 source, i32 sink, const Watch& watch);

// Which nodes an edge leads to, from one of `start` or from another that is reached. Row v of the edges:
// where they lead from node v.
std::vector<std::uint8_t> reached(const std::vector<i32>& start, const std::vector<i64>& rows,
                                  const std::vector<i32>& heads);

}  // namespace tightship
