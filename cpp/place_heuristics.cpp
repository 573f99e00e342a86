// Packings without a tree search: orders and packings that other systems are known for, first fit in the
// order of time as an allocator at run time would do it, and improvement by changing the order in which
// buffers are placed.

#include <algorithm>
#include <map>
#include <queue>
#include <tuple>

#include "place.h"

namespace tightship::place {

namespace {

struct Stretch {
    i32 last;
    i64 height;
};

constexpr std::size_t kBlock = 512;  // holes, at most

// Free bytes by address, in blocks that know their largest hole.
class Holes {
  public:
    Holes() : blocks_{{{{0, kNoLimit}}, kNoLimit}} {}

    i64 take(i64 size, i64 alignment) {
        for (std::size_t k = 0;; ++k) {
            Block& block = blocks_[k];
            if (block.largest < size) continue;
            for (std::size_t j = 0; j < block.holes.size(); ++j) {
                const Span hole = block.holes[j];
                const i64 at = (hole.start + alignment - 1) / alignment * alignment;
                if (hole.end - at < size) continue;
                const Span before{hole.start, at}, after{at + size, hole.end};
                if (before.start < before.end) {
                    block.holes[j] = before;
                    if (after.start < after.end)
                        block.holes.insert(block.holes.begin() + static_cast<i64>(j) + 1, after);
                } else if (after.start < after.end) {
                    block.holes[j] = after;
                } else {
                    block.holes.erase(block.holes.begin() + static_cast<i64>(j));
                }
                settle(k);
                return at;
            }
        }
    }

    void give_back(i64 start, i64 end) {
        std::size_t k =
            std::partition_point(blocks_.begin(), blocks_.end(),
                                 [&](const Block& block) { return block.holes.back().start < start; }) -
            blocks_.begin();
        // Block k has the first hole above; the one below may be the last of the block before.
        auto* above = &blocks_[k].holes;
        const auto at = std::partition_point(above->begin(), above->end(),
                                             [&](const Span& s) { return s.start < start; });
        Span* below = at != above->begin() ? &*(at - 1) : k ? &blocks_[k - 1].holes.back() : nullptr;
        const bool joins_below = below && below->end == start, joins_above = at->start == end;
        if (joins_below && joins_above) {
            at->start = below->start;
            if (at != above->begin()) {
                above->erase(at - 1);
            } else {
                blocks_[k - 1].holes.pop_back();
                settle(k);
                settle(k - 1);
                return;
            }
        } else if (joins_below) {
            below->end = end;
            if (at == above->begin()) --k;
        } else if (joins_above) {
            at->start = start;
        } else {
            above->insert(at, {start, end});
        }
        settle(k);
    }

  private:
    struct Block {
        std::vector<Span> holes;
        i64 largest;
    };
    std::vector<Block> blocks_;

    void settle(std::size_t k) {
        if (blocks_[k].holes.empty()) {
            blocks_.erase(blocks_.begin() + static_cast<i64>(k));
            return;
        }
        if (blocks_[k].holes.size() > kBlock) {
            auto& holes = blocks_[k].holes;
            Block upper{{holes.begin() + kBlock / 2, holes.end()}, 0};
            holes.resize(kBlock / 2);
            blocks_.insert(blocks_.begin() + static_cast<i64>(k) + 1, std::move(upper));
            measure(blocks_[k + 1]);
        }
        measure(blocks_[k]);
    }

