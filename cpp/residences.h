// When which bytes are taken and given back: the residences that steps imply (`plan.Residence`).
#pragma once

#include "timeline.h"

namespace tightship {

struct Requests {
    std::vector<i64> start;  // by op, and the end
    std::vector<i64> size, storage, begin, end;
};

struct Residences {
    std::vector<i64> storage, start, end, size, request, first, last;
    std::vector<std::uint8_t> form;
    i64 wrong = -1;  // a step that ends what is not there
};

// `block`: by op, the bytes that it needs as one block while it runs.
Residences residences(const Uses& u, const std::vector<i64>& size, const std::vector<i64>& state,
                      const std::vector<i64>& block, const Requests& requests, const PlanSteps& steps);

}  // namespace tightship
