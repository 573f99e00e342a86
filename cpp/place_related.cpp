#include "place_related.h"

#include <algorithm>
#include <numeric>

namespace tightship::place {

Edges::Edges(i64 count, const std::vector<Pair>& pairs) : from_(count + 1, 0), edges_(2 * pairs.size()) {
    for (const Pair& p : pairs) ++from_[p.one + 1], ++from_[p.two + 1];
    std::partial_sum(from_.begin(), from_.end(), from_.begin());
    std::vector<i64> at(from_.begin(), from_.end() - 1);
    for (const Pair& p : pairs) {
        edges_[at[p.one]++] = {p.two, p.low, p.high};
        edges_[at[p.two]++] = {p.one, -p.high, -p.low};
    }
    for (i64 i = 0; i < count; ++i)
        std::sort(edges_.begin() + from_[i], edges_.begin() + from_[i + 1],
                  [](const Edge& x, const Edge& y) { return x.other < y.other; });
}

bool Edges::has(i32 i, i32 j) const {
    const Edge* at =
        std::lower_bound(begin(i), end(i), j, [](const Edge& e, i32 other) { return e.other < other; });
    return at != end(i) && at->other == j;
}

RelatedPacker::RelatedPacker(const Related& problem)
    : Packing(problem), r_(problem), conflicts_(problem.count(), problem.conflicts),
      placed_(problem.count(), 0), at_(problem.count(), 0), space_(problem.part.sections) {
    for (i64 size : r_.part.size)
        if (size) least_ = std::min(least_, size);
}

bool RelatedPacker::meet(i32 i, i32 j) const {
    const Buffers& b = r_.part;
    for (i64 k = r_.from[i]; k < r_.from[i + 1]; ++k)
        for (i64 m = r_.from[j]; m < r_.from[j + 1]; ++m)
            if (b.first[k] < b.last[m] && b.first[m] < b.last[k]) return true;
    return conflicts_.has(i, j);
}

void RelatedPacker::clear(const i32*) {
    space_.clear();
    std::fill(placed_.begin(), placed_.end(), 0);
}

void RelatedPacker::put(i32 i, i64 at) {
    at_[i] = at;
    placed_[i] = 1;
    for (i64 k = r_.from[i]; k < r_.from[i + 1]; ++k) {
        const i64 start = at + r_.low[k];
        if (r_.part.size[k])
            space_.take(r_.part.first[k], r_.part.last[k], start, start + r_.part.size[k], least_);
    }
}

void RelatedPacker::open(i32 i) {
    cursors_.clear();
    taken_.clear();
    for (const auto* e = conflicts_.begin(i); e != conflicts_.end(i); ++e)
        if (placed_[e->other] && e->low < e->high)
            taken_.push_back({at_[e->other] + e->low, at_[e->other] + e->high});
    join_all(taken_, false);
    if (!taken_.empty()) cursors_.push_back({taken_.data(), taken_.data() + taken_.size(), 0, 0});
    for (i64 k = r_.from[i]; k < r_.from[i + 1]; ++k) {
        const i64 low = r_.low[k], high = low + r_.part.size[k];
        if (low == high) continue;
        space_.each(r_.part.first[k], r_.part.last[k], [&](const std::vector<Span>& set) {
            if (!set.empty()) cursors_.push_back({set.data(), set.data() + set.size(), low, high});
        });
    }
}

// A span [start, end) is in the way of a buffer that begins in (start - high, end - low).
i64 RelatedPacker::next_free(i64 at, i64 alignment) {
    at = align_up(at, alignment);
    std::size_t steady = 0;  // cursors in a row that had nothing to say against `at`
    for (std::size_t k = 0; steady < cursors_.size(); k = k + 1 < cursors_.size() ? k + 1 : 0) {
        Cursor& c = cursors_[k];
        c.at = first_above(c.at, c.end, at + c.low);
        ++steady;
        if (c.at == c.end || c.at->start - c.high >= at) continue;
        at = align_up(c.at->end - c.low, alignment);
        steady = 0;
    }
    return at;
}

i64 RelatedPacker::last_free() const {
    i64 last = kNoLimit;
    for (const Cursor& c : cursors_)
        if (c.at != c.end) last = std::min(last, c.at->start - c.high);
    return last;
}

bool RelatedPacker::is_free(i32 i, i64 at) {
    open(i);
    return next_free(at, 1) == at;
}

i64 RelatedPacker::find_from(i32 i, Fit fit, i64 from) {
    ++work_;
    open(i);
    i64 best = -1, least = kNoLimit;
    for (i64 at = from;;) {
        at = next_free(at, r_.alignment[i]);
        const i64 last = last_free();
        if (fit == Fit::first || last == kNoLimit) return best < 0 ? at : best;
        if (last - at < least) best = at, least = last - at;
        if (!least) return best;
        at = last + 1;
    }
}

// Depth first over the buffers in the order of their offsets. In a placement in which nothing can be lowered,
// each buffer lies at the lowest offset that those below it, and the pinned ones, allow, and nothing fits
// whole between the last one placed and the next.
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
        for (i64 i = 0; i < p.sizes_.count(); ++i) most = std::max(most, at[i] + p.sizes_.size[i]);
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
            for (i64 i = 0; i < p.sizes_.count(); ++i) best[i] = p.placed_[i] ? p.at_[i] : 0;
            arena = top;
            return;
        }
        if (p.work_ >= stop) over = true;
        over = over || watch();
        if (over) return;
        Node node{top, kNoLimit, {}};
        for (i32 i : left) {
            const i64 at = p.find_from(i, Fit::first, last);
            if (at + p.sizes_.size[i] >= arena) return;  // it only moves up from here
            node.lowest_end = std::min(node.lowest_end, at + p.sizes_.size[i]);
            node.next.emplace_back(at, i);
        }
        std::sort(node.next.begin(), node.next.end(), [&](const auto& x, const auto& y) {
            return x.first != y.first ? x.first < y.first : p.sizes_.size[x.second] > p.sizes_.size[y.second];
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
            const i64 end = at + p.sizes_.size[i];
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
    std::vector<i64> pins(sizes_.count());
    const i64 top = start(nullptr, pins.data());
    for (i64 i = 0; i < sizes_.count(); ++i)
        if (!passed(static_cast<i32>(i))) tree.left.push_back(static_cast<i32>(i));
    if (tree.arena > limits.goal && tree.arena > top) tree.go(top);
    // Where a buffer may lie within another, lowering the one can be in the way of the other: nothing is
    // proved.
    const bool plain = std::all_of(r_.conflicts.begin(), r_.conflicts.end(),
                                   [](const Pair& p) { return p.low <= 0 && 0 <= p.high; });
    return plain && !tree.over && tree.arena > limits.goal;
}

}  // namespace tightship::place
