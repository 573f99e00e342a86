// Python bindings of placement: by whole live ranges, and by parts and pairs.

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind_alarm.h"
#include "bind_arrays.h"
#include "place_related.h"

namespace nb = nanobind;

namespace tightship::place {

namespace {

using Ints = Array<i64>;
using Offsets = Result<i64>;

constexpr double kForever = std::numeric_limits<double>::infinity();

// Offsets that a search starts from: a buffer at each still ends within what can be counted.
std::vector<i64> to_offsets(const char* name, const Ints& a, i64 count, i64 least) {
    check::length(name, a, count, "buffer");
    check::within(name, a, least, check::kMost,
                  least < 0 ? "must be from 0 to 2^62, or -1" : "must be from 0 to 2^62");
    return to_vector(a);
}

std::vector<i32> to_order(const Ints& order, i64 count) { return check::permutation("order", order, count); }

// Sizes, alignments and pins of buffers, from which no arena comes out that overflows: bytes of all, each
// moved up to its alignment, above the highest pin.
void check_sizes(const Ints& size, const Ints* alignment, const Ints* pinned) {
    const i64 n = check::count("size", size);
    check::Bytes bytes;
    bytes.add("size", size);
    if (alignment) {
        check::length("alignment", *alignment, n, "buffer");
        bytes.add("alignment", *alignment, 1);
    }
    if (pinned) {
        check::length("pinned", *pinned, n, "buffer");
        check::within("pinned", *pinned, kFree, check::kMost, "must be from 0 to 2^62, or -1 for none");
        i64 highest = 0;
        for (i64 k = 0; k < n; ++k) highest = std::max(highest, pinned->data()[k]);
        bytes.add("the highest pin", highest);
    }
}

void check_lives(const Ints& lower, const Ints& upper, i64 count) {
    check::length("lower", lower, count, "buffer");
    check::length("upper", upper, count, "buffer");
    for (i64 k = 0; k < count; ++k)
        if (lower.data()[k] >= upper.data()[k])
            check::refuse(
                check::entry("upper", static_cast<std::size_t>(k), upper.data()[k]),
                "a live range must end after it begins, here at " + std::to_string(lower.data()[k]));
}

Buffers from_numpy(const Ints& lower, const Ints& upper, const Ints& size, const Ints* alignment,
                   const Ints* pinned) {
    check_sizes(size, alignment, pinned);
    const i64 n = static_cast<i64>(size.shape(0));
    check_lives(lower, upper, n);
    return make_buffers(lower.data(), upper.data(), size.data(), alignment ? alignment->data() : nullptr,
                        pinned ? pinned->data() : nullptr, n, raise_signals);
}

std::vector<Pair> to_pairs(i64 count, const Ints& one, const Ints& two, const Ints& low, const Ints& high) {
    const i64 n = check::count("one", one), most = check::kMost / 4 / std::max<i64>(count, 1);
    check::length("two", two, n, "pair");
    check::length("low", low, n, "pair");
    check::length("high", high, n, "pair");
    check::within("one", one, 0, count - 1, "must be a buffer, and not the other one of the pair");
    check::within("two", two, 0, count - 1, "must be a buffer, and not the other one of the pair");
    check::within("low", low, -most, most,
                  "a difference of offsets, times the buffers, must be at most 2^60");
    check::within("high", high, -most, most,
                  "a difference of offsets, times the buffers, must be at most 2^60");
    std::vector<Pair> pairs;
    pairs.reserve(n);
    for (i64 k = 0; k < n; ++k) {
        const i64 i = one.data()[k], j = two.data()[k];
        if (i == j)
            check::refuse(check::entry("two", static_cast<std::size_t>(k), j),
                          "must be a buffer, and not the other one of the pair");
        pairs.push_back({static_cast<i32>(i), static_cast<i32>(j), low.data()[k], high.data()[k]});
    }
    return pairs;
}

// A problem with its working memory: several packings cost one preparation. The searches end by Ctrl-C with
// what they have, and from then on at once.
template <class Problem, class Packer> class Bound {
  public:
    explicit Bound(Problem problem) : problem_(std::move(problem)), packer_(problem_) {}
    Bound(const Bound&) = delete;

    i64 work() const { return packer_.work() + nodes_; }
    i64 clash() { return packer_.clash(); }
    bool interrupted() const { return alarm_.interrupted(); }

    std::tuple<Offsets, i64> pack(Ints order, bool best_fit, i64 cutoff, double seconds) {
        check_cutoff(cutoff);
        auto found = packed(order, seconds, [&](const i32* by, i64* offset, const Watch& watch) {
            return packer_.pack(by, to_fit(best_fit), cutoff, offset, watch);
        });
        alarm_.raise();
        return found;
    }

    std::tuple<Offsets, i64> hinted(Ints order, Ints hint, i64 cutoff, double seconds) {
        const std::vector<i64> hints = to_offsets("hint", hint, problem_.count(), kFree);
        check_cutoff(cutoff);
        return packed(order, seconds, [&](const i32* by, i64* offset, const Watch& watch) {
            return packer_.pack_hinted(by, hints.data(), cutoff, offset, watch);
        });
    }

    Offsets fill(Ints order, bool best_fit, i64 capacity, double seconds) {
        return std::get<0>(packed(order, seconds, [&](const i32* by, i64* offset, const Watch& watch) {
            packer_.fill(by, to_fit(best_fit), capacity, offset, watch);
            return i64{0};
        }));
    }

    std::tuple<Offsets, i64> climb(Ints order, bool best_fit, std::uint64_t seed, i64 work, double seconds,
                                   i64 bound) {
        const std::vector<i32> by = to_order(order, problem_.count());
        std::vector<i64> offset(problem_.count());
        const Limits limits{check::at_most(work), check::at_most(bound)};
        const i64 arena = watched(seconds, [&](const Watch& watch) {
            return place::climb(packer_, problem_, by, to_fit(best_fit), offset, seed, limits, watch);
        });
        return {to_numpy(std::move(offset)), arena};
    }

  protected:
    Problem problem_;
    Packer packer_;
    Alarm alarm_;
    i64 nodes_ = 0;  // buffers placed otherwise than by the packer

    static void check_cutoff(i64 cutoff) {
        check::number("cutoff", cutoff, 0, kNoLimit, "must not be negative");
    }
    static Fit to_fit(bool best_fit) { return best_fit ? Fit::best : Fit::first; }

    template <class Work> auto watched(double seconds, Work work) {
        check::seconds(seconds);
        return unlocked([&] { return work(alarm_.set(seconds)); });
    }

    // Offsets that `pack` fills in, and what it returns.
    template <class Pack> std::tuple<Offsets, i64> packed(const Ints& order, double seconds, Pack pack) {
        const std::vector<i32> by = to_order(order, problem_.count());
        std::vector<i64> offset(problem_.count());
        const i64 arena =
            watched(seconds, [&](const Watch& watch) { return pack(by.data(), offset.data(), watch); });
        return {to_numpy(std::move(offset)), arena};
    }
};

// The methods that every packer has.
template <class Bound, class Class> Class& bind_packing(Class& c) {
    using namespace nb::literals;
    return c.def_prop_ro("clash", &Bound::clash, "A pinned buffer that shares bytes with another one, or -1.")
        .def_prop_ro("work", &Bound::work, "Buffers placed so far, over all packings and trees.")
        .def_prop_ro("interrupted", &Bound::interrupted, "Whether Ctrl-C ended a search.")
        .def(
            "pack", &Bound::pack, "order"_a, "best_fit"_a, "cutoff"_a = kNoLimit, "seconds"_a = kForever,
            "Offsets and arena of the greedy packing in this order; the arena is 2^63-1, and the offsets mean "
            "nothing, once it would be `cutoff` or more. What is left when the time is over is not packed but stacked.")
        .def("climb", &Bound::climb, "order"_a, "best_fit"_a, "seed"_a, "work"_a, "seconds"_a, "bound"_a,
             "Offsets and arena of the best packing found by changing this order, as `pack` gives them.");
}

class Placer : public Bound<Buffers, Packer> {
  public:
    Placer(Ints lower, Ints upper, Ints size, Ints alignment, Ints pinned)
        : Bound(from_numpy(lower, upper, size, &alignment, &pinned)) {}

