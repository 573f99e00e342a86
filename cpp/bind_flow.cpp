// Python binding of the minimum cut.

#include "bind_checks.h"
#include "flow.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

using check::Array;
template <class T> std::vector<T> vec(const Array<T>& a) { return {a.data(), a.data() + a.shape(0)}; }

nb::tuple cut(std::int32_t nodes, const Array<std::int32_t>& tail, const Array<std::int32_t>& head,
              const Array<std::int64_t>& capacity, std::int32_t source, std::int32_t sink) {
    const auto edges = check::count("tail", tail);
    check::number("nodes", nodes, 2, check::kMostCount, "there are at least 2 nodes and at most 2^28");
    check::number("source", source, 0, nodes - 1, "it is a node");
    check::number("sink", sink, 0, nodes - 1, "it is a node");
    if (source == sink) check::refuse("sink is " + std::to_string(sink) + ", and source is, too", "source and sink are two nodes");
    check::length("head", head, edges, "edge");
    check::length("capacity", capacity, edges, "edge");
    check::within("tail", tail, 0, nodes - 1, "an edge joins two nodes");
    check::within("head", head, 0, nodes - 1, "an edge joins two nodes");
    check::within("capacity", capacity, 0, std::numeric_limits<std::int64_t>::max(), "a capacity is not negative");
    const auto t = vec(tail), h = vec(head);
    const auto c = vec(capacity);
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
