// Facts of a graph, derived from its ops and values: what each op reads, defines and writes, and which ops
// wait for which. `graph.Uses` says what the rows are.
#pragma once

#include "index.h"

namespace tightship {

struct Values {
    Rows inputs, outputs;                      // by op: values
    Rows mutates, control;                     // by op: storages; ops
    std::vector<i32> home;                     // by value: its storage
    std::vector<std::uint8_t> caller;          // by storage
    std::vector<std::uint8_t> random, effect;  // by op
};

struct Uses {
    Rows reads, defines, mutates, needs;  // by op
    Rows writers, readers;                // by storage
    std::vector<i32> definer, maker;
    i32 op = -1, storage = -1;  // the first that is read before it is defined
};

Uses uses_of(const Values& g);

// By op, those that must run before it: direct edges only, ascending.
Rows predecessors(const Values& g, const Uses& u);

// The same edges, seen from the other end.
Rows successors(const Rows& before);

// The order that runs an op as soon as it frees no fewer bytes than it makes (planners/order/sink).
std::vector<i32> sink(const Uses& u, const Rows& before, const std::vector<i64>& size,
                      const std::vector<std::uint8_t>& stays);

}  // namespace tightship
