// What the verifier has to know of a graph, and its replay of a plan's steps.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "verify_lanes.h"

namespace tightship::verify {

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

inline bool has(const Filled<Index>& rows, Int k, Index x) {
    return std::find(rows.begin(k), rows.end(k), x) != rows.end(k);
}

// A form of a storage, or the random state of an op, is resident in steps [start, end), ended by `released`.
struct Implied {
    Index of;
    Form form;
    Int start, end, size, released;
};

struct Taken {
    Int step;
    Index storage, before;
};

class Replay {
  public:
    Replay(const Graph& g, const Facts& f, const Plan& p);

    // Whether no step breaks a rule.
    bool run();

    std::vector<Implied> implied;
    std::vector<Taken> took;
    Int live, peak, host_peak = 0;
    double seconds() const { return times_.end(); }
    const Lanes& lanes() const { return lanes_; }

  private:
    const Graph& g_;
    const Facts& f_;
    const Plan& p_;
    Lanes lanes_;
    Times times_;
    struct Residents {
        std::vector<Int> since;
        std::vector<Index> version;  // -1: not there
    };
    Residents forms_[kForms];     // by form: storages, or ops
    std::vector<Int> packed_;     // by storage: bytes
    std::vector<Index> written_;  // by storage: writes by first runs
    std::vector<Int> at_;         // by op: the step that computed it
    Index random_ = -1;
    Int drew_ = -1, host_ = 0;  // the step of the last random op; bytes offloaded

    bool there(Form form, Index s) const { return forms_[form].version[s] >= 0; }
    bool storage(Index s) const { return s >= 0 && s < g_.size.count; }
    Int key(Form form, Index s) const { return form * g_.size.count + s; }
    Int size(Form form, Index s) const {
        return form == kPacked ? packed_[s] : form == kState ? g_.state[s] : g_.size[s];
    }

    bool step(Int i, Int& level);
    bool drop(Int i, Form form, Index s);
    bool make(Int i, Form form, Index s, Index version);
    bool free(Int i);
    bool copy(Int i);
    bool op(Int i, Int& level);
    bool pure(Int i, Index k);
    bool in_order(Int i, Index k);
    bool reads(Int i, Index k, bool again);
    bool writes(Int i, Index k, bool again);
    bool reuses(Int i, Index k, bool again);
    bool may_overwrite(Index k, Index a, Index b) const;
    bool results(Int i, Index k, bool again);
    bool end();
};

}  // namespace tightship::verify
