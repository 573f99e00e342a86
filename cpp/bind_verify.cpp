// Python binding of the verifier's replay. It knows nothing of the engine, and shares with the other bindings
// only how arrays are checked.

#include <nanobind/stl/pair.h>

#include <array>
#include <initializer_list>

#include "bind_alarm.h"
#include "bind_arrays.h"
#include "verify.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

// Columns by name, each checked when it is taken.
class Columns {
  public:
    explicit Columns(const nb::dict& columns) : columns_(columns) {}

    template <class T> verify::Column<T> column(const char* name, i64 count, const char* of) const {
        const auto found = get<Array<T>>(name);
        check::length(name, found, count, of);
        return {found.data(), count};
    }

    template <class T>
    verify::Column<T> indices(const char* name, i64 count, const char* of, i64 most) const {
        const auto found = column<T>(name, count, of);
        check::within(name, get<Array<T>>(name), 0, most, "must be an index");
        return found;
    }

    verify::Table table(const char* name, i64 count, const char* of, i64 least, i64 most) const {
        const auto found = get<RowsIn>(name);
        check::rows(name, found, count, of, least, most, "must be an index");
        return {{found.first.data(), count + 1},
                {found.second.data(), static_cast<i64>(found.second.shape(0))}};
    }

    template <class T> i64 count(const char* name) const { return check::count(name, get<Array<T>>(name)); }
    template <class T = i64> T number(const char* name) const { return get<T>(name); }

  private:
    const nb::dict& columns_;

    template <class T> T get(const char* name) const { return check::column<T>(columns_, name); }
};

constexpr i64 kLeast32 = std::numeric_limits<i32>::min(), kMost32 = std::numeric_limits<i32>::max();

verify::Graph graph_of(const Columns& c) {
    const i64 ops = c.count<double>("time"), storages = c.count<i64>("size"), values = c.count<i32>("home");
    const auto by_op = [&](const char* name, i64 count) { return c.table(name, ops, "op", 0, count - 1); };
    verify::Graph g;
    g.inputs = by_op("inputs", values), g.outputs = by_op("outputs", values);
    g.mutates = by_op("mutates", storages), g.updates = by_op("updates", storages);
    g.control = by_op("control", ops), g.overwrites = by_op("overwrites", storages);
    g.storage = c.indices<i32>("home", values, "value", storages - 1);
    g.size = c.column<i64>("size", storages, "storage");
    g.random = c.column<std::uint8_t>("random", ops, "op");
    g.effect = c.column<std::uint8_t>("effect", ops, "op");
    g.workspace = c.column<i64>("workspace", ops, "op"), g.extra = c.column<i64>("extra", ops, "op");
    g.state = c.column<i64>("state", ops, "op");
    g.time = c.column<double>("time", ops, "op"), g.move = c.number<double>("move");
    g.caller = c.indices<i32>("caller", c.count<i32>("caller"), "input", values - 1);
    g.results = c.indices<i32>("results", c.count<i32>("results"), "output", values - 1);
    const i64 requests = c.count<i64>("request_size");
    g.requests = c.indices<i64>("requests", ops + 1, "op, and the end", requests);
    for (i64 k = 0; k < ops; ++k)
        if (g.requests[k] > g.requests[k + 1])
            check::refuse(check::entry("requests", static_cast<std::size_t>(k + 1), g.requests[k + 1]),
                          "must not go down");
    g.request_size = c.column<i64>("request_size", requests, "request");
    g.request_storage = c.column<i64>("request_storage", requests, "request");
    g.request_start = c.column<i64>("request_start", requests, "request");
    g.request_end = c.column<i64>("request_end", requests, "request");
    g.alignment = c.number("alignment");
    check::number("alignment", g.alignment, 1, check::kMost, "must be at least 1");
    return g;
}

verify::Plan plan_of(const Columns& c) {
    const i64 steps = c.count<std::uint8_t>("kind"), residences = c.count<i64>("storage");
    verify::Plan p;
    p.kind = c.indices<std::uint8_t>("kind", steps, "step", verify::kDecompress);
    p.form = c.indices<std::uint8_t>("form", steps, "step", verify::kState);
    p.saves = c.column<std::uint8_t>("saves", steps, "step");
    p.lossy = c.column<std::uint8_t>("lossy", steps, "step");
    p.op = c.column<i64>("op", steps, "step"), p.nbytes = c.column<i64>("nbytes", steps, "step");
    p.stream = c.column<i64>("stream", steps, "step");
    p.seconds = c.column<double>("seconds", steps, "step"), p.lost = c.column<double>("lost", steps, "step");
    p.waits = c.table("waits", steps, "step", kLeast32, kMost32);
    p.storages = c.table("storages", steps, "step", kLeast32, kMost32);
    p.reuses = c.table("reuses", steps, "step", kLeast32, kMost32);
    const auto by_residence = [&](const char* name) { return c.column<i64>(name, residences, "residence"); };
    p.storage = by_residence("storage"), p.start = by_residence("start"), p.end = by_residence("end");
    p.size = by_residence("size"), p.offset = by_residence("offset"), p.request = by_residence("request");
    p.first = by_residence("first"), p.last = by_residence("last");
    p.pool = c.indices<std::uint8_t>("pool", residences, "residence", verify::kOut);
    p.shape = c.indices<std::uint8_t>("shape", residences, "residence", verify::kState);
    p.arena = c.number("arena"), p.host = c.number("host");
    return p;
}

// Whether no sum of these can overflow.
bool small(std::initializer_list<verify::Column<i64>> columns) {
    constexpr i64 most = i64{1} << 61;
    i64 sum = 0;
    for (const auto& column : columns)
        for (i64 k = 0; k < column.count; ++k) {
            if (column[k] > most || column[k] < -most) return false;
            sum += column[k] < 0 ? -column[k] : column[k];
            if (sum > most) return false;
        }
    return true;
}

nb::object verified(const nb::dict& graph, const nb::dict& plan) {
    const verify::Graph g = graph_of(Columns(graph));
    const verify::Plan p = plan_of(Columns(plan));
    const std::array<i64, 2> pools{p.arena, p.host};
    if (!small({g.size, g.workspace, g.extra, g.state, g.request_size, p.nbytes, p.size}) ||
        !small({{pools.data(), 2}}))
        return nb::none();
    for (i64 k = 0; k < p.offset.count; ++k)
        if (!small({{p.offset.data + k, 1}})) return nb::none();
    const verify::Verdict v = unlocked([&] { return verify::verify(g, p); });
    if (!v.right) return nb::none();
    return nb::make_tuple(v.peak, v.unplanned, v.caller, v.handed, v.host, v.seconds);
}

}  // namespace

void bind_verify(nb::module_& m) {
    using namespace nb::literals;
    m.def(
        "verified", &verified, "graph"_a, "plan"_a,
        "Peak, unplanned need, the caller's bytes, bytes handed out, the most bytes offloaded at once and seconds of a "
        "plan of which nothing is wrong with steps and residences; None where something is, or may be.");
}
