#include "run_moves.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tightship {

namespace {
constexpr double kRebuild = 0.03;                         // of moves; of the others:
constexpr double kOut = 0.3, kIn = 0.35, kChange = 0.25;  // the rest lets first runs wait
constexpr double kDeeper = 0.8;  // how often what a run put in reads, and is not there, is made for it
constexpr int kDepth = 6;        // so many such runs in a row
constexpr int kLooked = 24;      // ops looked at to know what a storage takes
constexpr int kTries = 8;        // to find something to change
constexpr int kRepairs = 30;     // runs put in for those that were left out
}  // namespace

RunMoves::RunMoves(const Index& index, std::uint64_t seed)
    : x_(index), rng_(seed), again_op_(index.p.ops), later_op_(index.p.ops), maker_(index.p.storages, -1) {
    for (i32 o = 0; o < x_.p.ops; ++o) {
        again_op_[o] = can_run_again(o);
        for (const i32 d : x_.p.defines[o]) maker_[d] = again_op_[o] && x_.p.size[d] ? o : -1;
    }
    for (const i32 at : x_.movable) later_op_[x_.p.order[at]] = 1;
}

// Whether it is pure, and makes what it alone writes and what may be recomputed.
bool RunMoves::can_run_again(i32 o) const {
    const Program& p = x_.p;
    if (!p.pure[o] || !p.defines.size(o)) return false;
    for (const i32 m : p.mutates[o])
        if (!p.updates.has(o, m)) return false;
    for (const i32 d : p.defines[o])
        if (x_.writers.size(d) != 1 || p.must[d] || !(p.may[d] >> kEvict & 1)) return false;
    return true;
}

void RunMoves::follow(const Sequence& runs, i64 limit, const Lives& lives) {
    now_ = &runs, limit_ = limit;
    level_ = lives.levels();
    again_.clear(), crowded_.clear();
    for (i32 at = 0; at < static_cast<i32>(runs.size()); ++at) {
        if (runs[at].again && again_op_[runs[at].op]) again_.push_back(at);
        if (level_[at] > limit) crowded_.push_back(at);
    }
    find_touches(runs);
}

void RunMoves::find_touches(const Sequence& runs) {
    const Program& p = x_.p;
    const auto each = [&](auto visit) {
        for (i32 at = 0; at < static_cast<i32>(runs.size()); ++at) {
            const Run run = runs[at];
            for (const i32 r : p.reads[run.op])
                if (!p.owned[r] && !(run.again && p.updates.has(run.op, r))) visit(r, 2 * at);
            for (const i32 d : p.defines[run.op]) visit(d, 2 * at + 1);
        }
    };
    touches_.start.assign(p.storages + 1, 0);
    each([&](i32 s, i32) { ++touches_.start[s + 1]; });
    std::partial_sum(touches_.start.begin(), touches_.start.end(), touches_.start.begin());
    touches_.item.resize(touches_.start.back());
    std::vector<i64> next(touches_.start.begin(), touches_.start.end() - 1);
    each([&](i32 s, i32 touch) { touches_.item[next[s]++] = touch; });
}

// The first touch of a storage at a run or after it, or the end of its touches.
const i32* RunMoves::next_touch(i32 s, i32 at) const {
    return std::lower_bound(touches_.begin(s), touches_.end(s), 2 * at);
}

// Whether a storage is there right before a run.
bool RunMoves::there(i32 s, i32 at) const {
    const i32* t = next_touch(s, at);
    if (t == touches_.begin(s)) return false;
    return t == touches_.end(s) ? x_.p.kept[s] : !(*t & 1);
}

// The run that reads a storage next, which is there but not touched at one and may be made again; -1: it is
// not so.
i32 RunMoves::idle_until(i32 s, i32 at) const {
    if (maker_[s] < 0) return -1;
    const i32* t = next_touch(s, at);
    if (t == touches_.begin(s) || t == touches_.end(s) || *t & 1 || *t == 2 * at) return -1;
    return *t / 2;
}

