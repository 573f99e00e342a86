// Placement: an offset for every buffer such that buffers alive at the same time share no byte.
//
// Minimized: the arena, max(offset + size). Time is reduced to *sections*, the maximal sets of buffers alive
// together in the order of time; two buffers are alive together exactly when their section ranges meet.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "watch.h"

namespace tightship::place {

constexpr i64 kNoLimit = std::numeric_limits<i64>::max();
constexpr i64 kFree = -1;  // Sizes::pinned of a buffer that may go anywhere

inline i64 align_up(i64 offset, i64 alignment) {
    return alignment == 1 ? offset : (offset + alignment - 1) / alignment * alignment;
}

struct Sizes {
    std::vector<i64> size, alignment, pinned;
    i64 count() const { return static_cast<i64>(size.size()); }
};

struct Buffers : Sizes {
    std::vector<i32> first, last;  // sections [first, last)
    std::vector<double> length;    // time alive
    i32 sections = 0;
};

// Flat arrays of `count`; alignment and pinned may be null (1 and kFree). `between` is called between the
// parts of the work, which of a million buffers take a tenth of a second each.
Buffers make_buffers(const i64* lower, const i64* upper, const i64* size, const i64* alignment,
                     const i64* pinned, i64 count, const std::function<void()>& between);

// The most bytes alive at one time: no placement spans less.
i64 peak_load(const Buffers& buffers);

struct Span {
    i64 start, end;
};

// Sorts spans and joins those that overlap, and with `touching` those that only meet.
void join_all(std::vector<Span>& spans, bool touching);

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
// spans: `covering`, bytes of buffers that were put at this node, and `touching`, bytes of every buffer that
// was put here or below. A query therefore reads O(log sections) sets, and the sets stay short because spans
// that meet are joined.
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
    // The same for something that is there several times, in spans of sections.
    i64 best_fit_all(const std::vector<Span>& residences, i64 size, i64 alignment);
    // Calls `use` on sets of spans that are, together, all that is taken in sections [first, last).
    template <class Use> void each(i32 first, i32 last, Use use) const {
        visit(
            first, last, [&](i32 node) { use(nodes_[node].touching); },
            [&](i32 node) { use(nodes_[node].covering); });
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

    template <class Whole, class Partial> void visit(i32 first, i32 last, Whole whole, Partial partial) const;
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

// Buffers found by the sections that they are alive in: in the order of their first one, a tree of the least
// key of each. `sign`: the key is the last section (1), or the last section negated (-1).
class ByFirst {
  public:
    ByFirst(const Buffers& buffers, i32 sign);
    void remove(i32 i);
    // Calls `use` on those not removed that begin in sections [first, last) and have a key of at most `most`.
    template <class Use> void visit(i32 first, i32 last, i32 most, Use use) const {
        visit_below(1, 0, leaves_, starts(first), starts(last), most, use);
    }

  private:
    const Buffers& b_;
    std::vector<i32> order_, least_;  // least_: by node
    std::vector<std::size_t> place_;
    std::size_t leaves_;

    std::size_t starts(i32 section) const {
        const auto at =
            std::partition_point(order_.begin(), order_.end(), [&](i32 i) { return b_.first[i] < section; });
        return static_cast<std::size_t>(at - order_.begin());
    }
    template <class Use> void visit_below(std::size_t node, std::size_t from, std::size_t to,
                                          std::size_t since, std::size_t until, i32 most, Use& use) const {
        if (to <= since || until <= from || least_[node] > most) return;
        if (node >= leaves_) return use(order_[from]);
        const std::size_t middle = (from + to) / 2;
        visit_below(2 * node, from, middle, since, until, most, use);
        visit_below(2 * node + 1, middle, to, since, until, most, use);
    }
};

enum class Fit { first, best };

// Places buffers one after the other; keeps its working memory from one packing to the next.
class Packing {
  public:
    explicit Packing(const Sizes& sizes);
    virtual ~Packing() = default;

    // Pinned buffers first, then the others in `order` (a permutation; pinned and empty ones in it are passed
    // over). Gives up, with kNoLimit, as soon as the arena would be `cutoff` or more. When the watch says so,
    // the others get bytes of their own, or it gives up.
    i64 pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch);
    // As pack, by first fit, but buffers lie where `hint` says (-1: nowhere) if nothing is there.
    i64 pack_hinted(const i32* order, const i64* hint, i64 cutoff, i64* offset, const Watch& watch);
    // As pack, but buffers that would end beyond `capacity`, and all that the watch left no time for, are
    // left out, with offset -1.
    void fill(const i32* order, Fit fit, i64 capacity, i64* offset, const Watch& watch);
    // A pinned buffer that shares bytes with another one alive at the same time; -1: none.
    i64 clash();
    // Whether two buffers may be in one another's way.
    virtual bool meet(i32 i, i32 j) const = 0;
    // Buffers placed so far.
    i64 work() const { return work_; }

  protected:
    const Sizes& sizes_;
    i64 work_ = 0;

    // Forgets what was put; `order` (or null) is that in which buffers will be.
    virtual void clear(const i32* order) = 0;
    virtual void put(i32 i, i64 at) = 0;
    virtual bool is_free(i32 i, i64 at) = 0;
    // Where buffer i is to lie among those that were put.
    virtual i64 find(i32 i, Fit fit) = 0;

    bool passed(i32 i) const { return sizes_.pinned[i] != kFree || sizes_.size[i] == 0; }
    // Puts those that are pinned; returns their arena.
    i64 start(const i32* order, i64* offset);

  private:
    std::vector<i32> pinned_;

    template <class Find>
    i64 pack_by(const i32* order, i64 cutoff, i64* offset, const Watch& watch, Find find);
};

// Buffers alive in whole live ranges.
class Packer final : public Packing {
  public:
    explicit Packer(const Buffers& buffers)
        : Packing(buffers), b_(buffers), space_(buffers.sections), least_(buffers.count()) {}

