// Python bindings of placement. Arrays are int64, contiguous and of one length; the Python side checks them.

#include "bind_packing.h"
#include "place_exact.h"
#include "place_sets.h"
#include "place_windows.h"

namespace nb = nanobind;

namespace tightship::place {

namespace {

Buffers from_numpy(const Array& lower, const Array& upper, const Array& size, const Array* alignment,
                   const Array* pinned) {
    const std::size_t n = size.shape(0);
    if (lower.shape(0) != n || upper.shape(0) != n || (alignment && alignment->shape(0) != n) ||
        (pinned && pinned->shape(0) != n))
        throw nb::value_error("arrays of one length");
    return make_buffers(lower.data(), upper.data(), size.data(), alignment ? alignment->data() : nullptr,
                        pinned ? pinned->data() : nullptr, static_cast<i64>(n), raise_signals);
}

class Placer : public Bound<Buffers, Packer> {
  public:
    Placer(Array lower, Array upper, Array size, Array alignment, Array pinned)
        : Bound(from_numpy(lower, upper, size, &alignment, &pinned)) {}

    i64 peak() const { return peak_load(problem_); }

    // Offsets, lower bound, and the buffers that prove it where the peak load does not.
    std::tuple<Result, i64, Result> exact(Array start, std::uint64_t seed, i64 work, double seconds, i64 goal,
                                          bool wanted, int threads) {
        std::vector<i64> offset = to_offsets(start);
        Exact found;
        {
            nb::gil_scoped_release unlocked;
            const ExactLimits limits{work, goal, wanted, threads, seed};
            found = place_exactly(problem_, std::move(offset), limits, alarm_.set(seconds));
        }
        nodes_ += found.nodes;
        std::vector<i64> clash(found.clash.begin(), found.clash.end());
        return {to_numpy(std::move(found.offset)), found.bound, to_numpy(std::move(clash))};
    }

    Result windows(Array start, std::uint64_t seed, i64 work, double seconds, i64 goal) {
        std::vector<i64> offset = to_offsets(start);
        Windows found;
        {
            nb::gil_scoped_release unlocked;
            found = place_in_windows(problem_, std::move(offset), {work, goal, seed}, alarm_.set(seconds));
        }
        nodes_ += found.nodes;
        return to_numpy(std::move(found.offset));
    }

    std::tuple<Result, bool> sweep(Array order, double seconds) {
        const std::vector<i32> by = to_order(order, problem_.count());
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
        std::vector<i32> order;
        {
            nb::gil_scoped_release unlocked;
            order = place::skyline(problem_, static_cast<Sky>(rule), alarm_.set(std::numeric_limits<double>::infinity()));
        }
        alarm_.raise();
        return to_numpy({order.begin(), order.end()});
    }

  private:
    std::vector<i64> to_offsets(const Array& start) const { return to_vector(start, problem_.count()); }
};

std::tuple<Result, i64> pack_sets_of(Array lower, Array upper, Array set, Array size, Array alignment, Array order) {
    const i64 count = static_cast<i64>(size.shape(0));
    if (set.shape(0) != lower.shape(0) || alignment.shape(0) != size.shape(0)) throw nb::value_error("arrays of one length");
    const std::vector<i32> by = to_order(order, count);
    std::vector<i32> sets;
    std::vector<i64> sizes(size.data(), size.data() + count), offset;
    for (std::size_t k = 0; k < set.shape(0); ++k) {
        if (set.data()[k] < 0 || set.data()[k] >= count) throw nb::value_error("a set is one of those with a size");
        sets.push_back(static_cast<i32>(set.data()[k]));
    }
    const Buffers buffers = from_numpy(lower, upper, set, nullptr, nullptr);
    Alarm alarm;
    {
        nb::gil_scoped_release unlocked;
        const Watch watch = alarm.set(std::numeric_limits<double>::infinity());
        offset = pack_sets(buffers, sets, sizes, {alignment.data(), alignment.data() + count}, by, watch);
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
