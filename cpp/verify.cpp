#include "verify.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tightship::verify {

namespace {

// Rows that are filled one after the other.
template <class T> struct Filled {
    std::vector<Int> start{0};
    std::vector<T> item;
    void close() { start.push_back(static_cast<Int>(item.size())); }
    const T* begin(Int k) const { return item.data() + start[k]; }
    const T* end(Int k) const { return item.data() + start[k + 1]; }
};

struct Seen {
    Index storage, writes;
};

// What has to be known of a graph, from its ops and values alone.
struct Facts {
    Filled<Seen> sees;            // by op: what it reads, and how many writes that must have behind it
    Filled<Index> makes, writes;  // by op: storages
    Filled<Index> views;          // by op: ops that made views that it reads
    std::vector<Index> final;     // by storage: all writes
    std::vector<char> caller, kept;
    Int caller_bytes = 0;

    explicit Facts(const Graph& g) : final(g.size.count), caller(g.size.count), kept(g.size.count) {
        const Int ops = g.time.count;
        std::vector<char> known(g.size.count);
        std::vector<Index> viewer(g.storage.count, -1), touched(g.size.count, -1), read(g.size.count, -1);
        for (Int k = 0; k < g.caller.count; ++k) {
            const Index s = g.storage[g.caller[k]];
            if (!std::exchange(caller[s], 1)) caller_bytes += g.size[s];
            known[s] = 1;
        }
        for (Int k = 0; k < g.results.count; ++k) kept[g.storage[g.results[k]]] = 1;
        for (Index o = 0; o < ops; ++o) {
            for (const Index v : g.outputs[o])
                if (const Index s = g.storage[v]; !known[s])
                    known[s] = 1, touched[s] = o, makes.item.push_back(s);
            makes.close();
            const auto use = [&](Index s) {
                if (touched[s] != o && std::exchange(read[s], o) != o) sees.item.push_back({s, final[s]});
            };
            for (const Index v : g.inputs[o]) use(g.storage[v]);
            for (const Index s : g.mutates[o]) use(s);
            sees.close();
            for (const Index v : g.inputs[o])
                if (viewer[v] >= 0) views.item.push_back(viewer[v]);
            views.close();
            for (const Index s : g.mutates[o])
                if (std::exchange(touched[s], o) != o) writes.item.push_back(s);
            writes.close();
            for (const Index v : g.outputs[o])
                if (touched[g.storage[v]] != o) viewer[v] = o;
            for (auto* rows : {&makes, &writes})
                for (const Index* s = rows->begin(o); s != rows->end(o); ++s) ++final[*s];
        }
    }
};

bool has(const Filled<Index>& rows, Int k, Index x) {
    return std::find(rows.begin(k), rows.end(k), x) != rows.end(k);
}

// A storage is resident in steps [start, end).
struct Implied {
    Index storage;
    Int start, end;
};

struct Taken {
    Int step;
    Index storage, before;
};

class Replay {
  public:
    Replay(const Graph& g, const Facts& f, const Plan& p)
        : g_(g), f_(f), p_(p), since_(g.size.count), version_(g.size.count, -1), written_(g.size.count),
          at_(g.time.count, -1), live(f.caller_bytes), peak(f.caller_bytes) {
        for (Index s = 0; s < static_cast<Index>(g.size.count); ++s)
            if (f.caller[s]) version_[s] = 0, since_[s] = -1;
    }

    bool run() {
        for (Int i = 0; i < p_.kind.count; ++i) {
            Int level = live;
            if (p_.kind[i] == kFree ? !free(i) : !op(i, level)) return false;
            peak = std::max({peak, level, live});
        }
        return end();
    }

    std::vector<Implied> implied;
    std::vector<Taken> took;

  private:
    const Graph& g_;
    const Facts& f_;
    const Plan& p_;
    std::vector<Int> since_;
    std::vector<Index> version_, written_;  // -1: not there
    std::vector<Int> at_;                   // by op: the step that computed it
    Index random_ = -1;

  public:
    Int live, peak;
    double seconds = 0;

