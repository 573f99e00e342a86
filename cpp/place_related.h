// Placement by pairs: for every two buffers the differences of their offsets that are not allowed.
//
// What live ranges alone cannot say is said this way: bytes that are alive for a while only, buffers that lie at one
// offset, and buffers that meet in some order of execution. Memory is that of the pairs, so this is for thousands of
// buffers, not millions.
#pragma once

#include <functional>
#include <vector>

#include "place.h"

namespace tightship::place {

struct Related {
    // Offsets of buffers `one` and `two` must not have low < offset[one] - offset[two] < high.
    struct Pair {
        i32 one, two;
        i64 low, high;
    };
    std::vector<i64> size, alignment, pinned;
    std::vector<Pair> pairs;
    i64 count() const { return static_cast<i64>(size.size()); }
};

struct TreeLimits {
    i64 work;  // offsets looked for
    i64 goal;  // an arena that is small enough
};

class RelatedPacker final : public Packing {
  public:
    explicit RelatedPacker(const Related& problem);

    i64 pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch) override;
    i64 clash() override;
    bool meet(i32 i, i32 j) const override;

    // As pack, by first fit, but buffers lie where `hint` says (-1: nowhere) if nothing is there.
    i64 pack_hinted(const i32* order, const i64* hint, i64 cutoff, i64* offset);
    // As pack, but buffers that would end beyond `capacity` are left out, with offset -1.
    void fill(const i32* order, Fit fit, i64 capacity, i64* offset);
    // Improves `offset` by going through all placements in which every buffer lies as low as those below it allow.
    // Returns whether it went through all of them: then there is none with a smaller arena.
    bool exhaust(std::vector<i64>& offset, const TreeLimits& limits, const Watch& watch);

  private:
    struct Edge {
        i32 other;
        i64 low, high;  // not allowed: low < own offset - other's offset < high
    };
    struct Range {
        i64 after, before;  // not allowed, both exclusive
    };
    struct Tree;

    const Related& b_;
    std::vector<i64> from_;  // edges of buffer i: [from_[i], from_[i + 1])
    std::vector<Edge> edges_;
    std::vector<Range> taken_;
    std::vector<char> placed_;
    std::vector<i32> pinned_;

    bool passed(i32 i) const { return b_.pinned[i] != kFree || b_.size[i] == 0; }
    void collect(i32 i, const i64* offset);
    i64 fit(i32 i, Fit fit, i64 from, const i64* offset);
    bool is_free(i32 i, i64 at, const i64* offset);
    i64 start(i64* offset);
};

}  // namespace tightship::place
