// Columns of frozen records (dataclasses with slots): attributes of many objects read as arrays, and many
// objects made of columns. Python takes microseconds for each object, which is most of the time on graphs of
// a million ops.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bind_arrays.h"

namespace nb = nanobind;
using namespace tightship;

namespace {

nb::object interned(const std::string& name) {
    return nb::steal<nb::object>(PyUnicode_InternFromString(name.c_str()));
}

nb::object attribute(PyObject* record, const nb::object& name) {
    PyObject* found = PyObject_GetAttr(record, name.ptr());
    if (!found) throw nb::python_error();
    return nb::steal<nb::object>(found);
}

// An integer as it is: one with a fraction, or beyond 64 bits, is refused.
i64 integer(PyObject* value) {
    nb::object whole;
    if (!PyLong_Check(value)) {
        whole = nb::steal<nb::object>(PyNumber_Index(value));
        if (!whole) throw nb::python_error();
        value = whole.ptr();
    }
    const long long found = PyLong_AsLongLong(value);
    if (found == -1 && PyErr_Occurred()) throw nb::python_error();
    return found;
}

i32 index(PyObject* value) {
    const i64 found = integer(value);
    if (found < std::numeric_limits<i32>::min() || found > std::numeric_limits<i32>::max()) {
        PyErr_SetString(PyExc_OverflowError, "an index is beyond 32 bits");
        throw nb::python_error();
    }
    return static_cast<i32>(found);
}

template <class Each> void each(const nb::object& given, Each&& look) {
    const nb::tuple records(given);
    const auto count = static_cast<Py_ssize_t>(nb::len(records));
    for (Py_ssize_t k = 0; k < count; ++k) look(PyTuple_GetItem(records.ptr(), k));
}

Result<i64> integers(const nb::object& records, const std::string& name) {
    const nb::object attr = interned(name);
    std::vector<i64> out;
    out.reserve(nb::len(records));
    each(records, [&](PyObject* r) { out.push_back(integer(attribute(r, attr).ptr())); });
    return to_numpy(std::move(out));
}

Result<double> numbers(const nb::object& records, const std::string& name) {
    const nb::object attr = interned(name);
    std::vector<double> out;
    out.reserve(nb::len(records));
    each(records, [&](PyObject* r) {
        const double found = PyFloat_AsDouble(attribute(r, attr).ptr());
        if (found == -1.0 && PyErr_Occurred()) throw nb::python_error();
        out.push_back(found);
    });
    return to_numpy(std::move(out));
}

Result<std::uint8_t> flags(const nb::object& records, const std::string& name) {
    const nb::object attr = interned(name);
    std::vector<std::uint8_t> out;
    out.reserve(nb::len(records));
    each(records, [&](PyObject* r) {
        const int found = PyObject_IsTrue(attribute(r, attr).ptr());
        if (found < 0) throw nb::python_error();
        out.push_back(static_cast<std::uint8_t>(found));
    });
    return to_numpy(std::move(out));
}

constexpr std::uint8_t kUnknown = 255;

Result<std::uint8_t> codes(const nb::object& records, const std::string& name, const nb::tuple& known) {
    const nb::object attr = interned(name);
    std::vector<std::uint8_t> out;
    out.reserve(nb::len(records));
    const std::size_t most = std::min<std::size_t>(nb::len(known), kUnknown);
    PyObject* last = nullptr;  // strings of one text are mostly one object
    std::uint8_t code = kUnknown;
    each(records, [&](PyObject* r) {
        const nb::object value = attribute(r, attr);
        if (value.ptr() != last) {
            code = kUnknown;
            for (std::size_t k = 0; k < most && code == kUnknown; ++k)
                if (value.equal(known[k])) code = static_cast<std::uint8_t>(k);
            last = nullptr;
            for (std::size_t k = 0; k < most; ++k)
                if (value.ptr() == nb::object(known[k]).ptr()) last = value.ptr();
        }
        out.push_back(code);
    });
    return to_numpy(std::move(out));
}

void flatten(PyObject* row, std::vector<i32>& out, bool nested) {
    nb::object whole;
    if (!PyTuple_Check(row)) {
        whole = nb::steal<nb::object>(PySequence_Tuple(row));
        if (!whole) throw nb::python_error();
        row = whole.ptr();
    }
    const Py_ssize_t count = PyTuple_Size(row);
    for (Py_ssize_t k = 0; k < count; ++k) {
        PyObject* item = PyTuple_GetItem(row, k);
        if (nested && PySequence_Check(item)) flatten(item, out, false);
        else out.push_back(index(item));
    }
}

// Rows of integers; of pairs, one number after the other.
nb::tuple rows(const nb::object& records, const std::string& name) {
    const nb::object attr = interned(name);
    std::vector<i64> start{0};
    std::vector<i32> item;
    start.reserve(nb::len(records) + 1);
    each(records, [&](PyObject* r) {
        flatten(attribute(r, attr).ptr(), item, true);
        start.push_back(static_cast<i64>(item.size()));
    });
    return nb::make_tuple(to_numpy(std::move(start)), to_numpy(std::move(item)));
}

Result<i64> lengths(const nb::object& records, const std::string& name) {
    const nb::object attr = interned(name);
    std::vector<i64> out;
    out.reserve(nb::len(records));
    each(records, [&](PyObject* r) {
        const Py_ssize_t found = PyObject_Length(attribute(r, attr).ptr());
        if (found < 0) throw nb::python_error();
        out.push_back(found);
    });
    return to_numpy(std::move(out));
}

nb::tuple tuple_of(std::size_t count) {
    PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(count));
    if (!made) throw nb::python_error();
    return nb::steal<nb::tuple>(made);
}