  private:
    bool there(Index s) const { return version_[s] >= 0; }
    bool storage(Index s) const { return s >= 0 && s < g_.size.count; }

    void drop(Int i, Index s) {
        implied.push_back({s, since_[s], i});
        version_[s] = -1;
        live -= g_.size[s];
    }

    bool free(Int i) {
        for (const Index s : p_.storages[i]) {
            if (!storage(s) || f_.caller[s] || !there(s)) return false;
            drop(i, s);
        }
        return true;
    }

    bool op(Int i, Int& level) {
        if (p_.op[i] < 0 || p_.op[i] >= g_.time.count) return false;
        const auto k = static_cast<Index>(p_.op[i]);
        const bool again = p_.kind[i] == kRecompute;
        if (again != (at_[k] >= 0)) return false;
        if (again ? !pure(k) : !in_order(k)) return false;
        at_[k] = i;
        if (!reads(k, again)) return false;
        for (const Index* s = f_.writes.begin(k); s != f_.writes.end(k); ++s) {
            if (again && g_.updates[k].has(*s)) continue;
            if (!again) ++written_[*s];
            if (there(*s)) ++version_[*s];
        }
        Int need = g_.extra[k];
        for (const Index* s = f_.makes.begin(k); s != f_.makes.end(k); ++s) need += g_.size[*s];
        if (!reuses(i, k, again)) return false;
        level = live + need;
        seconds += g_.time[k];
        return results(i, k, again);
    }

    bool pure(Index k) const {
        if (g_.effect[k] || g_.random[k]) return false;  // random ops with saved states: not here
        for (const Index* s = f_.writes.begin(k); s != f_.writes.end(k); ++s)
            if (f_.caller[*s] && !g_.updates[k].has(*s)) return false;
        return true;
    }

    bool in_order(Index k) {
        for (const Index c : g_.control[k])
            if (at_[c] < 0) return false;
        if (g_.random[k] && k < random_) return false;
        if (g_.random[k]) random_ = k;
        return true;
    }

    bool reads(Index k, bool again) const {
        for (const Index* v = f_.views.begin(k); v != f_.views.end(k); ++v)
            if (at_[*v] < 0) return false;
        for (const Seen* s = f_.sees.begin(k); s != f_.sees.end(k); ++s)
            if (version_[s->storage] != s->writes && !(again && g_.updates[k].has(s->storage))) return false;
        return true;
    }

    bool reuses(Int i, Index k, bool again) {
        const auto pairs = p_.reuses[i];
        if (pairs.count() % 2) return false;
        const std::size_t before = took.size();
        for (const Index* pair = pairs.begin(); pair != pairs.end(); pair += 2) {
            const Index a = pair[0], b = pair[1];
            if (!storage(a) || !storage(b) || !may_overwrite(k, a, b) || g_.size[a] != g_.size[b])
                return false;
            const bool kept = again ? p_.storages[i].has(b) : has(f_.makes, k, b);
            if (f_.caller[a] || !there(a) || !kept || there(b)) return false;
            for (std::size_t t = before; t < took.size(); ++t)
                if (took[t].storage == b) return false;
            drop(i, a);
            took.push_back({i, b, a});
        }
        return true;
    }

    bool may_overwrite(Index k, Index a, Index b) const {
        const auto allowed = g_.overwrites[k];
        bool named = false, seen = false;
        for (const Index* pair = allowed.begin(); pair != allowed.end(); pair += 2)
            named |= pair[0] == a && pair[1] == b;
        for (const Seen* s = f_.sees.begin(k); s != f_.sees.end(k); ++s) seen |= s->storage == a;
        return named && seen && !has(f_.writes, k, a);
    }

    bool make(Int i, Index s) {
        if (there(s)) return false;
        since_[s] = i, version_[s] = 1;
        live += g_.size[s];
        return true;
    }

