// Python bindings of the eviction engine and its searches.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "cut.h"
#include "search.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

template <class T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowsIn = std::pair<Array<i64>, Array<i32>>;

template <class T> std::vector<T> vec(const Array<T>& a) { return {a.data(), a.data() + a.shape(0)}; }
Rows rows(const RowsIn& r) { return {vec(r.first), vec(r.second)}; }

Bits bits(const Engine& e, const Array<std::uint8_t>& a) {
    if (a.shape(0) != e.gaps().size()) throw std::invalid_argument("one decision per gap is needed");
    Bits found = vec(a);
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (found[i] >= kDecisions) throw std::invalid_argument("a decision is keep, evict, pass, drop, pack or offload");
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

// Ctrl-C and progress: Python is asked now and then, with the lock taken for that moment only. Ctrl-C ends a search,
// which still has what it found.
Budget budget(i64 work, double seconds, std::uint64_t seed, nb::object progress, bool& interrupted) {
    Budget b{work, seconds, seed, {}};
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

Engine* make(const RowsIn& reads, const RowsIn& needs, const RowsIn& defines, const RowsIn& mutates,
             const RowsIn& updates, const Array<i64>& extra, const Array<double>& time,
             const Array<std::uint8_t>& pure, const Array<std::uint8_t>& fixed, const Array<i64>& size, const Array<std::uint8_t>& owned,
             const Array<std::uint8_t>& kept, const Array<i32>& order, const Array<i64>& packed,
             const Array<double>& pack, const Array<double>& unpack, const Array<double>& offload,
             const Array<double>& fetch, const Array<double>& lost, const Array<std::uint8_t>& may, const Array<std::uint8_t>& must,
             i32 boundary, const RowsIn& overwrites) {
    Program p;
    p.ops = static_cast<i64>(order.shape(0));
    p.storages = static_cast<i64>(size.shape(0));
    p.reads = rows(reads), p.needs = rows(needs), p.defines = rows(defines);
    p.mutates = rows(mutates), p.updates = rows(updates);
    p.extra = vec(extra), p.time = vec(time), p.pure = vec(pure), p.fixed = vec(fixed), p.size = vec(size);
    p.owned = vec(owned), p.kept = vec(kept), p.order = vec(order);
    p.packed = vec(packed), p.pack = vec(pack), p.unpack = vec(unpack);
    p.offload = vec(offload), p.fetch = vec(fetch), p.lost = vec(lost), p.may = vec(may), p.must = vec(must), p.boundary = boundary;
    p.overwrites = rows(overwrites);
    return new Engine(std::move(p));
}

nb::tuple as_tuple(const std::vector<i32>& row) {
    nb::list out;
    for (i32 x : row) out.append(x);
    return nb::tuple(out);
}

nb::tuple emitted(Engine& e, const Array<std::uint8_t>& evict, i64 limit) {
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
        .def("set_horizon", &Engine::set_horizon, nb::arg("positions"))
        .def("evaluate",
             [](Engine& e, const Array<std::uint8_t>& evict, i64 limit) {
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
                 const Bits b = bits(e, start);
                 const Rows r = rows(groups);
                 const Twins t{rows(twins), vec(families)};
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
                 const Bits b = bits(e, start);
                 const Rows r = rows(in);
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
                 if (boundary < 0 || boundary > e.program().ops)
                     throw std::invalid_argument("the boundary is a position of the order");
                 return array(priced_cut(e.program(), e.replayable(), boundary, bytes_per_second));
             },
             nb::arg("boundary"), nb::arg("bytes_per_second"))
        .def("relax",
             [](Engine& e, const RowsIn& groups, i64 limit, const Array<std::uint8_t>& start, i64 work,
                double seconds) {
                 Found f{bits(e, start), {}};
                 const Rows r = rows(groups);
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
