#include "place.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace tightship::place {

namespace {

constexpr i64 kLookEvery = 16;  // buffers placed, most of them within microseconds

// Joins [start, end) with the spans of `set` that it meets or leaves a hole smaller than `least` to.
void join(std::vector<Span>& set, i64 start, i64 end, i64 least) {
    const i64 reach = least - 1;
    if (start <= reach) start = 0;
    auto from = std::lower_bound(set.begin(), set.end(), start - reach,
                                 [](const Span& s, i64 offset) { return s.end < offset; });
    auto to = from;
    while (to != set.end() && to->start - reach <= end) ++to;
    if (from == to) {
        if (set.empty()) set.reserve(4);
        set.insert(set.empty() ? set.end() : from, Span{start, end});
        return;
    }
    from->start = std::min(from->start, start);
    from->end = std::max((to - 1)->end, end);
    set.erase(from + 1, to);
}

// Buffers by a time of theirs, which is kept beside them: a fourth of the time that looking it up takes.
std::vector<std::pair<i64, i32>> by_time(const i64* time, i64 count) {
    std::vector<std::pair<i64, i32>> order;
    order.reserve(count);
    for (i64 i = 0; i < count; ++i) order.emplace_back(time[i], static_cast<i32>(i));
    if (!std::is_sorted(order.begin(), order.end())) std::sort(order.begin(), order.end());
    return order;
}

}  // namespace

Buffers make_buffers(const i64* lower, const i64* upper, const i64* size, const i64* alignment,
                     const i64* pinned, i64 count, const std::function<void()>& between) {
    Buffers b;
    b.size.assign(size, size + count);
    b.alignment.assign(count, 1);
    if (alignment) b.alignment.assign(alignment, alignment + count);
    b.pinned.assign(count, kFree);
    if (pinned) b.pinned.assign(pinned, pinned + count);
    b.first.resize(count);
    b.last.resize(count);
    b.length.resize(count);
    for (i64 i = 0; i < count; ++i)
        b.length[i] = static_cast<double>(upper[i]) - static_cast<double>(lower[i]);
    between();
    const auto starts = by_time(lower, count);
    between();
    const auto ends = by_time(upper, count);
    between();
    // A section ends where a buffer starts after another has ended: the set alive just before was maximal.
    i32 section = 0;
    bool ended = false;
    i64 e = 0;
    for (const auto& [time, s] : starts) {
        for (; e < count && ends[e].first <= time; ++e) {
            b.last[ends[e].second] = section + 1;
            ended = true;
        }
        section += ended;
        ended = false;
        b.first[s] = section;
    }
    for (; e < count; ++e) b.last[ends[e].second] = section + 1;
    b.sections = section + 1;
    between();
    return b;
}

i64 peak_load(const Buffers& b) {
    std::vector<i64> change(b.sections + 1, 0);
    for (i64 i = 0; i < b.count(); ++i) {
        change[b.first[i]] += b.size[i];
        change[b.last[i]] -= b.size[i];
    }
    i64 load = 0, peak = 0;
    for (i64 c : change) peak = std::max(peak, load += c);
    return peak;
}

void join_all(std::vector<Span>& spans, bool touching) {
    std::sort(spans.begin(), spans.end(), [](const Span& x, const Span& y) { return x.start < y.start; });
    std::size_t kept = 0;
    for (const Span& span : spans) {
        if (kept && span.start < spans[kept - 1].end + touching)
            spans[kept - 1].end = std::max(spans[kept - 1].end, span.end);
        else spans[kept++] = span;
    }
    spans.resize(kept);
}

Space::Space(i32 sections)
    : leaves_(static_cast<i32>(std::bit_ceil(static_cast<std::uint32_t>(std::max(sections, 1))))),
      nodes_(2 * leaves_) {}

void Space::clear() {
    for (i32 node : used_) {
        nodes_[node].covering.clear();
        nodes_[node].touching.clear();
    }
    used_.clear();
}