    bool results(Int i, Index k, bool again) {
        if (!again) {
            for (const Index* s = f_.makes.begin(k); s != f_.makes.end(k); ++s) {
                if (!make(i, *s)) return false;
                ++written_[*s];
            }
            return true;
        }
        const auto keep = p_.storages[i];
        for (const Index s : keep)
            if (!storage(s) || !has(f_.makes, k, s) || !make(i, s)) return false;
        for (const Index* s = f_.makes.begin(k); s != f_.makes.end(k); ++s)
            if (!keep.has(*s)) implied.push_back({*s, i, i + 1});
        return true;
    }

    bool end() {
        const Int n = p_.kind.count;
        for (const Int at : at_)
            if (at < 0) return false;
        for (Index s = 0; s < static_cast<Index>(g_.size.count); ++s) {
            if (f_.kept[s] && version_[s] != f_.final[s]) return false;
            if (!there(s) || f_.caller[s]) continue;
            if (!f_.kept[s]) return false;
            implied.push_back({s, since_[s], n});
        }
        return true;
    }
};

// The most bytes a graph uses beyond its inputs: in its own order, freeing after last use.
Int unplanned(const Graph& g, const Facts& f) {
    const Int ops = g.time.count;
    std::vector<Index> last(g.size.count, -1);
    const auto touched = [&](Int o, auto&& look) {
        for (const Seen* s = f.sees.begin(o); s != f.sees.end(o); ++s) look(s->storage);
        for (const Index* s = f.makes.begin(o); s != f.makes.end(o); ++s) look(*s);
    };
    for (Index o = 0; o < ops; ++o) touched(o, [&](Index s) { last[s] = o; });
    Int live = 0, peak = 0;
    for (Index o = 0; o < ops; ++o) {
        for (const Index* s = f.makes.begin(o); s != f.makes.end(o); ++s) live += g.size[*s];
        peak = std::max(peak, live + g.extra[o]);
        touched(o, [&](Index s) {
            if (last[s] == o && !f.caller[s] && !f.kept[s]) live -= g.size[s];
        });
    }
    return peak;
}

using Point = std::pair<Int, Int>;  // step, event within it

struct Block {
    Point begin, finish;
    Int low, high;
};

class Places {
  public:
    Places(const Graph& g, const Facts& f, const Plan& p, const Replay& r) : g_(g), f_(f), p_(p), r_(r) {}

    bool right() {
        std::vector<Int> rows, workspace;  // residences of storages, and of what ops need while they run
        for (Int j = 0; j < p_.storage.count; ++j) (p_.storage[j] == -1 ? workspace : rows).push_back(j);
        if (!match(rows) || !same_places(rows) || !temporaries(workspace)) return false;
        for (Int j = 0; j < p_.storage.count; ++j)
            if (!inside(j)) return false;
        return apart();
    }

    Int handed = 0;

  private:
    const Graph& g_;
    const Facts& f_;
    const Plan& p_;
    const Replay& r_;
    std::vector<Implied> implied_;  // by start and storage
    std::vector<Int> placed_;       // by implied residence: which of the plan, or -1
    std::vector<Block> blocks_;

    Int aligned(Int bytes) const { return (bytes + g_.alignment - 1) / g_.alignment * g_.alignment; }

    // Each residence is one that the steps imply, and each that they imply, of any bytes, is there once.
    bool match(std::vector<Int>& rows) {
        implied_ = r_.implied;
        const auto key = [](Int start, Int storage) { return Point{start, storage}; };
        std::sort(implied_.begin(), implied_.end(), [&](const Implied& a, const Implied& b) {
            return key(a.start, a.storage) < key(b.start, b.storage);
        });
        const auto begins = [&](Int a, Int b) {
            return key(p_.start[a], p_.storage[a]) < key(p_.start[b], p_.storage[b]);
        };
        if (!std::is_sorted(rows.begin(), rows.end(), begins)) std::sort(rows.begin(), rows.end(), begins);
        placed_.assign(implied_.size(), -1);
        std::size_t row = 0;
        for (std::size_t e = 0; e < implied_.size(); ++e) {
            const Implied& x = implied_[e];
            if (e && key(x.start, x.storage) == key(implied_[e - 1].start, implied_[e - 1].storage))
                return false;
            const bool here =
                row < rows.size() && p_.start[rows[row]] == x.start && p_.storage[rows[row]] == x.storage;
            if (!here) {
                if (g_.size[x.storage] > 0) return false;
                continue;
            }
            placed_[e] = rows[row];
            if (!fits(rows[row++], x)) return false;
        }
        return row == rows.size();
    }

