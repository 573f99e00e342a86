// Python bindings of placement by whole live ranges.

#include "bind_packing.h"
#include "place_exact.h"
#include "place_sets.h"
#include "place_windows.h"

namespace nb = nanobind;

namespace tightship::place {

namespace {

Buffers from_numpy(const Array& lower, const Array& upper, const Array& size, const Array* alignment,
                   const Array* pinned) {
    check_sizes(size, alignment, pinned);
    const i64 n = static_cast<i64>(size.shape(0));
    check_lives(lower, upper, n);
    return make_buffers(lower.data(), upper.data(), size.data(), alignment ? alignment->data() : nullptr,
                        pinned ? pinned->data() : nullptr, n, raise_signals);
}

class Placer : public Bound<Buffers, Packer> {
  public:
    Placer(Array lower, Array upper, Array size, Array alignment, Array pinned)
        : Bound(from_numpy(lower, upper, size, &alignment, &pinned)) {}

    i64 peak() const { return peak_load(problem_); }

    // Offsets, lower bound, and the buffers that prove it where the peak load does not.
    std::tuple<Result, i64, Result> exact(Array start, std::uint64_t seed, i64 work, double seconds, i64 goal,
                                          bool wanted, int threads) {
        std::vector<i64> offset = to_offsets("start", start, problem_.count(), 0);
        check::seconds(seconds);
        Exact found;
        {
            nb::gil_scoped_release unlocked;
            const ExactLimits limits{at_most(work), at_most(goal), wanted, threads, seed};
            found = place_exactly(problem_, std::move(offset), limits, alarm_.set(seconds));
        }
        nodes_ += found.nodes;
        std::vector<i64> clash(found.clash.begin(), found.clash.end());
        return {to_numpy(std::move(found.offset)), found.bound, to_numpy(std::move(clash))};
    }

    Result windows(Array start, std::uint64_t seed, i64 work, double seconds, i64 goal) {
        std::vector<i64> offset = to_offsets("start", start, problem_.count(), 0);
        check::seconds(seconds);
        Windows found;
        {
            nb::gil_scoped_release unlocked;
            found = place_in_windows(problem_, std::move(offset), {at_most(work), at_most(goal), seed}, alarm_.set(seconds));
        }
        nodes_ += found.nodes;
        return to_numpy(std::move(found.offset));
    }

    std::tuple<Result, bool> sweep(Array order, double seconds) {
        const std::vector<i32> by = to_order(order, problem_.count());
        check::seconds(seconds);
        for (std::size_t k = 1; k < by.size(); ++k)
            if (problem_.first[by[k]] < problem_.first[by[k - 1]])
                check::refuse(check::entry("order", k, by[k]), "a sweep goes by the beginning of live ranges");
        if (std::any_of(problem_.pinned.begin(), problem_.pinned.end(), [](i64 at) { return at != kFree; }))
            check::refuse("a buffer is pinned", "a sweep places buffers of which none is");
        std::vector<i64> offset;
        {
            nb::gil_scoped_release unlocked;
            offset = first_fit_by_start(problem_, by, alarm_.set(seconds));
        }
        alarm_.raise();
        nodes_ += problem_.count();
        const bool complete = static_cast<i64>(offset.size()) == problem_.count();
        offset.resize(problem_.count());
        return {to_numpy(std::move(offset)), complete};
    }

    // The order in which a skyline is built; `rule` is one of Sky, in order.
    Result skyline(int rule) {
        check::number("rule", rule, 0, 2, "it is 0, 1 or 2");
        std::vector<i32> order;
        {
            nb::gil_scoped_release unlocked;
            order = place::skyline(problem_, static_cast<Sky>(rule), alarm_.set(std::numeric_limits<double>::infinity()));
        }
        alarm_.raise();
        return to_numpy({order.begin(), order.end()});
    }
};

std::tuple<Result, i64> pack_sets_of(Array lower, Array upper, Array set, Array size, Array alignment, Array order) {
    check_sizes(size, &alignment, nullptr);
    const i64 count = static_cast<i64>(size.shape(0));
    check::within("set", set, 0, count - 1, "a set is one of those with a size");
    const std::vector<i32> by = to_order(order, count);
    const std::vector<i32> sets(set.data(), set.data() + set.shape(0));
    const std::vector<i64> sizes = to_vector(size);
    std::vector<i64> offset;
    const Buffers buffers = from_numpy(lower, upper, set, nullptr, nullptr);
    Alarm alarm;
    {
        nb::gil_scoped_release unlocked;
        const Watch watch = alarm.set(std::numeric_limits<double>::infinity());
        offset = pack_sets(buffers, sets, sizes, to_vector(alignment), by, watch);
    }
    alarm.raise();
    i64 arena = 0;
    for (i64 k = 0; k < count; ++k) arena = std::max(arena, offset[k] + sizes[k]);
    return {to_numpy(std::move(offset)), arena};
}

}  // namespace

}  // namespace tightship::place

void bind_place(nb::module_& m) {
    using namespace nb::literals;
    using namespace tightship::place;
    auto placer = nb::class_<Placer>(m, "Placer", "Packs one placement problem in given orders.");
    bind_packing<Placer>(placer)
        .def(nb::init<Array, Array, Array, Array, Array>(), "lower"_a, "upper"_a, "size"_a, "alignment"_a, "pinned"_a)
        .def_prop_ro("peak", &Placer::peak, "The most bytes alive at one time.")
        .def("exact", &Placer::exact, "start"_a, "seed"_a, "work"_a, "seconds"_a, "goal"_a, "wanted"_a, "threads"_a,
             "Offsets of the best placement found by tree search from `start` on, a lower bound, and the buffers "
             "that prove it (none where it is the peak load). Ends at an arena of `goal` bytes.")
        .def("sweep", &Placer::sweep, "order"_a, "seconds"_a = std::numeric_limits<double>::infinity(),
             "Offsets by first fit in this order, which is that of time; no buffer is pinned. As `pack`, but faster. And "
             "whether it came to its end.")
        .def("skyline", &Placer::skyline, "rule"_a,
             "The order in which a skyline is built: 0 longest-lived, 1 largest, 2 most snug first.")
        .def("windows", &Placer::windows, "start"_a, "seed"_a, "work"_a, "seconds"_a, "goal"_a,
             "Offsets no worse than `start`, improved by tree search of a few dozen buffers at a time.");
    m.def("pack_sets", &pack_sets_of, "lower"_a, "upper"_a, "set"_a, "size"_a, "alignment"_a, "order"_a,
          "Offsets and arena of sets of buffers, each set at one offset: set after set in this order, each into the "
          "smallest hole that is free in all live ranges of its members.");
    m.def(
        "lower_bound",
        [](Array lower, Array upper, Array size) {
            return peak_load(from_numpy(lower, upper, size, nullptr, nullptr));
        },
        "lower"_a, "upper"_a, "size"_a, "The most bytes alive at one time.");
}
