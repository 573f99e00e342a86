// Depth-first search for a placement within a capacity, with conflict-directed backjumping.
//
// Buffers are placed from the bottom up: in order of (offset, rank), each on top of those it meets. If there
// is a placement, there is one of this form (lower every buffer until it rests on another one): Moffitt,
// "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023, whose
// rules of inference and dominance are used here. New is that a failed subtree says why it failed: a
// *nogood*, a set of buffers with lowest offsets that have no placement within the capacity, whatever the
// others do. Where a nogood holds without the last choices, these are taken back at once; the nogood of the
// root is a proof and its buffers cannot fit.
#pragma once

#include <atomic>
#include <functional>

#include "place.h"

namespace tightship::place {

// Buffers that hang together in time, none of them empty or pinned, and bytes that are taken already; sizes
// and offsets in units.
struct Part {
    std::vector<i32> id;           // index into the problem
    std::vector<i32> first, last;  // sections [first, last)
    std::vector<i64> size, alignment;
    std::vector<double> length;  // time alive
    std::vector<i32> twin;       // the same number for buffers that are alike in all of this
    std::vector<i32> meets,
        meets_from;  // those alive together with buffer b: meets[meets_from[b]:meets_from[b+1]]
    std::vector<i32> alive, alive_from;  // those alive in section s, in the same way
    std::vector<std::vector<Span>>
        fixed;                 // by section: bytes that are taken; empty if there are none anywhere
    std::vector<Span> around;  // those in the way of buffer b: around[around_from[b]:around_from[b+1]]
    std::vector<i32> around_from;
    i32 sections = 0;
    i64 bound = 0;  // the peak load, and all that is fixed

    i32 count() const { return static_cast<i32>(id.size()); }
    // From first, last, size, alignment and fixed: all the rest. Spans in `fixed` may come in any order.
    void index();
    // The lowest offset from `offset` on at which nothing fixed is in the way of buffer b.
    i64 clear(i32 b, i64 offset) const;
    // Fixed bytes of a section from `offset` on.
    i64 fixed_above(i32 section, i64 offset) const;

  private:
    void index_fixed();
};

// Ranks in an order; `disorder` is the share of all buffers by which one may be misplaced.
std::vector<i32> ranks(const std::vector<i32>& order, double disorder, Random& random);

enum class Outcome { found, refuted, given_up };

// Told the number of the try; true makes it give up.
using Stop = std::function<bool(i64)>;

class Tree {
  public:
    explicit Tree(const Part& part);

    // Looks for a placement within `capacity`, trying buffers of a low rank first (a permutation), for at
    // most `most` units of work (`cost` of the buffers placed).
    Outcome run(const std::vector<i32>& rank, i64 capacity, i64 most, i64 number, const Stop& stop);

    const std::vector<i64>& offset() const { return lowest_; }   // after found
    const std::vector<i32>& nogood() const { return members_; }  // after refuted: these cannot fit
    i64 needed() const { return needed_; }                       // after refuted: no arena is smaller
    i64 work() const { return work_; }                           // of the last run
    i64 nodes() const { return nodes_; }                         // buffers it placed
    // Work of placing a buffer that meets `meets` others when `left` are left: about a microsecond each.
    static i64 cost(i64 left, i64 meets) { return 1 + (left + meets) / 256; }

  private:
    struct Need {
        i32 buffer;
        i64 offset;
    };
    struct Reason {
        std::size_t from, to;  // needs_[from:to]
    };
    // What is known about a state before one of the buffers left is placed, and which of them have been
    // tried.
    struct Node {
        i64 level;  // offset and rank of the buffer placed last: the next one comes after it
        i32 rank;
        i64 least_top;  // of those left: whoever starts at or above it leaves a gap that this one would fit
                        // in
        i32 least;
        i64 most_rest;  // the fullest section: the next buffer starts no higher than capacity - most_rest
        i32 fullest;
        std::size_t begin, next, end;  // candidates_[begin:end], those from `next` on not tried
        std::size_t needs, former;     // how many of these there were before it
        i32 placed = -1;               // the one under trial, and how many of these there were before it
        std::size_t lifts = 0, drops = 0;
    };

    const Part& p_;
    i64 capacity_ = 0, most_ = 0, work_ = 0, nodes_ = 0, number_ = 0;
    i64 needed_ = 0;  // the least capacity at which a branch that was cut would not have been
    const Stop* stop_ = nullptr;
    std::vector<i32> rank_;
    std::vector<i32> elder_;  // the twin that comes just before in rank, or -1

    std::vector<char> placed_;
    std::vector<i32> left_, place_in_left_;  // those not placed, in no order
    std::vector<i64> lowest_;                // offset of the placed, lowest possible one of the others
    std::vector<i64> open_;                  // lowest possible offset of those not placed, else beyond all
    std::vector<i64> floor_, rest_;          // by section: lowest possible offset, bytes not placed
    std::vector<i32> witness_;               // one not placed whose lowest offset is the floor
    std::vector<i32> raised_;                // marks of the current placement
    i32 mark_ = 0;
    i32 clash_ = 0;  // the section that overflowed

    struct Lift {
        i32 at;
        i64 was;
    };
    struct Drop {
        i32 section, witness;
        i64 floor;
    };
    std::vector<Lift> lifts_;
    std::vector<Drop> drops_;

    std::vector<Reason> reason_;  // why a buffer cannot be the next one (from == to: not known)
    std::vector<Need> needs_;
    std::vector<std::pair<i32, Reason>> former_;  // reasons that were overwritten
    std::vector<std::pair<i64, i32>> candidates_;
    std::vector<Node> path_;    // the nodes on the way down
    std::vector<i64> need_;     // the nogood being made: lowest offset by buffer, kAbsent if it is not in it
    std::vector<i32> members_;  // the buffers in it

    void reset(const std::vector<i32>& rank);
    Outcome search();
    void enter(i64 level, i32 rank);
    void leave();
    void fail();
    void look(Node& node) const;
    void look_for_fullest(Node& node) const;
    void remember(i32 b);
    bool place(i32 b, i64 offset);
    bool settle(i32 from, i32 to, i64 top, i32 b);
    void take_back(i32 b, std::size_t lifts, std::size_t drops);
    void blame_section();
    void blame_node(const Node& node);
    bool skipped_for_section(const Node& node, i32 b) const;
    void add(i32 b, i64 offset);
    bool over(i32 b);
};

}  // namespace tightship::place