    bool fits(Int j, const Implied& x) {
        const Int size = g_.size[x.storage];
        if (p_.end[j] != x.end || p_.size[j] < size || p_.size[j] > aligned(size)) return false;
        if (p_.request[j] != -1 || p_.last[j] != -1 || p_.first[j] < -1) return false;
        if (p_.pool[j] == kOut && !(x.end == p_.kind.count && f_.kept[x.storage])) return false;
        return p_.first[j] < 0 || requested(j, x);
    }

    // A result may take its bytes with its request in the op, never later.
    bool requested(Int j, const Implied& x) const {
        if (p_.kind[x.start] == kFree) return false;
        const Int k = p_.op[x.start];
        const Int which = std::find(f_.makes.begin(k), f_.makes.end(k), x.storage) - f_.makes.begin(k);
        bool asked = false;
        for (Int q = g_.requests[k]; q < g_.requests[k + 1]; ++q) {
            if (g_.request_storage[q] != which) continue;
            if (p_.first[j] > g_.request_start[q]) return false;
            asked = true;
        }
        return asked;
    }

    // What takes the place of something lies exactly there from the beginning of the step.
    bool same_places(const std::vector<Int>& rows) const {
        if (r_.took.empty()) return true;
        std::map<std::pair<Int, Index>, Int> begun, ended;
        for (const Int j : rows) {
            begun[{p_.start[j], static_cast<Index>(p_.storage[j])}] = j;
            ended[{p_.end[j], static_cast<Index>(p_.storage[j])}] = j;
        }
        for (const Taken& t : r_.took) {
            const auto now = begun.find({t.step, t.storage}), old = ended.find({t.step, t.before});
            if (now == begun.end() || old == ended.end()) continue;  // without bytes
            const Int a = old->second, b = now->second;
            if (p_.offset[a] != p_.offset[b] || p_.pool[a] != p_.pool[b] || p_.size[a] != p_.size[b])
                return false;
            if (p_.pool[b] == kOut || p_.first[b] != -1) return false;
        }
        return true;
    }

    // What ops need while they run has a place: their temporaries one by one, and what graphs that they call
    // need as a block; or all of it as one block.
    bool temporaries(std::vector<Int>& rows) {
        const auto begins = [&](Int a, Int b) { return p_.start[a] < p_.start[b]; };
        if (!std::is_sorted(rows.begin(), rows.end(), begins))
            std::stable_sort(rows.begin(), rows.end(), begins);
        std::size_t from = 0;
        for (Int i = 0; i < p_.kind.count; ++i) {
            std::size_t to = from;
            while (to < rows.size() && p_.start[rows[to]] == i) ++to;
            if (p_.kind[i] == kFree ? to > from : !served(p_.op[i], {rows.begin() + from, rows.begin() + to}))
                return false;
            from = to;
        }
        return from == rows.size();
    }

    bool served(Int k, const std::vector<Int>& rows) const {
        const Int from = g_.requests[k], count = g_.requests[k + 1] - from;
        if (!count && !g_.extra[k] && rows.empty()) return true;
        const auto among = [&](Int request) {
            return std::any_of(rows.begin(), rows.end(), [&](Int j) { return p_.request[j] == request; });
        };
        bool in_parts = true;
        for (Int q = 0; q < count; ++q)
            if (g_.request_storage[from + q] < 0 && g_.request_size[from + q] > 0) in_parts &= among(q);
        Int block = g_.extra[k] - g_.workspace[k];
        if (!count || !in_parts) block += std::max(g_.workspace[k], held(k));
        for (std::size_t a = 0; a < rows.size(); ++a) {
            for (std::size_t b = 0; b < a; ++b)
                if (p_.request[rows[a]] == p_.request[rows[b]]) return false;
            if (!temporary(k, rows[a], block)) return false;
        }
        return (in_parts || among(-1)) && (block <= 0 || among(-1));
    }

