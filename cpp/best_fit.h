// Best fit as XLA's heap simulator does it: in a given order, each into the smallest free chunk that takes it.
#pragma once

#include <cstdint>
#include <vector>

namespace tightship {

// Buffers are alive in stays [start, end); those of buffer b are number first[b] up to first[b + 1].
struct Stays {
    std::vector<std::int64_t> start, end, first;
};

// Offset of each buffer. A free chunk begins at a multiple of `alignment`; among those that fit all stays the one
// with the least room is taken, the lowest of them. Time: buffers times what is placed before them.
std::vector<std::int64_t> best_fit(const Stays& stays, const std::vector<std::int64_t>& size,
                                   const std::vector<std::int32_t>& order, std::int64_t alignment);

}  // namespace tightship
