// Python binding of XLA's best fit.

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "best_fit.h"
#include "bind_arrays.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

place::Result fit(const place::Array& start, const place::Array& end, const place::Array& first,
                  const place::Array& size, const place::Array& order, std::int64_t alignment) {
    const auto vec = [](const place::Array& a) { return std::vector<std::int64_t>(a.data(), a.data() + a.shape(0)); };
    const Stays stays{vec(start), vec(end), vec(first)};
    const auto sizes = vec(size);
    const auto sequence = place::to_order(order, static_cast<std::int64_t>(sizes.size()));
    if (alignment < 1) throw std::invalid_argument("an alignment is at least 1");
    if (stays.start.size() != stays.end.size() || stays.first.size() != sizes.size() + 1 || stays.first.front() != 0 ||
        stays.first.back() != static_cast<std::int64_t>(stays.start.size()))
        throw std::invalid_argument("every buffer has its stays");
    std::int64_t total = 0;
    for (std::size_t b = 0; b < sizes.size(); ++b) {
        if (stays.first[b] > stays.first[b + 1] || sizes[b] < 0)
            throw std::invalid_argument("every buffer has its stays and a size");
        if (__builtin_add_overflow(total, sizes[b], &total) || __builtin_add_overflow(total, alignment, &total))
            throw std::invalid_argument("the buffers have 2^63 bytes or more in all");
    }
    std::vector<std::int64_t> offsets;
    {
        nb::gil_scoped_release free;
        offsets = best_fit(stays, sizes, sequence, alignment);
    }
    return place::to_numpy(std::move(offsets));
}

}  // namespace

void bind_fit(nb::module_& m) {
    m.def("best_fit", &fit, nb::arg("start"), nb::arg("end"), nb::arg("first"), nb::arg("size"), nb::arg("order"),
          nb::arg("alignment"), "Offsets of buffers with several stays, each in the smallest free chunk that takes it.");
}
