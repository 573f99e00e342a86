// Python bindings of the eviction engine and its searches.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind_checks.h"
#include "cut.h"
#include "search.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

using check::Array;
using check::RowsIn;

template <class T> std::vector<T> vec(const Array<T>& a) { return {a.data(), a.data() + a.shape(0)}; }
Rows rows(const RowsIn& r) { return {vec(r.first), vec(r.second)}; }

Bits bits(const Engine& e, const Array<std::uint8_t>& a) {
    check::length("decisions", a, static_cast<i64>(e.gaps().size()), "gap");
    check::within("decisions", a, 0, kDecisions - 1, "a decision is keep, evict, pass, drop, pack or offload (0 to 5)");
    Bits found = vec(a);
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (!e.allowed(static_cast<i32>(i), found[i])) found[i] = e.least(static_cast<i32>(i));
    }
    return found;
}

template <class T> nb::object array(std::vector<T> v) {
    auto* held = new std::vector<T>(std::move(v));
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), {held->size()}, owner));
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

nb::tuple as_tuple(Found f) {
    return nb::make_tuple(array(std::move(f.evict)), as_dict(f.cost), f.work, f.met, f.interrupted);
}

void check_limit(i64 limit) {
    check::number("limit", limit, -check::kMost, std::numeric_limits<i64>::max(), "a limit is not below -2^62");
}

// Groups of gaps that a search decides together.
Rows groups_of(const Engine& e, const char* name, const RowsIn& in) {
    const i64 gaps = static_cast<i64>(e.gaps().size());
    check::rows(name, in, 0, gaps - 1, "a group is of gaps of this engine");
    for (std::size_t k = 1; gaps && k < in.first.shape(0); ++k)
        if (in.first.data()[k] == in.first.data()[k - 1])
            check::refuse(check::entry(std::string(name) + "[0]", k, in.first.data()[k]), "a group has a gap or more");
    return rows(in);
}

Twins twins_of(const Engine& e, const RowsIn& in, const Array<i64>& families) {
    const i64 gaps = static_cast<i64>(e.gaps().size()), rows_in = static_cast<i64>(in.first.shape(0)) - 1;
    check::rows("twins", in, -1, gaps - 1, "a twin is a gap of this engine, or -1 for none");
    const i64 n = check::count("families", families);
    if (n == 0) check::refuse("families is empty", "it has the first row of each family, and how many rows there are");
    for (i64 k = 0; k < n; ++k) {
        const i64 from = families.data()[k], before = k ? families.data()[k - 1] : -1;
        if (from <= before || (k == 0 && from != 0) || (k == n - 1 && from != rows_in))
            check::refuse(check::entry("families", static_cast<std::size_t>(k), from),
                          "the first rows of families begin with 0, go up and end with the number of rows");
    }
    Twins t{rows(in), vec(families)};
    for (i64 f = 0; f < t.families(); ++f)
        for (i64 r = t.family[f]; r < t.family[f + 1]; ++r)
            if (t.rows.size(r) == 0 || t.rows.size(r) != t.rows.size(t.family[f]))
                check::refuse("row " + std::to_string(r) + " of twins has " + std::to_string(t.rows.size(r)) + " gaps",
                              "the rows of a family are equally long, and not empty");
    return t;
}

// Ctrl-C and progress: Python is asked now and then, with the lock taken for that moment only. Ctrl-C ends a search,
// which still has what it found.
Budget budget(i64 work, double seconds, std::uint64_t seed, nb::object progress, bool& interrupted) {
    check::seconds(seconds);
    Budget b{std::clamp<i64>(work, 0, check::kMost), seconds, seed, {}};
    b.poll = [progress, &interrupted](const Found& f) {
        nb::gil_scoped_acquire gil;
        try {
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            return !progress.is_none() && nb::cast<bool>(progress(f.cost.peak, f.cost.extra, f.met));
        } catch (nb::python_error& raised) {
            if (!raised.matches(PyExc_KeyboardInterrupt)) throw;
            return interrupted = true;
        }
    };
    return b;
}

