#include "place_parts.h"

#include <algorithm>

namespace tightship::place {

PartPacker::PartPacker(const Parts& problem)
    : StepPacker(problem), p_(problem), conflicts_(problem.count(), problem.conflicts), placed_(problem.count(), 0),
      at_(problem.count(), 0), space_(problem.part.sections) {
    for (i64 size : p_.part.size)
        if (size) least_ = std::min(least_, size);
}

bool PartPacker::meet(i32 i, i32 j) const {
    const Buffers& b = p_.part;
    for (i64 k = p_.from[i]; k < p_.from[i + 1]; ++k)
        for (i64 m = p_.from[j]; m < p_.from[j + 1]; ++m)
            if (b.first[k] < b.last[m] && b.first[m] < b.last[k]) return true;
    return conflicts_.has(i, j);
}

void PartPacker::clear() {
    space_.clear();
    std::fill(placed_.begin(), placed_.end(), 0);
}

void PartPacker::put(i32 i, i64 at) {
    at_[i] = at;
    placed_[i] = 1;
    for (i64 k = p_.from[i]; k < p_.from[i + 1]; ++k) {
        const i64 start = at + p_.low[k];
        if (p_.part.size[k]) space_.take(p_.part.first[k], p_.part.last[k], start, start + p_.part.size[k], least_);
    }
}

void PartPacker::collect(i32 i) {
    taken_.clear();
    for (const auto* e = conflicts_.begin(i); e != conflicts_.end(i); ++e)
        if (placed_[e->other]) taken_.push_back({at_[e->other] + e->low, at_[e->other] + e->high});
    std::sort(taken_.begin(), taken_.end(), [](const Span& x, const Span& y) { return x.start < y.start; });
    std::size_t kept = 0;
    for (const Span& span : taken_) {
        if (kept && span.start < taken_[kept - 1].end)
            taken_[kept - 1].end = std::max(taken_[kept - 1].end, span.end);
        else
            taken_[kept++] = span;
    }
    taken_.resize(kept);
}

void PartPacker::open(i32 i) {
    cursors_.clear();
    collect(i);
    if (!taken_.empty()) cursors_.push_back({taken_.data(), taken_.data() + taken_.size(), 0, 0});
    for (i64 k = p_.from[i]; k < p_.from[i + 1]; ++k) {
        const i64 low = p_.low[k], high = low + p_.part.size[k];
        if (low == high) continue;
        space_.each(p_.part.first[k], p_.part.last[k], [&](const std::vector<Span>& set) {
            if (!set.empty()) cursors_.push_back({set.data(), set.data() + set.size(), low, high});
        });
    }
}

// A span [start, end) is in the way of a buffer that begins in (start - high, end - low).
i64 PartPacker::next_free(i64 at, i64 alignment) {
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

i64 PartPacker::last_free() const {
    i64 last = kNoLimit;
    for (const Cursor& c : cursors_)
        if (c.at != c.end) last = std::min(last, c.at->start - c.high);
    return last;
}

bool PartPacker::is_free(i32 i, i64 at) {
    open(i);
    return next_free(at, 1) == at;
}

i64 PartPacker::find(i32 i, Fit fit) {
    ++work_;
    open(i);
    i64 best = -1, least = kNoLimit;
    for (i64 at = 0;;) {
        at = next_free(at, p_.alignment[i]);
        const i64 last = last_free();
        if (fit == Fit::first || last == kNoLimit) return best < 0 ? at : best;
        if (last - at < least) best = at, least = last - at;
        if (!least) return best;
        at = last + 1;
    }
}

}  // namespace tightship::place
