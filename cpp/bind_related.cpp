// Python bindings of placement by pairs and in parts, with the methods that bind_place.cpp gives to placement by whole
// live ranges.

#include "bind_packing.h"
#include "place_parts.h"
#include "place_related.h"

namespace nb = nanobind;

namespace tightship::place {

namespace {

Sizes to_sizes(const Array& size, const Array& alignment, const Array& pinned) {
    check_sizes(size, &alignment, &pinned);
    return {to_vector(size), to_vector(alignment), to_vector(pinned)};
}

std::vector<Pair> to_pairs(i64 count, const Array& one, const Array& two, const Array& low, const Array& high) {
    const i64 n = check::count("one", one), most = check::kMost / 4 / std::max<i64>(count, 1);
    check::length("two", two, n, "pair");
    check::length("low", low, n, "pair");
    check::length("high", high, n, "pair");
    check::within("one", one, 0, count - 1, "a pair is of two buffers");
    check::within("two", two, 0, count - 1, "a pair is of two buffers");
    check::within("low", low, -most, most, "a difference of offsets, times the buffers, is at most 2^60");
    check::within("high", high, -most, most, "a difference of offsets, times the buffers, is at most 2^60");
    std::vector<Pair> pairs;
    pairs.reserve(n);
    for (i64 k = 0; k < n; ++k) {
        const i64 i = one.data()[k], j = two.data()[k];
        if (i == j) check::refuse(check::entry("two", static_cast<std::size_t>(k), j), "a pair is of two buffers");
        pairs.push_back({static_cast<i32>(i), static_cast<i32>(j), low.data()[k], high.data()[k]});
    }
    return pairs;
}

template <class Problem, class Packer>
class StepBound : public Bound<Problem, Packer> {
  public:
    using Bound<Problem, Packer>::Bound;

    std::tuple<Result, i64> hinted(Array order, Array hint, i64 cutoff, double seconds) {
        const std::vector<i32> by = to_order(order, this->problem_.count());
        const std::vector<i64> hints = to_offsets("hint", hint, this->problem_.count(), kFree);
        this->check_cutoff(cutoff, seconds);
        return this->packed([&](i64* offset) {
            return this->packer_.pack_hinted(by.data(), hints.data(), cutoff, offset, this->alarm_.set(seconds));
        });
    }

    Result fill(Array order, bool best_fit, i64 capacity, double seconds) {
        const std::vector<i32> by = to_order(order, this->problem_.count());
        check::seconds(seconds);
        return std::get<0>(this->packed([&](i64* offset) {
            this->packer_.fill(by.data(), this->to_fit(best_fit), capacity, offset, this->alarm_.set(seconds));
            return i64{0};
        }));
    }
};

class RelatedPlacer : public StepBound<Related, RelatedPacker> {
  public:
    RelatedPlacer(Array size, Array alignment, Array pinned, Array one, Array two, Array low, Array high)
        : StepBound(read(to_sizes(size, alignment, pinned), one, two, low, high)) {}

    std::tuple<Result, bool> exhaust(Array start, i64 work, double seconds, i64 goal) {
        std::vector<i64> offset = to_offsets("start", start, problem_.count(), 0);
        check::seconds(seconds);
        bool complete;
        {
            nb::gil_scoped_release unlocked;
            complete = packer_.exhaust(offset, {at_most(work), at_most(goal)}, alarm_.set(seconds));
        }
        return {to_numpy(std::move(offset)), complete};
    }

  private:
    static Related read(Sizes sizes, const Array& one, const Array& two, const Array& low, const Array& high) {
        std::vector<Pair> pairs = to_pairs(sizes.count(), one, two, low, high);
        return {std::move(sizes), std::move(pairs)};
    }
};

class PartPlacer : public StepBound<Parts, PartPacker> {
  public:
    PartPlacer(Array size, Array alignment, Array pinned, Array owner, Array since, Array until, Array low, Array high,
               Array one, Array two, Array from, Array to)
        : StepBound(read(to_sizes(size, alignment, pinned), owner, since, until, low, high,
                         to_pairs(static_cast<i64>(size.shape(0)), one, two, from, to))) {}

  private:
    static Parts read(Sizes sizes, const Array& owner, const Array& since, const Array& until, const Array& low,
                      const Array& high, std::vector<Pair> conflicts) {
        const i64 n = sizes.count();
        const i64 count = check::count("owner", owner);
        check::length("low", low, count, "part");
        check::length("high", high, count, "part");
        check_lives(since, until, count);
        check::within("owner", owner, 0, n - 1, "an owner is a buffer");
        Parts p{std::move(sizes), {}, to_vector(low), std::vector<i64>(n + 1, 0), std::move(conflicts)};
        std::vector<i64> size(count);
        for (i64 k = 0; k < count; ++k) {
            const i64 i = owner.data()[k];
            const auto at = static_cast<std::size_t>(k);
            if (k && i < owner.data()[k - 1]) check::refuse(check::entry("owner", at, i), "parts are in the order of their buffers");
            if (p.low[k] < 0 || p.low[k] > p.size[i]) check::refuse(check::entry("low", at, p.low[k]), "a part is of its buffer's bytes");
            if (high.data()[k] < p.low[k] || high.data()[k] > p.size[i])
                check::refuse(check::entry("high", at, high.data()[k]), "a part is of its buffer's bytes");
            size[k] = high.data()[k] - p.low[k];
            ++p.from[i + 1];
        }
        for (i64 i = 0; i < n; ++i) p.from[i + 1] += p.from[i];
        p.part = make_buffers(since.data(), until.data(), size.data(), nullptr, nullptr, count, raise_signals);
        return p;
    }
};

template <class Bound, class Class>
Class& bind_steps(Class& c) {
    using namespace nb::literals;
    constexpr double forever = std::numeric_limits<double>::infinity();
    return bind_packing<Bound>(c)
        .def("hinted", &Bound::hinted, "order"_a, "hint"_a, "cutoff"_a, "seconds"_a = forever,
             "First fit, but at the hint (-1: none) where that is free.")
        .def("fill", &Bound::fill, "order"_a, "best_fit"_a, "capacity"_a, "seconds"_a = forever,
             "Offsets of what fits into the capacity in this order; -1 for what does not, or came too late.");
}

}  // namespace

}  // namespace tightship::place

void bind_related(nb::module_& m) {
    using namespace nb::literals;
    using namespace tightship::place;
    auto related =
        nb::class_<RelatedPlacer>(m, "RelatedPlacer", "Packs one placement problem given by pairs that are in the way.");
    bind_steps<RelatedPlacer>(related)
        .def(nb::init<Array, Array, Array, Array, Array, Array, Array>(), "size"_a, "alignment"_a, "pinned"_a, "one"_a,
             "two"_a, "low"_a, "high"_a)
        .def("exhaust", &RelatedPlacer::exhaust, "start"_a, "work"_a, "seconds"_a, "goal"_a,
             "Offsets of the best placement found from `start` on, and whether no other has a smaller arena.");
    auto parts = nb::class_<PartPlacer>(m, "PartPlacer", "Packs one placement problem given by parts that are alive.");
    bind_steps<PartPlacer>(parts).def(
        nb::init<Array, Array, Array, Array, Array, Array, Array, Array, Array, Array, Array, Array>(), "size"_a,
        "alignment"_a, "pinned"_a, "owner"_a, "since"_a, "until"_a, "low"_a, "high"_a, "one"_a, "two"_a, "below"_a,
        "above"_a);
}
