#include "place_steps.h"

#include <algorithm>
#include <numeric>

namespace tightship::place {

namespace {

constexpr i64 kLookEvery = 16;  // offsets looked for, a fraction of a millisecond each

}  // namespace

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
    const Edge* at = std::lower_bound(begin(i), end(i), j, [](const Edge& e, i32 other) { return e.other < other; });
    return at != end(i) && at->other == j;
}

StepPacker::StepPacker(const Sizes& sizes) : b_(sizes) {
    for (i64 i = 0; i < b_.count(); ++i)
        if (b_.pinned[i] != kFree) pinned_.push_back(static_cast<i32>(i));
}

i64 StepPacker::start(i64* offset) {
    clear();
    std::fill(offset, offset + b_.count(), 0);
    i64 arena = 0;
    for (i32 i : pinned_) {
        offset[i] = b_.pinned[i];
        put(i, offset[i]);
        arena = std::max(arena, offset[i] + b_.size[i]);
    }
    return arena;
}

i64 StepPacker::clash() {
    clear();
    for (i32 i : pinned_) {
        if (!is_free(i, b_.pinned[i])) return i;
        put(i, b_.pinned[i]);
    }
    return -1;
}

template <class Find>
i64 StepPacker::pack_by(const i32* order, i64 cutoff, i64* offset, const Watch& watch, Find find) {
    i64 arena = start(offset);
    bool stopped = false;
    for (i64 k = 0; k < b_.count(); ++k) {
        const i32 i = order[k];
        if (passed(i)) continue;
        stopped = stopped || (work_ % kLookEvery == 0 && watch());
        offset[i] = stopped ? align_up(arena, b_.alignment[i]) : find(i);  // the rest in bytes of their own
        if (!stopped) put(i, offset[i]);
        arena = std::max(arena, offset[i] + b_.size[i]);
        if (arena >= cutoff) return kNoLimit;
    }
    return arena;
}

i64 StepPacker::pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch) {
    return pack_by(order, cutoff, offset, watch, [&](i32 i) { return find(i, fit); });
}

i64 StepPacker::pack_hinted(const i32* order, const i64* hint, i64 cutoff, i64* offset, const Watch& watch) {
    return pack_by(order, cutoff, offset, watch, [&](i32 i) {
        const bool usable = hint[i] >= 0 && hint[i] % b_.alignment[i] == 0 && hint[i] < cutoff - b_.size[i];
        return usable && is_free(i, hint[i]) ? hint[i] : find(i, Fit::first);
    });
}

void StepPacker::fill(const i32* order, Fit fit, i64 capacity, i64* offset, const Watch& watch) {
    start(offset);
    bool stopped = false;
    for (i64 k = 0; k < b_.count(); ++k) {
        const i32 i = order[k];
        if (b_.pinned[i] != kFree) continue;
        stopped = stopped || (work_ % kLookEvery == 0 && watch());
        const i64 at = b_.size[i] && !stopped ? find(i, fit) : 0;
        const bool fits = !stopped && b_.size[i] <= capacity && at <= capacity - b_.size[i];
        offset[i] = fits ? at : -1;
        if (fits && b_.size[i]) put(i, at);
    }
}

}  // namespace tightship::place
