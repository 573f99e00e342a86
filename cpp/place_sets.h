// Orders and packings that other systems are known for, where they need more than an order by keys.
#pragma once

#include "place.h"

namespace tightship::place {

enum class Sky { longest, largest, snug };

// The order in which a skyline is built: at its lowest stretch, the buffer that is alive within that stretch and is
// the longest-lived (Sekiyama, Imai, Negishi, Raymond 2018), the largest (size times time), or leaves the least of
// the stretch beside it where it touches an end of it. Where none is, the stretch is raised to its lower neighbour.
// Pins and alignments are not looked at. Empty if the watch stopped it.
std::vector<i32> skyline(const Buffers& buffers, Sky rule, const Watch& watch);

// Sets of buffers, each set at one offset and as large as its entry of `size`: set after set in this order, each into
// the smallest hole that all its members, each in its own live range, have in common; else above what is there.
// `set` is that of every buffer. Returns offsets by set; empty if the watch stopped it.
std::vector<i64> pack_sets(const Buffers& buffers, const std::vector<i32>& set, const std::vector<i64>& size,
                           const std::vector<i64>& alignment, const std::vector<i32>& order, const Watch& watch);

}  // namespace tightship::place
