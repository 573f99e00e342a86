// A plan's steps and residences replayed for the verifier: whether anything is wrong with them. This is apart
// from the engine and shares nothing with it, as the verifier in Python shares nothing with planners: what is
// wrong there must not pass as right here. It says yes or no; what a fault is called, and where it is, is
// told in Python.
#pragma once

#include <cstdint>
#include <vector>

namespace tightship::verify {

using Int = std::int64_t;
using Index = std::int32_t;

template <class T> struct Column {
    const T* data = nullptr;
    Int count = 0;
    T operator[](Int k) const { return data[k]; }
};

struct Table {
    Column<Int> start;
    Column<Index> item;
    struct Row {
        const Index *first, *last;
        const Index* begin() const { return first; }
        const Index* end() const { return last; }
        Int count() const { return last - first; }
        bool has(Index x) const {
            for (const Index* i = first; i != last; ++i)
                if (*i == x) return true;
            return false;
        }
    };
    Row operator[](Int k) const { return {item.data + start[k], item.data + start[k + 1]}; }
};

// Indices are within bounds: construction of a graph has checked that.
struct Graph {
    Table inputs, outputs, mutates, updates, control, overwrites;  // by op
    Column<Index> storage;                                         // by value
    Column<Int> size;                                              // by storage
    Column<std::uint8_t> random, effect;                           // by op
    Column<Int> workspace, extra;                                  // by op; with what called graphs need
    Column<Int> state;                                             // by op
    Column<double> time;                                           // by op
    double move = 0;                                               // seconds to save or to set a random state
    Column<Index> caller, results;                                 // values
    Column<Int> requests;  // by op, where its requests begin, and the end
    Column<Int> request_size, request_storage, request_start, request_end;
    Int alignment = 1;
};

enum Kind : std::uint8_t { kCompute, kRecompute, kFree, kOffload, kFetch, kCompress, kDecompress };
enum Form : std::uint8_t { kFull, kPacked, kHosted, kState, kForms };
enum Pool : std::uint8_t { kDevice, kHost, kOut };

// Nothing is known of these numbers, but that `seconds` and `lost` are those of copies, and that what a step
// packs can be packed so once it is written for the last time; if `lossy`, also before.
struct Plan {
    Column<std::uint8_t> kind, form, saves, lossy;
    Column<Int> op, nbytes, stream;
    Column<double> seconds, lost;
    Table storages, waits, reuses;  // by step
    // By residence.
    Column<Int> storage, start, end, size, offset, request, first, last;
    Column<std::uint8_t> pool, shape;  // shape: the form
    Int arena = 0, host = 0;
};

struct Verdict {
    bool right = false;  // otherwise the rest means nothing
    Int peak = 0, unplanned = 0, caller = 0, handed = 0, host = 0;
    double seconds = 0;
};

Verdict verify(const Graph& graph, const Plan& plan);

}  // namespace tightship::verify