// Rows as tuples; equal neighbors without items share one.
nb::tuple tuples(const RowsIn& in) {
    check::rows("rows", in, std::numeric_limits<i32>::min(), std::numeric_limits<i32>::max(), "");
    const std::size_t count = in.first.shape(0) - 1;
    nb::tuple out = tuple_of(count);
    const nb::tuple none = tuple_of(0);
    for (std::size_t k = 0; k < count; ++k) {
        const i64 from = in.first.data()[k], to = in.first.data()[k + 1];
        nb::tuple row = none;
        if (to > from) {
            row = tuple_of(static_cast<std::size_t>(to - from));
            for (i64 j = from; j < to; ++j)
                PyTuple_SetItem(row.ptr(), static_cast<Py_ssize_t>(j - from),
                                PyLong_FromLong(in.second.data()[j]));
        }
        PyTuple_SetItem(out.ptr(), static_cast<Py_ssize_t>(k), row.release().ptr());
    }
    return out;
}

// `count` objects of a dataclass with slots, by a column for each field: integers, a tuple with an entry for
// each object, or one value for all. What is made has the values given and nothing computed by
// ``__post_init__``.
nb::tuple records(const nb::type_object& type, i64 count, const nb::dict& columns) {
    check::number("count", count, 0, check::kMostCount, "must be from 0 to 2^28");
    if (!nb::hasattr(type, "__dataclass_fields__")) check::refuse("the type is not a dataclass", "must be one");
    struct Column {
        nb::object name, values;
        Array<i64> integers;
        bool one = false, array = false;
    };
    std::vector<Column> given;
    for (const auto& [key, value] : columns) {
        Column c{nb::borrow<nb::object>(key), nb::borrow<nb::object>(value), {}, true, false};
        if (nb::try_cast(value, c.integers)) {
            check::length("a column", c.integers, count, "object");
            c.one = false, c.array = true;
        } else if (nb::isinstance<nb::list>(value)) {
            c.values = nb::tuple(nb::borrow<nb::list>(value)), c.one = false;
            if (static_cast<i64>(nb::len(c.values)) != count)
                check::refuse("a column has " + std::to_string(nb::len(c.values)) + " entries instead of " +
                                  std::to_string(count),
                              "must have one entry per object");
        }
        given.push_back(std::move(c));
    }
    nb::tuple out = tuple_of(static_cast<std::size_t>(count));
    auto* made = reinterpret_cast<PyTypeObject*>(type.ptr());
    for (i64 k = 0; k < count; ++k) {
        nb::object record = nb::steal<nb::object>(PyType_GenericAlloc(made, 0));
        if (!record) throw nb::python_error();
        for (const Column& c : given) {
            nb::object value;
            if (c.one) value = c.values;
            else if (c.array) value = nb::steal<nb::object>(PyLong_FromLongLong(c.integers.data()[k]));
            else value = nb::borrow<nb::object>(PyTuple_GetItem(c.values.ptr(), static_cast<Py_ssize_t>(k)));
            if (PyObject_GenericSetAttr(record.ptr(), c.name.ptr(), value.ptr())) throw nb::python_error();
        }
        PyTuple_SetItem(out.ptr(), static_cast<Py_ssize_t>(k), record.release().ptr());
    }
    return out;
}

