// What a run of the engine had at every so many positions, so that one that decides little else need not be
// run from the first position to the last.
#pragma once

#include <utility>

#include "replay.h"

namespace tightship {

using Changes = std::vector<std::pair<i32, std::uint8_t>>;  // gap, what it was

// What there was before a position.
struct Mark {
    std::vector<std::uint8_t> resident, packed, waiting;  // waiting: by op
    std::vector<i32> version;
    i64 live = 0, waits = 0, runs = 0;
    double extra = 0, excess = 0;
    i64 most = 0;  // bytes used at once from here to the next one

    bool same(const Replay& s, const std::vector<std::uint8_t>& waiting_now) const {
        return live == s.live && resident == s.resident && version == s.version && packed == s.packed &&
               waiting == waiting_now;
    }
};

struct Trace {
    std::vector<Mark> marks;
    i64 count = 0;          // of marks that hold
    bool complete = false;  // whether it came to the end
    Cost cost;
    std::vector<std::uint8_t> late;
};

}  // namespace tightship
