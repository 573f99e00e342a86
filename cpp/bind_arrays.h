// Arrays that come from and go to Python: int64, contiguous.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <vector>

#include "bind_checks.h"
#include "place.h"

namespace tightship::place {

using Array = check::Array<i64>;
using Result = nanobind::ndarray<i64, nanobind::numpy, nanobind::ndim<1>>;

inline Result to_numpy(std::vector<i64> values) {
    auto owned = std::make_unique<std::vector<i64>>(std::move(values));
    i64* data = owned->data();
    const std::size_t count = owned->size();
    nanobind::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<i64>*>(p); });
    return Result(data, {count}, owner);
}

inline std::vector<i64> to_vector(const Array& a) { return {a.data(), a.data() + a.shape(0)}; }

// Offsets that a search starts from: a buffer at each still ends within what can be counted.
inline std::vector<i64> to_offsets(const char* name, const Array& a, i64 count, i64 least) {
    check::length(name, a, count, "buffer");
    check::within(name, a, least, check::kMost, least < 0 ? "an offset is from 0 to 2^62, or -1" : "an offset is from 0 to 2^62");
    return to_vector(a);
}

inline std::vector<i32> to_order(const Array& order, i64 count) { return check::permutation("order", order, count); }

// Sizes, alignments and pins of buffers, from which no arena comes out that overflows: bytes of all, each moved up to its
// alignment, above the highest pin.
inline void check_sizes(const Array& size, const Array* alignment, const Array* pinned) {
    const i64 n = check::count("size", size);
    check::Bytes bytes;
    bytes.add("size", size);
    if (alignment) {
        check::length("alignment", *alignment, n, "buffer");
        bytes.add("alignment", *alignment, 1);
    }
    if (pinned) {
        check::length("pinned", *pinned, n, "buffer");
        check::within("pinned", *pinned, kFree, check::kMost, "a pinned offset is from 0 to 2^62, or -1 for none");
        i64 highest = 0;
        for (i64 k = 0; k < n; ++k) highest = std::max(highest, pinned->data()[k]);
        bytes.add("the highest pin", highest);
    }
}

inline void check_lives(const Array& lower, const Array& upper, i64 count) {
    check::length("lower", lower, count, "buffer");
    check::length("upper", upper, count, "buffer");
    for (i64 k = 0; k < count; ++k)
        if (lower.data()[k] >= upper.data()[k])
            check::refuse(check::entry("upper", static_cast<std::size_t>(k), upper.data()[k]),
                          "a live range ends after it begins, here at " + std::to_string(lower.data()[k]));
}

// Limits of work and aims: what is beyond them means no more than they do.
inline i64 at_most(i64 work) { return std::clamp<i64>(work, 0, check::kMost); }

}  // namespace tightship::place
