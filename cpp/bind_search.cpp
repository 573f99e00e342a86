// Python bindings of the eviction engine, its searches and the minimum cut.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind_alarm.h"
#include "bind_arrays.h"
#include "flow.h"
#include "linear_bound.h"
#include "reruns.h"
#include "search.h"
#include "states.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

using Flags = Array<std::uint8_t>;

Rows rows(const RowsIn& r) { return {to_vector(r.first), to_vector(r.second)}; }

Bits bits(const Engine& e, const Flags& a) {
    const Index& x = e.index();
    check::length("decisions", a, static_cast<i64>(x.gaps.size()), "gap");
    check::within("decisions", a, 0, kDecisions - 1,
                  "must be keep, evict, pass, drop, pack, offload or stay (0 to 6)");
    Bits decisions = to_vector(a);
    for (i32 gap = 0; gap < static_cast<i32>(decisions.size()); ++gap)
        if (!x.allows(gap, decisions[gap])) decisions[gap] = x.least(gap);
    return decisions;
}

nb::dict as_dict(const Cost& c) {
    nb::dict d;
    d["valid"] = c.valid;
    d["peak"] = c.peak;
    d["peak_at"] = c.peak_at;
    d["extra"] = c.extra;
    d["excess"] = c.excess;
    d["runs"] = c.runs;
    d["host"] = c.host;
    return d;
}

void check_limit(i64 limit) {
    check::number("limit", limit, -check::kMost, std::numeric_limits<i64>::max(), "must not be below -2^62");
}

// What decisions cost one after the other, each evaluated from the last one that was valid, as annealing
// does.
nb::list walked(Engine& e, const nb::list& decisions, i64 limit) {
    check_limit(limit);
    nb::list costs;
    Bits now;
    for (const auto& row : decisions) {
        Flags given;
        if (!nb::try_cast(row, given))
            check::refuse("decisions has no array", "must be arrays of one byte a gap");
        const Bits next = bits(e, given);
        if (now.empty()) e.follow(now = next, limit);
        Changes changes;
        for (i32 gap = 0; gap < static_cast<i32>(next.size()); ++gap)
            if (next[gap] != now[gap]) changes.emplace_back(gap, now[gap]);
        const Cost c = e.evaluate_near(next, changes, limit);
        costs.append(as_dict(c));
        if (c.valid) e.accept(), now = next;
    }
    return costs;
}

// Groups of gaps that a search decides together.
Rows groups_of(const Engine& e, const char* name, const RowsIn& in) {
    const i64 gaps = static_cast<i64>(e.index().gaps.size());
    check::rows(name, in, 0, gaps - 1, "must be a gap of this engine");
    for (std::size_t k = 1; gaps && k < in.first.shape(0); ++k)
        if (in.first.data()[k] == in.first.data()[k - 1])
            check::refuse(check::entry(std::string(name) + "[0]", k, in.first.data()[k]),
                          "a group must have a gap or more");
    return rows(in);
}

IsomorphicLayers layers_of(const Engine& e, const RowsIn& in, const Array<i64>& families) {
    const i64 gaps = static_cast<i64>(e.index().gaps.size()),
              rows_in = static_cast<i64>(in.first.shape(0)) - 1;
    check::rows("twins", in, -1, gaps - 1, "must be a gap of this engine, or -1 for none");
    const i64 n = check::count("families", families);
    if (n == 0)
        check::refuse("families is empty",
                      "must have the first row of each family, and how many rows there are");
    for (i64 k = 0; k < n; ++k) {
        const i64 from = families.data()[k], before = k ? families.data()[k - 1] : -1;
        if (from <= before || (k == 0 && from != 0) || (k == n - 1 && from != rows_in))
            check::refuse(check::entry("families", static_cast<std::size_t>(k), from),
                          "must begin with 0, go up and end with the number of rows");
    }
    IsomorphicLayers t{rows(in), to_vector(families)};
    for (i64 f = 0; f < t.families(); ++f)
        for (i64 r = t.family[f]; r < t.family[f + 1]; ++r)
            if (t.rows.size(r) == 0 || t.rows.size(r) != t.rows.size(t.family[f]))
                check::refuse(
                    "row " + std::to_string(r) + " of twins has " + std::to_string(t.rows.size(r)) + " gaps",
                    "the rows of a family must be equally long, and not empty");
    return t;
}

