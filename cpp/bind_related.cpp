// Python bindings of placement by pairs, with the methods that bind_place.cpp gives to placement by live ranges.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind_alarm.h"
#include "bind_arrays.h"
#include "place_related.h"

namespace nb = nanobind;

namespace tightship::place {

namespace {

std::vector<i64> to_vector(const Array& a, std::size_t count) {
    if (a.shape(0) != count) throw nb::value_error("arrays of one length");
    return {a.data(), a.data() + count};
}

class RelatedPlacer {
  public:
    RelatedPlacer(Array size, Array alignment, Array pinned, Array one, Array two, Array low, Array high)
        : problem_(read(size, alignment, pinned, one, two, low, high)), packer_(problem_) {}

    i64 work() const { return packer_.work(); }
    i64 clash() { return packer_.clash(); }
    bool interrupted() const { return alarm_.interrupted(); }

    std::tuple<Result, i64> pack(Array order, bool best_fit, i64 cutoff, double seconds) {
        auto found = packed(order, [&](const i32* by, i64* offset) {
            return packer_.pack(by, best_fit ? Fit::best : Fit::first, cutoff, offset, alarm_.set(seconds));
        });
        alarm_.raise();
        return found;
    }

    std::tuple<Result, i64> hinted(Array order, Array hint, i64 cutoff) {
        const std::vector<i64> hints = to_vector(hint, problem_.count());
        return packed(order, [&](const i32* by, i64* offset) {
            return packer_.pack_hinted(by, hints.data(), cutoff, offset);
        });
    }

    Result fill(Array order, bool best_fit, i64 capacity) {
        return std::get<0>(packed(order, [&](const i32* by, i64* offset) {
            packer_.fill(by, best_fit ? Fit::best : Fit::first, capacity, offset);
            return i64{0};
        }));
    }

    std::tuple<Result, i64> climb(Array order, bool best_fit, std::uint64_t seed, i64 work, double seconds, i64 bound) {
        const std::vector<i32> by = to_order(order, problem_.count());
        std::vector<i64> offset(problem_.count());
        i64 arena;
        {
            nb::gil_scoped_release unlocked;
            arena = place::climb(packer_, problem_.size, problem_.pinned, by, best_fit ? Fit::best : Fit::first, offset,
                                 seed, {work, bound}, alarm_.set(seconds));
        }
        return {to_numpy(std::move(offset)), arena};
    }

    std::tuple<Result, bool> exhaust(Array start, i64 work, double seconds, i64 goal) {
        std::vector<i64> offset = to_vector(start, problem_.count());
        bool complete;
        {
            nb::gil_scoped_release unlocked;
            complete = packer_.exhaust(offset, {work, goal}, alarm_.set(seconds));
        }
        return {to_numpy(std::move(offset)), complete};
    }

  private:
    Related problem_;
    RelatedPacker packer_;
    Alarm alarm_;

    static Related read(const Array& size, const Array& alignment, const Array& pinned, const Array& one,
                        const Array& two, const Array& low, const Array& high) {
        const std::size_t n = size.shape(0), pairs = one.shape(0);
        if (two.shape(0) != pairs || low.shape(0) != pairs || high.shape(0) != pairs)
            throw nb::value_error("arrays of one length");
        Related r{to_vector(size, n), to_vector(alignment, n), to_vector(pinned, n), {}};
        r.pairs.reserve(pairs);
        const auto known = [n](i64 i) { return 0 <= i && i < static_cast<i64>(n); };
        for (std::size_t k = 0; k < pairs; ++k) {
            const i64 i = one.data()[k], j = two.data()[k];
            if (!known(i) || !known(j) || i == j) throw nb::value_error("a pair is of two buffers");
            r.pairs.push_back({static_cast<i32>(i), static_cast<i32>(j), low.data()[k], high.data()[k]});
        }
        return r;
    }

    template <class Pack>
    std::tuple<Result, i64> packed(const Array& order, Pack pack) {
        const std::vector<i32> by = to_order(order, problem_.count());
        std::vector<i64> offset(problem_.count());
        i64 arena;
        {
            nb::gil_scoped_release unlocked;
            arena = pack(by.data(), offset.data());
        }
        return {to_numpy(std::move(offset)), arena};
    }
};

}  // namespace

}  // namespace tightship::place

void bind_related(nb::module_& m) {
    using namespace nb::literals;
    using namespace tightship::place;
    nb::class_<RelatedPlacer>(m, "RelatedPlacer", "Packs one placement problem given by pairs that are in the way.")
        .def(nb::init<Array, Array, Array, Array, Array, Array, Array>(), "size"_a, "alignment"_a, "pinned"_a, "one"_a,
             "two"_a, "low"_a, "high"_a)
        .def_prop_ro("clash", &RelatedPlacer::clash, "A pinned buffer that shares bytes with another one, or -1.")
        .def_prop_ro("work", &RelatedPlacer::work, "Buffers placed so far, over all packings and trees.")
        .def_prop_ro("interrupted", &RelatedPlacer::interrupted, "Whether Ctrl-C ended a search.")
        .def("pack", &RelatedPlacer::pack, "order"_a, "best_fit"_a, "cutoff"_a = kNoLimit,
             "seconds"_a = std::numeric_limits<double>::infinity(),
             "Offsets and arena of the greedy packing in this order, as Placer.pack.")
        .def("hinted", &RelatedPlacer::hinted, "order"_a, "hint"_a, "cutoff"_a,
             "First fit, but at the hint (-1: none) where that is free.")
        .def("fill", &RelatedPlacer::fill, "order"_a, "best_fit"_a, "capacity"_a,
             "Offsets of what fits into the capacity in this order; -1 for what does not.")
        .def("climb", &RelatedPlacer::climb, "order"_a, "best_fit"_a, "seed"_a, "work"_a, "seconds"_a, "bound"_a,
             "Offsets and arena of the best packing found by changing this order.")
        .def("exhaust", &RelatedPlacer::exhaust, "start"_a, "work"_a, "seconds"_a, "goal"_a,
             "Offsets of the best placement found from `start` on, and whether no other has a smaller arena.");
}
