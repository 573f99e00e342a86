// Packing one buffer after the other where it is more than live ranges that tells who is in whose way: what placement
// by pairs (place_related.h) and in parts (place_parts.h) have in common.
#pragma once

#include <vector>

#include "place.h"

namespace tightship::place {

struct Sizes {
    std::vector<i64> size, alignment, pinned;
    i64 count() const { return static_cast<i64>(size.size()); }
};

// Offsets of buffers `one` and `two` must not have low < offset[one] - offset[two] < high.
struct Pair {
    i32 one, two;
    i64 low, high;
};

// Pairs by buffer.
class Edges {
  public:
    struct Edge {
        i32 other;
        i64 low, high;  // not allowed: low < own offset - other's offset < high
    };

    Edges(i64 count, const std::vector<Pair>& pairs);
    const Edge* begin(i32 i) const { return edges_.data() + from_[i]; }
    const Edge* end(i32 i) const { return edges_.data() + from_[i + 1]; }
    bool has(i32 i, i32 j) const;

  private:
    std::vector<i64> from_;
    std::vector<Edge> edges_;
};

class StepPacker : public Packing {
  public:
    explicit StepPacker(const Sizes& sizes);

    i64 pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch) override;
    i64 clash() override;
    // As pack, by first fit, but buffers lie where `hint` says (-1: nowhere) if nothing is there.
    i64 pack_hinted(const i32* order, const i64* hint, i64 cutoff, i64* offset, const Watch& watch);
    // As pack, but buffers that would end beyond `capacity`, and all that the watch left no time for, are left out, with
    // offset -1.
    void fill(const i32* order, Fit fit, i64 capacity, i64* offset, const Watch& watch);

  protected:
    const Sizes& b_;

    virtual void clear() = 0;
    virtual void put(i32 i, i64 at) = 0;
    virtual bool is_free(i32 i, i64 at) = 0;
    // Where buffer i is to lie among those that were put.
    virtual i64 find(i32 i, Fit fit) = 0;

    bool passed(i32 i) const { return b_.pinned[i] != kFree || b_.size[i] == 0; }
    // Puts those that are pinned; returns their arena.
    i64 start(i64* offset);

  private:
    std::vector<i32> pinned_;

    template <class Find>
    i64 pack_by(const i32* order, i64 cutoff, i64* offset, const Watch& watch, Find find);
};

}  // namespace tightship::place