    i64 peak() const { return peak_load(problem_); }

    // Offsets, lower bound, and the buffers that prove it where the peak load does not.
    std::tuple<Offsets, i64, Offsets> exact(Ints start, std::uint64_t seed, i64 work, double seconds,
                                            i64 goal, bool wanted, int threads) {
        std::vector<i64> offset = to_offsets("start", start, problem_.count(), 0);
        const ExactLimits limits{check::at_most(work), check::at_most(goal), wanted, threads, seed};
        Exact found = watched(
            seconds, [&](const Watch& watch) { return place_exactly(problem_, offset, limits, watch); });
        nodes_ += found.nodes;
        std::vector<i64> clash(found.clash.begin(), found.clash.end());
        return {to_numpy(std::move(found.offset)), found.bound, to_numpy(std::move(clash))};
    }

    Offsets windows(Ints start, std::uint64_t seed, i64 work, double seconds, i64 goal) {
        std::vector<i64> offset = to_offsets("start", start, problem_.count(), 0);
        const WindowLimits limits{check::at_most(work), check::at_most(goal), seed};
        Windows found = watched(
            seconds, [&](const Watch& watch) { return place_in_windows(problem_, offset, limits, watch); });
        nodes_ += found.nodes;
        return to_numpy(std::move(found.offset));
    }

