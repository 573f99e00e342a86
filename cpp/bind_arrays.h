// Arrays that come from and go to Python: int64, contiguous.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <vector>

#include "place.h"

namespace tightship::place {

using Array = nanobind::ndarray<const i64, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Result = nanobind::ndarray<i64, nanobind::numpy, nanobind::ndim<1>>;

inline Result to_numpy(std::vector<i64> values) {
    auto owned = std::make_unique<std::vector<i64>>(std::move(values));
    i64* data = owned->data();
    const std::size_t count = owned->size();
    nanobind::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<i64>*>(p); });
    return Result(data, {count}, owner);
}

inline std::vector<i64> to_vector(const Array& a, std::size_t count) {
    if (a.shape(0) != count) throw nanobind::value_error("arrays of one length");
    return {a.data(), a.data() + count};
}

inline std::vector<i32> to_order(const Array& order, i64 count) {
    std::vector<i32> result;
    std::vector<bool> seen(count, false);
    for (std::size_t k = 0; k < order.shape(0); ++k) {
        const i64 i = order.data()[k];
        if (i < 0 || i >= count || seen[i]) break;
        seen[i] = true;
        result.push_back(static_cast<i32>(i));
    }
    if (static_cast<i64>(result.size()) != count) throw nanobind::value_error("order is a permutation");
    return result;
}

}  // namespace tightship::place