// What the engine counts on beyond the rows themselves: an op touches a storage once, and defines what no other does.
void check_ops(const Program& p) {
    std::vector<i32> touched(p.storages, -1), maker(p.storages, -1);
    for (i32 o = 0; o < p.ops; ++o) {
        const std::string op = "of op " + std::to_string(o);
        if (p.needs.size(o) != p.reads.size(o))
            check::refuse("needs " + op + " has " + std::to_string(p.needs.size(o)) + " entries", "needs has one per read");
        const auto touch = [&](const char* name, i32 s) {
            if (std::exchange(touched[s], o) == o)
                check::refuse(std::string(name) + " " + op + " has storage " + std::to_string(s) + " again",
                              "an op reads or defines a storage once");
        };
        for (auto s = p.reads.begin(o); s != p.reads.end(o); ++s) touch("reads", *s);
        for (auto s = p.defines.begin(o); s != p.defines.end(o); ++s) {
            touch("defines", *s);
            if (std::exchange(maker[*s], o) >= 0)
                check::refuse("defines " + op + " has storage " + std::to_string(*s), "a storage is defined once");
        }
        for (auto s = p.mutates.begin(o); s != p.mutates.end(o); ++s)
            if (touched[*s] != o || maker[*s] == o)
                check::refuse("mutates " + op + " has storage " + std::to_string(*s), "an op reads what it mutates");
        if (p.overwrites.size(o) % 2)
            check::refuse("overwrites " + op + " has " + std::to_string(p.overwrites.size(o)) + " entries", "they are pairs");
        for (auto s = p.overwrites.begin(o); s != p.overwrites.end(o); s += 2)
            if (touched[s[0]] != o || maker[s[0]] == o || maker[s[1]] != o)
                check::refuse("overwrites " + op + " has storages " + std::to_string(s[0]) + " and " + std::to_string(s[1]),
                              "a pair is of one that is read and one that is defined");
    }
}

Engine* make(const RowsIn& reads, const RowsIn& needs, const RowsIn& defines, const RowsIn& mutates,
             const RowsIn& updates, const Array<i64>& extra, const Array<double>& time,
             const Array<std::uint8_t>& pure, const Array<std::uint8_t>& fixed, const Array<i64>& size, const Array<std::uint8_t>& owned,
             const Array<std::uint8_t>& kept, const Array<i32>& order, const Array<i64>& packed,
             const Array<double>& pack, const Array<double>& unpack, const Array<double>& offload,
             const Array<double>& fetch, const Array<double>& lost, const Array<std::uint8_t>& may, const Array<std::uint8_t>& must,
             i32 boundary, const RowsIn& overwrites) {
    const i64 ops = check::count("order", order), storages = check::count("size", size);
    check::permutation("order", order, ops);
    const auto by_op = [&](const char* name, const RowsIn& r, i64 most, const char* rule) {
        check::rows(name, r, ops, "op", 0, most, rule);
    };
    constexpr const char* storage = "it is a storage";
    by_op("reads", reads, storages - 1, storage);
    by_op("needs", needs, std::numeric_limits<i32>::max(), "a version is not negative");
    by_op("defines", defines, storages - 1, storage);
    by_op("mutates", mutates, storages - 1, storage);
    by_op("updates", updates, storages - 1, storage);
    by_op("overwrites", overwrites, storages - 1, storage);
    const std::pair<const char*, const Array<i64>&> bytes_of_storages[] = {{"size", size}, {"packed", packed}};
    check::Bytes bytes;
    for (const auto& [name, column] : bytes_of_storages) {
        check::length(name, column, storages, "storage");
        bytes.add(name, column);
    }
    check::length("extra", extra, ops, "op");
    check::within("extra", extra, 0, check::kMost, "bytes are from 0 to 2^62");
    // What is there, what an op makes anew and what it needs beside that.
    bytes.add("size", size);
    bytes.add("extra", ops ? *std::max_element(extra.data(), extra.data() + ops) : 0);
    check::length("time", time, ops, "op");
    check::times("time", time);
    const std::pair<const char*, const Array<double>&> times_of_storages[] = {
        {"pack", pack}, {"unpack", unpack}, {"offload", offload}, {"fetch", fetch}, {"lost", lost}};
    for (const auto& [name, column] : times_of_storages) {
        check::length(name, column, storages, "storage");
        check::times(name, column);
    }
    check::length("pure", pure, ops, "op");
    check::length("fixed", fixed, ops, "op");
    const std::pair<const char*, const Array<std::uint8_t>&> flags_of_storages[] = {
        {"owned", owned}, {"kept", kept}, {"may", may}, {"must", must}};
    for (const auto& [name, column] : flags_of_storages) check::length(name, column, storages, "storage");
    check::within("may", may, 0, (1 << kDecisions) - 1, "it is a set of decisions, a bit each");
    check::within("must", must, 0, (1 << kDecisions) - 1, "it is a set of decisions, a bit each");
    check::number("boundary", boundary, 0, ops, "it is a position of the order");
    Program p;
    p.ops = ops;
    p.storages = storages;
    p.reads = rows(reads), p.needs = rows(needs), p.defines = rows(defines);
    p.mutates = rows(mutates), p.updates = rows(updates);
    p.extra = vec(extra), p.time = vec(time), p.pure = vec(pure), p.fixed = vec(fixed), p.size = vec(size);
    p.owned = vec(owned), p.kept = vec(kept), p.order = vec(order);
    p.packed = vec(packed), p.pack = vec(pack), p.unpack = vec(unpack);
    p.offload = vec(offload), p.fetch = vec(fetch), p.lost = vec(lost), p.may = vec(may), p.must = vec(must), p.boundary = boundary;
    p.overwrites = rows(overwrites);
    check_ops(p);
    return new Engine(std::move(p));
}

