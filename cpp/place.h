// Placement: an offset for every buffer such that buffers alive at the same time share no byte.
//
// Minimised: the arena, max(offset + size). Time is reduced to *sections*, the maximal sets of buffers alive
// together in the order of time; two buffers are alive together exactly when their section ranges meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace tightship::place {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i64 kNoLimit = std::numeric_limits<i64>::max();
constexpr i64 kFree = -1;  // Buffers::pinned of a buffer that may go anywhere

inline i64 align_up(i64 offset, i64 alignment) {
    return alignment == 1 ? offset : (offset + alignment - 1) / alignment * alignment;
}

struct Buffers {
    std::vector<i64> size, alignment, pinned;
    std::vector<i32> first, last;  // sections [first, last)
    std::vector<double> length;    // time alive
    i32 sections = 0;
    i64 count() const { return static_cast<i64>(size.size()); }
};

// Flat arrays of `count`; alignment and pinned may be null (1 and kFree). `between` is called between the parts of the
// work, which of a million buffers take a tenth of a second each.
Buffers make_buffers(const i64* lower, const i64* upper, const i64* size, const i64* alignment,
                     const i64* pinned, i64 count, const std::function<void()>& between);

// The most bytes alive at one time: no placement spans less.
i64 peak_load(const Buffers& buffers);

struct Span {
    i64 start, end;
};

// The first of the spans that ends above `offset`: in steps that double, since it is often near.
inline const Span* first_above(const Span* from, const Span* end, i64 offset) {
    for (i64 step = 1; from != end && from->end <= offset; step *= 2) {
        if (end - from > step && from[step].end <= offset) {
            from += step;
        } else {
            const Span* to = from + std::min<i64>(step, end - from);
            return std::partition_point(from, to, [offset](const Span& s) { return s.end <= offset; });
        }
    }
    return from;
}

// The bytes taken so far, by section. A segment tree over the sections; each node keeps two sets of disjoint
// spans: `covering`, bytes of buffers that were put at this node, and `touching`, bytes of every buffer that was
// put here or below. A query therefore reads O(log sections) sets, and the sets stay short because spans that
// meet are joined.
class Space {
  public:
    explicit Space(i32 sections);

    void clear();
    // Takes [start, end) in sections [first, last). Holes smaller than `least` are taken as well: the caller
    // promises to ask for nothing smaller from now on.
    void take(i32 first, i32 last, i64 start, i64 end, i64 least);
    // Lowest free offset.
    i64 first_fit(i32 first, i32 last, i64 size, i64 alignment);
    bool is_free(i32 first, i32 last, i64 start, i64 end);
    // Offset of the smallest hole that is large enough (the lowest of equals), else above everything.
    i64 best_fit(i32 first, i32 last, i64 size, i64 alignment);
    // The same for something that is there several times.
    struct Stay {
        i32 first, last;
    };
    i64 best_fit_all(const std::vector<Stay>& stays, i64 size, i64 alignment);
    // Calls `use` on sets of spans that are, together, all that is taken in sections [first, last).
    template <class Use>
    void each(i32 first, i32 last, Use use) const {
        visit(
            first, last, [&](i32 node) { use(nodes_[node].touching); }, [&](i32 node) { use(nodes_[node].covering); });
    }

  private:
    struct Cursor {
        const Span* at;
        const Span* end;
    };

    struct Node {  // side by side, because what a query has read is what is changed next
        std::vector<Span> covering, touching;
    };

    i32 leaves_;
    std::vector<Node> nodes_;
    std::vector<i32> used_;  // nodes whose touching set is not empty
    std::vector<Cursor> cursors_;

    template <class Whole, class Partial>
    void visit(i32 first, i32 last, Whole whole, Partial partial) const;
    void open(i32 first, i32 last);
    void open_also(i32 first, i32 last);
    i64 smallest_hole(i64 size, i64 alignment);
    // Moves all cursors beyond `offset` and returns the lowest offset from there on that is free everywhere.
    i64 next_free(i64 offset, i64 alignment);
    i64 next_taken() const;
};

// Calls `whole` on the nodes that make up [first, last) and `partial` on all nodes above them.
template <class Whole, class Partial>
void Space::visit(i32 first, i32 last, Whole whole, Partial partial) const {
    const i32 left = first + leaves_, right = last + leaves_;
    for (i32 l = left, r = right; l < r; l >>= 1, r >>= 1) {
        if (l & 1) whole(l++);
        if (r & 1) whole(--r);
    }
    for (int k = 1; leaves_ >> k; ++k) {
        const i32 l = left >> k, r = (right - 1) >> k;
        const bool cuts_left = l << k != left, cuts_right = (right >> k) << k != right;
        if (cuts_left) partial(l);
        if (cuts_right && !(cuts_left && l == r)) partial(r);
    }
}

enum class Fit { first, best };

// Asked again and again while the core works, in the calling thread; true: stop, with the best so far. May throw.
using Watch = std::function<bool()>;

// Places buffers one after the other; keeps its working memory from one packing to the next.
class Packing {
  public:
    virtual ~Packing() = default;

    // Pinned buffers first, then the others in `order` (a permutation; pinned and empty ones in it are passed
    // over). Gives up, with kNoLimit, as soon as the arena would be `cutoff` or more. When the watch says so, the others
    // get bytes of their own, or it gives up.
    virtual i64 pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch) = 0;
    // A pinned buffer that shares bytes with another one alive at the same time; -1: none.
    virtual i64 clash() = 0;
    // Whether two buffers may be in one another's way.
    virtual bool meet(i32 i, i32 j) const = 0;
    // Buffers placed so far.
    i64 work() const { return work_; }

  protected:
    i64 work_ = 0;
};

// Buffers alive in whole live ranges.
class Packer final : public Packing {
  public:
    explicit Packer(const Buffers& buffers);

    i64 pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch) override;
    i64 clash() override;
    bool meet(i32 i, i32 j) const override { return b_.first[i] < b_.last[j] && b_.first[j] < b_.last[i]; }

  private:
    const Buffers& b_;
    Space space_;
    std::vector<i32> pinned_;
    std::vector<i64> least_;  // least_[k]: smallest size in order[k:]
};

struct Limits {
    i64 work = 0;   // buffers to place
    i64 bound = 0;  // an arena this small cannot be beaten
};

// The same numbers on every platform (splitmix64).
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    i64 below(i64 n) { return static_cast<i64>(next() % static_cast<std::uint64_t>(n)); }

  private:
    std::uint64_t state_;
};

// Hill climbing over orders, starting from `order`: changes the order around the buffers that make up the top of
// the arena and accepts late (no worse than some rounds ago). Returns the best arena and its offsets; kNoLimit when
// it was stopped before there was one.
i64 climb(Packing& packer, const std::vector<i64>& size, const std::vector<i64>& pinned, std::vector<i32> order,
          Fit fit, std::vector<i64>& offset, std::uint64_t seed, const Limits& limits, const Watch& watch);

// First fit in the order of time, for buffers none of which is pinned: what Packer does in the same order, but by the
// holes that there are at that time, so that it takes a time near-linear in the buffers however many are alive. Empty
// if the watch stopped it.
std::vector<i64> first_fit_by_start(const Buffers& buffers, const std::vector<i32>& order, const Watch& watch);

}  // namespace tightship::place
