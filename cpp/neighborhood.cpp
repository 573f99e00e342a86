#include "neighborhood.h"

#include <algorithm>
#include <tuple>

namespace tightship {

namespace {
constexpr double kTwo = 0.3;                // of moves are two at once
constexpr double kCopy = 0.1, kSwap = 0.1;  // of moves, where layers are isomorphic
constexpr int kTries = 8;                   // to find two gaps that differ
}  // namespace

Neighborhood::Neighborhood(const Index& index, const Rows& groups, const IsomorphicLayers& layers,
                           double exchanges, std::uint64_t seed)
    : index_(index), groups_(groups), layers_(layers), gaps_(static_cast<i64>(index.gaps.size())),
      exchanges_(exchanges), rng_(seed) {
    for (i64 g = 0; g < gaps_; ++g)
        for (const std::uint8_t to : {kPack, kOffload})
            if (index.allows(static_cast<i32>(g), to)) others_ |= 1 << to;
}

void Neighborhood::apply(Bits& bits, Changes& changes) {
    changes.clear();
    one(bits, changes);
    if (uniform() < kTwo) one(bits, changes);
}

void Neighborhood::one(Bits& bits, Changes& changes) {
    if (layers_.families() > 0) {
        const double kind = uniform();
        if (kind < kCopy) return copy(bits, changes);
        if (kind < kCopy + kSwap) return swap(bits, changes);
        if (kind < kCopy + kSwap + exchanges_) return exchange(bits, changes);
    }
    flip(bits, changes);
}

std::uint8_t Neighborhood::other(std::uint8_t now) {
    if (others_ && uniform() < 0.4) {
        const std::uint8_t to = others_ == (1 << kPack | 1 << kOffload) ? (uniform() < 0.5 ? kPack : kOffload)
                                : others_ == 1 << kPack                 ? kPack
                                                                        : kOffload;
        return to == now ? std::uint8_t{kKeep} : to;
    }
    if (now == kStay) return kKeep;
    if (now > kDrop) return uniform() < 0.5 ? kKeep : kEvict;
    const double u = uniform();
    if (now == kKeep) return u < 0.7 ? kEvict : u < 0.85 ? kPass : kDrop;
    if (u < 0.7) return kKeep;
    const bool first = u < 0.85;
    return now == kEvict  ? (first ? kPass : kDrop)
           : now == kPass ? (first ? kEvict : kDrop)
                          : (first ? kEvict : kPass);
}

// All of n, its front, its back, or something in between.
std::pair<i64, i64> Neighborhood::part(i64 n) {
    i64 lo = 0, hi = n;
    const double kind = uniform();
    if (kind < 0.25) hi = 1 + below(hi);
    else if (kind < 0.5) lo = below(hi);
    else if (kind < 0.6) lo = below(hi), hi = lo + 1 + below(hi - lo);
    return {lo, hi};
}

void Neighborhood::flip(Bits& bits, Changes& changes) {
    const i64 n = groups_.count();
    if (n == 0 || uniform() < 0.25) {
        const i32 gap = static_cast<i32>(below(gaps_));
        return set(bits, changes, gap, other(bits[gap]));
    }
    const i64 g = below(n);
    const auto [lo, hi] = part(groups_.size(g));
    const i32* row = groups_.begin(g);
    i64 count[kDecisions] = {};
    for (i64 j = lo; j < hi; ++j) ++count[bits[row[j]]];
    const std::uint8_t most = static_cast<std::uint8_t>(std::max_element(count, count + kDecisions) - count);
    const std::uint8_t to = other(most);
    for (i64 j = lo; j < hi; ++j)
        if (bits[row[j]] != to) set(bits, changes, row[j], to);
}

// What one layer has, in some of its roles, for one other or for several.
void Neighborhood::copy(Bits& bits, Changes& changes) {
    const i64 f = below(layers_.families()), first = layers_.family[f], roles = layers_.family[f + 1] - first;
    const i64 layers = layers_.rows.size(first), from = below(layers);
    auto [lo, hi] = part(roles);
    i64 begin = below(layers), end = begin + 1;
    if (uniform() < 0.5) std::tie(begin, end) = part(layers);
    for (i64 r = first + lo; r < first + hi; ++r) {
        const i32* row = layers_.rows.begin(r);
        if (row[from] < 0) continue;
        const std::uint8_t to = bits[row[from]];
        for (i64 k = begin; k < end; ++k)
            if (row[k] >= 0 && bits[row[k]] != to) set(bits, changes, row[k], to);
    }
}

void Neighborhood::swap(Bits& bits, Changes& changes) {
    for (int tries = 0; tries < kTries; ++tries) {
        const i64 f = below(layers_.families()), first = layers_.family[f];
        const i64 r = first + below(layers_.family[f + 1] - first);
        const i32* row = layers_.rows.begin(r);
        const i32 a = row[below(layers_.rows.size(r))], b = row[below(layers_.rows.size(r))];
        if (a < 0 || b < 0 || bits[a] == bits[b]) continue;
        const std::uint8_t was = bits[a];
        set(bits, changes, a, bits[b]);
        return set(bits, changes, b, was);
    }
}

// In one layer or in several, what one role has for what another of about as many bytes has.
void Neighborhood::exchange(Bits& bits, Changes& changes) {
    const i64 f = below(layers_.families()), first = layers_.family[f], roles = layers_.family[f + 1] - first;
    const i64 layers = layers_.rows.size(first), at = below(layers);
    auto size = [&](i32 gap) { return index_.p.size[index_.gaps[gap].storage]; };
    for (int tries = 0; tries < kTries; ++tries) {
        const i32* one = layers_.rows.begin(first + below(roles));
        const i32* two = layers_.rows.begin(first + below(roles));
        if (one[at] < 0 || two[at] < 0 || bits[one[at]] == bits[two[at]]) continue;
        if (index_.allows(one[at], kStay) != index_.allows(two[at], kStay)) continue;
        const i64 a = size(one[at]), b = size(two[at]);
        if (a > 2 * b || b > 2 * a) continue;
        i64 begin = at, end = at + 1;
        if (uniform() < 0.7) std::tie(begin, end) = part(layers);
        for (i64 k = begin; k < end; ++k) {
            if (one[k] < 0 || two[k] < 0) continue;
            const std::uint8_t was = bits[one[k]], now = bits[two[k]];
            if (was == now) continue;
            set(bits, changes, one[k], now);
            set(bits, changes, two[k], was);
        }
        return;
    }
}

void Neighborhood::set(Bits& bits, Changes& changes, i32 gap, std::uint8_t to) {
    if (to != kKeep && index_.allows(gap, kStay)) to = kStay;
    if (to == bits[gap] || !index_.allows(gap, to)) return;
    changes.emplace_back(gap, bits[gap]);
    bits[gap] = to;
}

}  // namespace tightship
