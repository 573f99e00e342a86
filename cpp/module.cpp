// The Python module tightship._core: bindings only; what is bound stands in the other files of this folder.

#include <nanobind/nanobind.h>

#include <system_error>

void bind_copier(nanobind::module_& m);   // bind_copier.cpp
void bind_graph(nanobind::module_& m);    // bind_graph.cpp
void bind_pickle(nanobind::module_& m);   // bind_pickle.cpp
void bind_place(nanobind::module_& m);    // bind_place.cpp
void bind_records(nanobind::module_& m);  // bind_records.cpp
void bind_search(nanobind::module_& m);   // bind_search.cpp
void bind_verify(nanobind::module_& m);   // bind_verify.cpp

namespace {

// A thread that the system does not start, for want of memory in most cases, is no error of the search.
void no_thread(const std::exception_ptr& raised, void*) {
    try {
        std::rethrow_exception(raised);
    } catch (const std::system_error& fault) {
        const bool again = fault.code() == std::errc::resource_unavailable_try_again;
        PyErr_SetString(again ? PyExc_MemoryError : PyExc_RuntimeError,
                        again ? "the system starts no more threads" : fault.what());
    }
}

}  // namespace

NB_MODULE(_core, m) {
    nanobind::register_exception_translator(no_thread);
    nanobind::set_leak_warnings(
        false);  // graphs in caches of the process are there to its end, with their facts
    m.doc() = "Hot search loops of tightship. Private: use the planners instead.";
    bind_copier(m);
    bind_graph(m);
    bind_pickle(m);
    bind_place(m);
    bind_records(m);
    bind_search(m);
    bind_verify(m);
}
