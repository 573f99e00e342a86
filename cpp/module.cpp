// The Python module tightship._core: bindings only; what is bound stands in the other files of this folder.

#include <nanobind/nanobind.h>

void bind_copier(nanobind::module_& m);  // bind_copier.cpp
void bind_place(nanobind::module_& m);   // bind_place.cpp
void bind_search(nanobind::module_& m);  // bind_search.cpp

NB_MODULE(_core, m) {
    m.doc() = "Hot search loops of tightship. Private: use the planners instead.";
    bind_copier(m);
    bind_place(m);
    bind_search(m);
}