// As `if` takes an object.
bool truth(const nb::object& given) {
    const int said = PyObject_IsTrue(given.ptr());
    if (said < 0) throw nb::python_error();
    return said != 0;
}

// A search from `start` on: its decisions, their cost, the work, whether the limit is met, and whether Ctrl-C
// ended it. `progress` is told the best so far now and then, and may end it.
template <class Search> nb::tuple searched(Engine& e, i64 limit, const Flags& start, i64 work, double seconds,
                                           const nb::object& progress, Search search) {
    check_limit(limit);
    check::seconds(seconds);
    const Bits from = bits(e, start);
    Alarm alarm;
    Budget budget{check::at_most(work), alarm.set(seconds)};
    if (!progress.is_none())
        budget.report = [&](const Found& f) {
            return alarm.call([&] { return truth(progress(f.cost.peak, f.cost.extra, f.met)); });
        };
    Found f = unlocked([&] { return search(from, budget); });
    return nb::make_tuple(to_numpy(std::move(f.evict)), as_dict(f.cost), f.work, f.met, alarm.interrupted());
}

Network network_of(i32 nodes, const Array<i32>& tail, const Array<i32>& head, const Array<i64>& capacity,
                   i32 source, i32 sink) {
    const i64 edges = check::count("tail", tail);
    check::number("nodes", nodes, 2, check::kMostCount, "must be from 2 to 2^28");
    check::number("source", source, 0, nodes - 1, "must be a node");
    check::number("sink", sink, 0, nodes - 1, "must be a node");
    if (source == sink)
        check::refuse("sink is " + std::to_string(sink), "must be another node than the source");
    check::length("head", head, edges, "edge");
    check::length("capacity", capacity, edges, "edge");
    check::within("tail", tail, 0, nodes - 1, "must be a node");
    check::within("head", head, 0, nodes - 1, "must be a node");
    check::within("capacity", capacity, 0, std::numeric_limits<i64>::max(), "must not be negative");
    return {to_vector(tail), to_vector(head), to_vector(capacity)};
}

nb::tuple cut(i32 nodes, const Array<i32>& tail, const Array<i32>& head, const Array<i64>& capacity,
              i32 source, i32 sink, double seconds) {
    check::seconds(seconds);
    const Network network = network_of(nodes, tail, head, capacity, source, sink);
    Alarm alarm;
    Cut found = unlocked([&] { return min_cut(nodes, network, source, sink, alarm.set(seconds)); });
    alarm.raise();
    return nb::make_tuple(found.value, to_numpy(std::move(found.near)));
}

Cuts* cuts_of(i32 nodes, const Array<i32>& tail, const Array<i32>& head, const Array<i64>& capacity,
              i32 source, i32 sink, i64 switches) {
    const Network network = network_of(nodes, tail, head, capacity, source, sink);
    check::number("switches", switches, 0, static_cast<i64>(network.tail.size()),
                  "must be an edge, or the end");
    check::within("capacity", capacity, 0, Network::kEndless, "must be from 0 to 2^60");
    return new Cuts(nodes, network, source, sink, switches);
}

i64 value_of(Cuts& cuts, const Flags& open, const Array<i64>& free) {
    check::length("open", open, cuts.count(), "switch");
    check::within("free", free, 0, cuts.edges() - 1, "must be an edge");
    return cuts.value(to_vector(open), to_vector(free));
}

