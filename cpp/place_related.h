// Placement by pairs: for every two buffers the differences of their offsets that are not allowed.
//
// What live ranges alone cannot say is said this way: bytes that are alive for a while only, buffers that lie at one
// offset, and buffers that meet in some order of execution. Memory is that of the pairs, so this is for thousands of
// buffers, not millions; all but the last can be told in parts, too (place_parts.h).
#pragma once

#include <vector>

#include "place_steps.h"

namespace tightship::place {

struct Related : Sizes {
    std::vector<Pair> pairs;
};

struct TreeLimits {
    i64 work;  // offsets looked for
    i64 goal;  // an arena that is small enough
};

class RelatedPacker final : public StepPacker {
  public:
    explicit RelatedPacker(const Related& problem);

    bool meet(i32 i, i32 j) const override { return edges_.has(i, j); }
    // Improves `offset` by going through all placements in which every buffer lies as low as those below it allow.
    // Returns whether it went through all of them: then there is none with a smaller arena.
    bool exhaust(std::vector<i64>& offset, const TreeLimits& limits, const Watch& watch);

  protected:
    void clear() override;
    void put(i32 i, i64 at) override;
    bool is_free(i32 i, i64 at) override;
    i64 find(i32 i, Fit fit) override { return find_from(i, fit, 0); }

  private:
    struct Range {
        i64 after, before;  // not allowed, both exclusive
    };
    struct Tree;

    const Related& r_;
    Edges edges_;
    std::vector<Range> taken_;
    std::vector<char> placed_;
    std::vector<i64> at_;  // where those placed lie

    void collect(i32 i);
    i64 find_from(i32 i, Fit fit, i64 from);
};

}  // namespace tightship::place
