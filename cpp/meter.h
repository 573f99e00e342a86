// What the searches share: limits on their work, and which of two costs is better.
#pragma once

#include <algorithm>
#include <chrono>

#include "search.h"

namespace tightship {

// Stops a search at its work limit (reproducible) or its time limit (a bound only).
class Meter {
  public:
    using Clock = std::chrono::steady_clock;

    Meter(const Engine& engine, const Budget& budget)
        : ops_(std::max<i64>(1, engine.program().ops)), budget_(budget), begin_(Clock::now()) {}
    void spend(const Cost& cost) { work_ += ops_ + cost.runs, ++calls_; }
    i64 work() const { return work_; }
    double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }
    bool over(const Found& best) {
        if (stopped_ || work_ >= budget_.work) return true;
        if (calls_ - asked_ < std::max<i64>(1, 20000 / ops_)) return false;
        asked_ = calls_;
        stopped_ = seconds() > budget_.seconds || (budget_.poll && budget_.poll(best));
        return stopped_;
    }

  private:
    i64 ops_, work_ = 0, calls_ = 0, asked_ = 0;
    const Budget& budget_;
    Clock::time_point begin_;
    bool stopped_ = false;
};

inline bool better(const Cost& a, const Cost& b, i64 limit) {
    if (!a.valid || !b.valid) return a.valid && !b.valid;
    const bool fa = a.peak <= limit, fb = b.peak <= limit;
    if (fa != fb) return fa;
    if (fa) return a.extra < b.extra || (a.extra == b.extra && a.peak < b.peak);
    return a.peak < b.peak || (a.peak == b.peak && a.extra < b.extra);
}

inline bool offer(Found& best, const Bits& evict, const Cost& cost, i64 limit) {
    if (!better(cost, best.cost, limit)) return false;
    best.evict = evict;
    best.cost = cost;
    best.met = cost.valid && cost.peak <= limit;
    return true;
}

}  // namespace tightship