nb::tuple linear_bound_of(const RowsIn& rows, const Array<double>& coefficient, const Array<double>& limit,
                          const Array<double>& cost, const Array<double>& low, const Array<double>& high,
                          i64 rounds, double enough, double seconds) {
    const i64 columns = check::count("cost", cost), count = check::count("limit", limit);
    check::rows("rows", rows, count, "limit", 0, columns - 1, "must be a column");
    check::length("coefficient", coefficient, static_cast<i64>(rows.second.shape(0)), "entry");
    check::length("low", low, columns, "column");
    check::length("high", high, columns, "column");
    for (const auto& [name, numbers] : {std::pair{"coefficient", &coefficient},
                                        {"limit", &limit},
                                        {"cost", &cost},
                                        {"low", &low},
                                        {"high", &high}})
        for (std::size_t k = 0; k < numbers->shape(0); ++k)
            if (!std::isfinite(numbers->data()[k]))
                check::refuse(check::entry(name, k, numbers->data()[k]), "must be finite");
    check::seconds(seconds);
    const Linear program{to_vector(rows.first), to_vector(rows.second), to_vector(coefficient),
                         to_vector(limit),      to_vector(cost),        to_vector(low),
                         to_vector(high)};
    Alarm alarm;
    Bound found =
        unlocked([&] { return linear_bound(program, check::at_most(rounds), enough, alarm.set(seconds)); });
    alarm.raise();
    return nb::make_tuple(found.value, to_numpy(std::move(found.prices)));
}

Result<std::uint8_t> reached_of(const Array<i32>& start, const RowsIn& edges) {
    const i64 nodes = static_cast<i64>(edges.first.shape(0)) - 1;
    check::rows("edges", edges, 0, nodes - 1, "must be a node");
    check::within("start", start, 0, nodes - 1, "must be a node");
    return to_numpy(reached(to_vector(start), to_vector(edges.first), to_vector(edges.second)));
}

// What the engine counts on beyond the rows themselves: an op touches a storage once, and defines what no
// other does.
void check_ops(const Program& p) {
    std::vector<i32> touched(p.storages, -1), maker(p.storages, -1);
    for (i32 o = 0; o < p.ops; ++o) {
        const std::string op = "of op " + std::to_string(o);
        if (p.needs.size(o) != p.reads.size(o))
            check::refuse("needs " + op + " has " + std::to_string(p.needs.size(o)) + " entries",
                          "must have one per read");
        const auto touch = [&](const char* name, i32 s) {
            if (std::exchange(touched[s], o) == o)
                check::refuse(std::string(name) + " " + op + " has storage " + std::to_string(s) + " again",
                              "an op must read or define a storage once");
        };
        for (const i32 s : p.reads[o]) touch("reads", s);
        for (const i32 s : p.defines[o]) {
            touch("defines", s);
            if (std::exchange(maker[s], o) >= 0)
                check::refuse("defines " + op + " has storage " + std::to_string(s),
                              "a storage must be defined once");
        }
        for (const i32 s : p.mutates[o])
            if (touched[s] != o || maker[s] == o)
                check::refuse("mutates " + op + " has storage " + std::to_string(s),
                              "an op must read what it mutates");
        if (p.overwrites.size(o) % 2)
            check::refuse("overwrites " + op + " has " + std::to_string(p.overwrites.size(o)) + " entries",
                          "must be pairs");
        for (auto s = p.overwrites.begin(o); s != p.overwrites.end(o); s += 2)
            if (touched[s[0]] != o || maker[s[0]] == o || maker[s[1]] != o)
                check::refuse("overwrites " + op + " has storages " + std::to_string(s[0]) + " and " +
                                  std::to_string(s[1]),
                              "must be one that is read and one that is defined");
    }
}

