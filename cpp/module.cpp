// The Python module tightship._core: bindings only; what is bound stands in the other files of this folder.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_copier(nb::module_& m);   // bind_copier.cpp
void bind_flow(nb::module_& m);     // bind_flow.cpp
void bind_place(nb::module_& m);    // bind_place.cpp
void bind_related(nb::module_& m);  // bind_related.cpp
void bind_search(nb::module_& m);   // bind_search.cpp

namespace {

// Raised by one whenever a binding changes its meaning, so that a stale build can be told from a current one.
constexpr int kAbi = 1;

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Hot search loops of tightship. Private: use the planners instead.";
  m.def("abi", [] { return kAbi; }, "Version of the interface between this module and the Python code.");
  bind_copier(m);
  bind_flow(m);
  bind_place(m);
  bind_related(m);
  bind_search(m);
}
