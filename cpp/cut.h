// The set of storages to keep across a point of the order, by bytes and seconds: a minimum cut.
#pragma once

#include <vector>

#include "engine.h"

namespace tightship {

// For each storage whether it is one to keep, of those made before position `boundary` and read at it or later:
// minimises bytes kept + bytes_per_second * seconds of ops to run again, over all sets from which the rest can be
// made (exactly: a closure problem, solved by Dinic's maximum flow). `again` says per storage whether it can be
// made again at all. Ops that only feed what is read after the boundary cost nothing: they can run there.
std::vector<std::uint8_t> priced_cut(const Program& program, const std::vector<std::uint8_t>& again, i32 boundary,
                                     double bytes_per_second);

}  // namespace tightship