Engine* make(const RowsIn& reads, const RowsIn& needs, const RowsIn& defines, const RowsIn& mutates,
             const RowsIn& updates, const Array<i64>& extra, const Array<double>& time,
             const Array<double>& again, const Flags& pure, const Flags& fixed, const Array<i64>& size,
             const Flags& owned, const Flags& kept, const Array<i32>& order, const Array<i64>& packed,
             const Array<double>& pack, const Array<double>& unpack, const Array<double>& offload,
             const Array<double>& fetch, const Array<double>& lost, const Flags& may, const Flags& must,
             i32 boundary, const RowsIn& overwrites, const Array<i32>& ending, bool until_written,
             bool brief) {
    const i64 ops = check::count("order", order), storages = check::count("size", size);
    check::permutation("order", order, ops);
    check::Bytes all;
    const auto by_op = [&](const char* name, const RowsIn& r, i64 most,
                           const char* rule = "must be a storage") {
        check::rows(name, r, ops, "op", 0, most, rule);
        return rows(r);
    };
    const auto column = [&](const char* name, const auto& a, i64 count) {
        check::length(name, a, count, count == ops ? "op" : "storage");
        return to_vector(a);
    };
    const auto bytes = [&](const char* name, const Array<i64>& a) {
        all.add(name, a);
        return column(name, a, storages);
    };
    const auto seconds = [&](const char* name, const Array<double>& a, i64 count) {
        check::times(name, a);
        return column(name, a, count);
    };
    const auto decisions = [&](const char* name, const Flags& a) {
        check::within(name, a, 0, (1 << kDecisions) - 1, "must be a set of decisions, a bit each");
        return column(name, a, storages);
    };
    Program p;
    p.ops = ops, p.storages = storages, p.order = to_vector(order);
    p.reads = by_op("reads", reads, storages - 1);
    p.needs = by_op("needs", needs, std::numeric_limits<i32>::max(), "must not be negative");
    p.defines = by_op("defines", defines, storages - 1), p.mutates = by_op("mutates", mutates, storages - 1);
    p.updates = by_op("updates", updates, storages - 1);
    p.overwrites = by_op("overwrites", overwrites, storages - 1);
    p.size = bytes("size", size), p.packed = bytes("packed", packed);
    check::within("extra", extra, 0, check::kMost, "must be from 0 to 2^62");
    p.extra = column("extra", extra, ops);
    // What is there, what an op makes anew and what it needs beside that.
    all.add("size", size);
    all.add("extra", ops ? *std::max_element(p.extra.begin(), p.extra.end()) : 0);
    p.time = seconds("time", time, ops), p.again = seconds("again", again, ops);
    p.pack = seconds("pack", pack, storages);
    p.unpack = seconds("unpack", unpack, storages), p.offload = seconds("offload", offload, storages);
    p.fetch = seconds("fetch", fetch, storages), p.lost = seconds("lost", lost, storages);
    p.pure = column("pure", pure, ops), p.fixed = column("fixed", fixed, ops);
    p.owned = column("owned", owned, storages), p.kept = column("kept", kept, storages);
    p.may = decisions("may", may), p.must = decisions("must", must);
    check::number("boundary", boundary, 0, ops, "must be a position of the order");
    p.boundary = boundary, p.until_written = until_written, p.brief = brief;
    p.ending = check::permutation("ending", ending, storages);
    check_ops(p);
    return new Engine(std::move(p));
}

// Steps as columns: kind, op, storages, form, stream, waits, reuses.
nb::tuple steps_of(const std::vector<Step>& steps) {
    std::vector<std::uint8_t> kind, form;
    std::vector<i64> op, stream, start[3];
    std::vector<i32> item[3];
    for (auto& rows : start) rows.reserve(steps.size() + 1), rows.push_back(0);
    for (const Step& s : steps) {
        kind.push_back(s.kind), form.push_back(s.form), op.push_back(s.op), stream.push_back(s.stream);
        int k = 0;
        for (const auto* row : {&s.storages, &s.waits, &s.reuses}) {
            item[k].insert(item[k].end(), row->begin(), row->end());
            start[k].push_back(static_cast<i64>(item[k].size()));
            ++k;
        }
    }
    const auto rows = [&](int k) {
        return nb::make_tuple(to_numpy(std::move(start[k])), to_numpy(std::move(item[k])));
    };
    return nb::make_tuple(to_numpy(std::move(kind)), to_numpy(std::move(op)), rows(0),
                          to_numpy(std::move(form)), to_numpy(std::move(stream)), rows(1), rows(2));
}