// One such storage, rather a large one, and who reads it next.
std::pair<i32, i32> RunMoves::idle(i32 at) {
    std::vector<std::pair<i32, i32>> found;
    std::vector<i64> bytes;
    for (i32 s = 0; s < x_.p.storages; ++s) {
        const i32 until = idle_until(s, at);
        if (until < 0) continue;
        found.emplace_back(s, until);
        bytes.push_back((bytes.empty() ? 0 : bytes.back()) + x_.p.size[s]);
    }
    if (found.empty()) return {-1, -1};
    return found[std::upper_bound(bytes.begin(), bytes.end(), below(bytes.back())) - bytes.begin()];
}

// What it takes to make a storage again right before a run, of what is there; at least, where that is `left`
// ops or more.
double RunMoves::seconds(i32 s, i32 at, int& left) const {
    double all = x_.p.again[maker_[s]];
    for (const i32 r : x_.p.reads[maker_[s]])
        if (left > 0 && !x_.p.owned[r] && maker_[r] >= 0 && !there(r, at)) all += seconds(r, at, --left);
    return all;
}

// Ops that make a storage again right before a run, in order.
void RunMoves::remake(i32 s, i32 at, int depth, std::vector<i32>& ops) {
    const i32 o = maker_[s];
    if (std::find(ops.begin(), ops.end(), o) != ops.end()) return;
    for (const i32 r : x_.p.reads[o]) {
        if (x_.p.owned[r] || x_.p.updates.has(o, r) || there(r, at)) continue;
        if (depth < kDepth && maker_[r] >= 0 && uniform() < kDeeper) remake(r, at, depth + 1, ops);
    }
    ops.push_back(o);
}

void RunMoves::put_in(Sequence& next, i32 s, i32 at) {
    std::vector<i32> ops;
    remake(s, at, 0, ops);
    std::vector<Run> more;
    for (const i32 o : ops) more.push_back({o, true});
    next.insert(next.begin() + at, more.begin(), more.end());
}

bool RunMoves::apply(Sequence& next, Lives& lives) {
    next = *now_;
    if (uniform() < kRebuild) return rebuild(next, lives);
    const double kind = uniform();
    if (kind < kOut) return leave_out(next);
    if (kind < kOut + kIn) return put_in(next);
    if (kind < kOut + kIn + kChange) return exchange(next);
    return delay(next);
}

bool RunMoves::leave_out(Sequence& next) {
    if (again_.empty()) return false;
    next.erase(next.begin() + any(again_));
    return true;
}

// Something made again for one that reads it: what is idle above the limit, or anything.
bool RunMoves::put_in(Sequence& next) {
    if (!crowded_.empty() && uniform() < 0.5) {
        const auto [s, at] = idle(any(crowded_));
        if (s >= 0) put_in(next, s, at);
        return s >= 0;
    }
    for (int tries = 0; tries < kTries; ++tries) {
        const i32 at = static_cast<i32>(below(static_cast<i64>(now_->size()))), o = (*now_)[at].op;
        if (!x_.p.reads.size(o)) continue;
        const i32 s = x_.p.reads.begin(o)[below(x_.p.reads.size(o))];
        if (x_.p.owned[s] || maker_[s] < 0) continue;
        const i32* t = next_touch(s, at);
        if (t == touches_.begin(s) || t == touches_.end(s) || *t != 2 * at || at - t[-1] / 2 < 2) continue;
        put_in(next, s, at);
        return true;
    }
    return false;
}

