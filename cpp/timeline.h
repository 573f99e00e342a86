// Steps replayed on paper, for plans of so many that the reference in Python (`simulate`) takes seconds: the
// same bytes and times, tested equal. A plan that breaks a rule is left to the reference, which says which.
#pragma once

#include "uses.h"

namespace tightship {

struct Costs {  // by op
    std::vector<i64> extra, state;
    std::vector<double> time;
    double save = 0;  // seconds that a move of a random state takes
    Rows updates, overwrites;
};

// As in `plan.KINDS` and `plan.FORMS`.
enum PlanKind : std::uint8_t {
    kComputes,
    kRecomputes,
    kOffloads,
    kFetches,
    kCompresses,
    kDecompresses,
    kFrees
};
enum PlanForm : std::uint8_t { kFullForm, kPackedForm, kHostForm, kStateForm };

struct PlanSteps {
    std::vector<std::uint8_t> kind, form, saves;
    std::vector<i64> op, nbytes, stream;
    Rows storages, waits, reuses;
    std::vector<double> seconds, lost;  // of copies and codecs
};

struct Timeline {
    bool legal = false;
    i64 peak = 0, peak_step = -1, host_peak = 0;
    double time = 0, compute_time = 0;
    std::vector<i64> during, resident;
    std::vector<double> begins, ends;
};

Timeline timeline(const Values& g, const Uses& u, const std::vector<i64>& size, const Costs& costs,
                  const PlanSteps& steps);

}  // namespace tightship
