// Placement of buffers in parts: bytes [low, high) of a buffer are alive in sections [first, last), and a buffer may
// have any number of such parts. Gaps, windows in them, and buffers that lie at one offset are told this way. As with
// whole live ranges a packing takes a time near-linear in the parts, so there may be a million of them. Conflicts,
// buffers in one another's way at all times, are pairs beside that.
#pragma once

#include <vector>

#include "place_steps.h"

namespace tightship::place {

struct Parts : Sizes {
    Buffers part;             // of every part its sections; its size is high - low
    std::vector<i64> low;     // of every part
    std::vector<i64> from;    // the parts of buffer i: [from[i], from[i + 1])
    std::vector<Pair> conflicts;
};

class PartPacker final : public StepPacker {
  public:
    explicit PartPacker(const Parts& problem);

    bool meet(i32 i, i32 j) const override;

  protected:
    void clear() override;
    void put(i32 i, i64 at) override;
    bool is_free(i32 i, i64 at) override;
    i64 find(i32 i, Fit fit) override;

  private:
    // What is taken in the sections of a part, as far as it is not below where the buffer is looked for.
    struct Cursor {
        const Span* at;
        const Span* end;
        i64 low, high;
    };

    const Parts& p_;
    Edges conflicts_;
    std::vector<char> placed_;
    std::vector<i64> at_;      // where those placed lie
    std::vector<Span> taken_;  // where the buffer that is looked for may not begin for its conflicts, both exclusive
    Space space_;
    i64 least_ = kNoLimit / 2;  // bytes of the smallest part
    std::vector<Cursor> cursors_;

    void collect(i32 i);
    void open(i32 i);
    i64 next_free(i64 at, i64 alignment);
    i64 last_free() const;
};

}  // namespace tightship::place