    std::tuple<Offsets, bool> sweep(Ints order, double seconds) {
        const std::vector<i32> by = to_order(order, problem_.count());
        for (std::size_t k = 1; k < by.size(); ++k)
            if (problem_.first[by[k]] < problem_.first[by[k - 1]])
                check::refuse(check::entry("order", k, by[k]),
                              "a sweep must go by the beginning of live ranges");
        if (std::any_of(problem_.pinned.begin(), problem_.pinned.end(), [](i64 at) { return at != kFree; }))
            check::refuse("a buffer is pinned", "a sweep takes no pins");
        std::vector<i64> offset =
            watched(seconds, [&](const Watch& watch) { return first_fit_by_start(problem_, by, watch); });
        alarm_.raise();
        nodes_ += problem_.count();
        const bool complete = static_cast<i64>(offset.size()) == problem_.count();
        offset.resize(problem_.count());
        return {to_numpy(std::move(offset)), complete};
    }

    // The order in which a skyline is built; `rule` is one of Sky, in order.
    Offsets skyline(int rule) {
        check::number("rule", rule, 0, 2, "must be 0, 1 or 2");
        const std::vector<i32> order = watched(kForever, [&](const Watch& watch) {
            return place::skyline(problem_, static_cast<Sky>(rule), watch);
        });
        alarm_.raise();
        return to_numpy(std::vector<i64>(order.begin(), order.end()));
    }
};

std::tuple<Offsets, i64> pack_sets_of(Ints lower, Ints upper, Ints set, Ints size, Ints alignment,
                                      Ints order) {
    check_sizes(size, &alignment, nullptr);
    const i64 count = static_cast<i64>(size.shape(0));
    check::within("set", set, 0, count - 1, "must be one of the sets with a size");
    const std::vector<i32> by = to_order(order, count);
    const std::vector<i32> sets(set.data(), set.data() + set.shape(0));
    const std::vector<i64> sizes = to_vector(size);
    const Buffers buffers = from_numpy(lower, upper, set, nullptr, nullptr);
    Alarm alarm;
    std::vector<i64> offset =
        unlocked([&] { return pack_sets(buffers, sets, sizes, to_vector(alignment), by, alarm.set()); });
    alarm.raise();
    i64 arena = 0;
    for (i64 k = 0; k < count; ++k) arena = std::max(arena, offset[k] + sizes[k]);
    return {to_numpy(std::move(offset)), arena};
}

Related to_related(const Ints& size, const Ints& alignment, const Ints& pinned, const Ints& one,
                   const Ints& two, const Ints& below, const Ints& above) {
    check_sizes(size, &alignment, &pinned);
    const i64 n = static_cast<i64>(size.shape(0));
    Related p{
        {to_vector(size), to_vector(alignment), to_vector(pinned)}, {}, {}, std::vector<i64>(n + 1, 0), {}};
    p.conflicts = to_pairs(n, one, two, below, above);
    p.part.sections = 1;
    return p;
}

void add_parts(Related& p, const Ints& owner, const Ints& since, const Ints& until, const Ints& low,
               const Ints& high) {
    const i64 n = p.count(), count = check::count("owner", owner);
    check::length("low", low, count, "part");
    check::length("high", high, count, "part");
    check_lives(since, until, count);
    check::within("owner", owner, 0, n - 1, "must be a buffer");
    p.low = to_vector(low);
    std::vector<i64> size(count);
    for (i64 k = 0; k < count; ++k) {
        const i64 i = owner.data()[k], begin = p.low[k], end = high.data()[k];
        const auto at = static_cast<std::size_t>(k);
        constexpr const char* rule = "a part must be of its buffer's bytes";
        if (k && i < owner.data()[k - 1])
            check::refuse(check::entry("owner", at, i), "parts must be in the order of their buffers");
        if (begin < 0 || begin > p.size[i]) check::refuse(check::entry("low", at, begin), rule);
        if (end < begin || end > p.size[i]) check::refuse(check::entry("high", at, end), rule);
        size[k] = end - begin;
        ++p.from[i + 1];
    }
    for (i64 i = 0; i < n; ++i) p.from[i + 1] += p.from[i];
    p.part = make_buffers(since.data(), until.data(), size.data(), nullptr, nullptr, count, raise_signals);
}

class RelatedPlacer : public Bound<Related, RelatedPacker> {
  public:
    RelatedPlacer(Ints size, Ints alignment, Ints pinned, Ints one, Ints two, Ints low, Ints high)
        : Bound(to_related(size, alignment, pinned, one, two, low, high)) {}

