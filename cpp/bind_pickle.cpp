// The reader of plain pickles as Python sees it: values are pairs of arrays, kinds and numbers.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bind_arrays.h"
#include "plain_pickle.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

using Values = std::pair<Result<std::uint8_t>, Result<i64>>;

class Reader {
  public:
    explicit Reader(nb::bytes data)
        : data_(std::move(data)), read_(std::string_view(data_.c_str(), data_.size())) {}

    std::pair<int, i64> root() const { return read_.root(); }

    Values items(i64 container) const {
        std::vector<std::uint8_t> kinds;
        std::vector<i64> numbers;
        for (const auto value : read_.items(checked(container))) add(read_.unpacked(value), kinds, numbers);
        return {to_numpy(std::move(kinds)), to_numpy(std::move(numbers))};
    }

    Values column(i64 container, const std::string& key) const {
        std::vector<std::uint8_t> kinds;
        std::vector<i64> numbers;
        const i64 text = read_.find(key);
        for (const auto value : read_.items(checked(container))) add(read_.at(value, text), kinds, numbers);
        return {to_numpy(std::move(kinds)), to_numpy(std::move(numbers))};
    }

    // What many containers hold, one after the other: where each begins, kinds, numbers.
    std::pair<Result<i64>, Values> rows(const Array<i64>& which) const {
        std::vector<i64> start{0}, numbers;
        std::vector<std::uint8_t> kinds;
        for (std::size_t k = 0; k < which.shape(0); ++k) {
            for (const auto value : read_.items(checked(which.data()[k]))) {
                add(read_.unpacked(value), kinds, numbers);
                if (static_cast<i64>(numbers.size()) > check::kMostCount)
                    check::refuse("the containers hold more than 2^28 values", "ask for fewer at a time");
            }
            start.push_back(static_cast<i64>(numbers.size()));
        }
        return {to_numpy(std::move(start)), {to_numpy(std::move(kinds)), to_numpy(std::move(numbers))}};
    }

    nb::bytes text(i64 k) const {
        const auto found = read_.text(k);
        return nb::bytes(found.data(), found.size());
    }
    double real(i64 k) const { return read_.real(k); }

  private:
    i64 checked(i64 container) const {
        read_.items(container);  // raises out_of_range
        return container;
    }
    static void add(std::pair<PlainPickle::Kind, i64> value, std::vector<std::uint8_t>& kinds,
                    std::vector<i64>& numbers) {
        kinds.push_back(value.first);
        numbers.push_back(value.second);
    }

    nb::bytes data_;
    PlainPickle read_;
};

}  // namespace

void bind_pickle(nb::module_& m) {
    nb::class_<Reader>(m, "PlainPickle")
        .def(nb::init<nb::bytes>(), nb::arg("data"))
        .def_prop_ro("root", &Reader::root)
        .def("items", &Reader::items, nb::arg("container"))
        .def("column", &Reader::column, nb::arg("container"), nb::arg("key"))
        .def("rows", &Reader::rows, nb::arg("which"))
        .def("text", &Reader::text, nb::arg("k"))
        .def("real", &Reader::real, nb::arg("k"));
    nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
        try {
            std::rethrow_exception(raised);
        } catch (const PlainPickle::Refused& fault) {
            PyErr_SetString(PyExc_ValueError, fault.what());
        }
    });
}
