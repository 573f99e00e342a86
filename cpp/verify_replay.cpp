#include "verify_replay.h"

namespace tightship::verify {

Replay::Replay(const Graph& g, const Facts& f, const Plan& p)
    : live(f.caller_bytes), peak(f.caller_bytes), g_(g), f_(f), p_(p),
      lanes_(p, kState * g.size.count + g.time.count), times_(p), packed_(g.size.count),
      written_(g.size.count), at_(g.time.count, -1) {
    for (int form = kFull; form < kForms; ++form) {
        const Int count = form == kState ? g.time.count : g.size.count;
        forms_[form].since.assign(count, 0);
        forms_[form].version.assign(count, -1);
    }
    for (Index s = 0; s < static_cast<Index>(g.size.count); ++s)
        if (f.caller[s]) forms_[kFull].version[s] = 0, forms_[kFull].since[s] = -1;
}

bool Replay::run() {
    if (!lanes_.known()) return false;
    for (Int i = 0; i < p_.kind.count; ++i) {
        for (const Index w : p_.waits[i])
            if (w < 0 || w >= i) return false;
        if (p_.stream[i] < 0) return false;
        lanes_.begin(i);
        Int level = live;
        if (!step(i, level)) return false;
        peak = std::max({peak, level, live});
    }
    return end();
}

bool Replay::step(Int i, Int& level) {
    if (p_.kind[i] <= kRecompute) return op(i, level);
    times_.step(i, p_.seconds[i], p_.lost[i]);
    return p_.kind[i] == kFree ? free(i) : copy(i);
}

// The end of a residence that there is.
bool Replay::drop(Int i, Form form, Index s) {
    implied.push_back({s, form, forms_[form].since[s], i, size(form, s), i});
    forms_[form].version[s] = -1;
    (form == kHosted ? host_ : live) -= size(form, s);
    return lanes_.write(i, key(form, s));
}

bool Replay::make(Int i, Form form, Index s, Index version) {
    if (there(form, s)) return false;
    forms_[form].since[s] = i, forms_[form].version[s] = version;
    (form == kHosted ? host_ : live) += size(form, s);
    host_peak = std::max(host_peak, host_);
    lanes_.make(i, key(form, s));
    return true;
}

bool Replay::free(Int i) {
    const auto form = static_cast<Form>(p_.form[i]);
    if (form == kState) {
        const Int k = p_.op[i];
        if (p_.storages[i].count() || k < 0 || k >= g_.time.count) return false;
        return there(kState, static_cast<Index>(k)) && drop(i, kState, static_cast<Index>(k));
    }
    for (const Index s : p_.storages[i]) {
        if (!storage(s) || (form == kFull && f_.caller[s]) || !there(form, s)) return false;
        if (!drop(i, form, s)) return false;
    }
    return true;
}

// One form made of another.
bool Replay::copy(Int i) {
    const bool out = p_.kind[i] == kOffload || p_.kind[i] == kCompress;
    const Form other = p_.kind[i] == kOffload || p_.kind[i] == kFetch ? kHosted : kPacked;
    const Form from = out ? kFull : other, to = out ? other : kFull;
    if (p_.kind[i] == kCompress && p_.nbytes[i] < 1) return false;
    for (const Index s : p_.storages[i]) {
        if (!storage(s) || !there(from, s) || !lanes_.read(i, key(from, s))) return false;
        const Index version = forms_[from].version[s];
        if (to == kPacked) {
            if (there(kPacked, s) || (!p_.lossy[i] && version != f_.final[s])) return false;
            packed_[s] = p_.nbytes[i];
        }
        if (!make(i, to, s, version)) return false;
    }
    return true;
}

bool Replay::op(Int i, Int& level) {
    if (p_.op[i] < 0 || p_.op[i] >= g_.time.count) return false;
    const auto k = static_cast<Index>(p_.op[i]);
    const bool again = p_.kind[i] == kRecompute, saves = p_.saves[i];
    if (again != (at_[k] >= 0)) return false;
    if (again ? !pure(i, k) : !in_order(i, k)) return false;
    at_[k] = i;
    if (!reads(i, k, again) || !writes(i, k, again)) return false;
    Int need = g_.extra[k] + (saves || again ? g_.state[k] : 0);
    for (const Index* s = f_.makes.begin(k); s != f_.makes.end(k); ++s) need += g_.size[*s];
    if (!reuses(i, k, again)) return false;
    level = live + need;
    if (saves && (again || !g_.random[k] || !g_.state[k] || !make(i, kState, k, 0))) return false;
    if (again && g_.state[k]) implied.push_back({k, kState, i, i + 1, g_.state[k], i});
    // To save takes one move of the state; to set it aside, set the saved one and put it back takes three.
    const int moves = (saves ? 1 : 0) + (again && g_.random[k] ? 3 : 0);
    times_.step(i, g_.time[k] + moves * g_.move, 0);
    return results(i, k, again);
}

bool Replay::pure(Int i, Index k) {
    if (g_.effect[k] || (g_.random[k] && !there(kState, k))) return false;
    for (const Index* s = f_.writes.begin(k); s != f_.writes.end(k); ++s)
        if (f_.caller[*s] && !g_.updates[k].has(*s)) return false;
    return !g_.random[k] || lanes_.read(i, key(kState, k));
}

bool Replay::in_order(Int i, Index k) {
    for (const Index c : g_.control[k])
        if (at_[c] < 0 || !lanes_.before(at_[c], i)) return false;
    if (!g_.random[k]) return true;
    if (k < random_ || !lanes_.before(drew_, i)) return false;
    random_ = k, drew_ = i;
    return true;
}

bool Replay::reads(Int i, Index k, bool again) {
    for (const Index* v = f_.views.begin(k); v != f_.views.end(k); ++v)
        if (at_[*v] < 0 || !lanes_.before(at_[*v], i)) return false;
    for (const Seen* s = f_.sees.begin(k); s != f_.sees.end(k); ++s) {
        if (again && g_.updates[k].has(s->storage)) continue;
        if (forms_[kFull].version[s->storage] != s->writes) return false;
        if (!lanes_.read(i, key(kFull, s->storage))) return false;
    }
    return true;
}

bool Replay::writes(Int i, Index k, bool again) {
    for (const Index* s = f_.writes.begin(k); s != f_.writes.end(k); ++s) {
        if (again && g_.updates[k].has(*s)) continue;
        if (!again) ++written_[*s];
        if (there(kFull, *s)) ++forms_[kFull].version[*s];
        if (!lanes_.write(i, key(kFull, *s))) return false;
    }
    return true;
}

bool Replay::reuses(Int i, Index k, bool again) {
    const auto pairs = p_.reuses[i];
    if (pairs.count() % 2) return false;
    const std::size_t before = took.size();
    for (const Index* pair = pairs.begin(); pair != pairs.end(); pair += 2) {
        const Index a = pair[0], b = pair[1];
        if (!storage(a) || !storage(b) || !may_overwrite(k, a, b) || g_.size[a] != g_.size[b]) return false;
        const bool kept = again ? p_.storages[i].has(b) : has(f_.makes, k, b);
        if (f_.caller[a] || !there(kFull, a) || !kept || there(kFull, b)) return false;
        for (std::size_t t = before; t < took.size(); ++t)
            if (took[t].storage == b) return false;
        if (!drop(i, kFull, a)) return false;
        took.push_back({i, b, a});
    }
    return true;
}

bool Replay::may_overwrite(Index k, Index a, Index b) const {
    const auto allowed = g_.overwrites[k];
    bool named = false, seen = false;
    for (const Index* pair = allowed.begin(); pair != allowed.end(); pair += 2)
        named |= pair[0] == a && pair[1] == b;
    for (const Seen* s = f_.sees.begin(k); s != f_.sees.end(k); ++s) seen |= s->storage == a;
    return named && seen && !has(f_.writes, k, a);
}

bool Replay::results(Int i, Index k, bool again) {
    if (!again) {
        for (const Index* s = f_.makes.begin(k); s != f_.makes.end(k); ++s) {
            if (!make(i, kFull, *s, 1)) return false;
            ++written_[*s];
        }
        return true;
    }
    const auto keep = p_.storages[i];
    for (const Index s : keep)
        if (!storage(s) || !has(f_.makes, k, s) || !make(i, kFull, s, 1)) return false;
    for (const Index* s = f_.makes.begin(k); s != f_.makes.end(k); ++s)
        if (!keep.has(*s)) implied.push_back({*s, kFull, i, i + 1, g_.size[*s], i});
    return true;
}

bool Replay::end() {
    const Int n = p_.kind.count;
    for (const Int at : at_)
        if (at < 0) return false;
    for (int form = kPacked; form < kForms; ++form)
        for (const Index version : forms_[form].version)
            if (version >= 0) return false;
    const Residents& full = forms_[kFull];
    for (Index s = 0; s < static_cast<Index>(g_.size.count); ++s) {
        if (f_.kept[s] && full.version[s] != f_.final[s]) return false;
        if (!there(kFull, s) || f_.caller[s]) continue;
        if (!f_.kept[s]) return false;
        implied.push_back({s, kFull, full.since[s], n, g_.size[s], n});
    }
    return true;
}

}  // namespace tightship::verify
