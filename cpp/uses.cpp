#include "uses.h"

#include <utility>

namespace tightship {

namespace {

void close(Rows& rows) { rows.start.push_back(static_cast<i64>(rows.item.size())); }

Rows opened(i64 rows) {
    Rows r;
    r.start.reserve(static_cast<std::size_t>(rows) + 1);
    r.start.push_back(0);
    return r;
}

// Rows of pairs (row, item), the items of a row in the order in which they come.
Rows gathered(i64 rows, const std::vector<std::pair<i32, i32>>& pairs) {
    Rows r;
    r.start.assign(static_cast<std::size_t>(rows) + 1, 0);
    for (const auto& [row, _] : pairs) ++r.start[row + 1];
    for (i64 k = 0; k < rows; ++k) r.start[k + 1] += r.start[k];
    r.item.resize(pairs.size());
    std::vector<i64> at(r.start.begin(), r.start.end() - 1);
    for (const auto& [row, item] : pairs) r.item[at[row]++] = item;
    return r;
}

}  // namespace

Uses uses_of(const Values& g) {
    const i64 ops = g.inputs.count(), storages = static_cast<i64>(g.caller.size());
    Uses u;
    for (Rows* rows : {&u.reads, &u.defines, &u.mutates, &u.needs}) *rows = opened(ops);
    u.definer.assign(storages, -1), u.maker.assign(g.home.size(), -1);
    std::vector<std::uint8_t> alive = g.caller;
    std::vector<i32> version(storages), made(storages, -1), seen(storages, -1), wrote(storages, -1);
    std::vector<std::pair<i32, i32>> writers, readers;
    for (i32 k = 0; k < ops; ++k) {
        for (const i32 v : g.outputs[k])
            if (const i32 s = g.home[v]; !alive[s] && std::exchange(made[s], k) != k)
                u.defines.item.push_back(s);
        const auto read = [&](i32 s) {
            if (made[s] == k || std::exchange(seen[s], k) == k) return;
            if (!alive[s] && u.op < 0) u.op = k, u.storage = s;
            u.reads.item.push_back(s), u.needs.item.push_back(version[s]);
            readers.emplace_back(s, k);
        };
        for (const i32 v : g.inputs[k]) read(g.home[v]);
        for (const i32 s : g.mutates[k]) read(s);
        if (u.op >= 0) return u;
        for (const i32 s : g.mutates[k])
            if (made[s] != k && std::exchange(wrote[s], k) != k) u.mutates.item.push_back(s);
        for (Rows* rows : {&u.reads, &u.defines, &u.mutates, &u.needs}) close(*rows);
        for (const i32 s : u.defines[k]) alive[s] = 1, u.definer[s] = k;
        for (const Rows* rows : {&u.defines, &u.mutates})
            for (const i32 s : (*rows)[k]) writers.emplace_back(s, k), ++version[s];
        for (const i32 v : g.outputs[k]) u.maker[v] = k;
    }
    u.writers = gathered(storages, writers), u.readers = gathered(storages, readers);
    return u;
}

Rows predecessors(const Values& g, const Uses& u) {
    const i64 ops = g.inputs.count();
    Rows out = opened(ops);
    std::vector<i32> last_write(g.caller.size(), -1), before;
    std::vector<std::vector<i32>> readers(g.caller.size());
    i32 last_random = -1, last_effect = -1;
    for (i32 k = 0; k < ops; ++k) {
        before.assign(g.control.begin(k), g.control.end(k));
        for (const i32 v : g.inputs[k]) before.push_back(u.maker[v]);
        for (const i32 s : u.reads[k]) before.push_back(last_write[s]);
        for (const i32 s : u.mutates[k]) before.insert(before.end(), readers[s].begin(), readers[s].end());
        for (const Rows* rows : {&u.mutates, &u.defines})
            for (const i32 s : (*rows)[k]) last_write[s] = k, readers[s].clear();
        for (const i32 s : u.reads[k])
            if (last_write[s] != k) readers[s].push_back(k);
        if (g.random[k]) before.push_back(std::exchange(last_random, k));
        if (g.effect[k]) before.push_back(std::exchange(last_effect, k));
        std::sort(before.begin(), before.end());
        before.erase(std::unique(before.begin(), before.end()), before.end());
        for (const i32 b : before)
            if (b >= 0) out.item.push_back(b);
        close(out);
    }
    return out;
}

Rows successors(const Rows& before) {
    std::vector<std::pair<i32, i32>> pairs;
    pairs.reserve(before.item.size());
    for (i32 k = 0; k < before.count(); ++k)
        for (const i32 b : before[k]) pairs.emplace_back(b, k);
    return gathered(before.count(), pairs);
}

std::vector<i32> sink(const Uses& u, const Rows& before, const std::vector<i64>& size,
                      const std::vector<std::uint8_t>& stays) {
    const i64 ops = before.count();
    const Rows after = successors(before);
    std::vector<i64> waiting(ops), readers(size.size());
    for (i64 k = 0; k < ops; ++k) waiting[k] = before.size(k);
    for (std::size_t s = 0; s < size.size(); ++s) readers[s] = u.readers.size(static_cast<i64>(s));
    std::vector<std::uint8_t> done(ops);
    std::vector<i32> order, stack, ready;
    const auto frees = [&](i32 k) {
        i64 freed = 0, made = 0;
        for (const i32 s : u.reads[k])
            if (!stays[s] && readers[s] == 1) freed += size[s];
        for (const i32 s : u.defines[k]) made += size[s];
        return freed > 0 && freed >= made;
    };
    for (i32 first = 0; first < ops; ++first) {
        stack.assign(1, first);
        while (!stack.empty()) {
            const i32 k = stack.back();
            stack.pop_back();
            if (std::exchange(done[k], 1)) continue;
            order.push_back(k);
            for (const i32 s : u.reads[k]) --readers[s];
            ready.clear();
            for (const i32 a : after[k])
                if (--waiting[a] == 0 && !done[a]) ready.push_back(a);
            for (auto a = ready.rbegin(); a != ready.rend(); ++a)
                if (frees(*a)) stack.push_back(*a);
        }
    }
    return order;
}

}  // namespace tightship