void Space::take(i32 first, i32 last, i64 start, i64 end, i64 least) {
    const auto touch = [&](i32 node) {
        if (nodes_[node].touching.empty()) used_.push_back(node);
        join(nodes_[node].touching, start, end, least);
    };
    visit(
        first, last,
        [&](i32 node) {
            join(nodes_[node].covering, start, end, least);
            touch(node);
        },
        touch);
}

void Space::open(i32 first, i32 last) {
    cursors_.clear();
    open_also(first, last);
}

void Space::open_also(i32 first, i32 last) {
    each(first, last, [&](const std::vector<Span>& set) {
        if (!set.empty()) cursors_.push_back({set.data(), set.data() + set.size()});
    });
}

i64 Space::next_free(i64 offset, i64 alignment) {
    offset = align_up(offset, alignment);
    std::size_t steady = 0;  // cursors in a row that had nothing to say against `offset`
    for (std::size_t k = 0; steady < cursors_.size();) {
        Cursor& c = cursors_[k];
        c.at = first_above(c.at, c.end, offset);
        if (c.at == c.end) {  // nothing taken above: never asked again
            c = cursors_.back();
            cursors_.pop_back();
            if (k == cursors_.size()) k = 0;
            steady = 0;  // the order of the others has changed
            continue;
        }
        if (c.at->start <= offset) {
            offset = align_up(c.at->end, alignment);
            steady = 0;
        } else {
            ++steady;
        }
        if (++k == cursors_.size()) k = 0;
    }
    return offset;
}

i64 Space::next_taken() const {
    i64 offset = kNoLimit;
    for (const Cursor& c : cursors_) offset = std::min(offset, c.at->start);
    return offset;
}

bool Space::is_free(i32 first, i32 last, i64 start, i64 end) {
    open(first, last);
    return next_free(start, 1) == start && next_taken() >= end;
}

i64 Space::first_fit(i32 first, i32 last, i64 size, i64 alignment) {
    open(first, last);
    for (i64 offset = 0;;) {
        offset = next_free(offset, alignment);
        const i64 hole = next_taken();
        if (hole - offset >= size) return offset;
        offset = hole;
    }
}

i64 Space::best_fit(i32 first, i32 last, i64 size, i64 alignment) {
    open(first, last);
    return smallest_hole(size, alignment);
}

i64 Space::best_fit_all(const std::vector<Span>& residences, i64 size, i64 alignment) {
    cursors_.clear();
    for (const Span& r : residences) open_also(static_cast<i32>(r.start), static_cast<i32>(r.end));
    return smallest_hole(size, alignment);
}

i64 Space::smallest_hole(i64 size, i64 alignment) {
    i64 best = -1, least = kNoLimit;
    for (i64 offset = 0;;) {
        offset = next_free(offset, alignment);
        const i64 hole = next_taken();
        if (hole == kNoLimit) return best < 0 ? offset : best;
        const i64 room = hole - offset;
        if (room >= size && room < least) {
            best = offset;
            least = room;
            if (room == size) return best;
        }
        offset = hole;
    }
}

Packing::Packing(const Sizes& sizes) : sizes_(sizes) {
    for (i64 i = 0; i < sizes_.count(); ++i)
        if (sizes_.pinned[i] != kFree) pinned_.push_back(static_cast<i32>(i));
}

i64 Packing::start(const i32* order, i64* offset) {
    clear(order);
    std::fill(offset, offset + sizes_.count(), 0);
    i64 arena = 0;
    for (i32 i : pinned_) {
        offset[i] = sizes_.pinned[i];
        put(i, offset[i]);
        arena = std::max(arena, offset[i] + sizes_.size[i]);
    }
    return arena;
}

i64 Packing::clash() {
    clear(nullptr);
    for (i32 i : pinned_) {
        if (!is_free(i, sizes_.pinned[i])) return i;
        put(i, sizes_.pinned[i]);
    }
    return -1;
}

