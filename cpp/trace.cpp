// Evaluation of decisions that differ in a few gaps from those of a run that is known: from the last mark
// before the first position at which they matter to the first mark behind the last such position where all is
// as it was there.
#include "trace.h"

#include "engine.h"

namespace tightship {

namespace {
constexpr i64 kStride = 16, kMarks = 64;  // positions between two marks at least, marks at most
constexpr i64 kLargest = 10000;           // ops: of more, marks take too much memory
}  // namespace

void Engine::begin_tracing() {
    const i64 n = x_.p.ops;
    if (copies_.any() || n > kLargest || n == 0) return;
    stride_ = std::max(kStride, (n + kMarks - 1) / kMarks);
    for (Trace* t : {&base_, &tried_}) t->marks.resize((n + stride_ - 1) / stride_);
    touched_.resize(base_.marks.size());
}

void Engine::follow(const Bits& decisions, i64 limit) {
    base_.count = 0;
    base_.complete = false;
    evaluate_near(decisions, {}, limit);
    accept();
}

// At a mark: takes it down. True: from here on everything is as in the run that is known.
bool Engine::at_mark(i32 position) {
    const i64 m = position / stride_;
    if (m > from_mark_) tried_.marks[m - 1].most = s_.most;
    s_.most = 0;
    if (m > from_mark_ && position >= join_from_ && base_.complete && base_.marks[m].same(s_, waiting_)) {
        joined_ = m;
        return true;
    }
    Mark& mark = tried_.marks[m];
    mark.resident = s_.resident, mark.packed = s_.packed, mark.waiting = waiting_, mark.version = s_.version;
    mark.live = s_.live, mark.waits = waits_, mark.runs = s_.cost.runs;
    mark.extra = s_.cost.extra, mark.excess = s_.cost.excess;
    if (touched_[m].empty()) touched_[m] = s_.touch;  // the same in every run
    tried_.count = m + 1;
    return false;
}

// Which positions the changes can matter at: first and past the last.
std::pair<i32, i32> Engine::reach(const Bits& decisions, const Changes& changes) const {
    i32 first = static_cast<i32>(x_.p.ops), last = 0;
    for (const auto& [g, was] : changes) {
        const auto [s, from, to] = x_.gaps[g];
        if (decisions[g] == was) continue;
        first = std::min(first, from);
        // Whether a storage is held after its last touch depends on whether its last gap is kDrop.
        const bool lasting = x_.shared[s] && (was == kDrop || decisions[g] == kDrop);
        last = std::max(last, lasting ? static_cast<i32>(x_.p.ops) + 1 : to + 1);
    }
    for (const i32 at : x_.movable)
        if (late_[at] != base_.late[at]) first = std::min(first, at), last = std::max(last, at + 1);
    return {first, last};
}

// The state of a run at a mark, for decisions that agree with its own before it.
void Engine::resume(const Trace& trace, i64 m) {
    const Mark& mark = trace.marks[m];
    s_.reset(x_);
    s_.resident = mark.resident, s_.packed = mark.packed, s_.version = mark.version, s_.touch = touched_[m];
    s_.live = mark.live, s_.cost.runs = mark.runs, s_.cost.extra = mark.extra, s_.cost.excess = mark.excess;
    for (i64 k = 0; k < m; ++k) s_.cost.peak = std::max(s_.cost.peak, trace.marks[k].most);
    waits_ = 0;
    for (const i32 at : x_.movable) {
        const i32 o = x_.p.order[at];
        if (at < m * stride_) waiting_[o] = mark.waiting[o];
        waits_ += waiting_[o];
    }
}

// As if nothing that cannot be made again had left.
void Engine::keep_lives() {
    for (i32 s = 0; s < x_.p.storages; ++s) {
        if (x_.replayable[s] || x_.p.owned[s] || s_.resident[s] || has_touch(s) || !s_.touch[s]) continue;
        s_.resident[s] = 1;
        s_.live += x_.p.size[s];
    }
}

// The rest of the known run, from the mark where this one has come to the same.
void Engine::join() {
    const Cost now = s_.cost;
    const Mark& here = base_.marks[joined_];
    const i64 marks = static_cast<i64>(base_.marks.size());
    for (i64 k = joined_; k < marks && s_.cost.valid; ++k) {
        const bool end = k + 1 == marks;
        const Mark& next = base_.marks[end ? k : k + 1];
        s_.cost.peak = std::max(s_.cost.peak, base_.marks[k].most);
        s_.cost.extra = now.extra + ((end ? base_.cost.extra : next.extra) - here.extra);
        s_.cost.excess = now.excess + ((end ? base_.cost.excess : next.excess) - here.excess);
        s_.cost.runs = now.runs + ((end ? base_.cost.runs : next.runs) - here.runs);
        s_.cost.valid = !beyond_cutoff() && !too_many_runs();
    }
}

Cost Engine::evaluate_near(const Bits& decisions, const Changes& changes, i64 limit, double cutoff) {
    if (!stride_) return evaluate(decisions, limit, cutoff);
    s_.decisions = decisions.data(), s_.limit = limit, cutoff_ = cutoff;
    copies_.plan();
    copies_.begin_attempt();
    extended_ = lost_anchor_ = false;
    joined_ = -1;
    from_mark_ = 0, join_from_ = 0;
    tried_.count = 0;
    begin_run();
    if (base_.count > 0) {
        const auto [first, last] = reach(decisions, changes);
        from_mark_ = std::min(first / stride_, base_.count - 1), join_from_ = last;
        resume(base_, from_mark_);
    }
    tracing_ = true;
    run_from(static_cast<i32>(from_mark_ * stride_));
    tracing_ = false;
    if (joined_ >= 0) join();
    else if (tried_.count) tried_.marks[tried_.count - 1].most = s_.most;
    tried_.complete = s_.cost.valid;
    tried_.cost = s_.cost;
    return lost_anchor_ && !s_.cost.valid ? with_longer_lives(tried_.count - 1) : s_.cost;
}

void Engine::accept() {
    if (!stride_) return;
    for (i64 m = from_mark_; m < tried_.count; ++m) std::swap(base_.marks[m], tried_.marks[m]);
    base_.late = late_;
    if (joined_ < 0) {
        base_.count = std::max(tried_.count, from_mark_);
        base_.complete = tried_.complete;
        base_.cost = tried_.cost;
        return;
    }
    const double extra = tried_.cost.extra - base_.cost.extra,
                 excess = tried_.cost.excess - base_.cost.excess;
    const i64 runs = tried_.cost.runs - base_.cost.runs;
    for (i64 m = joined_; m < static_cast<i64>(base_.marks.size()); ++m)
        base_.marks[m].extra += extra, base_.marks[m].excess += excess, base_.marks[m].runs += runs;
    base_.cost = tried_.cost;
}

}  // namespace tightship
