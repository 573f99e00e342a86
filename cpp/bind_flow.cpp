// Python binding of the minimum cut.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "flow.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

template <class T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> std::vector<T> vec(const Array<T>& a) { return {a.data(), a.data() + a.shape(0)}; }

nb::tuple cut(std::int32_t nodes, const Array<std::int32_t>& tail, const Array<std::int32_t>& head,
              const Array<std::int64_t>& capacity, std::int32_t source, std::int32_t sink) {
    if (tail.shape(0) != head.shape(0) || tail.shape(0) != capacity.shape(0))
        throw std::invalid_argument("an edge has a tail, a head and a capacity");
    const auto t = vec(tail), h = vec(head);
    const auto c = vec(capacity);
    auto outside = [nodes](std::int32_t v) { return v < 0 || v >= nodes; };
    if (outside(source) || outside(sink) || source == sink) throw std::invalid_argument("source and sink are two nodes");
    for (std::size_t e = 0; e < t.size(); ++e)
        if (outside(t[e]) || outside(h[e]) || c[e] < 0)
            throw std::invalid_argument("an edge joins two nodes and has a capacity that is not negative");
    Cut found;
    {
        nb::gil_scoped_release free;
        found = min_cut(nodes, t, h, c, source, sink);
    }
    auto* held = new std::vector<std::uint8_t>(std::move(found.near));
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<std::uint8_t>*>(p); });
    return nb::make_tuple(found.value,
                          nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(held->data(), {held->size()}, owner));
}

}  // namespace

void bind_flow(nb::module_& m) {
    m.def("min_cut", &cut, nb::arg("nodes"), nb::arg("tail"), nb::arg("head"), nb::arg("capacity"),
          nb::arg("source"), nb::arg("sink"), "Capacity of a minimum cut, and which nodes are on the source's side.");
}
