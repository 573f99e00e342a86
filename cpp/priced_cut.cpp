// The set of storages to keep across a point of the order, by bytes and seconds.

#include "flow.h"
#include "search.h"

namespace tightship {

std::vector<std::uint8_t> priced_cut(const Index& index, i32 boundary, double bytes_per_second,
                                     const Watch& watch) {
    const Program& p = index.p;
    // What the ops before the boundary need among themselves: an op none of whose results they need can wait.
    std::vector<std::uint8_t> early(p.storages, 0), inside(p.storages, 0), needed(p.storages, 0),
        waits(p.ops, 0);
    for (i32 at = boundary; at-- > 0;) {
        const i32 o = p.order[at];
        bool wanted = p.mutates.size(o) > 0 || !p.pure[o] || p.fixed[o];
        for (const i32 d : p.defines[o]) {
            inside[d] = 1;
            wanted = wanted || early[d] || p.kept[d];
        }
        waits[o] = !wanted;
        if (wanted)
            for (const i32 s : p.reads[o]) early[s] = 1;
    }
    for (i32 at = boundary; at < p.ops; ++at)
        for (const i32 s : p.reads[p.order[at]]) needed[s] = inside[s];

    const i32 source = 0, sink = 1, base = 2, ops = base + 2 * static_cast<i32>(p.storages);
    auto enter = [&](i32 s) { return base + 2 * s; };
    auto leave = [&](i32 s) { return base + 2 * s + 1; };
    Network net;
    for (i32 at = 0; at < boundary; ++at) {
        const i32 o = p.order[at], node = ops + at;
        const double price = waits[o] ? 0 : p.again[o] * bytes_per_second;
        net.edge(source, node, price < 1e15 ? static_cast<i64>(price) : i64{1'000'000'000'000'000});
        auto made = [&](i32 s) {
            net.edge(node, enter(s), Network::kEndless);
            if (!index.replayable[s]) net.edge(source, enter(s), Network::kEndless);
        };
        for (const i32 s : p.defines[o]) {
            made(s);
            net.edge(enter(s), leave(s), p.size[s]);
            if (needed[s] || p.kept[s]) net.edge(leave(s), sink, Network::kEndless);
        }
        for (const i32 s : p.mutates[o])
            if (inside[s]) made(s);
        for (const i32 s : p.reads[o])
            if (inside[s] && !p.mutates.has(o, s)) net.edge(leave(s), node, Network::kEndless);
    }
    const auto [value, near, complete] = min_cut(ops + boundary, net, source, sink, watch);
    if (!complete) return {};
    std::vector<std::uint8_t> kept(p.storages, 0);
    for (i32 s = 0; s < p.storages; ++s) kept[s] = inside[s] && near[enter(s)] && !near[leave(s)];
    return kept;
}

}  // namespace tightship
