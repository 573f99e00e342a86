// Arrays and numbers from Python, checked once, where they come in: the searches index with them. Each fault
// is a ValueError with the argument, the value and the rule.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "watch.h"

namespace tightship {

template <class T> using Array =
    nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T> using Result = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;
using RowsIn = std::pair<Array<i64>, Array<i32>>;

template <class T> std::vector<T> to_vector(const Array<T>& a) { return {a.data(), a.data() + a.shape(0)}; }

template <class T> Result<T> to_numpy(std::vector<T> values) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    T* data = owned->data();
    const std::size_t count = owned->size();
    return {data, {count}, nanobind::capsule(owned.release(), [](void* p) noexcept {
                delete static_cast<std::vector<T>*>(p);
            })};
}

}  // namespace tightship

namespace tightship::check {

constexpr i64 kMost = (i64{1} << 62) - 1;  // bytes in all: two such sums still fit into 64 bits
constexpr i64 kMostCount = i64{1} << 28;   // entries of an array, and nodes

[[noreturn]] inline void refuse(const std::string& fault, const std::string& rule) {
    throw nanobind::value_error((fault + "; " + rule).c_str());
}

// A column of a dict, of this type and not converted: what it holds belongs to the dict and outlives the
// call.
template <class T> T column(const nanobind::dict& columns, const char* name) {
    if (!columns.contains(name)) refuse(std::string("there is no column ") + name, "must be given");
    T found;
    if (!nanobind::try_cast<T>(columns[name], found, false))
        refuse(std::string(name) + " is of another type", "must be numbers, or arrays, of the column's type");
    return found;
}

template <class T> std::string entry(const std::string& name, std::size_t k, T value) {
    return name + "[" + std::to_string(k) + "] is " + std::to_string(value);
}

template <class T> void length(const char* name, const Array<T>& a, i64 count, const char* of) {
    if (static_cast<i64>(a.shape(0)) != count)
        refuse(std::string(name) + " has " + std::to_string(a.shape(0)) + " entries instead of " +
                   std::to_string(count),
               "must have one entry per " + std::string(of));
}

template <class T> i64 count(const char* name, const Array<T>& a) {
    if (static_cast<i64>(a.shape(0)) > kMostCount)
        refuse(std::string(name) + " has " + std::to_string(a.shape(0)) + " entries",
               "must have at most 2^28");
    return static_cast<i64>(a.shape(0));
}

inline void number(const char* name, i64 value, i64 least, i64 most, const char* rule) {
    if (value < least || value > most) refuse(std::string(name) + " is " + std::to_string(value), rule);
}

// Each entry within [least, most].
template <class T> void within(const char* name, const Array<T>& a, i64 least, i64 most, const char* rule) {
    const T* data = a.data();
    for (std::size_t k = 0; k < a.shape(0); ++k)
        if (data[k] < least || data[k] > most) refuse(entry(name, k, data[k]), rule);
}

inline void finite(const char* name, double value) {
    if (!(value >= 0) || std::isinf(value))
        refuse(std::string(name) + " is " + std::to_string(value), "must be finite and not negative");
}

// Limits of work and aims: what is beyond them means no more than they do.
inline i64 at_most(i64 work) { return std::clamp<i64>(work, 0, kMost); }

inline void seconds(double value) {
    if (std::isnan(value)) refuse("seconds is nan", "must be a number, or infinite");
}

// Times: finite and not negative, and their sum is finite, too.
inline void times(const char* name, const Array<double>& a) {
    double sum = 0;
    for (std::size_t k = 0; k < a.shape(0); ++k) {
        const double t = a.data()[k];
        if (!(t >= 0) || std::isinf(t)) refuse(entry(name, k, t), "must be finite and not negative");
        sum += t;
    }
    if (std::isinf(sum)) refuse("the sum of " + std::string(name) + " is infinite", "must be finite");
}

// Bytes that add up without an overflow.
class Bytes {
  public:
    void add(const char* name, i64 bytes) {
        if (bytes > kMost - sum_)
            refuse("bytes add up to more than 2^62 with " + std::string(name),
                   "the sum of all sizes must be at most 2^62");
        sum_ += bytes;
    }
    void add(const char* name, const Array<i64>& a, i64 least = 0) {
        for (std::size_t k = 0; k < a.shape(0); ++k) {
            const i64 bytes = a.data()[k];
            if (bytes < least || bytes > kMost)
                refuse(entry(name, k, bytes), "must be from " + std::to_string(least) + " to 2^62");
            if (bytes > kMost - sum_)
                refuse(entry(name, k, bytes), "the sum of all sizes must be at most 2^62");
            sum_ += bytes;
        }
    }

  private:
    i64 sum_ = 0;
};

// Rows one after the other: `start` goes up from 0 to the number of items, and each item is within [least,
// most].
inline void rows(const char* name, const RowsIn& r, i64 least, i64 most, const char* rule) {
    const auto& [start, item] = r;
    const std::string at = std::string(name) + "[0]";
    const std::size_t n = start.shape(0);
    count(name, item);
    if (n == 0) refuse(at + " is empty", "must have one start more than there are rows");
    for (std::size_t k = 0; k < n; ++k) {
        const i64 x = start.data()[k], before = k ? start.data()[k - 1] : 0;
        if (x < before || (k == 0 && x != 0)) refuse(entry(at, k, x), "must begin with 0 and not go down");
    }
    if (start.data()[n - 1] != static_cast<i64>(item.shape(0)))
        refuse(entry(at, n - 1, start.data()[n - 1]) + " with " + std::to_string(item.shape(0)) + " items",
               "the last start must be the number of items");
    for (std::size_t k = 0; k < item.shape(0); ++k)
        if (item.data()[k] < least || item.data()[k] > most)
            refuse(entry(std::string(name) + "[1]", k, item.data()[k]), rule);
}

inline void rows(const char* name, const RowsIn& r, i64 count, const char* of, i64 least, i64 most,
                 const char* rule) {
    length((std::string(name) + "[0]").c_str(), r.first, count + 1,
           (std::string(of) + ", and the end").c_str());
    rows(name, r, least, most, rule);
}

// Each of 0 … count - 1 once.
template <class T> std::vector<i32> permutation(const char* name, const Array<T>& order, i64 count) {
    length(name, order, count, "entry that is ordered");
    std::vector<i32> result(static_cast<std::size_t>(count));
    std::vector<bool> seen(static_cast<std::size_t>(count), false);
    for (i64 k = 0; k < count; ++k) {
        const i64 i = order.data()[k];
        if (i < 0 || i >= count || seen[static_cast<std::size_t>(i)])
            refuse(entry(name, static_cast<std::size_t>(k), i), "must be a permutation");
        seen[static_cast<std::size_t>(i)] = true;
        result[static_cast<std::size_t>(k)] = static_cast<i32>(i);
    }
    return result;
}

}  // namespace tightship::check
