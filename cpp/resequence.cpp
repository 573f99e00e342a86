#include <algorithm>
#include <cmath>

#include "run_moves.h"

namespace tightship {

namespace {

constexpr i64 kLast = 8;  // a part of the work is kept for what is left out of the best in the end

// Stops at the limit of work, or when the watch says so.
class Tally {
  public:
    Tally(const Index& index, const Budget& budget)
        : budget_(budget), every_(std::max<i64>(1, 20000 / std::max<i64>(1, index.p.ops))) {}
    i64 work() const { return work_; }
    void spend(i64 runs) { work_ += runs, ++calls_; }
    bool over() {
        if (stopped_ || work_ >= budget_.work) return true;
        if (calls_ % every_ == 0) stopped_ = budget_.watch();
        return stopped_;
    }

  private:
    const Budget& budget_;
    i64 every_, work_ = 0, calls_ = 0;
    bool stopped_ = false;
};

// Runs again that are not needed to stay within the limit, the longest first.
std::vector<std::uint8_t> needless(const RunMoves& moves, const Index& x, Lives& lives, Resequenced& best,
                                   i64 limit, Tally& tally) {
    std::vector<i32> again;
    for (i32 at = 0; at < static_cast<i32>(best.runs.size()); ++at)
        if (best.runs[at].again && moves.may_run_again(best.runs[at].op)) again.push_back(at);
    std::stable_sort(again.begin(), again.end(),
                     [&](i32 a, i32 b) { return x.p.again[best.runs[a].op] > x.p.again[best.runs[b].op]; });
    std::vector<std::uint8_t> out(best.runs.size(), 0);
    Sequence rest;
    std::vector<i32> from;
    for (const i32 without : again) {
        if (tally.over()) break;
        if (out[without]) continue;
        rest.clear(), from.clear();
        for (i32 at = 0; at < static_cast<i32>(best.runs.size()); ++at)
            if (at != without && !out[at]) rest.push_back(best.runs[at]), from.push_back(at);
        const Cost cost = lives.evaluate(rest, {limit, best.cost.extra});
        tally.spend(static_cast<i64>(rest.size()));
        if (!cost.valid || cost.peak > limit || cost.extra >= best.cost.extra) continue;
        out[without] = 1;
        for (std::size_t at = 0; at < rest.size(); ++at)
            if (lives.dead()[at]) out[from[at]] = 1;
        best.cost = cost;
    }
    return out;
}

void spare(const RunMoves& moves, const Index& x, Lives& lives, Resequenced& best, i64 limit, Tally& tally) {
    for (std::size_t before = 0; best.cost.peak <= limit && before != best.runs.size();) {
        before = best.runs.size();
        drop(best.runs, needless(moves, x, lives, best, limit, tally));
    }
}

}  // namespace

Resequenced resequence(const Index& index, const Sequence& runs, i64 limit, const Cooling& cooling,
                       std::uint64_t seed, const Budget& budget) {
    RunMoves moves(index, seed);
    Lives lives(index);
    Tally tally(index, budget);
    Resequenced best{runs, lives.evaluate(runs, {limit})};
    if (!best.cost.valid) return best;
    lives.drop_dead(best.runs);
    spare(moves, index, lives, best, limit, tally);
    const double base = std::max(1e-12, index.base_time);
    const double room = std::max<double>(1, double(limit - index.static_bytes));
    const double ops = double(std::max<i64>(1, index.p.ops));
    const double hot = cooling.heat, cold = hot / 100, span = double(std::max<i64>(1, cooling.span));
    ExcessPrice price;
    const auto energy = [&](const Cost& c) {
        const double over = std::max<double>(0, double(c.peak - limit)) / room;
        return c.extra / base + price.value() * (over + c.excess / (room * ops));
    };
    Sequence now, next;
    Cost cost;
    double at = 0;
    const auto go_on = [&](const Cost& c) {  // from `now`, which was evaluated last
        cost = c;
        at = energy(cost);
        moves.follow(now, limit, lives);
    };
    const auto go_back = [&] {
        now = best.runs;
        go_on(lives.evaluate(now, {limit}));
    };
    go_back();
    const i64 began = tally.work(), enough = budget.work - budget.work / kLast;
    for (i64 calls = 1; !tally.over() && tally.work() < enough; ++calls) {
        const double t = hot * std::pow(cold / hot, std::min(1.0, double(tally.work() - began) / span));
        const bool changed = moves.apply(next, lives);
        const double most = at - t * std::log(std::max(1e-12, moves.uniform()));
        if (changed) {
            const double peak = price.value() * base / room;
            const Cost c = lives.evaluate(next, {limit, most * base, peak, peak / ops});
            if (c.valid && energy(c) <= most) {
                lives.drop_dead(next);
                std::swap(now, next);
                go_on(c);
                if (better(cost, best.cost, limit)) best.runs = now, best.cost = cost;
            }
        }
        tally.spend(static_cast<i64>(next.size()) + moves.spent());
        if (price.turn(cost.peak <= limit)) at = energy(cost);
        if (calls % 2000 == 0 && energy(best.cost) + 4 * t < at) go_back();
    }
    spare(moves, index, lives, best, limit, tally);
    best.work = tally.work();
    return best;
}

}  // namespace tightship