// Tuples lie in one another no deeper than Python's own functions: the machine's stack has an end.
struct Deeper {
    Deeper() {
        if (Py_EnterRecursiveCall(" while tuples in one another are written out")) throw nb::python_error();
    }
    ~Deeper() { Py_LeaveRecursiveCall(); }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
};

// Text of attributes, as Python's ``str`` and ``repr`` have it.
class Text {
  public:
    std::string text;

    void add(PyObject* value, bool quoted) {
        if (PyBool_Check(value)) {
            text += value == Py_True ? "True" : "False";
        } else if (PyLong_CheckExact(value)) {
            add_integer(value);
        } else if (PyTuple_CheckExact(value)) {
            const Deeper deeper;
            const Py_ssize_t count = PyTuple_Size(value);
            text += '(';
            for (Py_ssize_t k = 0; k < count; ++k) {
                if (k) text += ", ";
                add(PyTuple_GetItem(value, k), true);
            }
            text += count == 1 ? ",)" : ")";
        } else {
            add_other(value, quoted);
        }
    }

  private:
    PyObject* last_ = nullptr;  // strings of one text are mostly one object
    nb::object kept_;
    bool quoted_ = false;
    std::string known_;

    void add_integer(PyObject* value) {
        int overflow = 0;
        const long long found = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) add_other(value, true);
        else text += std::to_string(found);
    }

    void add_other(PyObject* value, bool quoted) {
        if (value != last_ || quoted != quoted_) {
            const nb::object shown =
                nb::steal<nb::object>(quoted ? PyObject_Repr(value) : PyObject_Str(value));
            if (!shown) throw nb::python_error();
            const nb::object bytes = nb::steal<nb::object>(PyUnicode_AsUTF8String(shown.ptr()));
            if (!bytes) throw nb::python_error();
            known_.assign(PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr())));
            kept_ = nb::borrow<nb::object>(value), last_ = value, quoted_ = quoted;
        }
        text += known_;
    }
};

nb::bytes text(const nb::object& records, const std::string& begin, const nb::tuple& names,
               const std::string& between, const std::string& end, bool quoted) {
    std::vector<nb::object> attrs;
    std::vector<Text> columns(nb::len(names));
    for (const auto& name : names) {
        if (!nb::isinstance<nb::str>(name)) check::refuse("a name is no text", "must be an attribute's");
        attrs.push_back(nb::borrow<nb::object>(name));
    }
    std::string out;
    each(records, [&](PyObject* r) {
        out += begin;
        for (std::size_t k = 0; k < attrs.size(); ++k) {
            if (k) out += between;
            columns[k].text.clear();
            columns[k].add(attribute(r, attrs[k]).ptr(), quoted);
            out += columns[k].text;
        }
        out += end;
    });
    return nb::bytes(out.data(), out.size());
}

}  // namespace

void bind_records(nb::module_& m) {
    using namespace nb::literals;
    m.def("integers", &integers, "records"_a, "name"_a);
    m.def("numbers", &numbers, "records"_a, "name"_a);
    m.def("flags", &flags, "records"_a, "name"_a);
    m.def("codes", &codes, "records"_a, "name"_a, "known"_a,
          "Which of the known values each record's attribute is; 255: none of them.");
    m.def("rows", &rows, "records"_a, "name"_a);
    m.def("lengths", &lengths, "records"_a, "name"_a);
    m.def("text", &text, "records"_a, "begin"_a, "names"_a, "between"_a, "end"_a, "quoted"_a,
          "A line for each record, its attributes as str (quoted: as repr) has them.");
    m.def("tuples", &tuples, "rows"_a);
    m.def(
        "records", &records, "type"_a, "count"_a, "columns"_a,
        "Objects of a dataclass with slots; a column is integers, a list with an entry for each, or one value "
        "for all.");
}