nb::tuple as_tuple(const std::vector<i32>& row) {
    nb::list out;
    for (i32 x : row) out.append(x);
    return nb::tuple(out);
}

nb::tuple emitted(Engine& e, const Array<std::uint8_t>& evict, i64 limit) {
    check_limit(limit);
    const Bits b = bits(e, evict);
    const std::vector<Step> steps = e.emit(b.data(), limit);
    nb::list out;
    for (const Step& s : steps)
        out.append(nb::make_tuple(int(s.kind), s.op, as_tuple(s.storages), int(s.form), int(s.stream), as_tuple(s.waits),
                                 as_tuple(s.reuses)));
    return nb::tuple(out);
}

}  // namespace

void bind_search(nb::module_& m) {
    nb::class_<Engine>(m, "Engine")
        .def(nb::new_(&make), nb::arg("reads"), nb::arg("needs"), nb::arg("defines"), nb::arg("mutates"),
             nb::arg("updates"), nb::arg("extra"), nb::arg("time"), nb::arg("pure"), nb::arg("fixed"), nb::arg("size"),
             nb::arg("owned"), nb::arg("kept"), nb::arg("order"), nb::arg("packed"), nb::arg("pack"),
             nb::arg("unpack"), nb::arg("offload"), nb::arg("fetch"), nb::arg("lost"), nb::arg("may"), nb::arg("must"),
             nb::arg("boundary"), nb::arg("overwrites"))
        .def_prop_ro("gaps",
                     [](const Engine& e) {
                         std::vector<i32> s, from, to;
                         for (const Gap& g : e.gaps())
                             s.push_back(g.storage), from.push_back(g.from), to.push_back(g.to);
                         return nb::make_tuple(array(std::move(s)), array(std::move(from)), array(std::move(to)));
                     })
        .def_prop_ro("base_time", &Engine::base_time)
        .def_prop_ro("allowed", [](const Engine& e) { return array(std::vector<std::uint8_t>(e.allowed())); })
        .def("set_host_limit", &Engine::set_host_limit, nb::arg("bytes"))
        .def("set_horizon",
             [](Engine& e, i32 positions) {
                 check::number("positions", positions, 0, check::kMostCount, "it is from 0 to 2^28");
                 e.set_horizon(positions);
             }, nb::arg("positions"))
        .def("evaluate",
             [](Engine& e, const Array<std::uint8_t>& evict, i64 limit) {
                 check_limit(limit);
                 const Bits b = bits(e, evict);
                 return as_dict(e.evaluate(b.data(), limit));
             })
        .def("profile",
             [](Engine& e, const Array<std::uint8_t>& evict) {
                 const Bits b = bits(e, evict);
                 return array(e.profile(b.data()));
             })
        .def("emit", &emitted)
        .def("greedy",
             [](Engine& e, i64 limit, const Array<std::uint8_t>& start, i64 work, double seconds,
                std::uint64_t seed, nb::object progress) {
                 check_limit(limit);
                 const Bits b = bits(e, start);
                 bool interrupted = false;
                 const Budget limits = budget(work, seconds, seed, std::move(progress), interrupted);
                 Found f;
                 {
                     nb::gil_scoped_release free;
                     f = greedy(e, limit, b, limits);
                 }
                 f.interrupted = interrupted;
                 return as_tuple(std::move(f));
             },
             nb::arg("limit"), nb::arg("start"), nb::arg("work"), nb::arg("seconds"), nb::arg("seed"),
             nb::arg("progress").none())
        .def("anneal",
             [](Engine& e, const RowsIn& groups, const RowsIn& twins, const Array<i64>& families, i64 limit,
                const Array<std::uint8_t>& start, double heat, i64 span, i64 work, double seconds, std::uint64_t seed,
                nb::object progress) {
                 check_limit(limit);
                 const Bits b = bits(e, start);
                 const Rows r = groups_of(e, "groups", groups);
                 const Twins t = twins_of(e, twins, families);
                 check::finite("heat", heat);
                 bool interrupted = false;
                 const Budget limits = budget(work, seconds, seed, std::move(progress), interrupted);
                 Found f;
                 {
                     nb::gil_scoped_release free;
                     f = anneal(e, r, t, limit, b, {heat, span}, limits);
                 }
                 f.interrupted = interrupted;
                 return as_tuple(std::move(f));
             },
             nb::arg("groups"), nb::arg("twins"), nb::arg("families"), nb::arg("limit"), nb::arg("start"), nb::arg("heat"),
             nb::arg("span"), nb::arg("work"),
             nb::arg("seconds"), nb::arg("seed"), nb::arg("progress").none())
        .def("ladder",
             [](Engine& e, const RowsIn& in, i64 limit, const Array<std::uint8_t>& start, i64 work,
                double seconds, nb::object progress) {
                 check_limit(limit);
                 const Bits b = bits(e, start);
                 const Rows r = groups_of(e, "rows", in);
                 bool interrupted = false;
                 const Budget limits = budget(work, seconds, 0, std::move(progress), interrupted);
                 Found f;
                 {
                     nb::gil_scoped_release free;
                     f = ladder(e, r, limit, b, limits);
                 }
                 f.interrupted = interrupted;
                 return as_tuple(std::move(f));
             },
             nb::arg("rows"), nb::arg("limit"), nb::arg("start"), nb::arg("work"), nb::arg("seconds"),
             nb::arg("progress").none())
        .def("priced_cut",
             [](const Engine& e, i32 boundary, double bytes_per_second) {
                 check::number("boundary", boundary, 0, e.program().ops, "it is a position of the order");
                 check::finite("bytes_per_second", bytes_per_second);
                 return array(priced_cut(e.program(), e.replayable(), boundary, bytes_per_second));
             },
             nb::arg("boundary"), nb::arg("bytes_per_second"))
        .def("relax",
             [](Engine& e, const RowsIn& groups, i64 limit, const Array<std::uint8_t>& start, i64 work,
                double seconds) {
                 check_limit(limit);
                 Found f{bits(e, start), {}};
                 const Rows r = groups_of(e, "groups", groups);
                 bool interrupted = false;
                 const Budget limits = budget(work, seconds, 0, nb::none(), interrupted);
                 f.cost = e.evaluate(f.evict.data(), limit);
                 f.met = f.cost.valid && f.cost.peak <= limit;
                 {
                     nb::gil_scoped_release free;
                     f = relax(e, r, limit, f, limits);
                 }
                 f.interrupted = interrupted;
                 return as_tuple(std::move(f));
             },
             nb::arg("groups"), nb::arg("limit"), nb::arg("start"), nb::arg("work"), nb::arg("seconds"));
}
