// Python bindings of facts of graphs, and of what steps cost and imply.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "bind_alarm.h"
#include "bind_arrays.h"
#include "residences.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

using Flags = Array<std::uint8_t>;

Rows rows(const RowsIn& r) { return {to_vector(r.first), to_vector(r.second)}; }

nb::tuple out(const Rows& r) {
    return nb::make_tuple(to_numpy(std::vector<i64>(r.start)), to_numpy(std::vector<i32>(r.item)));
}

// A graph's values and what follows from them.
struct Facts {
    Values g;
    Uses u;
    std::vector<i64> size;
    i64 ops() const { return g.inputs.count(); }
    i64 storages() const { return static_cast<i64>(size.size()); }
};

Facts* facts_of(const RowsIn& inputs, const RowsIn& outputs, const RowsIn& mutates, const RowsIn& control,
                const Array<i32>& home, const Array<i64>& size, const Flags& caller, const Flags& random,
                const Flags& effect) {
    const i64 ops = check::count("random", random), storages = check::count("size", size),
              values = check::count("home", home);
    check::rows("inputs", inputs, ops, "op", 0, values - 1, "must be a value");
    check::rows("outputs", outputs, ops, "op", 0, values - 1, "must be a value");
    check::rows("mutates", mutates, ops, "op", 0, storages - 1, "must be a storage");
    check::rows("control", control, ops, "op", 0, ops - 1, "must be an op");
    check::within("home", home, 0, storages - 1, "must be a storage");
    check::length("caller", caller, storages, "storage");
    check::length("effect", effect, ops, "op");
    check::Bytes().add("size", size);
    Values g{rows(inputs),    rows(outputs),     rows(mutates),     rows(control),
             to_vector(home), to_vector(caller), to_vector(random), to_vector(effect)};
    return unlocked([&] {
        Uses u = uses_of(g);
        return new Facts{std::move(g), std::move(u), to_vector(size)};
    });
}

void check_found(const Facts& f) {
    if (f.u.op >= 0)
        check::refuse("op " + std::to_string(f.u.op) + " reads storage " + std::to_string(f.u.storage),
                      "must be defined before it is used");
}

Rows before_of(const Facts& f, const RowsIn& before) {
    check::rows("before", before, f.ops(), "op", 0, f.ops() - 1, "must be an op");
    return rows(before);
}

Result<i32> sink_of(const Facts& f, const RowsIn& before, const Flags& stays) {
    check_found(f);
    check::length("stays", stays, f.storages(), "storage");
    return to_numpy(sink(f.u, before_of(f, before), f.size, to_vector(stays)));
}

// Columns of steps by name.
PlanSteps steps_of(const Facts& f, const nb::dict& columns) {
    const auto column = [&]<class T>(const char* name, T) { return check::column<Array<T>>(columns, name); };
    PlanSteps p;
    const Flags kind = column("kind", std::uint8_t{}), form = column("form", std::uint8_t{}),
                saves = column("saves", std::uint8_t{});
    const i64 count = check::count("kind", kind);
    const auto numbers = [&](const char* name) {
        const auto found = column(name, i64{});
        check::length(name, found, count, "step");
        return to_vector(found);
    };
    const auto seconds = [&](const char* name) {
        const auto found = column(name, double{});
        check::length(name, found, count, "step");
        return to_vector(found);
    };
    const auto table = [&](const char* name) {
        const auto found = check::column<RowsIn>(columns, name);
        check::rows(name, found, count, "step", std::numeric_limits<i32>::min(),
                    std::numeric_limits<i32>::max(), "");
        return rows(found);
    };
    check::length("form", form, count, "step");
    check::length("saves", saves, count, "step");
    p.kind = to_vector(kind), p.form = to_vector(form), p.saves = to_vector(saves);
    p.op = numbers("op"), p.nbytes = numbers("nbytes"), p.stream = numbers("stream");
    p.storages = table("storages"), p.waits = table("waits"), p.reuses = table("reuses");
    p.seconds = seconds("seconds"), p.lost = seconds("lost");
    check_found(f);
    return p;
}

nb::object timeline_of(const Facts& f, const Array<i64>& extra, const Array<i64>& state,
                       const Array<double>& time, double save, const RowsIn& updates,
                       const RowsIn& overwrites, const nb::dict& steps) {
    check::length("extra", extra, f.ops(), "op");
    check::length("state", state, f.ops(), "op");
    check::length("time", time, f.ops(), "op");
    check::rows("updates", updates, f.ops(), "op", 0, f.storages() - 1, "must be a storage");
    check::rows("overwrites", overwrites, f.ops(), "op", 0, f.storages() - 1, "must be a storage");
    const Costs costs{to_vector(extra), to_vector(state), to_vector(time), save,
                      rows(updates),    rows(overwrites)};
    for (i64 k = 0; k < f.ops(); ++k)
        if (costs.overwrites.size(k) % 2)
            check::refuse("overwrites of op " + std::to_string(k) + " has an odd number of entries",
                          "must be pairs");
    const PlanSteps p = steps_of(f, steps);
    check::Bytes all;  // what is alive at once is at most all of it
    for (const i64 bytes : f.size) all.add("size", bytes);
    all.add("extra", extra);
    all.add("state", state);
    for (std::size_t k = 0; k < p.nbytes.size(); ++k) {
        if (p.nbytes[k] < 0) check::refuse(check::entry("nbytes", k, p.nbytes[k]), "must be 0 or more");
        all.add("nbytes", p.nbytes[k]);
    }
    Timeline t = unlocked([&] { return timeline(f.g, f.u, f.size, costs, p); });
    if (!t.legal) return nb::none();
    return nb::make_tuple(t.peak, t.peak_step, t.time, t.compute_time, t.host_peak,
                          to_numpy(std::move(t.during)), to_numpy(std::move(t.resident)),
                          to_numpy(std::move(t.begins)), to_numpy(std::move(t.ends)));
}