nb::tuple emitted(Engine& e, const Flags& evict, i64 limit) {
    check_limit(limit);
    return steps_of(e.emit(bits(e, evict), limit));
}

// Temporaries of each op, and when it asks for each of its results: ticks of its run.
void requests_of(StateProblem& q, const RowsIn& temporaries, const Array<i64>& size, const Array<i32>& first,
                 const Array<i32>& last, const RowsIn& defined) {
    const i64 ops = q.p.ops, count = check::count("size", size);
    check::rows("temporaries", temporaries, ops, "op", 0, count - 1, "must be a temporary");
    check::rows("defined", defined, ops, "op", -1, check::kMostCount, "must be a tick");
    check::length("first", first, count, "temporary");
    check::length("last", last, count, "temporary");
    check::within("size", size, 0, check::kMost, "must be from 0 to 2^62");
    const Rows rows_in = rows(temporaries), ticks = rows(defined);
    for (i32 o = 0; o < ops; ++o) {
        if (ticks.size(o) != q.p.defines.size(o))
            check::refuse(
                "defined of op " + std::to_string(o) + " has " + std::to_string(ticks.size(o)) + " entries",
                "must have one per storage the op defines");
        q.first.emplace_back(ticks.begin(o), ticks.end(o));
        q.temporaries.emplace_back();
        for (const i32 t : rows_in[o])
            q.temporaries.back().push_back({size.data()[t], first.data()[t], last.data()[t]});
    }
}

// What `search_states` finds: the steps (none: nothing), the seconds of recomputation, whether all was tried,
// the work, and whether Ctrl-C ended it.
nb::tuple states_of(const Engine& e, const RowsIn& before, const RowsIn& temporaries, const Array<i64>& size,
                    const Array<i32>& first, const Array<i32>& last, const RowsIn& defined, i64 limit,
                    bool place, bool hand_out, i64 work, double seconds, double cutoff) {
    const Program& p = e.index().p;
    check_limit(limit);
    check::seconds(seconds);
    check::seconds(cutoff);
    check::number("ops", p.ops, 0, kMostStateOps, "must be at most 64");
    check::rows("before", before, p.ops, "op", 0, p.ops - 1, "must be an op");
    StateProblem q{p, rows(before), {}, {}, limit, place, hand_out};
    requests_of(q, temporaries, size, first, last, defined);
    Alarm alarm;
    const StateLimits limits{check::at_most(work), cutoff, alarm.set(seconds)};
    const StatePath found = unlocked([&] { return search_states(q, limits); });
    return nb::make_tuple(steps_of(found.steps), found.extra, found.found, found.all, found.work,
                          alarm.interrupted());
}

nb::tuple gaps_of(const Engine& e) {
    std::vector<i32> storage, from, to;
    for (const Gap& g : e.index().gaps)
        storage.push_back(g.storage), from.push_back(g.from), to.push_back(g.to);
    return nb::make_tuple(to_numpy(std::move(storage)), to_numpy(std::move(from)), to_numpy(std::move(to)));
}

Result<std::uint8_t> cut_of(const Engine& e, i32 boundary, double bytes_per_second, double seconds) {
    check::seconds(seconds);
    check::number("boundary", boundary, 0, e.index().p.ops, "must be a position of the order");
    check::finite("bytes_per_second", bytes_per_second);
    Alarm alarm;
    Bits kept =
        unlocked([&] { return priced_cut(e.index(), boundary, bytes_per_second, alarm.set(seconds)); });
    alarm.raise();
    return to_numpy(std::move(kept));
}

