#include "best_fit.h"

#include <algorithm>
#include <limits>

namespace tightship {
namespace {

struct Chunk {
    std::int64_t low, high, start, end;
};

}  // namespace

std::vector<std::int64_t> best_fit(const Stays& stays, const std::vector<std::int64_t>& size,
                                   const std::vector<std::int32_t>& order, std::int64_t alignment) {
    std::vector<std::int64_t> offset(size.size(), 0);
    std::vector<Chunk> placed;  // by where they begin
    placed.reserve(stays.start.size());
    for (const std::int32_t b : order) {
        if (size[b] == 0) continue;
        const std::int64_t from = stays.first[b], to = stays.first[b + 1];
        std::int64_t at = 0, top = 0, best = -1, room = std::numeric_limits<std::int64_t>::max();
        for (const Chunk& c : placed) {
            bool meets = false;
            for (std::int64_t s = from; s < to && !meets; ++s) meets = c.start < stays.end[s] && c.end > stays.start[s];
            if (!meets) continue;
            if (c.low > top && c.low - at >= size[b] && c.low - at < room) {
                room = c.low - at;
                best = at;
            }
            if (c.high > top) {
                top = c.high;
                at = (top + alignment - 1) / alignment * alignment;
            }
        }
        offset[b] = best < 0 ? at : best;
        for (std::int64_t s = from; s < to; ++s) {
            const Chunk made{offset[b], offset[b] + size[b], stays.start[s], stays.end[s]};
            const auto after = std::upper_bound(placed.begin(), placed.end(), made,
                                                [](const Chunk& x, const Chunk& y) { return x.low < y.low; });
            placed.insert(after, made);
        }
    }
    return offset;
}

}  // namespace tightship
