#include "moves.h"

#include <algorithm>
#include <tuple>

namespace tightship {

namespace {
constexpr double kTwo = 0.3;                // of moves are two at once
constexpr double kCopy = 0.1, kSwap = 0.1;  // of moves, where there are twins
constexpr int kTries = 8;                   // to find two gaps that differ
}  // namespace

Moves::Moves(const Engine& engine, const Rows& groups, const Twins& twins, std::uint64_t seed)
    : engine_(engine), groups_(groups), twins_(twins), gaps_(static_cast<i64>(engine.gaps().size())), rng_(seed) {
    for (i64 g = 0; g < gaps_; ++g)
        for (std::uint8_t to = kPack; to < kDecisions; ++to)
            if (engine.allowed(static_cast<i32>(g), to)) others_ |= 1 << to;
}

void Moves::apply(Bits& bits, Changed& changed) {
    changed.clear();
    one(bits, changed);
    if (uniform() < kTwo) one(bits, changed);
}

void Moves::one(Bits& bits, Changed& changed) {
    if (twins_.families() > 0) {
        const double kind = uniform();
        if (kind < kCopy) return copy(bits, changed);
        if (kind < kCopy + kSwap) return swap(bits, changed);
    }
    flip(bits, changed);
}

std::uint8_t Moves::other(std::uint8_t now) {
    if (others_ && uniform() < 0.4) {
        const std::uint8_t to = others_ == (1 << kPack | 1 << kOffload) ? (uniform() < 0.5 ? kPack : kOffload)
                                : others_ == 1 << kPack                 ? kPack
                                                                        : kOffload;
        return to == now ? std::uint8_t{kKeep} : to;
    }
    if (now > kDrop) return uniform() < 0.5 ? kKeep : kEvict;
    const double u = uniform();
    if (now == kKeep) return u < 0.7 ? kEvict : u < 0.85 ? kPass : kDrop;
    if (u < 0.7) return kKeep;
    const bool first = u < 0.85;
    return now == kEvict ? (first ? kPass : kDrop) : now == kPass ? (first ? kEvict : kDrop) : (first ? kEvict : kPass);
}

// All of n, its front, its back, or something in between.
std::pair<i64, i64> Moves::part(i64 n) {
    i64 lo = 0, hi = n;
    const double kind = uniform();
    if (kind < 0.25) hi = 1 + below(hi);
    else if (kind < 0.5) lo = below(hi);
    else if (kind < 0.6) lo = below(hi), hi = lo + 1 + below(hi - lo);
    return {lo, hi};
}

void Moves::flip(Bits& bits, Changed& changed) {
    const i64 n = static_cast<i64>(groups_.start.size()) - 1;
    if (n == 0 || uniform() < 0.25) {
        const i32 gap = static_cast<i32>(below(gaps_));
        return set(bits, changed, gap, other(bits[gap]));
    }
    const i64 g = below(n);
    const auto [lo, hi] = part(groups_.size(g));
    const i32* row = groups_.begin(g);
    i64 count[kDecisions] = {};
    for (i64 j = lo; j < hi; ++j) ++count[bits[row[j]]];
    const std::uint8_t most = static_cast<std::uint8_t>(std::max_element(count, count + kDecisions) - count);
    const std::uint8_t to = other(most);
    for (i64 j = lo; j < hi; ++j)
        if (bits[row[j]] != to) set(bits, changed, row[j], to);
}

// What one layer has, in some of its roles, for one other or for several.
void Moves::copy(Bits& bits, Changed& changed) {
    const i64 f = below(twins_.families()), first = twins_.family[f], roles = twins_.family[f + 1] - first;
    const i64 layers = twins_.rows.size(first), from = below(layers);
    auto [lo, hi] = part(roles);
    i64 begin = below(layers), end = begin + 1;
    if (uniform() < 0.5) std::tie(begin, end) = part(layers);
    for (i64 r = first + lo; r < first + hi; ++r) {
        const i32* row = twins_.rows.begin(r);
        if (row[from] < 0) continue;
        const std::uint8_t to = bits[row[from]];
        for (i64 k = begin; k < end; ++k)
            if (row[k] >= 0 && bits[row[k]] != to) set(bits, changed, row[k], to);
    }
}

void Moves::swap(Bits& bits, Changed& changed) {
    for (int tries = 0; tries < kTries; ++tries) {
        const i64 f = below(twins_.families()), first = twins_.family[f];
        const i64 r = first + below(twins_.family[f + 1] - first);
        const i32* row = twins_.rows.begin(r);
        const i32 a = row[below(twins_.rows.size(r))], b = row[below(twins_.rows.size(r))];
        if (a < 0 || b < 0 || bits[a] == bits[b]) continue;
        const std::uint8_t was = bits[a];
        set(bits, changed, a, bits[b]);
        return set(bits, changed, b, was);
    }
}

void Moves::set(Bits& bits, Changed& changed, i32 gap, std::uint8_t to) {
    if (!engine_.allowed(gap, to)) return;
    changed.emplace_back(gap, bits[gap]);
    bits[gap] = to;
}

}  // namespace tightship