nb::tuple greedy_of(Engine& e, i64 limit, const Flags& start, i64 work, double seconds,
                    const nb::object& progress) {
    return searched(e, limit, start, work, seconds, progress,
                    [&](const Bits& from, const Budget& budget) { return greedy(e, limit, from, budget); });
}

nb::tuple cover_of(Engine& e, i64 limit, const Flags& start, i64 work, double seconds,
                   const nb::object& progress) {
    return searched(e, limit, start, work, seconds, progress,
                    [&](const Bits& from, const Budget& budget) { return cover(e, limit, from, budget); });
}

nb::tuple anneal_of(Engine& e, const RowsIn& groups, const RowsIn& twins, const Array<i64>& families,
                    i64 limit, const Flags& start, double heat, i64 span, i64 work, double seconds,
                    double exchanges, std::uint64_t seed, const nb::object& progress) {
    const Rows rows = groups_of(e, "groups", groups);
    const IsomorphicLayers layers = layers_of(e, twins, families);
    check::finite("heat", heat);
    check::finite("exchanges", exchanges);
    return searched(e, limit, start, work, seconds, progress, [&](const Bits& from, const Budget& budget) {
        return anneal(e, rows, layers, limit, from, {heat, span}, exchanges, seed, budget);
    });
}

nb::tuple lazy_greedy_of(Engine& e, const RowsIn& in, i64 limit, const Flags& start, i64 work, double seconds,
                         const nb::object& progress) {
    const Rows rows = groups_of(e, "rows", in);
    return searched(e, limit, start, work, seconds, progress, [&](const Bits& from, const Budget& budget) {
        return lazy_greedy(e, rows, limit, from, budget);
    });
}

nb::tuple relax_of(Engine& e, const RowsIn& groups, i64 limit, const Flags& start, i64 work, double seconds) {
    const Rows rows = groups_of(e, "groups", groups);
    return searched(e, limit, start, work, seconds, nb::none(), [&](const Bits& from, const Budget& budget) {
        return relax(e, rows, limit, from, budget);
    });
}

Sequence sequence_in(const Engine& e, const Array<i32>& ops) {
    const i64 count = e.index().p.ops;
    check::within("ops", ops, 0, count - 1, "must be an op");
    Sequence runs = sequence_of(to_vector(ops), count);
    const i64 first = std::count_if(runs.begin(), runs.end(), [](const Run& r) { return !r.again; });
    if (first != count)
        check::refuse("ops has " + std::to_string(first) + " of " + std::to_string(count) + " ops",
                      "must have every op");
    return runs;
}

// Steps of other runs of the same ops (none: these read what is not there), what they cost, the work, and
// whether Ctrl-C ended it.
nb::tuple resequence_of(const Engine& e, const Array<i32>& ops, i64 limit, double heat, i64 span, i64 work,
                        double seconds, std::uint64_t seed) {
    check_limit(limit);
    check::finite("heat", heat);
    check::seconds(seconds);
    const Sequence runs = sequence_in(e, ops);
    Alarm alarm;
    const Budget budget{check::at_most(work), alarm.set(seconds)};
    const Resequenced found =
        unlocked([&] { return resequence(e.index(), runs, limit, {heat, span}, seed, budget); });
    return nb::make_tuple(steps_of(Lives(e.index()).emit(found.runs)), as_dict(found.cost), found.work,
                          alarm.interrupted());
}

}  // namespace

