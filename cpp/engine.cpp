#include "engine.h"

#include <utility>

namespace tightship {

namespace {
constexpr i64 kMaxRunsPerOp = 30;  // recomputations, over the number of ops
}  // namespace

// Whether an op that runs at its place reads `s` before a gap in which it is evicted.
bool Engine::wanted_at_once(i32 s) const {
    for (i64 j = x_.touches.start[s]; j + 1 < x_.touches.start[s + 1]; ++j) {
        const i32 gap = x_.gap_of[j];
        if (gap >= 0 && (gap == x_.stay[s] || recomputed(s_.decisions[gap]))) return false;
        if (gap >= 0 && s_.decisions[gap] != kKeep) return true;
        const i32 next = x_.touches.item[j + 1];
        if (next == x_.p.ops || !late_[next]) return true;
    }
    return false;
}

// Which ops do not run at their place: last first, since readers that don't run want nothing.
void Engine::defer() {
    late_.assign(x_.p.ops, 0);
    waiting_.assign(x_.p.ops, 0);
    waits_ = 0;
    for (auto at = x_.movable.rbegin(); at != x_.movable.rend(); ++at) {
        const i32 o = x_.p.order[*at];
        bool wanted = false;
        for (auto d = x_.p.defines.begin(o); d != x_.p.defines.end(o) && !wanted; ++d)
            wanted = wanted_at_once(*d);
        late_[*at] = !wanted;
        waiting_[o] = !wanted;
        waits_ += !wanted;
    }
}

bool Engine::beyond_cutoff() const {
    if (scouting_) return s_.cost.extra > cutoff_;
    const double over = static_cast<double>(std::max<i64>(0, s_.cost.peak - s_.limit));
    return s_.cost.extra + peak_price_ * over + excess_price_ * s_.cost.excess > cutoff_;
}

// Whether a storage restored only for a recomputation is to go again.
bool Engine::passes(i32 s) const {
    if (!x_.replayable[s] || !s_.resident[s] || (ending_ && x_.p.kept[s])) return false;
    if (!has_touch(s)) return true;
    const i64 next = x_.touches.start[s] + s_.touch[s];
    if (s_.touch[s] == 0 || x_.gap_of[next - 1] < 0) return false;
    const std::uint8_t to = s_.decisions[x_.gap_of[next - 1]];
    return to == kDrop || (to == kPass && x_.touches.item[next] > s_.position + horizon_);
}

// Whether a storage is there in a version that its next touch does not want.
bool Engine::passing(i32 s) const {
    if (!x_.versioned[s]) return false;
    const i64 next = x_.touches.start[s] + s_.touch[s];
    return s_.version[s] != (has_touch(s) ? x_.seen[next] : static_cast<i32>(x_.writers.size(s)));
}

// Whether a storage is not there, or had to go as another version of it is wanted, and nobody else needs it
// (`readers` pinned it).
bool Engine::gone(i32 s, i32 version, i32 readers) {
    if (!s_.resident[s]) return true;
    if (!x_.versioned[s] || s_.version[s] == version || s_.pin[s] > readers) return false;
    if (closing_ && x_.p.kept[s]) return false;
    copies_.leave(s);
    return true;
}

// Whether a storage restored after its last touch, which several recomputations may read, is kept for them
// until the op that asked for it has run.
bool Engine::held(i32 s) const {
    if (!x_.shared[s] || has_touch(s)) return false;
    for (i64 j = x_.touches.start[s + 1] - 2; j >= x_.touches.start[s]; --j)
        if (const i32 gap = x_.gap_of[j]; gap >= 0 && gap != x_.stay[s]) return s_.decisions[gap] != kDrop;
    return true;
}

// Whether the stay of `s` ends with its touch at this position, its bytes free at once.
bool Engine::departs(i32 s, i32 at) const {
    if (x_.p.owned[s] || !s_.resident[s] || s_.pin[s]) return false;
    const i64 touch = x_.touches.start[s] + s_.touch[s];
    if (s_.touch[s] + 1 < x_.touches.size(s))
        return x_.gap_of[touch] >= 0 && x_.absent(x_.gap_of[touch], s_.decisions[x_.gap_of[touch]]);
    return x_.replayable[s] || !(scouting_ || (extended_ && until_[s] > at));
}

// Which results take the places of inputs when `op` runs, at its position or (-1) for `wanted` only. These
// inputs are gone from here on.
void Engine::take_places(i32 op, i32 at, i32 wanted) {
    reused_.clear();
    const auto taken = [&](i32 s, std::size_t side) {
        for (std::size_t j = side; j < reused_.size(); j += 2)
            if (reused_[j] == s) return true;
        return false;
    };
    for (auto pair = x_.p.overwrites.begin(op); pair != x_.p.overwrites.end(op); pair += 2) {
        const i32 a = pair[0], b = pair[1];
        if (x_.p.kept[b] || !s_.resident[a] || taken(a, 0) || taken(b, 1)) continue;
        if (at >= 0) {
            if (!departs(a, at)) continue;
        } else if (b != wanted || s_.resident[b] || s_.pin[a] != 1 ||
                   (!passing(a) && (!passes(a) || held(a)))) {
            continue;
        }
        reused_.push_back(a);
        reused_.push_back(b);
        s_.resident[a] = 0;
        s_.live -= x_.p.size[a];
    }
}

// A storage a recomputation reads, unless the op leaves it alone or makes it.
bool Engine::skips(i32 op, i32 wanted, i32 read) const {
    return read == wanted || (x_.p.updates.size(op) != 0 && x_.p.updates.has(op, read));
}

bool Engine::too_many_runs() const { return s_.cost.runs > kMaxRunsPerOp * x_.p.ops; }

// Begin to run one op of a recipe again. All it reads is pinned before any is restored: what two of them
// share must not be made twice.
bool Engine::begin_replay(Restoring& r) {
    const i32 op = *r.writer;
    ++s_.cost.runs;
    r.ok = !too_many_runs() && s_.cost.extra <= cutoff_;
    if (!r.ok) return false;
    for (auto t = x_.p.reads.begin(op); t != x_.p.reads.end(op); ++t) s_.pin[*t] += !skips(op, r.storage, *t);
    r.read = 0;
    return true;
}

// What follows once one of the storages that the op reads is there, or could not be restored.
void Engine::arrive(Restoring& r, bool there) {
    const i32 op = *r.writer, t = x_.p.reads.begin(op)[r.read];
    if (scouting_ && !x_.replayable[t] && !x_.p.owned[t])
        until_[t] = std::max(until_[t], ending_ ? static_cast<i32>(x_.p.ops) : s_.position);
    r.ok = there && s_.version[t] == x_.p.needs.begin(op)[r.read];
    ++r.read;
}

i64 Engine::made(i32 op) const {
    i64 bytes = 0;
    for (const i32 d : x_.p.defines[op]) bytes += x_.p.size[d];
    return bytes;
}

// Run the op, all it reads being there.
void Engine::recompute(i32 op, i32 wanted) {
    const bool first = waiting_[op];
    Step step{first ? kCompute : kRecompute, op, {}};
    std::vector<i32> dropped;
    if (copies_.any()) step.waits = copies_.await(x_.p.reads.begin(op), x_.p.reads.end(op));
    take_places(op, -1, wanted);
    const i64 bytes = made(op) + x_.p.extra[op];
    if (copies_.any()) copies_.make_room(bytes);
    s_.use(s_.live + bytes, s_.position);
    for (auto d = x_.p.defines.begin(op); d != x_.p.defines.end(op); ++d) {
        if (s_.resident[*d]) continue;
        s_.resident[*d] = 1;
        s_.version[*d] = 1;
        const bool stored = s_.packed[*d] || s_.host[*d];
        if (*d != wanted && (stored || !x_.replayable[*d] || x_.writers.size(*d) > 1 || passes(*d))) {
            if (first && s_.steps) dropped.push_back(*d);
            s_.resident[*d] = 0;
            continue;
        }
        s_.live += x_.p.size[*d];
        if (s_.steps) step.storages.push_back(*d);
    }
    if (x_.p.mutates.has(op, wanted)) ++s_.version[wanted];
    if (first) {
        waiting_[op] = 0;
        --waits_;
        --s_.cost.runs;
        step.storages.clear();
        s_.now += x_.p.time[op];
    } else {
        s_.spend(x_.p.again[op]);
    }
    if (s_.steps) step.reuses = reused_;
    if (s_.steps) s_.steps->push_back(std::move(step));
    if (copies_.any()) copies_.clear();
    if (!dropped.empty()) s_.steps->push_back({kFree, -1, std::move(dropped)});
}

// Run the op unless something it reads is missing, and let go of what it read.
void Engine::end_replay(const Restoring& r) {
    const i32 op = *r.writer;
    if (r.ok) recompute(op, r.storage);
    if (x_.p.brief) release(restoring_.size());
    for (auto t = x_.p.reads.begin(op); t != x_.p.reads.end(op); ++t) {
        if (skips(op, r.storage, *t) || --s_.pin[*t] > 0 || !r.ok || !s_.resident[*t]) continue;
        if (passing(*t)) copies_.leave(*t);
        else if (!passes(*t)) continue;
        else if (held(*t)) held_.emplace_back(*t, restoring_.size());
        else copies_.leave(*t);
    }
}

// Restore a version of a storage where nothing has to be restored first; else its recipe is to run, and
// stands in `restoring_`.
Engine::Way Engine::begin_restore(i32 s, i32 version) {
    if ((s_.packed[s] || s_.host[s]) && s_.version[s] != version) return Way::lost;
    if (s_.packed[s]) return copies_.unpack(s), Way::there;
    if (s_.host[s]) return copies_.fetch(s), Way::there;
    if (!x_.replayable[s] && (s_.position > x_.until[s] || !has_touch(s))) {
        lost_anchor_ = true;
        return Way::lost;
    }
    ++s_.pin[s];
    const i32* writers = x_.writers.begin(s);
    const i64 count = x_.versioned[s] ? version : x_.writers.size(s);
    restoring_.push_back({s, writers, writers + count, -1, true});
    return Way::recipe;
}

// Restore what the op of the innermost recipe reads. False: one of them has to be made by a recipe of its own
// first.
bool Engine::restore_reads() {
    Restoring& r = restoring_.back();
    const i32 op = *r.writer;
    while (r.ok && r.read < x_.p.reads.size(op)) {
        const i32 t = x_.p.reads.begin(op)[r.read];
        if (skips(op, r.storage, t)) {
            ++r.read;
            continue;
        }
        const i32 version = x_.p.needs.begin(op)[r.read];
        const Way way = gone(t, version, 1) ? begin_restore(t, version) : Way::there;
        if (way == Way::recipe) return false;
        arrive(r, way == Way::there);
    }
    return true;
}

// Go on with the innermost recipe, until it is over or waits for another one; `last`: what became of what it
// waited for.
Engine::Way Engine::go_on(Way last) {
    Restoring& r = restoring_.back();
    if (last != Way::recipe) arrive(r, last == Way::there);
    while (r.ok && r.writer != r.end) {
        if (r.read < 0 && !begin_replay(r)) break;
        if (!restore_reads()) return Way::recipe;
        end_replay(r);
        ++r.writer;
        r.read = -1;
    }
    const Way way = r.ok ? Way::there : Way::lost;
    --s_.pin[r.storage];
    restoring_.pop_back();
    return way;
}

// What a recipe reads may have recipes of its own, to any depth: those under way stand in `restoring_`, the
// innermost last.
bool Engine::restore(i32 s, i32 version) {
    Way way = begin_restore(s, version);
    while (!restoring_.empty()) way = go_on(way);
    return way == Way::there;
}

// Let go of what was held for ops of more than so many recipes; who needs it still decides anew.
void Engine::release(std::size_t depth) {
    std::size_t left = 0;
    for (const auto& [t, readers] : held_) {
        if (readers <= depth) held_[left++] = {t, readers};
        else if (s_.resident[t] && s_.pin[t] == 0) copies_.leave(t);
    }
    held_.resize(left);
}

void Engine::compute(i32 at) {
    const i32 o = x_.p.order[at];
    s_.position = at;
    const i32 *rb = x_.p.reads.begin(o), *re = x_.p.reads.end(o);
    if (copies_.any()) copies_.begin(rb, re, at);
    for (auto s = rb; s != re; ++s) ++s_.pin[*s];
    const i32* version = x_.p.needs.begin(o);
    for (auto s = rb; s != re && s_.cost.valid; ++s, ++version)
        if (gone(*s, *version, 1)) s_.cost.valid = restore(*s, *version);
    version = x_.p.needs.begin(o);
    for (auto s = rb; s != re && s_.cost.valid; ++s, ++version)
        s_.cost.valid = !x_.versioned[*s] || s_.version[*s] == *version;
    for (auto s = rb; s != re; ++s) --s_.pin[*s];
    release();
    if (!s_.cost.valid) return;
    std::vector<i32> waits;
    if (copies_.any()) waits = copies_.await(rb, re);
    take_places(o, at, -1);
    const i64 bytes = made(o) + x_.p.extra[o];
    if (copies_.any()) copies_.make_room(bytes);
    s_.use(s_.live + bytes, at);
    s_.now += x_.p.time[o];
    if (s_.steps) s_.steps->push_back({kCompute, o, {}, kFull, 0, std::move(waits), reused_});
    if (copies_.any()) copies_.clear();
    for (auto d = x_.p.defines.begin(o); d != x_.p.defines.end(o); ++d) {
        s_.resident[*d] = 1;
        s_.version[*d] = 1;
        s_.live += x_.p.size[*d];
    }
    for (auto m = x_.p.mutates.begin(o); m != x_.p.mutates.end(o); ++m) ++s_.version[*m];
    depart_all(at);
}

// An op that runs later: what it reads is not touched here, though it may leave.
void Engine::pass_over(i32 at) {
    const i32 o = x_.p.order[at];
    s_.position = at;
    if (copies_.any()) copies_.begin(x_.p.reads.begin(o), x_.p.reads.end(o), at);
    depart_all(at);
}

void Engine::depart_all(i32 at) {
    const i32 o = x_.p.order[at];
    for (const i32 s : x_.p.reads[o]) depart(s, at);
    for (const i32 d : x_.p.defines[o]) depart(d, at);
    for (const i32 s : x_.stay_ends[at]) depart(s, at);
    if (extended_)
        for (const i32 s : leaving_[at]) copies_.leave(s);
}

// The touch of `s` at this position is over: it leaves when it is not needed, or evicted until the next one.
void Engine::depart(i32 s, i32 at) {
    if (x_.p.owned[s]) return;
    const i64 touch = x_.touches.start[s] + s_.touch[s]++;
    if (!s_.resident[s]) return;
    if (has_touch(s)) {
        const std::uint8_t to = x_.gap_of[touch] < 0 ? std::uint8_t{kKeep} : s_.decisions[x_.gap_of[touch]];
        if (to == kKeep || to == kStay) return;
        if (to == kPack) return copies_.pack(s);
        if (to == kOffload) return copies_.offload(s);
    } else if ((extended_ || scouting_) && !x_.replayable[s] && (scouting_ || until_[s] > at)) {
        return;
    }
    copies_.leave(s);
}

void Engine::run() {
    begin_run();
    run_from(0);
}

void Engine::begin_run() {
    s_.reset(x_);
    copies_.reset();
    defer();
    held_.clear();
    restoring_.clear();
}

void Engine::run_from(i32 position) {
    for (i32 at = position; at < x_.p.ops && s_.cost.valid; ++at) {
        if (tracing_ && at % stride_ == 0 && at_mark(at)) return;
        late_[at] ? pass_over(at) : compute(at);
        if (at % 16 == 0 && beyond_cutoff()) s_.cost.valid = false;
    }
    s_.position = static_cast<i32>(x_.p.ops) - 1;
    ending_ = true;
    for (i64 s = 0; s < x_.p.storages; ++s)
        if (x_.p.kept[s]) copies_.stay(static_cast<i32>(s));
    for (const bool versioned : {false, true}) {  // of these, the others may want earlier versions
        closing_ = versioned;
        for (const i32 s : x_.p.ending)
            if (s_.cost.valid && x_.p.kept[s] && x_.versioned[s] == versioned && !s_.resident[s])
                s_.cost.valid = restore(s, static_cast<i32>(x_.writers.size(s)));
    }
    closing_ = false;
    ending_ = false;
    release();
    if (extended_ && s_.cost.valid)
        for (i32 t : leaving_[x_.p.ops])
            if (s_.resident[t]) copies_.leave(t);
    if (s_.cost.valid) copies_.land_all();
    s_.cost.extra += std::max(0.0, copies_.finished() - s_.now);
    if (beyond_cutoff() || waits_ > 0 || s_.cost.host > copies_.host_limit) s_.cost.valid = false;
}

// A second and third pass only where a life must be extended.
Cost Engine::attempt() {
    extended_ = lost_anchor_ = false;
    copies_.begin_attempt();
    run();
    return s_.cost.valid || !lost_anchor_ ? s_.cost : with_longer_lives();
}

// `mark`: of the run evaluated last, before which nothing was lost.
Cost Engine::with_longer_lives(i64 mark) {
    extend(mark);
    if (extended_) run();
    return s_.cost;
}

void Engine::extend(i64 mark) {
    auto* steps = std::exchange(s_.steps, nullptr);
    auto* profile = std::exchange(s_.profile, nullptr);
    until_.assign(x_.p.storages, -1);
    scouting_ = true;
    begin_run();
    if (mark > 0) {  // until there it would be the same
        resume(tried_, mark);
        keep_lives();
    }
    run_from(static_cast<i32>(mark * stride_));
    scouting_ = false;
    s_.steps = steps, s_.profile = profile;
    extended_ = s_.cost.valid;
    leaving_.assign(x_.p.ops + 1, {});
    for (i64 s = 0; s < x_.p.storages; ++s) {
        const i64 n = x_.touches.size(s);
        if (until_[s] >= 0 && n > 0 && x_.touches.begin(s)[n - 1] < until_[s])
            leaving_[until_[s]].push_back(static_cast<i32>(s));
    }
}

Cost Engine::evaluate(const Bits& decisions, i64 limit, double cutoff) {
    s_.decisions = decisions.data(), s_.limit = limit, cutoff_ = cutoff;
    copies_.plan();
    Cost cost = attempt();
    while (copies_.try_again(cost)) cost = attempt();
    return cost;
}

std::vector<i64> Engine::profile(const Bits& decisions) {
    std::vector<i64> bytes(x_.p.ops, 0);
    s_.profile = &bytes;
    evaluate(decisions, std::numeric_limits<i64>::max());
    s_.profile = nullptr;
    return bytes;
}

std::vector<Step> Engine::emit(const Bits& decisions, i64 limit) {
    std::vector<Step> steps;
    s_.steps = &steps;
    evaluate(decisions, limit);
    s_.steps = nullptr;
    if (!s_.cost.valid) steps.clear();
    return steps;
}

}  // namespace tightship