    bool temporary(Int k, Int j, Int block) const {
        const Int request = p_.request[j], count = g_.requests[k + 1] - g_.requests[k];
        if (p_.end[j] != p_.start[j] + 1 || p_.pool[j] == kOut) return false;
        if (request < 0)
            return request == -1 && p_.first[j] == -1 && p_.last[j] == -1 && block > 0 &&
                   block <= p_.size[j] && p_.size[j] <= aligned(block);
        const Int q = g_.requests[k] + request;
        if (request >= count || g_.request_storage[q] >= 0) return false;
        const Int end = g_.request_end[q], size = g_.request_size[q];
        const bool until_end = p_.last[j] == -1 || (end >= 0 && p_.last[j] >= end);
        return until_end && p_.first[j] >= -1 && p_.first[j] <= g_.request_start[q] && size <= p_.size[j] &&
               p_.size[j] <= aligned(size);
    }

    // The most bytes an op's temporaries hold at a time.
    Int held(Int k) const {
        std::vector<std::pair<Point, Int>> events;
        for (Int q = g_.requests[k]; q < g_.requests[k + 1]; ++q) {
            if (g_.request_storage[q] >= 0) continue;
            events.push_back({{g_.request_start[q], 1}, g_.request_size[q]});
            if (g_.request_end[q] >= 0) events.push_back({{g_.request_end[q], 0}, -g_.request_size[q]});
        }
        std::sort(events.begin(), events.end());
        Int live = 0, peak = 0;
        for (const auto& [_, change] : events) live += change, peak = std::max(peak, live);
        return peak;
    }

    bool inside(Int j) {
        const Point begin{p_.start[j], std::max<Int>(p_.first[j], 0)};
        const Point finish = p_.last[j] >= 0 ? Point{p_.end[j] - 1, p_.last[j]} : Point{p_.end[j], 0};
        if (begin >= finish) return false;
        if (p_.pool[j] == kOut) handed += p_.size[j];
        if (p_.size[j] <= 0 || p_.pool[j] == kOut) return true;
        if (p_.offset[j] < 0 || p_.offset[j] % g_.alignment || p_.size[j] > p_.arena) return false;
        if (p_.offset[j] > p_.arena - p_.size[j]) return false;
        blocks_.push_back({begin, finish, p_.offset[j], p_.offset[j] + p_.size[j]});
        return true;
    }

    // In the order in which blocks begin, who had each byte last: they are apart from one another if each is
    // from those.
    bool apart() {
        std::stable_sort(blocks_.begin(), blocks_.end(), [](const Block& a, const Block& b) {
            return std::pair{a.begin, a.finish} < std::pair{b.begin, b.finish};
        });
        std::map<Int, Point> until{
            {0, Point{-1, 0}}};  // from each byte on, up to the next: when its last owner ends
        for (const Block& b : blocks_) {
            auto first = std::prev(until.upper_bound(b.low));
            Point after = first->second;
            auto at = first;
            for (; at != until.end() && at->first < b.high; ++at) {
                after = at->second;
                if (after > b.begin) return false;
            }
            const bool ends = at != until.end() && at->first == b.high;
            auto gone = first->first < b.low ? std::next(first) : first;
            until.erase(gone, at);
            until.insert_or_assign(b.low, b.finish);
            if (!ends) until.insert_or_assign(b.high, after);
        }
        return true;
    }
};

}  // namespace

Verdict verify(const Graph& graph, const Plan& plan) {
    const Facts facts(graph);
    Replay replay(graph, facts, plan);
    Verdict v;
    if (!replay.run()) return v;
    Places places(graph, facts, plan, replay);
    if (plan.storage.count && !places.right()) return v;
    return {true, replay.peak, unplanned(graph, facts), facts.caller_bytes, places.handed, replay.seconds};
}

}  // namespace tightship::verify
