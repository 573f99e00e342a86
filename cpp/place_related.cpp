#include "place_related.h"

#include <algorithm>
#include <numeric>

namespace tightship::place {

namespace {

constexpr i64 kLookEvery = 16;  // offsets looked for, a fraction of a millisecond each

i64 align_up(i64 offset, i64 alignment) { return (offset + alignment - 1) / alignment * alignment; }

}  // namespace

RelatedPacker::RelatedPacker(const Related& problem)
    : b_(problem), from_(problem.count() + 1, 0), edges_(2 * problem.pairs.size()), placed_(problem.count(), 0) {
    for (const auto& p : b_.pairs) ++from_[p.one + 1], ++from_[p.two + 1];
    std::partial_sum(from_.begin(), from_.end(), from_.begin());
    std::vector<i64> at(from_.begin(), from_.end() - 1);
    for (const auto& p : b_.pairs) {
        edges_[at[p.one]++] = {p.two, p.low, p.high};
        edges_[at[p.two]++] = {p.one, -p.high, -p.low};
    }
    for (i64 i = 0; i < b_.count(); ++i) {
        std::sort(edges_.begin() + from_[i], edges_.begin() + from_[i + 1],
                  [](const Edge& x, const Edge& y) { return x.other < y.other; });
        if (b_.pinned[i] != kFree) pinned_.push_back(static_cast<i32>(i));
    }
}

bool RelatedPacker::meet(i32 i, i32 j) const {
    const auto last = edges_.begin() + from_[i + 1];
    const auto at = std::lower_bound(edges_.begin() + from_[i], last, j,
                                     [](const Edge& e, i32 other) { return e.other < other; });
    return at != last && at->other == j;
}

// What buffers placed so far do not allow buffer i, by where it begins.
void RelatedPacker::collect(i32 i, const i64* offset) {
    taken_.clear();
    for (i64 k = from_[i]; k < from_[i + 1]; ++k) {
        const Edge& e = edges_[k];
        if (placed_[e.other]) taken_.push_back({offset[e.other] + e.low, offset[e.other] + e.high});
    }
    std::sort(taken_.begin(), taken_.end(), [](const Range& x, const Range& y) { return x.after < y.after; });
}

i64 RelatedPacker::fit(i32 i, Fit fit, i64 from, const i64* offset) {
    collect(i, offset);
    ++work_;
    const i64 unit = b_.alignment[i];
    i64 reach = from, best = -1, least = kNoLimit;
    for (const Range& r : taken_) {
        if (r.before <= reach) continue;
        const i64 at = align_up(reach, unit);
        if (at <= r.after) {
            if (fit == Fit::first) return at;
            if (r.after - at < least) best = at, least = r.after - at;
        }
        reach = r.before;
    }
    return best < 0 ? align_up(reach, unit) : best;
}

bool RelatedPacker::is_free(i32 i, i64 at, const i64* offset) {
    collect(i, offset);
    return std::none_of(taken_.begin(), taken_.end(),
                        [at](const Range& r) { return r.after < at && at < r.before; });
}

// Places those that are pinned; returns their arena.
i64 RelatedPacker::start(i64* offset) {
    std::fill(placed_.begin(), placed_.end(), 0);
    std::fill(offset, offset + b_.count(), 0);
    i64 arena = 0;
    for (i32 i : pinned_) {
        offset[i] = b_.pinned[i];
        placed_[i] = 1;
        arena = std::max(arena, offset[i] + b_.size[i]);
    }
    return arena;
}

i64 RelatedPacker::clash() {
    std::vector<i64> offset(b_.count(), 0);
    std::fill(placed_.begin(), placed_.end(), 0);
    for (i32 i : pinned_) {
        if (!is_free(i, b_.pinned[i], offset.data())) return i;
        offset[i] = b_.pinned[i];
        placed_[i] = 1;
    }
    return -1;
}

i64 RelatedPacker::pack(const i32* order, Fit how, i64 cutoff, i64* offset, const Watch& watch) {
    i64 arena = start(offset);
    for (i64 k = 0; k < b_.count(); ++k) {
        const i32 i = order[k];
        if (passed(i)) continue;
        if (work_ % kLookEvery == 0 && watch()) return kNoLimit;
        offset[i] = fit(i, how, 0, offset);
        placed_[i] = 1;
        arena = std::max(arena, offset[i] + b_.size[i]);
        if (arena >= cutoff) return kNoLimit;
    }
    return arena;
}

i64 RelatedPacker::pack_hinted(const i32* order, const i64* hint, i64 cutoff, i64* offset) {
    i64 arena = start(offset);
    for (i64 k = 0; k < b_.count(); ++k) {
        const i32 i = order[k];
        if (passed(i)) continue;
        const bool usable = hint[i] >= 0 && hint[i] % b_.alignment[i] == 0 && hint[i] < cutoff - b_.size[i];
        offset[i] = usable && is_free(i, hint[i], offset) ? hint[i] : fit(i, Fit::first, 0, offset);
        placed_[i] = 1;
        arena = std::max(arena, offset[i] + b_.size[i]);
        if (arena >= cutoff) return kNoLimit;
    }
    return arena;
}

void RelatedPacker::fill(const i32* order, Fit how, i64 capacity, i64* offset) {
    start(offset);
    for (i64 k = 0; k < b_.count(); ++k) {
        const i32 i = order[k];
        if (b_.pinned[i] != kFree) continue;
        const i64 at = b_.size[i] ? fit(i, how, 0, offset) : 0;
        const bool fits = b_.size[i] <= capacity && at <= capacity - b_.size[i];
        offset[i] = fits ? at : -1;
        placed_[i] = fits;
    }
}

// Depth first over the buffers in the order of their offsets. In a placement in which nothing can be lowered, each
// buffer lies at the lowest offset that those below it, and the pinned ones, allow, and nothing fits whole between
// the last one placed and the next.
struct RelatedPacker::Tree {
    RelatedPacker& p;
    const TreeLimits& limits;
    std::vector<i64>& best;
    i64 arena, stop;
    const Watch& watch;
    std::vector<i64> offset;
    std::vector<i32> left;  // to place
    bool complete = true, over = false;