void bind_search(nb::module_& m) {
    using namespace nb::literals;
    m.def(
        "min_cut", &cut, "nodes"_a, "tail"_a, "head"_a, "capacity"_a, "source"_a, "sink"_a,
        "seconds"_a = std::numeric_limits<double>::infinity(),
        "Capacity of a minimum cut, and which nodes are on the source's side; after so many seconds something that "
        "no cut is below, and no nodes.");
    nb::class_<Cuts>(m, "Cuts", "Minimum cuts of a network of which little changes from one to the next.")
        .def(nb::new_(&cuts_of), "nodes"_a, "tail"_a, "head"_a, "capacity"_a, "source"_a, "sink"_a,
             "switches"_a)
        .def(
            "value", &value_of, "open"_a, "free"_a,
            "Capacity of a minimum cut with some switches open, without the capacity of the edges that are free.");
    m.def(
        "linear_bound", &linear_bound_of, "rows"_a, "coefficient"_a, "limit"_a, "cost"_a, "low"_a, "high"_a,
        "rounds"_a, "enough"_a, "seconds"_a = std::numeric_limits<double>::infinity(),
        "What every x between low and high with rows at most their limits costs at least, as far as so many "
        "rounds prove, or enough; and the prices of the rows.");
    m.def("reached", &reached_of, "start"_a, "edges"_a,
          "Which nodes edges lead to from a start, or from one that is reached.");
    nb::class_<Engine>(m, "Engine")
        .def(nb::new_(&make), "reads"_a, "needs"_a, "defines"_a, "mutates"_a, "updates"_a, "extra"_a,
             "time"_a, "again"_a, "pure"_a, "fixed"_a, "size"_a, "owned"_a, "kept"_a, "order"_a, "packed"_a,
             "pack"_a, "unpack"_a, "offload"_a, "fetch"_a, "lost"_a, "may"_a, "must"_a, "boundary"_a,
             "overwrites"_a, "ending"_a, "until_written"_a = false, "brief"_a = false)
        .def_prop_ro("gaps", &gaps_of)
        .def_prop_ro("base_time", [](const Engine& e) { return e.index().base_time; })
        .def_prop_ro("allowed", [](const Engine& e) { return nb::cast(to_numpy(Bits(e.index().allowed))); })
        .def("set_host_limit", &Engine::set_host_limit, "bytes"_a)
        .def(
            "set_horizon",
            [](Engine& e, i32 positions) {
                check::number("positions", positions, 0, check::kMostCount, "must be from 0 to 2^28");
                e.set_horizon(positions);
            },
            "positions"_a)
        .def(
            "evaluate",
            [](Engine& e, const Flags& evict, i64 limit, double cutoff) {
                check_limit(limit);
                check::seconds(cutoff);
                return as_dict(e.evaluate(bits(e, evict), limit, cutoff));
            },
            "evict"_a, "limit"_a, "cutoff"_a = std::numeric_limits<double>::infinity())
        .def("walk", &walked, "decisions"_a, "limit"_a)
        .def("profile", [](Engine& e, const Flags& evict) { return to_numpy(e.profile(bits(e, evict))); })
        .def("emit", &emitted)
        .def("states", &states_of, "before"_a, "temporaries"_a, "size"_a, "first"_a, "last"_a, "defined"_a,
             "limit"_a, "place"_a, "hand_out"_a, "work"_a, "seconds"_a, "cutoff"_a)
        .def("greedy", &greedy_of, "limit"_a, "start"_a, "work"_a, "seconds"_a, "progress"_a.none())
        .def("cover", &cover_of, "limit"_a, "start"_a, "work"_a, "seconds"_a, "progress"_a.none())
        .def("anneal", &anneal_of, "groups"_a, "twins"_a, "families"_a, "limit"_a, "start"_a, "heat"_a,
             "span"_a, "work"_a, "seconds"_a, "exchanges"_a, "seed"_a, "progress"_a.none())
        .def("lazy_greedy", &lazy_greedy_of, "rows"_a, "limit"_a, "start"_a, "work"_a, "seconds"_a,
             "progress"_a.none())
        .def("resequence", &resequence_of, "ops"_a, "limit"_a, "heat"_a, "span"_a, "work"_a, "seconds"_a,
             "seed"_a)
        .def("priced_cut", &cut_of, "boundary"_a, "bytes_per_second"_a,
             "seconds"_a = std::numeric_limits<double>::infinity())
        .def("relax", &relax_of, "groups"_a, "limit"_a, "start"_a, "work"_a, "seconds"_a);
}
