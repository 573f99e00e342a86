// Minimum cut of a network with integer capacities: Dinic's maximum flow (1970); and what is reached along
// edges.
#pragma once

#include <utility>
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

// Minimum cuts, one after the other, of a network of which little changes: the last edges, from `switches`
// on, are open (endless) or closed (0), and some others have no capacity for one cut alone. A flow is kept,
// and what runs along an edge that loses its capacity finds another way or goes back (Ahuja, Magnanti, Orlin
// 1993).
class Cuts {
  public:
    Cuts(i32 nodes, const Network& network, i32 source, i32 sink, i64 switches);

    // Of the network with these switches open, and without the capacity of the edges `free`.
    i64 value(const std::vector<std::uint8_t>& open, const std::vector<i64>& free);

    i64 count() const { return static_cast<i64>(open_.size()); }
    i64 edges() const { return static_cast<i64>(arc_.size()); }

  private:
    i32 nodes_, source_, sink_;
    std::vector<i64> first_;  // by node: its first arc
    std::vector<i32> to_;     // by arc
    std::vector<i64> back_, room_;
    std::vector<i64> arc_;  // by edge
    i64 switches_, value_ = 0;
    std::vector<std::uint8_t> open_;
    std::vector<i64> came_;  // by node: the arc on the way to it
    std::vector<i32> seen_;  // by node: the search that saw it last
    i32 searches_ = 0;
    std::vector<i32> queue_;
    bool noting_ = false;
    std::vector<std::pair<i64, i64>> before_;  // arc, what room it had

    void set(i64 arc, i64 room);
    i64 push(i32 from, i32 to, i64 most);
    void take_away(i64 arc);
};

Cut min_cut(i32 nodes, const Network& network, i32 source, i32 sink, const Watch& watch);

// Which nodes an edge leads to, from one of `start` or from another that is reached. Row v of the edges:
// where they lead from node v.
std::vector<std::uint8_t> reached(const std::vector<i32>& start, const std::vector<i64>& rows,
                                  const std::vector<i32>& heads);

}  // namespace tightship
