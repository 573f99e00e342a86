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
