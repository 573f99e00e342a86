#include "engine.h"

#include <algorithm>
#include <utility>

namespace tightship {

namespace {
constexpr i64 kMaxRunsPerOp = 30;  // recomputations, over the number of ops
}  // namespace

// Whether an op that runs at its place reads `s` before a gap in which it is evicted.
bool Engine::wanted_at_once(i32 s) const {
    for (i64 j = touches_.start[s]; j + 1 < touches_.start[s + 1]; ++j) {
        const i32 gap = gap_of_[j];
        if (gap >= 0 && recomputed(evict_[gap])) return false;
        if (gap >= 0 && evict_[gap] != kKeep) return true;
        const i32 next = touches_.item[j + 1];
        if (next == p_.ops || !late_[next]) return true;
    }
    return false;
}

// Which ops do not run at their place: last first, since readers that don't run want nothing.
void Engine::defer() {
    s_.late.assign(p_.ops, 0);
    s_.waiting = 0;
    for (auto at = movable_.rbegin(); at != movable_.rend(); ++at) {
        const i32 o = p_.order[*at];
        bool wanted = false;
        for (auto d = p_.defines.begin(o); d != p_.defines.end(o) && !wanted; ++d) wanted = wanted_at_once(*d);
        late_[*at] = !wanted;
        s_.late[o] = !wanted;
        s_.waiting += !wanted;
    }
}

void Engine::reset() {
    s_.resident.assign(p_.storages, 0);
    s_.version.assign(p_.storages, 0);
    s_.touch.assign(p_.storages, 0);
    for (i64 s = 0; s < p_.storages; ++s) s_.resident[s] = p_.owned[s];
    s_.live = static_bytes_;
    s_.cost = Cost{};
    s_.cost.peak = static_bytes_;
    s_.position = 0;
    s_.packed.assign(p_.storages, 0);
    s_.host.assign(p_.storages, 0);
    now_ = sent_ = fetched_ = 0;
    host_live_ = 0;
    leaving_now_.clear();
    landed_.clear();
    late_fetches_.clear();
    if (copies_) {
        ready_.assign(p_.storages, 0);
        coming_.assign(p_.storages, 0);
        schedule();
    }
    defer();
}

void Engine::use(i64 bytes, i32 position) {
    if (bytes > s_.cost.peak) {
        s_.cost.peak = bytes;
        s_.cost.peak_at = position;
    }
    if (bytes > limit_) {
        s_.cost.excess += static_cast<double>(bytes - limit_);
        if (copies_) crowded_[position] = 1;
    }
    if (line_) (*line_)[position] = std::max((*line_)[position], bytes);
}

bool Engine::beyond_cutoff() const {
    if (scouting_) return s_.cost.extra > cutoff_;
    const double over = static_cast<double>(std::max<i64>(0, s_.cost.peak - limit_));
    return s_.cost.extra + peak_price_ * over + excess_price_ * s_.cost.excess > cutoff_;
}

void Engine::leave(i32 s) {
    s_.resident[s] = 0;
    s_.live -= p_.size[s];
    std::vector<i32> waits;
    if (copies_ && coming_[s]) waits = arrivals(&s, &s + 1);
    if (!out_) return clear_copies();
    const Step* last = out_->empty() ? nullptr : &out_->back();
    const bool joins = last && last->kind == kFree && last->form == kFull && last->stream == 0 && last->waits.empty();
    if (!joins || !waits.empty()) out_->push_back({kFree, -1, {}, kFull, 0, std::move(waits)});
    out_->back().storages.push_back(s);
    if (copies_) clear_copies();
}

// Whether a storage restored only for a recomputation is to go again.
bool Engine::passes(i32 s) const {
    if (!replayable_[s] || !s_.resident[s]) return false;
    if (!has_touch(s)) return true;
    const i64 next = touches_.start[s] + s_.touch[s];
    if (s_.touch[s] == 0 || gap_of_[next - 1] < 0) return false;
    const std::uint8_t to = evict_[gap_of_[next - 1]];
    return to == kDrop || (to == kPass && touches_.item[next] > s_.position + horizon_);
}

// Whether the stay of `s` ends with its touch at this position, its bytes free at once.
bool Engine::departs(i32 s, i32 at) const {
    if (p_.owned[s] || !s_.resident[s] || pin_[s]) return false;
    const i64 touch = touches_.start[s] + s_.touch[s];
    if (s_.touch[s] + 1 < touches_.size(s)) return gap_of_[touch] >= 0 && recomputed(evict_[gap_of_[touch]]);
    return replayable_[s] || !(scouting_ || (extended_ && until_[s] > at));
}

// Which results take the places of inputs when `op` runs, at its position or (-1) for `wanted` only. These inputs are
// gone from here on.
void Engine::take_places(i32 op, i32 at, i32 wanted) {
    reused_.clear();
    const auto taken = [&](i32 s, std::size_t side) {
        for (std::size_t j = side; j < reused_.size(); j += 2)
            if (reused_[j] == s) return true;
        return false;
    };
    for (auto pair = p_.overwrites.begin(op); pair != p_.overwrites.end(op); pair += 2) {
        const i32 a = pair[0], b = pair[1];
        if (p_.kept[b] || !s_.resident[a] || taken(a, 0) || taken(b, 1)) continue;
        if (at >= 0) {
            if (!departs(a, at)) continue;
        } else if (b != wanted || s_.resident[b] || pin_[a] != 1 || !passes(a) || (shared_[a] && !has_touch(a))) {
            continue;
        }
        reused_.push_back(a);
        reused_.push_back(b);
        s_.resident[a] = 0;
        s_.live -= p_.size[a];
    }
}

// A storage a recomputation reads, unless the op leaves it alone or makes it.
bool Engine::skips(i32 op, i32 wanted, i32 read) const {
    return read == wanted || (p_.updates.size(op) != 0 && contains(p_.updates, op, read));
}

// Begin to run one op of a recipe again. All it reads is pinned before any is restored: what two of them share must
// not be made twice.
bool Engine::begin_replay(Restoring& r) {
    const i32 op = *r.writer;
    r.ok = ++s_.cost.runs <= kMaxRunsPerOp * p_.ops && s_.cost.extra <= cutoff_;
    if (!r.ok) return false;
    for (auto t = p_.reads.begin(op); t != p_.reads.end(op); ++t) pin_[*t] += !skips(op, r.storage, *t);
    r.read = 0;
    return true;
}

// What follows once one of the storages that the op reads is there, or could not be restored.
void Engine::arrive(Restoring& r, bool there) {
    const i32 op = *r.writer, t = p_.reads.begin(op)[r.read];
    if (scouting_ && !replayable_[t] && !p_.owned[t])
        until_[t] = std::max(until_[t], ending_ ? static_cast<i32>(p_.ops) : s_.position);
    r.ok = there && s_.version[t] == p_.needs.begin(op)[r.read];
    ++r.read;
}

// Run the op, all it reads being there.
void Engine::recompute(i32 op, i32 wanted) {
    const i32* reads = p_.reads.begin(op);
    i64 made = 0;
    const bool first = s_.late[op];
    Step step{first ? kCompute : kRecompute, op, {}};
    std::vector<i32> dropped;
    for (auto d = p_.defines.begin(op); d != p_.defines.end(op); ++d) made += p_.size[*d];
    if (copies_) {
        step.waits = arrivals(reads, p_.reads.end(op));
        settle();
    }
    take_places(op, -1, wanted);
    if (copies_) make_room(made + p_.extra[op]);
    use(s_.live + made + p_.extra[op], s_.position);
    for (auto d = p_.defines.begin(op); d != p_.defines.end(op); ++d) {
        if (s_.resident[*d]) continue;
        s_.resident[*d] = 1;
        s_.version[*d] = 1;
        const bool stored = s_.packed[*d] || s_.host[*d];
        if (*d != wanted && (stored || !replayable_[*d] || writers_.size(*d) > 1 || passes(*d))) {
            if (first && out_) dropped.push_back(*d);
            s_.resident[*d] = 0;
            continue;
        }
        s_.live += p_.size[*d];
        if (out_) step.storages.push_back(*d);
    }
    if (contains(p_.mutates, op, wanted)) ++s_.version[wanted];
    if (first) {
        s_.late[op] = 0;
        --s_.waiting;
        --s_.cost.runs;
        step.storages.clear();
        now_ += p_.time[op];
    } else {
        spend(p_.time[op]);
    }
    if (out_) step.reuses = reused_;
    if (out_) out_->push_back(std::move(step));
    if (copies_) clear_copies();
    if (!dropped.empty()) out_->push_back({kFree, -1, std::move(dropped)});
}

// Run the op unless something it reads is missing, and let go of what it read.
void Engine::end_replay(const Restoring& r) {
    const i32 op = *r.writer;
    if (r.ok) recompute(op, r.storage);
    for (auto t = p_.reads.begin(op); t != p_.reads.end(op); ++t) {
        if (skips(op, r.storage, *t) || --pin_[*t] > 0 || !r.ok || !passes(*t)) continue;
        if (shared_[*t] && !has_touch(*t)) held_.push_back(*t);
        else leave(*t);
    }
}

// Restore a storage where nothing has to be restored first; else its recipe is to run, and stands in `restoring_`.
Engine::Way Engine::begin_restore(i32 s) {
    if (s_.packed[s]) return unpack(s), Way::there;
    if (s_.host[s]) return fetch(s), Way::there;
    if (!replayable_[s]) {
        lost_anchor_ = true;
        return Way::lost;
    }
    ++pin_[s];
    restoring_.push_back({s, writers_.begin(s), -1, true});
    return Way::recipe;
}

// Restore what the op of the innermost recipe reads. False: one of them has to be made by a recipe of its own first.
bool Engine::restore_reads() {
    Restoring& r = restoring_.back();
    const i32 op = *r.writer;
    while (r.ok && r.read < p_.reads.size(op)) {
        const i32 t = p_.reads.begin(op)[r.read];
        if (skips(op, r.storage, t)) {
            ++r.read;
            continue;
        }
        const Way way = s_.resident[t] ? Way::there : begin_restore(t);
        if (way == Way::recipe) return false;
        arrive(r, way == Way::there);
    }
    return true;
}

// Go on with the innermost recipe, until it is over or waits for another one; `last`: what became of what it waited for.
Engine::Way Engine::go_on(Way last) {
    Restoring& r = restoring_.back();
    if (last != Way::recipe) arrive(r, last == Way::there);
    while (r.ok && r.writer != writers_.end(r.storage)) {
        if (r.read < 0 && !begin_replay(r)) break;
        if (!restore_reads()) return Way::recipe;
        end_replay(r);
        ++r.writer;
        r.read = -1;
    }
    const Way way = r.ok ? Way::there : Way::lost;
    --pin_[r.storage];
    restoring_.pop_back();
    return way;
}

// What a recipe reads may have recipes of its own, to any depth: those under way stand in `restoring_`, the innermost
// last.
bool Engine::restore(i32 s) {
    Way way = begin_restore(s);
    while (!restoring_.empty()) way = go_on(way);
    return way == Way::there;
}

void Engine::release() {
    for (i32 t : held_)
        if (s_.resident[t]) leave(t);
    held_.clear();
}

void Engine::compute(i32 at) {
    const i32 o = p_.order[at];
    s_.position = at;
    const i32 *rb = p_.reads.begin(o), *re = p_.reads.end(o);
    if (copies_) {
        for (auto s = rb; s != re; ++s) stay(*s);
        issue(at);
    }
    for (auto s = rb; s != re; ++s) ++pin_[*s];
    for (auto s = rb; s != re && s_.cost.valid; ++s)
        if (!s_.resident[*s]) s_.cost.valid = restore(*s);
    for (auto s = rb; s != re; ++s) --pin_[*s];
    release();
    if (!s_.cost.valid) return;
    i64 made = 0;
    for (auto d = p_.defines.begin(o); d != p_.defines.end(o); ++d) made += p_.size[*d];
    std::vector<i32> waits;
    if (copies_) {
        waits = arrivals(rb, re);
        settle();
    }
    take_places(o, at, -1);
    if (copies_) make_room(made + p_.extra[o]);
    use(s_.live + made + p_.extra[o], at);
    now_ += p_.time[o];
    if (out_) out_->push_back({kCompute, o, {}, kFull, 0, std::move(waits), reused_});
    if (copies_) clear_copies();
    for (auto d = p_.defines.begin(o); d != p_.defines.end(o); ++d) {
        s_.resident[*d] = 1;
        s_.version[*d] = 1;
        s_.live += p_.size[*d];
    }
    for (auto m = p_.mutates.begin(o); m != p_.mutates.end(o); ++m) ++s_.version[*m];
    for (auto s = rb; s != re; ++s) depart(*s, at);
    for (auto d = p_.defines.begin(o); d != p_.defines.end(o); ++d) depart(*d, at);
    if (extended_)
        for (i32 s : leaving_[at]) leave(s);
}

// An op that runs later: what it reads is not touched here, though it may leave.
void Engine::pass_over(i32 at) {
    const i32 o = p_.order[at];
    s_.position = at;
    if (copies_) {
        for (auto s = p_.reads.begin(o); s != p_.reads.end(o); ++s) stay(*s);
        issue(at);
    }
    for (auto s = p_.reads.begin(o); s != p_.reads.end(o); ++s) depart(*s, at);
    for (auto d = p_.defines.begin(o); d != p_.defines.end(o); ++d) depart(*d, at);
    if (extended_)
        for (i32 s : leaving_[at]) leave(s);
}

// The touch of `s` at this position is over: it leaves when it is not needed, or evicted until the next one.
void Engine::depart(i32 s, i32 at) {
    if (p_.owned[s]) return;
    const i64 touch = touches_.start[s] + s_.touch[s]++;
    if (!s_.resident[s]) return;
    if (has_touch(s)) {
        const std::uint8_t to = gap_of_[touch] < 0 ? std::uint8_t{kKeep} : evict_[gap_of_[touch]];
        if (to == kKeep) return;
        if (to == kPack) return pack(s);
        if (to == kOffload) return send(s);
    } else if ((extended_ || scouting_) && !replayable_[s] && (scouting_ || until_[s] > at)) {
        return;
    }
    leave(s);
}

void Engine::run() {
    pin_.assign(p_.storages, 0);
    held_.clear();
    restoring_.clear();
    for (i32 at = 0; at < p_.ops && s_.cost.valid; ++at) {
        late_[at] ? pass_over(at) : compute(at);
        if (at % 16 == 0 && beyond_cutoff()) s_.cost.valid = false;
    }
    s_.position = static_cast<i32>(p_.ops) - 1;
    ending_ = true;
    if (copies_)
        for (i64 s = 0; s < p_.storages; ++s)
            if (p_.kept[s]) stay(static_cast<i32>(s));
    for (i64 s = 0; s < p_.storages && s_.cost.valid; ++s)
        if (p_.kept[s] && !s_.resident[s]) s_.cost.valid = restore(static_cast<i32>(s));
    ending_ = false;
    release();
    if (copies_ && s_.cost.valid) land_all();
    if (extended_ && s_.cost.valid)
        for (i32 t : leaving_[p_.ops]) leave(t);
    if (copies_) s_.cost.extra += std::max(0.0, std::max(sent_, fetched_) - now_);
    if (beyond_cutoff() || s_.waiting > 0 || s_.cost.host > host_limit_) s_.cost.valid = false;
}

// Evaluate with `evict_`, `limit_`, `cutoff_`; a second and third pass only where a life must be extended.
Cost Engine::attempt() {
    extended_ = lost_anchor_ = false;
    if (line_) std::fill(line_->begin(), line_->end(), 0);
    if (out_) out_->clear();
    reset();
    run();
    if (s_.cost.valid || !lost_anchor_) return s_.cost;
    extend();
    if (!extended_) return s_.cost;
    if (line_) std::fill(line_->begin(), line_->end(), 0);
    if (out_) out_->clear();
    reset();
    run();
    return s_.cost;
}

void Engine::extend() {
    auto* out = std::exchange(out_, nullptr);
    auto* line = std::exchange(line_, nullptr);
    until_.assign(p_.storages, -1);
    scouting_ = true;
    reset();
    run();
    scouting_ = false;
    out_ = out, line_ = line;
    extended_ = s_.cost.valid;
    leaving_.assign(p_.ops + 1, {});
    for (i64 s = 0; s < p_.storages; ++s) {
        const i64 n = touches_.size(s);
        if (until_[s] >= 0 && n > 0 && touches_.begin(s)[n - 1] < until_[s])
            leaving_[until_[s]].push_back(static_cast<i32>(s));
    }
}

Cost Engine::evaluate(const std::uint8_t* evict, i64 limit, double cutoff) {
    evict_ = evict, limit_ = limit, cutoff_ = cutoff;
    return copies_ ? attempt_with_copies() : attempt();
}

std::vector<i64> Engine::profile(const std::uint8_t* evict) {
    std::vector<i64> line(p_.ops, 0);
    line_ = &line;
    evaluate(evict, std::numeric_limits<i64>::max());
    line_ = nullptr;
    return line;
}

std::vector<Step> Engine::emit(const std::uint8_t* evict, i64 limit) {
    std::vector<Step> steps;
    out_ = &steps;
    evaluate(evict, limit);
    out_ = nullptr;
    if (!s_.cost.valid) steps.clear();
    return steps;
}

}  // namespace tightship
