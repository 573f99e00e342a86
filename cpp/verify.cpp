#include "verify.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "verify_replay.h"

namespace tightship::verify {

namespace {

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
    Int low, high, released;
};

struct Owner {
    Point finish;
    Int released;
};

class Places {
  public:
    Places(const Graph& g, const Facts& f, const Plan& p, const Replay& r) : g_(g), f_(f), p_(p), r_(r) {}

    bool right() {
        std::vector<Int> rows, workspace;  // residences of storages, and of what ops need while they run
        released_.assign(p_.storage.count, 0);
        for (Int j = 0; j < p_.storage.count; ++j) {
            const bool scratch = p_.storage[j] == -1 && p_.shape[j] != kState;
            (scratch ? workspace : rows).push_back(j);
            if (scratch) released_[j] = p_.start[j];
        }
        if (!match(rows) || !same_places(rows) || !temporaries(workspace)) return false;
        for (Int j = 0; j < p_.storage.count; ++j)
            if (!inside(j)) return false;
        return apart(blocks_[kDevice]) && apart(blocks_[kHost]);
    }

    Int handed = 0;

  private:
    const Graph& g_;
    const Facts& f_;
    const Plan& p_;
    const Replay& r_;
    std::vector<Int> released_;     // by residence: the step that ends it
    std::vector<Block> blocks_[2];  // by pool

    Int aligned(Int bytes) const { return (bytes + g_.alignment - 1) / g_.alignment * g_.alignment; }

    // Where a residence stands in the order of those that the steps imply.
    using Key = std::tuple<Int, Int, Int>;
    Key key(Int j) const {
        return {p_.start[j], p_.shape[j], p_.shape[j] == kState ? p_.request[j] : p_.storage[j]};
    }
    static Key key(const Implied& x) { return {x.start, x.form, x.of}; }

    // Each residence is one that the steps imply, and each that they imply, of any bytes, is there once.
    bool match(std::vector<Int>& rows) {
        std::vector<Implied> implied = r_.implied;
        std::sort(implied.begin(), implied.end(),
                  [](const Implied& a, const Implied& b) { return key(a) < key(b); });
        const auto begins = [&](Int a, Int b) { return key(a) < key(b); };
        if (!std::is_sorted(rows.begin(), rows.end(), begins)) std::sort(rows.begin(), rows.end(), begins);
        std::size_t row = 0;
        for (std::size_t e = 0; e < implied.size(); ++e) {
            const Implied& x = implied[e];
            if (e && key(x) == key(implied[e - 1])) return false;
            if (row == rows.size() || key(rows[row]) != key(x)) {
                if (x.size > 0) return false;
                continue;
            }
            const Int j = rows[row++];
            if (!fits(j, x)) return false;
            released_[j] = x.released;
        }
        return row == rows.size();
    }

    bool fits(Int j, const Implied& x) const {
        if (p_.end[j] != x.end || p_.last[j] != -1 || p_.first[j] < -1) return false;
        if (x.form == kState)
            return p_.storage[j] == -1 && p_.size[j] == x.size && p_.first[j] == -1 && p_.pool[j] == kDevice;
        if (p_.size[j] < x.size || p_.size[j] > aligned(x.size) || p_.request[j] != -1) return false;
        if ((x.form == kHosted) != (p_.pool[j] == kHost)) return false;
        const bool last = x.form == kFull && x.end == p_.kind.count && f_.kept[x.of];
        if (p_.pool[j] == kOut && !last) return false;
        return p_.first[j] < 0 || requested(j, x);
    }

    // A result may take its bytes with its request in the op, never later.
    bool requested(Int j, const Implied& x) const {
        if (p_.kind[x.start] > kRecompute) return false;
        const Int k = p_.op[x.start];
        const Int which = std::find(f_.makes.begin(k), f_.makes.end(k), x.of) - f_.makes.begin(k);
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
            if (p_.shape[j] != kFull) continue;
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
            if (p_.kind[i] > kRecompute ? to > from
                                        : !served(p_.op[i], {rows.begin() + from, rows.begin() + to}))
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
        if (p_.end[j] != p_.start[j] + 1 || p_.shape[j] != kFull || p_.pool[j] == kOut) return false;
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
        const Int span = p_.pool[j] == kHost ? p_.host : p_.arena;
        if (p_.offset[j] < 0 || p_.offset[j] % g_.alignment || p_.size[j] > span) return false;
        if (p_.offset[j] > span - p_.size[j]) return false;
        blocks_[p_.pool[j]].push_back({begin, finish, p_.offset[j], p_.offset[j] + p_.size[j], released_[j]});
        return true;
    }

    // In the order in which blocks begin, who had each byte last: they are apart from one another if each is
    // from those.
    bool apart(std::vector<Block>& blocks) const {
        std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
            return std::pair{a.begin, a.finish} < std::pair{b.begin, b.finish};
        });
        std::map<Int, Owner> until{{0, {{-1, 0}, -1}}};  // from each byte on, up to the next: its last owner
        for (const Block& b : blocks) {
            const Int step = b.begin.first;
            auto first = std::prev(until.upper_bound(b.low));
            Owner after = first->second;
            auto at = first;
            for (; at != until.end() && at->first < b.high; ++at) {
                after = at->second;
                if (after.finish > b.begin) return false;
                if (after.released != step && !r_.lanes().before(after.released, step)) return false;
            }
            const bool ends = at != until.end() && at->first == b.high;
            auto gone = first->first < b.low ? std::next(first) : first;
            until.erase(gone, at);
            until.insert_or_assign(b.low, Owner{b.finish, b.released});
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
    return {true,          replay.peak,      unplanned(graph, facts), facts.caller_bytes,
            places.handed, replay.host_peak, replay.seconds()};
}

}  // namespace tightship::verify
