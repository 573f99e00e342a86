// First fit in the order of time, as an allocator at run time would do it.

#include <algorithm>
#include <numeric>
#include <queue>

#include "place.h"

namespace tightship::place {

namespace {

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

}  // namespace

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

}  // namespace tightship::place