    static void measure(Block& block) {
        block.largest = 0;
        for (const Span& hole : block.holes) block.largest = std::max(block.largest, hole.end - hole.start);
    }
};

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

// Takes one buffer that reaches above `level` and puts it before, or swaps it with, one alive at the same
// time.
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

std::vector<i32> skyline(const Buffers& b, Sky rule, const Watch& watch) {
    ByFirst left(b, 1);
    std::map<i32, Stretch> sky{{0, {b.sections, 0}}};  // by first section
    using Entry = std::tuple<i64, i32, i32>;  // height, first, last: outdated if the sky says otherwise
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lowest;
    lowest.push({0, 0, b.sections});
    std::vector<i32> order;
    const auto set = [&](i32 first, i32 last, i64 height) {
        if (first >= last) return;
        sky[first] = {last, height};
        lowest.push({height, first, last});
    };
    while (static_cast<i64>(order.size()) < b.count()) {
        if (watch()) return {};
        const auto [height, first, last] = lowest.top();
        const auto at = sky.find(first);
        if (at == sky.end() || at->second.height != height || at->second.last != last) {
            lowest.pop();
            continue;
        }
        i32 best = -1;
        double most = 0;
        left.visit(first, last, last, [&, first = first, last = last](i32 i) {
            const double sections = b.last[i] - b.first[i],
                         area = static_cast<double>(b.size[i]) * b.length[i];
            const i32 ends = (b.first[i] == first) + (b.last[i] == last);
            const double worth = rule == Sky::longest   ? b.length[i]
                                 : rule == Sky::largest ? area
                                                        : ends + sections / (1.0 + b.sections);
            if (best < 0 || worth > most || (worth == most && b.size[i] > b.size[best]))
                best = i, most = worth;
        });
        if (best >= 0) {
            order.push_back(best);
            left.remove(best);
            sky.erase(at);
            set(first, b.first[best], height);
            set(b.first[best], b.last[best], height + b.size[best]);
            set(b.last[best], last, height);
            continue;
        }
        // Raised to the lower neighbor, and joined with those of its height.
        const auto next = std::next(at);
        const bool has_left = at != sky.begin(), has_right = next != sky.end();
        if (!has_left && !has_right) break;
        i64 to = kNoLimit;
        if (has_left) to = std::min(to, std::prev(at)->second.height);
        if (has_right) to = std::min(to, next->second.height);
        i32 from = first, end = last;
        if (has_right && next->second.height == to) end = next->second.last, sky.erase(next);
        if (has_left && std::prev(at)->second.height == to)
            from = std::prev(at)->first, sky.erase(std::prev(at));
        sky.erase(at);
        set(from, end, to);
    }
    return order;
}

std::vector<i64> pack_sets(const Buffers& b, const std::vector<i32>& set, const std::vector<i64>& size,
                           const std::vector<i64>& alignment, const std::vector<i32>& order,
                           const Watch& watch) {
    const i32 sets = static_cast<i32>(size.size());
    std::vector<std::vector<Span>> residences(sets);  // in sections
    for (i64 i = 0; i < b.count(); ++i) residences[set[i]].push_back({b.first[i], b.last[i]});
    for (auto& of : residences) join_all(of, false);
    Space space(b.sections);
    std::vector<i64> offset(sets, 0);
    for (i32 s : order) {
        if (watch()) return {};
        if (!size[s] || residences[s].empty()) continue;
        offset[s] = space.best_fit_all(residences[s], size[s], alignment[s]);
        for (const auto [first, last] : residences[s])
            space.take(static_cast<i32>(first), static_cast<i32>(last), offset[s], offset[s] + size[s], 1);
    }
    return offset;
}

std::vector<i64> first_fit_by_start(const Buffers& b, const std::vector<i32>& order, const Watch& watch) {
    using Death = std::pair<i32, i32>;  // section, buffer
    std::priority_queue<Death, std::vector<Death>, std::greater<>> deaths;
    std::vector<i64> offset(b.count(), 0);
    Holes holes;
    i64 placed = 0;
    for (i32 i : order) {
        if (placed++ % 64 == 0 && watch()) return {};
        if (!b.size[i]) continue;
        for (; !deaths.empty() && deaths.top().first <= b.first[i]; deaths.pop()) {
            const i32 dead = deaths.top().second;
            holes.give_back(offset[dead], offset[dead] + b.size[dead]);
        }
        offset[i] = holes.take(b.size[i], b.alignment[i]);
        deaths.push({b.last[i], i});
    }
    return offset;
}

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
