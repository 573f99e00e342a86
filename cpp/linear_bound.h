// Lower bounds of linear programs by their duals.
#pragma once

#include <vector>

#include "watch.h"

namespace tightship {

// Minimize cost . x where low <= x <= high and every row is at most its limit. Row i: the entries from
// first[i] to first[i + 1].
struct Linear {
    std::vector<i64> first;
    std::vector<i32> column;
    std::vector<double> coefficient, limit, cost, low, high;

    i64 rows() const { return static_cast<i64>(limit.size()); }
    i64 columns() const { return static_cast<i64>(cost.size()); }
};

struct Bound {
    double value = 0;
    std::vector<double> prices;  // by row: what more of its limit would change
};

// A number that no x costs less than: as every x lies in a box, any prices on the rows give one (weak
// duality). The prices come from the primal-dual hybrid gradient method with restarts and step weights as in
// PDLP (Applegate et al. 2021), on rows and columns scaled so that steps of 1 converge (Pock, Chambolle
// 2011). Ends after so many rounds, where the number is `enough`, or where it hardly grows any more.
Bound linear_bound(const Linear& program, i64 rounds, double enough, const Watch& watch);

}  // namespace tightship