    bool meet(i32 i, i32 j) const override { return b_.first[i] < b_.last[j] && b_.first[j] < b_.last[i]; }

  protected:
    void clear(const i32* order) override;
    void put(i32 i, i64 at) override;
    bool is_free(i32 i, i64 at) override;
    i64 find(i32 i, Fit fit) override;

  private:
    const Buffers& b_;
    Space space_;
    std::vector<i64> least_;  // by buffer: the smallest size of those that are placed after it
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

// Hill climbing over orders, starting from `order`: changes the order around the buffers that make up the top
// of the arena and accepts late (no worse than some rounds ago). Returns the best arena and its offsets;
// kNoLimit when it was stopped before there was one.
i64 climb(Packing& packer, const Sizes& sizes, std::vector<i32> order, Fit fit, std::vector<i64>& offset,
          std::uint64_t seed, const Limits& limits, const Watch& watch);

// First fit in the order of time, for buffers none of which is pinned: what Packer does in the same order,
// but by the holes that there are at that time, so that it takes a time near-linear in the buffers however
// many are alive. Empty if the watch stopped it.
std::vector<i64> first_fit_by_start(const Buffers& buffers, const std::vector<i32>& order,
                                    const Watch& watch);

enum class Sky { longest, largest, snug };

// The order in which a skyline is built: at its lowest stretch, the buffer that is alive within that stretch
// and is the longest-lived (Sekiyama, Imai, Negishi, Raymond 2018), the largest (size times time), or leaves
// the least of the stretch beside it where it touches an end of it. Where none is, the stretch is raised to
// its lower neighbor. Pins and alignments are not looked at. Empty if the watch stopped it.
std::vector<i32> skyline(const Buffers& buffers, Sky rule, const Watch& watch);

// Sets of buffers, each set at one offset and as large as its entry of `size`: set after set in this order,
// each into the smallest hole that all its members, each in its own live range, have in common; else above
// what is there. `set` is that of every buffer. Returns offsets by set; empty if the watch stopped it.
std::vector<i64> pack_sets(const Buffers& buffers, const std::vector<i32>& set, const std::vector<i64>& size,
                           const std::vector<i64>& alignment, const std::vector<i32>& order,
                           const Watch& watch);

// Anytime exact placement: many short tree searches, each with another preference and perhaps another
// capacity.
//
// The time such a search takes has a heavy tail: among a handful of preferences one often succeeds at once
// where another does not in hours. So tries are short at first, all preferences get their turn, and what was
// tried is tried again with some disorder and more patience. A try that runs to its end without success
// proves a bound.
struct ExactLimits {
    i64 work = 0;         // units of Tree::cost
    i64 goal = 0;         // an arena this small is enough
    bool wanted = false;  // there is reason to think that the goal can be reached
    int threads = 1;      // the answer does not depend on it, unless the watch ended the search
    std::uint64_t seed = 0;
};

struct Exact {
    std::vector<i64> offset;
    i64 arena = 0, bound = 0;
    i64 work = 0, nodes = 0;  // units of Tree::cost, and buffers placed; of the tries that count
    std::vector<i32>
        clash;  // buffers that cannot all be placed below `bound` (empty: the peak load is the bound)
};

// The best placement found, starting from `offset`, which is one. What `clash` proves, it proves with
// all pinned buffers.
Exact place_exactly(const Buffers& buffers, std::vector<i64> offset, const ExactLimits& limits,
                    const Watch& watch);

struct WindowLimits {
    i64 work = 0;  // units of Tree::cost
    i64 goal = 0;  // an arena this small is enough
    std::uint64_t seed = 0;
};

struct Windows {
    std::vector<i64> offset;
    i64 work = 0, nodes = 0;  // units of Tree::cost, and buffers placed
};

// Offsets no worse than those given, which are a placement. Aims at arenas below the present one; every
// buffer that reaches above the aim is freed together with others around it, and all of them are placed anew
// below the aim between those that stay.
Windows place_in_windows(const Buffers& buffers, std::vector<i64> offset, const WindowLimits& limits,
                         const Watch& watch);

}  // namespace tightship::place
