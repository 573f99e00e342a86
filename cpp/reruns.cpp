#include "reruns.h"

#include <algorithm>

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

Lives::Lives(const Index& index)
    : x_(index), made_(index.p.extra), tracked_(index.p.storages), need_(index.p.storages),
      expect_(index.p.storages), ended_(index.p.storages), kept_(index.p.storages) {
    for (i32 o = 0; o < x_.p.ops; ++o)
        for (const i32 d : x_.p.defines[o]) made_[o] += x_.p.size[d];
    for (i64 s = 0; s < x_.p.storages; ++s) tracked_[s] = x_.writers.size(s) > (x_.p.owned[s] ? 0 : 1);
}

// What is there at the end.
void Lives::begin() {
    live_ = x_.static_bytes, open_ = 0, valid_ = true;
    std::fill(ended_.begin(), ended_.end(), -1);
    std::fill(kept_.begin(), kept_.end(), -1);
    for (i64 s = 0; s < x_.p.storages; ++s) {
        need_[s] = x_.p.kept[s] && !x_.p.owned[s];
        expect_[s] =
            tracked_[s] && (x_.p.kept[s] || x_.p.owned[s]) ? static_cast<i32>(x_.writers.size(s)) : -1;
        if (need_[s]) live_ += x_.p.size[s], ++open_;
    }
}

i32 Lives::nth_writer(i32 s, i32 op) const {
    return static_cast<i32>(std::find(x_.writers.begin(s), x_.writers.end(s), op) - x_.writers.begin(s)) + 1;
}

// Whether a run again makes a version that is read next.
bool Lives::wanted(i32 op) const {
    for (const i32 d : x_.p.defines[op])
        if (need_[d] && (!tracked_[d] || expect_[d] == 1)) return true;
    for (const i32 m : x_.p.mutates[op])
        if (need_[m] && !x_.p.updates.has(op, m) && expect_[m] == nth_writer(m, op)) return true;
    return false;
}

// A storage is in this version here: so has to be who sees it next.
void Lives::sees(i32 s, i32 version) {
    if (!tracked_[s]) return;
    if (expect_[s] >= 0 && expect_[s] != version) valid_ = false;
    expect_[s] = version;
}

// What the run makes is not there before it.
void Lives::make(Run run, i32 at, Step& step, std::vector<i32>& gone) {
    const Program& p = x_.p;
    for (const i32 d : p.defines[run.op]) {
        const bool other = tracked_[d] && expect_[d] != 1;
        if (need_[d] && !(run.again && other)) {  // of a later version the one before it is still there
            if (other) valid_ = false;
            need_[d] = 0, expect_[d] = -1, kept_[d] = at;
            --open_;
            live_ -= p.size[d];
            if (steps_ && run.again) step.storages.push_back(d);
        } else if (steps_ && !run.again) {
            gone.push_back(d);
        }
    }
    for (const i32 m : p.mutates[run.op]) {
        if (run.again && p.updates.has(run.op, m)) continue;
        sees(m, nth_writer(m, run.op));
        expect_[m] = -1;
    }
}

// What the run reads is there before it.
void Lives::read(Run run, i32 at, std::vector<i32>& gone) {
    const Program& p = x_.p;
    const i32* version = p.needs.begin(run.op);
    for (const i32 r : p.reads[run.op]) {
        const i32 seen = *version++;
        if (run.again && p.updates.has(run.op, r)) continue;
        sees(r, seen);
        if (p.owned[r] || need_[r]) continue;
        need_[r] = 1, ended_[r] = at;
        ++open_;
        live_ += p.size[r];
        if (steps_) gone.push_back(r);
    }
}

// Bytes of inputs whose places results take.
i64 Lives::taken(i32 op, i32 at, Step& step) {
    i64 bytes = 0;
    for (auto pair = x_.p.overwrites.begin(op); pair != x_.p.overwrites.end(op); pair += 2) {
        const i32 a = pair[0], b = pair[1];
        if (ended_[a] != at || kept_[b] != at || x_.p.kept[b]) continue;
        ended_[a] = kept_[b] = -1;  // each once
        bytes += x_.p.size[a];
        if (steps_) step.reuses.insert(step.reuses.end(), {a, b});
    }
    return bytes;
}

void Lives::walk(Run run, i32 at, Cost& cost, const Prices& prices) {
    if (run.again && !wanted(run.op)) {
        dead_[at] = 1;
        return;
    }
    Step step{run.again ? kRecompute : kCompute, run.op, {}};
    std::vector<i32> gone;
    make(run, at, step, gone);
    read(run, at, gone);
    const i64 bytes = live_ - taken(run.op, at, step) + made_[run.op];
    level_[at] = bytes;
    if (bytes > cost.peak) cost.peak = bytes, cost.peak_at = at;
    if (bytes > prices.limit) cost.excess += static_cast<double>(bytes - prices.limit);
    if (run.again) cost.extra += x_.p.again[run.op], ++cost.runs;
    if (!steps_) return;
    for (std::size_t k = 0; k < step.reuses.size(); k += 2) std::erase(gone, step.reuses[k]);
    if (!gone.empty()) steps_->push_back({kFree, -1, std::move(gone)});
    steps_->push_back(std::move(step));
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
    for (i64 s = 0; s < x_.p.storages && valid_; ++s) valid_ = expect_[s] <= 0;
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
