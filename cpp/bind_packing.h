// What the bindings of all packers have in common.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <tuple>
#include <utility>

#include "bind_alarm.h"
#include "bind_arrays.h"

namespace tightship::place {

// A problem with its working memory: several packings cost one preparation. The searches end by Ctrl-C with what
// they have, and from then on at once.
template <class Problem, class Packer>
class Bound {
  public:
    explicit Bound(Problem problem) : problem_(std::move(problem)), packer_(problem_) {}
    Bound(const Bound&) = delete;

    i64 work() const { return packer_.work() + nodes_; }
    i64 clash() { return packer_.clash(); }
    bool interrupted() const { return alarm_.interrupted(); }

    std::tuple<Result, i64> pack(Array order, bool best_fit, i64 cutoff, double seconds) {
        const std::vector<i32> by = to_order(order, problem_.count());
        check_cutoff(cutoff, seconds);
        auto found = packed([&](i64* offset) {
            return packer_.pack(by.data(), to_fit(best_fit), cutoff, offset, alarm_.set(seconds));
        });
        alarm_.raise();
        return found;
    }

    std::tuple<Result, i64> climb(Array order, bool best_fit, std::uint64_t seed, i64 work, double seconds, i64 bound) {
        const std::vector<i32> by = to_order(order, problem_.count());
        check::seconds(seconds);
        std::vector<i64> offset(problem_.count());
        i64 arena;
        {
            nanobind::gil_scoped_release unlocked;
            arena = place::climb(packer_, problem_.size, problem_.pinned, by, to_fit(best_fit), offset, seed,
                                 {at_most(work), at_most(bound)}, alarm_.set(seconds));
        }
        return {to_numpy(std::move(offset)), arena};
    }

  protected:
    Problem problem_;
    Packer packer_;
    Alarm alarm_;
    i64 nodes_ = 0;  // buffers placed otherwise than by the packer

    static void check_cutoff(i64 cutoff, double seconds) {
        check::number("cutoff", cutoff, 0, kNoLimit, "it is not negative");
        check::seconds(seconds);
    }
    static Fit to_fit(bool best_fit) { return best_fit ? Fit::best : Fit::first; }

    // Offsets that `pack` fills in, and what it returns.
    template <class Pack>
    std::tuple<Result, i64> packed(Pack pack) {
        std::vector<i64> offset(problem_.count());
        i64 arena;
        {
            nanobind::gil_scoped_release unlocked;
            arena = pack(offset.data());
        }
        return {to_numpy(std::move(offset)), arena};
    }
};

// The methods that every packer has.
template <class Bound, class Class>
Class& bind_packing(Class& c) {
    using namespace nanobind::literals;
    return c.def_prop_ro("clash", &Bound::clash, "A pinned buffer that shares bytes with another one, or -1.")
        .def_prop_ro("work", &Bound::work, "Buffers placed so far, over all packings and trees.")
        .def_prop_ro("interrupted", &Bound::interrupted, "Whether Ctrl-C ended a search.")
        .def("pack", &Bound::pack, "order"_a, "best_fit"_a, "cutoff"_a = kNoLimit,
             "seconds"_a = std::numeric_limits<double>::infinity(),
             "Offsets and arena of the greedy packing in this order; the arena is 2^63-1, and the offsets mean "
             "nothing, once it would be `cutoff` or more. What is left when the time is over is not packed but stacked.")
        .def("climb", &Bound::climb, "order"_a, "best_fit"_a, "seed"_a, "work"_a, "seconds"_a, "bound"_a,
             "Offsets and arena of the best packing found by changing this order, as `pack` gives them.");
}

}  // namespace tightship::place