// A run less, and something else, which is idle where most is in use while its result stays, made again.
bool RunMoves::exchange(Sequence& next) {
    if (again_.empty()) return false;
    const i32 out = any(again_), o = (*now_)[out].op;
    i32 from = out;
    for (const i32 d : x_.p.defines[o]) {
        const i32* t = next_touch(d, out);
        if (t != touches_.begin(d)) from = std::min(from, t[-1] / 2);
    }
    if (from + 1 >= out) return false;
    const auto most = std::max_element(level_.begin() + from + 1, level_.begin() + out);
    const auto [s, at] = idle(static_cast<i32>(most - level_.begin()));
    if (s < 0 || maker_[s] == o) return false;
    next.erase(next.begin() + out);
    put_in(next, s, at > out ? at - 1 : at);
    return true;
}

// A first run later, up to what reads it.
bool RunMoves::delay(Sequence& next) {
    for (int tries = 0; tries < kTries; ++tries) {
        const i32 at = static_cast<i32>(below(static_cast<i64>(now_->size())));
        const Run run = (*now_)[at];
        if (run.again || !later_op_[run.op]) continue;
        i32 to = static_cast<i32>(now_->size());
        for (const i32 d : x_.p.defines[run.op]) {
            const i32* t = next_touch(d, at) + 1;
            if (t < touches_.end(d)) to = std::min(to, *t / 2);
        }
        if (to - at < 2) continue;
        if (uniform() < 0.5) to = at + 2 + static_cast<i32>(below(to - at - 1));
        next.insert(next.begin() + to, run);
        next.erase(next.begin() + at);
        return true;
    }
    return false;
}

// Runs again close to one another, or a few anywhere.
void RunMoves::leave_out_some(Sequence& next) {
    std::vector<std::uint8_t> out(next.size(), 0);
    if (uniform() < 0.7) {
        const double part = 0.2 + 0.8 * uniform();
        const i32 first = any(again_);
        const i64 reach = 2 + below(std::max<i64>(3, static_cast<i64>(next.size()) / 12));
        for (const i32 at : again_)
            if (at >= first && at < first + reach && (at == first || uniform() < part)) out[at] = 1;
    } else {
        for (i64 count = 1 + below(6); count > 0; --count) out[any(again_)] = 1;
    }
    std::size_t left = 0;
    for (std::size_t at = 0; at < next.size(); ++at)
        if (!out[at]) next[left++] = next[at];
    next.resize(left);
}

// What is idle at the peak and takes the fewest seconds for all bytes above the limit that it takes away.
bool RunMoves::cheapest(const Sequence& next, const Cost& cost, double noise, i32& storage, i32& at) {
    std::vector<i64> over(next.size() + 1, 0);
    for (std::size_t k = 0; k < next.size(); ++k) over[k + 1] = over[k] + (level_[k] > limit_);
    double least = std::numeric_limits<double>::infinity();
    for (i32 s = 0; s < x_.p.storages; ++s) {
        const i32 until = idle_until(s, cost.peak_at);
        if (until < 0) continue;
        const i32 since = next_touch(s, cost.peak_at)[-1] / 2;
        const double gain = double(x_.p.size[s]) * double(over[until] - over[since + 1]);
        int left = kLooked;
        const double price = (seconds(s, until, left) + 1e-12) / gain * std::exp(noise * (2 * uniform() - 1));
        if (price < least) least = price, storage = s, at = until;
    }
    return least < std::numeric_limits<double>::infinity();
}

bool RunMoves::rebuild(Sequence& next, Lives& lives) {
    if (again_.empty()) return false;
    leave_out_some(next);
    const double noise = uniform();
    const std::vector<i64> level = level_;
    bool fits = false;
    for (int repairs = 0; repairs < kRepairs; ++repairs) {
        const Cost cost = lives.evaluate(next, {limit_});
        spent_ += static_cast<i64>(next.size());
        fits = cost.valid && cost.peak <= limit_;
        if (!cost.valid || fits) break;
        level_ = lives.levels();
        find_touches(next);
        i32 s = -1, at = -1;
        if (!cheapest(next, cost, noise, s, at)) break;
        put_in(next, s, at);
    }
    level_ = level;
    find_touches(*now_);
    return fits;
}

}  // namespace tightship
