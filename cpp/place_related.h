// Placement where it is more than live ranges that tells who is in whose way: in parts, and by pairs.
//
// Bytes [low, high) of a buffer are alive in sections [first, last), and a buffer may have any number of such
// parts: holes in live ranges, windows in them, and buffers that lie at one offset are told this way. As with
// whole live ranges a packing takes a time near-linear in the parts, so there may be a million of them.
// Conflicts are pairs of buffers with the differences of their offsets that are not allowed, at any time; the
// memory is theirs, so they are for thousands of buffers. Either may be all there is.
#pragma once

#include "place.h"

namespace tightship::place {

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

struct Related : Sizes {
    Buffers part;           // of every part its sections; its size is high - low
    std::vector<i64> low;   // of every part
    std::vector<i64> from;  // the parts of buffer i: [from[i], from[i + 1])
    std::vector<Pair> conflicts;
};

struct TreeLimits {
    i64 work;  // offsets looked for
    i64 goal;  // an arena that is small enough
};

class RelatedPacker final : public Packing {
  public:
    explicit RelatedPacker(const Related& problem);

    bool meet(i32 i, i32 j) const override;
    // Improves `offset` by going through all placements in which every buffer lies as low as those below it
    // allow. Returns whether it went through all of them: then there is none with a smaller arena.
    bool exhaust(std::vector<i64>& offset, const TreeLimits& limits, const Watch& watch);

  protected:
    void clear(const i32* order) override;
    void put(i32 i, i64 at) override;
    bool is_free(i32 i, i64 at) override;
    i64 find(i32 i, Fit fit) override { return find_from(i, fit, 0); }

  private:
    // What is taken in the sections of a part, as far as it is not below where the buffer is looked for.
    struct Cursor {
        const Span* at;
        const Span* end;
        i64 low, high;
    };
    struct Tree;

    const Related& r_;
    Edges conflicts_;
    std::vector<char> placed_;
    std::vector<i64> at_;  // where those placed lie
    std::vector<Span>
        taken_;  // where the buffer that is looked for may not begin for its conflicts, both exclusive
    Space space_;
    i64 least_ = kNoLimit / 2;  // bytes of the smallest part
    std::vector<Cursor> cursors_;

    void open(i32 i);
    i64 next_free(i64 at, i64 alignment);
    i64 last_free() const;
    i64 find_from(i32 i, Fit fit, i64 from);
};

}  // namespace tightship::place