    std::tuple<Offsets, bool> exhaust(Ints start, i64 work, double seconds, i64 goal) {
        if (problem_.part.count()) check::refuse("the problem has parts", "only pairs can be exhausted");
        std::vector<i64> offset = to_offsets("start", start, problem_.count(), 0);
        const TreeLimits limits{check::at_most(work), check::at_most(goal)};
        const bool complete =
            watched(seconds, [&](const Watch& watch) { return packer_.exhaust(offset, limits, watch); });
        return {to_numpy(std::move(offset)), complete};
    }

  protected:
    using Bound::Bound;
};

class PartPlacer : public RelatedPlacer {
  public:
    PartPlacer(Ints size, Ints alignment, Ints pinned, Ints owner, Ints since, Ints until, Ints low,
               Ints high, Ints one, Ints two, Ints below, Ints above)
        : RelatedPlacer([&] {
              Related p = to_related(size, alignment, pinned, one, two, below, above);
              add_parts(p, owner, since, until, low, high);
              return p;
          }()) {}
};

}  // namespace

}  // namespace tightship::place

void bind_place(nb::module_& m) {
    using namespace nb::literals;
    using namespace tightship::place;
    auto placer = nb::class_<Placer>(m, "Placer", "Packs one placement problem in given orders.");
    bind_packing<Placer>(placer)
        .def(nb::init<Ints, Ints, Ints, Ints, Ints>(), "lower"_a, "upper"_a, "size"_a, "alignment"_a,
             "pinned"_a)
        .def_prop_ro("peak", &Placer::peak, "The most bytes alive at one time.")
        .def(
            "exact", &Placer::exact, "start"_a, "seed"_a, "work"_a, "seconds"_a, "goal"_a, "wanted"_a,
            "threads"_a,
            "Offsets of the best placement found by tree search from `start` on, a lower bound, and the buffers "
            "that prove it (none where it is the peak load). Ends at an arena of `goal` bytes.")
        .def(
            "sweep", &Placer::sweep, "order"_a, "seconds"_a = kForever,
            "Offsets by first fit in this order, which is that of time; no buffer is pinned. As `pack`, but faster. "
            "And whether it came to its end.")
        .def("skyline", &Placer::skyline, "rule"_a,
             "The order in which a skyline is built: 0 longest-lived, 1 largest, 2 most snug first.")
        .def("windows", &Placer::windows, "start"_a, "seed"_a, "work"_a, "seconds"_a, "goal"_a,
             "Offsets no worse than `start`, improved by tree search of a few dozen buffers at a time.");
    auto related = nb::class_<RelatedPlacer>(m, "RelatedPlacer",
                                             "Packs one placement problem given by pairs in conflict.");
    bind_packing<RelatedPlacer>(related)
        .def(nb::init<Ints, Ints, Ints, Ints, Ints, Ints, Ints>(), "size"_a, "alignment"_a, "pinned"_a,
             "one"_a, "two"_a, "low"_a, "high"_a)
        .def("hinted", &RelatedPlacer::hinted, "order"_a, "hint"_a, "cutoff"_a, "seconds"_a = kForever,
             "First fit, but at the hint (-1: none) where that is free.")
        .def("fill", &RelatedPlacer::fill, "order"_a, "best_fit"_a, "capacity"_a, "seconds"_a = kForever,
             "Offsets of what fits into the capacity in this order; -1 for what does not, or came too late.")
        .def(
            "exhaust", &RelatedPlacer::exhaust, "start"_a, "work"_a, "seconds"_a, "goal"_a,
            "Offsets of the best placement found from `start` on, and whether no other has a smaller arena.");
    nb::class_<PartPlacer, RelatedPlacer>(m, "PartPlacer", "The same of parts that are alive, beside pairs.")
        .def(nb::init<Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints>(), "size"_a,
             "alignment"_a, "pinned"_a, "owner"_a, "since"_a, "until"_a, "low"_a, "high"_a, "one"_a, "two"_a,
             "below"_a, "above"_a);
    m.def(
        "pack_sets", &pack_sets_of, "lower"_a, "upper"_a, "set"_a, "size"_a, "alignment"_a, "order"_a,
        "Offsets and arena of sets of buffers, each set at one offset: set after set in this order, each into the "
        "smallest hole that is free in all live ranges of its members.");
    m.def(
        "lower_bound",
        [](Ints lower, Ints upper, Ints size) {
            return peak_load(from_numpy(lower, upper, size, nullptr, nullptr));
        },
        "lower"_a, "upper"_a, "size"_a, "The most bytes alive at one time.");
}