// What residences count on: kinds, forms, ops and storages that there are.
void check_steps(const Facts& f, const PlanSteps& p) {
    for (std::size_t i = 0; i < p.kind.size(); ++i) {
        const i64 k = p.op[i], row = static_cast<i64>(i);
        const bool runs = p.kind[i] <= kRecomputes, known = p.kind[i] <= kFrees && p.form[i] <= kStateForm;
        bool right = known && (runs ? k >= 0 : k >= -1) && k < f.ops() && p.reuses.size(row) % 2 == 0;
        if (known && !runs && p.form[i] == kStateForm && p.storages.size(row)) right = false;
        for (const Rows* table : {&p.storages, &p.reuses})
            for (const i32 s : (*table)[row]) right &= s >= 0 && s < f.storages();
        if (!right) check::refuse("step " + std::to_string(i), "must name ops and storages of the graph");
    }
}

nb::dict residences_of(const Facts& f, const Array<i64>& state, const Array<i64>& block,
                       const Array<i64>& requests, const Array<i64>& size, const Array<i64>& storage,
                       const Array<i64>& begin, const Array<i64>& end, const nb::dict& steps) {
    const i64 count = check::count("size", size);
    check::length("state", state, f.ops(), "op");
    check::length("block", block, f.ops(), "op");
    check::length("requests", requests, f.ops() + 1, "op, and the end");
    check::within("requests", requests, 0, count, "must be a request");
    for (i64 k = 0; k < f.ops(); ++k)
        if (requests.data()[k] > requests.data()[k + 1])
            check::refuse(check::entry("requests", static_cast<std::size_t>(k), requests.data()[k]),
                          "must not go down");
    check::length("storage", storage, count, "request");
    check::length("begin", begin, count, "request");
    check::length("end", end, count, "request");
    const PlanSteps p = steps_of(f, steps);
    check_steps(f, p);
    const Requests q{to_vector(requests), to_vector(size), to_vector(storage), to_vector(begin),
                     to_vector(end)};
    Residences r =
        unlocked([&] { return residences(f.u, f.size, to_vector(state), to_vector(block), q, p); });
    if (r.wrong >= 0) check::refuse("step " + std::to_string(r.wrong), "must end what is there");
    nb::dict d;
    d["storage"] = to_numpy(std::move(r.storage)), d["start"] = to_numpy(std::move(r.start));
    d["end"] = to_numpy(std::move(r.end)), d["size"] = to_numpy(std::move(r.size));
    d["request"] = to_numpy(std::move(r.request)), d["first"] = to_numpy(std::move(r.first));
    d["last"] = to_numpy(std::move(r.last)), d["form"] = to_numpy(std::move(r.form));
    return d;
}

}  // namespace

void bind_graph(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Facts> facts(m, "Facts");
    facts.def(nb::new_(&facts_of), "inputs"_a, "outputs"_a, "mutates"_a, "control"_a, "home"_a, "size"_a,
              "caller"_a, "random"_a, "effect"_a);
    facts.def_prop_ro("undefined", [](const Facts& f) { return nb::make_tuple(f.u.op, f.u.storage); });
    facts.def_prop_ro("reads", [](const Facts& f) { return out(f.u.reads); });
    facts.def_prop_ro("defines", [](const Facts& f) { return out(f.u.defines); });
    facts.def_prop_ro("mutates", [](const Facts& f) { return out(f.u.mutates); });
    facts.def_prop_ro("needs", [](const Facts& f) { return out(f.u.needs); });
    facts.def_prop_ro("writers", [](const Facts& f) { return out(f.u.writers); });
    facts.def_prop_ro("readers", [](const Facts& f) { return out(f.u.readers); });
    facts.def_prop_ro("definer",
                      [](const Facts& f) { return nb::cast(to_numpy(std::vector<i32>(f.u.definer))); });
    facts.def_prop_ro("maker",
                      [](const Facts& f) { return nb::cast(to_numpy(std::vector<i32>(f.u.maker))); });
    facts.def("predecessors", [](const Facts& f) {
        check_found(f);
        return out(predecessors(f.g, f.u));
    });
    facts.def("sink", &sink_of, "before"_a, "stays"_a);
    facts.def("timeline", &timeline_of, "extra"_a, "state"_a, "time"_a, "save"_a, "updates"_a, "overwrites"_a,
              "steps"_a, "What steps cost (`simulate.Timeline`); None where they break a rule.");
    facts.def("residences", &residences_of, "state"_a, "block"_a, "requests"_a, "size"_a, "storage"_a,
              "begin"_a, "end"_a, "steps"_a);
    m.def(
        "successors",
        [](const RowsIn& before) {
            const i64 nodes = static_cast<i64>(before.first.shape(0)) - 1;
            check::rows("before", before, 0, nodes - 1, "must be a node");
            return out(successors(rows(before)));
        },
        "before"_a);
}