    i64 reaches(const std::vector<i64>& at) const {
        i64 most = 0;
        for (i64 i = 0; i < p.b_.count(); ++i) most = std::max(most, at[i] + p.b_.size[i]);
        return most;
    }

    void go(i64 last, i64 top) {
        if (left.empty()) {
            best = offset;
            arena = top;
            return;
        }
        if (p.work_ >= stop) over = true;
        over = over || watch();
        if (over) return;
        std::vector<std::pair<i64, i32>> next;
        i64 lowest_end = kNoLimit;
        for (i32 i : left) {
            const i64 at = p.fit(i, Fit::first, last, offset.data());
            if (at + p.b_.size[i] >= arena) return;  // it only moves up from here
            lowest_end = std::min(lowest_end, at + p.b_.size[i]);
            next.emplace_back(at, i);
        }
        std::sort(next.begin(), next.end(), [&](const auto& x, const auto& y) {
            return x.first != y.first ? x.first < y.first : p.b_.size[x.second] > p.b_.size[y.second];
        });
        for (const auto& [at, i] : next) {
            if (at >= lowest_end || over || arena <= limits.goal) return;
            if (at + p.b_.size[i] >= arena) continue;
            const auto place = std::find(left.begin(), left.end(), i);
            left.erase(place);
            offset[i] = at;
            p.placed_[i] = 1;
            go(at, std::max(top, at + p.b_.size[i]));
            p.placed_[i] = 0;
            left.push_back(i);
        }
    }
};

bool RelatedPacker::exhaust(std::vector<i64>& offset, const TreeLimits& limits, const Watch& watch) {
    Tree tree{*this, limits, offset, 0, work_ + limits.work, watch, offset, {}, true, false};
    tree.arena = tree.reaches(offset);
    const i64 top = start(tree.offset.data());
    for (i64 i = 0; i < b_.count(); ++i)
        if (!passed(static_cast<i32>(i))) tree.left.push_back(static_cast<i32>(i));
    if (tree.arena > limits.goal && tree.arena > top) tree.go(0, top);
    // Where a buffer may lie within another, lowering the one can be in the way of the other: nothing is proved.
    const bool plain = std::all_of(b_.pairs.begin(), b_.pairs.end(),
                                   [](const Related::Pair& p) { return p.low <= 0 && 0 <= p.high; });
    return plain && !tree.over && tree.arena > limits.goal;
}

}  // namespace tightship::place
