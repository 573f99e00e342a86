// Which steps are known to have ended before another begins, when streams run side by side (vector clocks;
// Fidge 1988, Mattern 1989), and when streams end.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "verify.h"

namespace tightship::verify {

class Lanes {
  public:
    static constexpr std::size_t kMost = 64;

    // `keys`: forms of storages, and random states, that steps use.
    Lanes(const Plan& p, Int keys) : p_(p) {
        std::unordered_map<Int, Index> names;
        lane_.reserve(p.kind.count);
        for (Int i = 0; i < p.kind.count; ++i) {
            const auto next = static_cast<Index>(names.size());
            lane_.push_back(names.emplace(p.stream[i], next).first->second);
            if (names.size() > kMost) break;
        }
        lanes_ = names.size();
        if (!known() || single()) return;
        clock_.assign(p.kind.count * lanes_, -1);
        last_.assign(lanes_, -1);
        writer_.assign(keys, -1);
        readers_.resize(keys);
    }

    bool known() const { return lanes_ <= kMost; }
    bool single() const { return lanes_ <= 1; }

    // Step `i` is next: what has surely ended when it begins.
    void begin(Int i) {
        if (single()) return;
        Int* mine = &clock_[i * lanes_];
        const auto inherit = [&](Int from) {
            for (std::size_t k = 0; k < lanes_; ++k) mine[k] = std::max(mine[k], clock_[from * lanes_ + k]);
        };
        if (const Int before = last_[lane_[i]]; before >= 0) inherit(before);
        for (const Index w : p_.waits[i]) inherit(w);
        mine[lane_[i]] = last_[lane_[i]] = i;
    }

    bool before(Int a, Int b) const {
        if (a < 0 || single()) return true;
        if (a >= p_.kind.count) return false;  // the end of the plan
        return clock_[b * lanes_ + lane_[a]] >= a;
    }

    // Reading is after the last writer; writing in place, and freeing, also after all who read what that
    // wrote.
    bool read(Int i, Int key) {
        if (single()) return true;
        auto& readers = readers_[key];
        const auto mine =
            std::find_if(readers.begin(), readers.end(), [&](const auto& r) { return r.first == lane_[i]; });
        if (mine == readers.end()) readers.push_back({lane_[i], i});
        else mine->second = i;
        return ended(writer_[key], i);
    }
    bool write(Int i, Int key) {
        if (single()) return true;
        bool right = ended(writer_[key], i);
        for (const auto& [_, reader] : readers_[key]) right &= ended(reader, i);
        make(i, key);
        return right;
    }
    void make(Int i, Int key) {
        if (single()) return;
        writer_[key] = i;
        readers_[key].clear();
    }

  private:
    const Plan& p_;
    std::vector<Index> lane_;  // by step
    std::size_t lanes_ = 0;
    std::vector<Int> clock_, last_;  // by step and lane: the last that has ended; by lane: its last step
    std::vector<Int> writer_;        // by key
    std::vector<std::vector<std::pair<Index, Int>>> readers_;  // by key: lanes, and their last readers

    bool ended(Int a, Int i) const { return a == i || before(a, i); }
};

// Seconds: streams side by side; stream 0 begins copies on others, and loses time to them.
class Times {
  public:
    explicit Times(const Plan& p) : p_(p) { clock_[0] = 0; }

    void step(Int i, double seconds, double lost) {
        double begins = 0;
        if (const auto at = clock_.find(p_.stream[i]); at != clock_.end()) begins = at->second;
        for (const Index w : p_.waits[i]) begins = std::max(begins, ended_[w]);
        const bool beside = p_.kind[i] > kFree && p_.stream[i] != 0;
        if (beside) begins = std::max(begins, clock_[0]);
        ended_.push_back(begins + seconds);
        clock_[p_.stream[i]] = ended_.back();
        if (beside) clock_[0] += lost;
    }
    double end() const {
        double end = 0;
        for (const auto& [_, at] : clock_) end = std::max(end, at);
        return end;
    }

  private:
    const Plan& p_;
    std::unordered_map<Int, double> clock_;
    std::vector<double> ended_;
};

}  // namespace tightship::verify
