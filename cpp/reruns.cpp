#include "reruns.h"

#include <algorithm>
#include <utility>

namespace tightship {

Sequence sequence_of(const std::vector<i32>& ops, i64 count) {
    std::vector<std::uint8_t> ran(count, 0);
    Sequence runs;
    for (const i32 o : ops) {
        runs.push_back({o, ran[o] != 0});
        ran[o] = 1;
    }
    return runs;
}

void drop(Sequence& runs, const std::vector<std::uint8_t>& which) {
    std::size_t left = 0;
    for (std::size_t at = 0; at < runs.size(); ++at)
        if (!which[at]) runs[left++] = runs[at];
    runs.resize(left);
}

Lives::Lives(const Index& index)
    : x_(index), made_(index.p.extra), tracked_(index.p.storages), last_need_(index.p.storages),
      last_expect_(index.p.storages, -1), last_live_(index.static_bytes) {
    const Program& p = x_.p;
    for (i32 o = 0; o < p.ops; ++o) {
        for (const i32 d : p.defines[o]) made_[o] += p.size[d];
        for (const i32 m : p.mutates[o]) {
            const i32* writers = x_.writers.begin(m);
            nth_.push_back(static_cast<i32>(std::find(writers, x_.writers.end(m), o) - writers) + 1);
        }
    }
    for (i32 s = 0; s < p.storages; ++s) {
        tracked_[s] = x_.writers.size(s) > (p.owned[s] ? 0 : 1);
        if (tracked_[s]) versioned_.push_back(s);
        if (tracked_[s] && (p.kept[s] || p.owned[s])) last_expect_[s] = static_cast<i32>(x_.writers.size(s));
        last_need_[s] = p.kept[s] && !p.owned[s];
        if (last_need_[s]) last_live_ += p.size[s], ++last_open_;
    }
}

// What is there at the end.
void Lives::begin() {
    need_ = last_need_, expect_ = last_expect_;
    live_ = last_live_, open_ = last_open_;
    valid_ = true;
    ended_.assign(x_.p.storages, -1), kept_.assign(x_.p.storages, -1);
}

// Whether a run again makes a version that is read next.
bool Lives::wanted(i32 op) const {
    const Program& p = x_.p;
    for (const i32 d : p.defines[op])
        if (need_[d] && (!tracked_[d] || expect_[d] == 1)) return true;
    for (i64 k = p.mutates.start[op]; k < p.mutates.start[op + 1]; ++k) {
        const i32 m = p.mutates.item[k];
        if (need_[m] && expect_[m] == nth_[k] && !p.updates.has(op, m)) return true;
    }
    return false;
}

// A storage is in this version here: so has to be who sees it next.
void Lives::sees(i32 s, i32 version) {
    if (!tracked_[s]) return;
    if (expect_[s] >= 0 && expect_[s] != version) valid_ = false;
    expect_[s] = version;
}

// What the run makes is not there before it.
void Lives::make(Run run, i32 at) {
    const Program& p = x_.p;
    for (const i32 d : p.defines[run.op]) {
        const bool other = tracked_[d] && expect_[d] != 1;
        if (need_[d] && !(run.again && other)) {  // of a later version the one before it is still there
            if (other) valid_ = false;
            need_[d] = 0, expect_[d] = -1, kept_[d] = at;
            --open_;
            live_ -= p.size[d];
            if (steps_ && run.again) step_.storages.push_back(d);
        } else if (steps_ && !run.again) {
            gone_.push_back(d);
        }
    }
    for (i64 k = p.mutates.start[run.op]; k < p.mutates.start[run.op + 1]; ++k) {
        const i32 m = p.mutates.item[k];
        if (run.again && p.updates.has(run.op, m)) continue;
        sees(m, nth_[k]);
        expect_[m] = -1;
    }
}

// What the run reads is there before it.
void Lives::read(Run run, i32 at) {
    const Program& p = x_.p;
    const i32* version = p.needs.begin(run.op);
    for (const i32 r : p.reads[run.op]) {
        const i32 seen = *version++;
        if (run.again && p.updates.size(run.op) && p.updates.has(run.op, r)) continue;
        sees(r, seen);
        if (p.owned[r] || need_[r]) continue;
        need_[r] = 1, ended_[r] = at;
        ++open_;
        live_ += p.size[r];
        if (steps_) gone_.push_back(r);
    }
}

// Bytes of inputs whose places results take.
i64 Lives::taken(i32 op, i32 at) {
    i64 bytes = 0;
    for (auto pair = x_.p.overwrites.begin(op); pair != x_.p.overwrites.end(op); pair += 2) {
        const i32 a = pair[0], b = pair[1];
        if (ended_[a] != at || kept_[b] != at || x_.p.kept[b]) continue;
        ended_[a] = kept_[b] = -1;  // each once
        bytes += x_.p.size[a];
        if (steps_) step_.reuses.insert(step_.reuses.end(), {a, b});
    }
    return bytes;
}

void Lives::walk(Run run, i32 at, Cost& cost, const Prices& prices) {
    if (run.again && !wanted(run.op)) {
        dead_[at] = 1;
        return;
    }
    make(run, at);
    read(run, at);
    const i64 bytes = live_ - taken(run.op, at) + made_[run.op];
    level_[at] = bytes;
    if (bytes > cost.peak) cost.peak = bytes, cost.peak_at = at;
    if (bytes > prices.limit) cost.excess += static_cast<double>(bytes - prices.limit);
    if (run.again) cost.extra += x_.p.again[run.op], ++cost.runs;
    if (steps_) note(run);
}

void Lives::note(Run run) {
    step_.kind = run.again ? kRecompute : kCompute;
    step_.op = run.op;
    for (std::size_t k = 0; k < step_.reuses.size(); k += 2) std::erase(gone_, step_.reuses[k]);
    if (!gone_.empty()) steps_->push_back({kFree, -1, std::exchange(gone_, {})});
    steps_->push_back(std::exchange(step_, {}));
}

void Lives::drop_dead(Sequence& runs) {
    drop(runs, dead_);
    std::size_t left = 0;
    for (std::size_t at = 0; at < dead_.size(); ++at)
        if (!dead_[at]) level_[left++] = level_[at];
    level_.resize(left);
    dead_.assign(left, 0);
}

Cost Lives::evaluate(const Sequence& runs, const Prices& prices) {
    begin();
    const i32 count = static_cast<i32>(runs.size());
    level_.assign(count, 0), dead_.assign(count, 0);
    Cost cost;
    cost.peak = live_;
    for (i32 at = count; at-- > 0 && valid_;) {
        walk(runs[at], at, cost, prices);
        const double over = static_cast<double>(std::max<i64>(0, cost.peak - prices.limit));
        if (cost.extra + prices.peak * over + prices.excess * cost.excess > prices.cutoff) valid_ = false;
    }
    for (const i32 s : versioned_) valid_ = valid_ && expect_[s] <= 0;
    cost.valid = valid_ && open_ == 0;
    return cost;
}

std::vector<Step> Lives::emit(const Sequence& runs) {
    std::vector<Step> steps;
    steps_ = &steps;
    const Cost cost = evaluate(runs, {});
    steps_ = nullptr;
    if (!cost.valid) return {};
    std::reverse(steps.begin(), steps.end());
    return steps;
}

}  // namespace tightship
