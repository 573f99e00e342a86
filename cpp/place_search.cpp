// Improvement of a packing by changing the order in which buffers are placed.

#include <algorithm>

#include "place.h"

namespace tightship::place {

namespace {

constexpr i64 kHistory = 20;  // accept what is no worse than the arena so many rounds ago

// Moves buffers that reach above a random level nearer to the front, all by the same share of their way.
void lift(std::vector<i32>& order, const std::vector<i64>& size, const std::vector<i64>& at, i64 level,
          double share) {
    std::vector<std::pair<double, i32>> key;
    key.reserve(order.size());
    for (std::size_t k = 0; k < order.size(); ++k) {
        const i32 i = order[k];
        const bool high = at[i] + size[i] > level;
        key.emplace_back(high ? share * static_cast<double>(k) : static_cast<double>(k), i);
    }
    std::stable_sort(key.begin(), key.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = key[k].second;
}

// Takes one buffer that reaches above `level` and puts it before, or swaps it with, one alive at the same time.
bool advance(std::vector<i32>& order, const Packing& packer, const Sizes& sizes, const std::vector<i64>& at,
             i64 level, Random& random) {
    std::vector<i64> places;
    for (std::size_t k = 0; k < order.size(); ++k) {
        const i32 i = order[k];
        if (at[i] + sizes.size[i] > level && sizes.pinned[i] == kFree) places.push_back(static_cast<i64>(k));
    }
    if (places.empty()) return false;
    const i64 from = places[random.below(static_cast<i64>(places.size()))];
    const i32 i = order[from];
    places.clear();
    for (i64 k = 0; k < from; ++k)
        if (packer.meet(order[k], i)) places.push_back(k);
    if (places.empty()) return false;
    const i64 to = places[random.below(static_cast<i64>(places.size()))];
    if (random.below(2)) std::swap(order[to], order[from]);
    else std::rotate(order.begin() + to, order.begin() + from, order.begin() + from + 1);
    return true;
}

}  // namespace

i64 climb(Packing& packer, const Sizes& sizes, std::vector<i32> order, Fit fit, std::vector<i64>& offset,
          std::uint64_t seed, const Limits& limits, const Watch& watch) {
    const i64 stop = packer.work() + limits.work, most_rounds = limits.work;
    Random random(seed);
    i64 best = packer.pack(order.data(), fit, kNoLimit, offset.data(), watch);
    if (best == kNoLimit) return best;
    std::vector<i32> trial;
    std::vector<i64> at = offset, tried(offset.size());
    i64 arena = best;
    std::vector<i64> history(kHistory, arena);
    for (i64 round = 0; round < most_rounds && best > limits.bound && packer.work() < stop && !watch();
         ++round) {
        trial = order;
        if (random.below(3) == 0) {
            const i64 level = limits.bound + random.below(arena - limits.bound);
            lift(trial, sizes.size, at, level, static_cast<double>(random.below(1000)) / 1000);
        } else if (!advance(trial, packer, sizes, at, random.below(2) ? limits.bound : arena - 1, random)) {
            continue;
        }
        i64& late = history[round % kHistory];
        const i64 reached = packer.pack(trial.data(), fit, std::max(late, arena) + 1, tried.data(), watch);
        if (reached == kNoLimit) continue;
        order.swap(trial);
        at.swap(tried);
        arena = reached;
        late = std::min(late, arena);
        if (arena < best) {
            best = arena;
            offset = at;
        }
    }
    return best;
}

}  // namespace tightship::place
