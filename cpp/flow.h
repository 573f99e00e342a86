// Minimum cut of a network with integer capacities: Dinic's maximum flow (1970).
#pragma once

#include <cstdint>
#include <vector>

namespace tightship {

struct Cut {
    std::int64_t value = 0;           // capacity of the cut
    std::vector<std::uint8_t> near;   // by node: on the source's side of the cut nearest to the source
};

// Edge i leads from tail[i] to head[i]. Capacities are not negative, and the sum of those that leave the source or
// enter the sink with a finite meaning stays far below 2^62; larger ones count as endless.
Cut min_cut(std::int32_t nodes, const std::vector<std::int32_t>& tail, const std::vector<std::int32_t>& head,
            const std::vector<std::int64_t>& capacity, std::int32_t source, std::int32_t sink);

}  // namespace tightship