template <class Find>
i64 Packing::pack_by(const i32* order, i64 cutoff, i64* offset, const Watch& watch, Find find) {
    i64 arena = start(order, offset);
    bool stopped = false;
    for (i64 k = 0; k < sizes_.count(); ++k) {
        const i32 i = order[k];
        if (passed(i)) continue;
        stopped = stopped || (work_ % kLookEvery == 0 && watch());
        offset[i] =
            stopped ? align_up(arena, sizes_.alignment[i]) : find(i);  // the rest in bytes of their own
        if (!stopped) put(i, offset[i]);
        arena = std::max(arena, offset[i] + sizes_.size[i]);
        if (arena >= cutoff) return kNoLimit;
    }
    return arena;
}

i64 Packing::pack(const i32* order, Fit fit, i64 cutoff, i64* offset, const Watch& watch) {
    return pack_by(order, cutoff, offset, watch, [&](i32 i) { return find(i, fit); });
}

i64 Packing::pack_hinted(const i32* order, const i64* hint, i64 cutoff, i64* offset, const Watch& watch) {
    return pack_by(order, cutoff, offset, watch, [&](i32 i) {
        const bool usable =
            hint[i] >= 0 && hint[i] % sizes_.alignment[i] == 0 && hint[i] < cutoff - sizes_.size[i];
        return usable && is_free(i, hint[i]) ? hint[i] : find(i, Fit::first);
    });
}

void Packing::fill(const i32* order, Fit fit, i64 capacity, i64* offset, const Watch& watch) {
    start(order, offset);
    bool stopped = false;
    for (i64 k = 0; k < sizes_.count(); ++k) {
        const i32 i = order[k];
        if (sizes_.pinned[i] != kFree) continue;
        stopped = stopped || (work_ % kLookEvery == 0 && watch());
        const i64 at = sizes_.size[i] && !stopped ? find(i, fit) : 0;
        const bool fits = !stopped && sizes_.size[i] <= capacity && at <= capacity - sizes_.size[i];
        offset[i] = fits ? at : -1;
        if (fits && sizes_.size[i]) put(i, at);
    }
}

void Packer::clear(const i32* order) {
    space_.clear();
    i64 least = order ? kNoLimit / 2 : 1;
    for (i64 k = order ? b_.count() : 0; k-- > 0;) {
        least_[order[k]] = least;
        if (!passed(order[k])) least = std::min(least, b_.size[order[k]]);
    }
    for (i64 i = 0; i < b_.count(); ++i)
        if (b_.pinned[i] != kFree) least_[i] = least;
}

void Packer::put(i32 i, i64 at) {
    if (b_.size[i]) space_.take(b_.first[i], b_.last[i], at, at + b_.size[i], least_[i]);
}

bool Packer::is_free(i32 i, i64 at) {
    return !b_.size[i] || space_.is_free(b_.first[i], b_.last[i], at, at + b_.size[i]);
}

i64 Packer::find(i32 i, Fit fit) {
    ++work_;
    const auto place = fit == Fit::best ? &Space::best_fit : &Space::first_fit;
    return (space_.*place)(b_.first[i], b_.last[i], b_.size[i], b_.alignment[i]);
}

ByFirst::ByFirst(const Buffers& b, i32 sign)
    : b_(b), order_(b.count()), place_(b.count()),
      leaves_(std::bit_ceil(static_cast<std::size_t>(std::max<i64>(b.count(), 1)))) {
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](i32 x, i32 y) { return b.first[x] < b.first[y]; });
    least_.assign(2 * leaves_, std::numeric_limits<i32>::max());
    for (std::size_t k = 0; k < order_.size(); ++k) {
        place_[order_[k]] = k;
        least_[leaves_ + k] = sign * b.last[order_[k]];
    }
    for (std::size_t k = leaves_; --k;) least_[k] = std::min(least_[2 * k], least_[2 * k + 1]);
}

void ByFirst::remove(i32 i) {
    std::size_t k = leaves_ + place_[i];
    least_[k] = std::numeric_limits<i32>::max();
    while (k /= 2) least_[k] = std::min(least_[2 * k], least_[2 * k + 1]);
}

}  // namespace tightship::place
