#include "place_related.h"

#include <algorithm>

namespace tightship::place {

RelatedPacker::RelatedPacker(const Related& problem)
    : StepPacker(problem), r_(problem), edges_(problem.count(), problem.pairs), placed_(problem.count(), 0),
      at_(problem.count(), 0) {}

void RelatedPacker::clear() { std::fill(placed_.begin(), placed_.end(), 0); }

void RelatedPacker::put(i32 i, i64 at) {
    at_[i] = at;
    placed_[i] = 1;
}

// What buffers placed so far do not allow buffer i, by where it begins.
void RelatedPacker::collect(i32 i) {
    taken_.clear();
    for (const auto* e = edges_.begin(i); e != edges_.end(i); ++e)
        if (placed_[e->other]) taken_.push_back({at_[e->other] + e->low, at_[e->other] + e->high});
    std::sort(taken_.begin(), taken_.end(), [](const Range& x, const Range& y) { return x.after < y.after; });
}

i64 RelatedPacker::find_from(i32 i, Fit fit, i64 from) {
    collect(i);
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

bool RelatedPacker::is_free(i32 i, i64 at) {
    collect(i);
    return std::none_of(taken_.begin(), taken_.end(),
                        [at](const Range& r) { return r.after < at && at < r.before; });
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
    std::vector<i32> left;  // to place
    bool over = false;

    i64 reaches(const std::vector<i64>& at) const {
        i64 most = 0;
        for (i64 i = 0; i < p.b_.count(); ++i) most = std::max(most, at[i] + p.b_.size[i]);
        return most;
    }

    // Those of `left` that may come next, by where they would lie; the first `tried` of them have been tried.
    struct Node {
        i64 top, lowest_end;
        std::vector<std::pair<i64, i32>> next;
        std::size_t tried = 0;
        i32 placed = -1;
    };
    std::vector<Node> path = {};  // on the way down

    // After a buffer placed at `last`, when those placed reach up to `top`.
    void enter(i64 last, i64 top) {
        if (left.empty()) {
            for (i64 i = 0; i < p.b_.count(); ++i) best[i] = p.placed_[i] ? p.at_[i] : 0;
            arena = top;
            return;
        }
        if (p.work_ >= stop) over = true;
        over = over || watch();
        if (over) return;
        Node node{top, kNoLimit, {}};
        for (i32 i : left) {
            const i64 at = p.find_from(i, Fit::first, last);
            if (at + p.b_.size[i] >= arena) return;  // it only moves up from here
            node.lowest_end = std::min(node.lowest_end, at + p.b_.size[i]);
            node.next.emplace_back(at, i);
        }
        std::sort(node.next.begin(), node.next.end(), [&](const auto& x, const auto& y) {
            return x.first != y.first ? x.first < y.first : p.b_.size[x.second] > p.b_.size[y.second];
        });
        path.push_back(std::move(node));
    }

    void take_back(Node& node) {
        if (node.placed < 0) return;
        p.placed_[node.placed] = 0;
        left.push_back(node.placed);
        node.placed = -1;
    }

    void go(i64 top) {
        enter(0, top);
        while (!path.empty() && !over && arena > limits.goal) {
            Node& node = path.back();
            take_back(node);
            if (node.tried == node.next.size() || node.next[node.tried].first >= node.lowest_end) {
                path.pop_back();
                continue;
            }
            const auto [at, i] = node.next[node.tried++];
            const i64 end = at + p.b_.size[i];
            if (end >= arena) continue;
            left.erase(std::find(left.begin(), left.end(), i));
            p.put(i, at);
            node.placed = i;
            enter(at, std::max(node.top, end));
        }
    }
};

bool RelatedPacker::exhaust(std::vector<i64>& offset, const TreeLimits& limits, const Watch& watch) {
    Tree tree{*this, limits, offset, 0, work_ + limits.work, watch, {}};
    tree.arena = tree.reaches(offset);
    std::vector<i64> pins(b_.count());
    const i64 top = start(pins.data());
    for (i64 i = 0; i < b_.count(); ++i)
        if (!passed(static_cast<i32>(i))) tree.left.push_back(static_cast<i32>(i));
    if (tree.arena > limits.goal && tree.arena > top) tree.go(top);
    // Where a buffer may lie within another, lowering the one can be in the way of the other: nothing is proved.
    const bool plain = std::all_of(r_.pairs.begin(), r_.pairs.end(),
                                   [](const Pair& p) { return p.low <= 0 && 0 <= p.high; });
    return plain && !tree.over && tree.arena > limits.goal;
}

}  // namespace tightship::place
