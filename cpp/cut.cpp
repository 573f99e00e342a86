#include "cut.h"

#include <algorithm>

namespace tightship {

namespace {

constexpr i64 kEndless = i64{1} << 60;

// Maximum flow (Dinic 1970), with explicit stacks.
class Network {
  public:
    explicit Network(i32 nodes) : first_(nodes, -1), level_(nodes), at_(nodes) {}

    void edge(i32 from, i32 to, i64 room) {
        add(from, to, room);
        add(to, from, 0);
    }

    // Nodes on the source's side of a minimum cut.
    std::vector<std::uint8_t> cut(i32 source, i32 sink) {
        while (levels(source, sink)) push(source, sink);
        std::vector<std::uint8_t> near(level_.size());
        for (std::size_t n = 0; n < near.size(); ++n) near[n] = level_[n] >= 0;
        return near;
    }

  private:
    struct Edge {
        i32 to, next;
        i64 room;
    };
    std::vector<Edge> edges_;
    std::vector<i32> first_, level_, at_, queue_, path_;

    void add(i32 from, i32 to, i64 room) {
        edges_.push_back({to, first_[from], room});
        first_[from] = static_cast<i32>(edges_.size()) - 1;
    }

    bool levels(i32 source, i32 sink) {
        std::fill(level_.begin(), level_.end(), -1);
        level_[source] = 0;
        queue_.assign(1, source);
        for (std::size_t k = 0; k < queue_.size(); ++k)
            for (i32 e = first_[queue_[k]]; e >= 0; e = edges_[e].next)
                if (edges_[e].room > 0 && level_[edges_[e].to] < 0) {
                    level_[edges_[e].to] = level_[queue_[k]] + 1;
                    queue_.push_back(edges_[e].to);
                }
        return level_[sink] >= 0;
    }

    void push(i32 source, i32 sink) {
        at_ = first_;
        path_.clear();
        for (i32 a = source;;) {
            if (a == sink) {
                i64 flow = kEndless;
                for (i32 e : path_) flow = std::min(flow, edges_[e].room);
                std::size_t back = path_.size();
                for (std::size_t k = path_.size(); k-- > 0;) {
                    edges_[path_[k]].room -= flow;
                    edges_[path_[k] ^ 1].room += flow;
                    if (edges_[path_[k]].room == 0) back = k;
                }
                a = edges_[path_[back] ^ 1].to;
                path_.resize(back);
                continue;
            }
            i32& e = at_[a];
            while (e >= 0 && (edges_[e].room == 0 || level_[edges_[e].to] != level_[a] + 1)) e = edges_[e].next;
            if (e >= 0) {
                path_.push_back(e);
                a = edges_[e].to;
            } else if (path_.empty()) {
                return;
            } else {
                const i32 last = path_.back();
                path_.pop_back();
                a = edges_[last ^ 1].to;
                at_[a] = edges_[at_[a]].next;
            }
        }
    }
};

}  // namespace

std::vector<std::uint8_t> priced_cut(const Program& p, const std::vector<std::uint8_t>& again, i32 boundary,
                                     double bytes_per_second) {
    // What the ops before the boundary need among themselves: an op none of whose results they need can wait.
    std::vector<i32> place(p.ops);
    for (i32 at = 0; at < p.ops; ++at) place[p.order[at]] = at;
    std::vector<std::uint8_t> early(p.storages, 0), inside(p.storages, 0), needed(p.storages, 0), waits(p.ops, 0);
    for (i32 at = boundary; at-- > 0;) {
        const i32 o = p.order[at];
        bool wanted = p.mutates.size(o) > 0 || !p.pure[o] || p.fixed[o];
        for (auto d = p.defines.begin(o); d != p.defines.end(o); ++d) {
            inside[*d] = 1;
            wanted = wanted || early[*d] || p.kept[*d];
        }
        waits[o] = !wanted;
        if (wanted)
            for (auto s = p.reads.begin(o); s != p.reads.end(o); ++s) early[*s] = 1;
    }
    for (i32 at = boundary; at < p.ops; ++at)
        for (auto s = p.reads.begin(p.order[at]); s != p.reads.end(p.order[at]); ++s) needed[*s] = inside[*s];

    const i32 source = 0, sink = 1, base = 2, ops = base + 2 * static_cast<i32>(p.storages);
    auto enter = [&](i32 s) { return base + 2 * s; };
    auto leave = [&](i32 s) { return base + 2 * s + 1; };
    Network net(ops + boundary);
    for (i32 at = 0; at < boundary; ++at) {
        const i32 o = p.order[at], node = ops + at;
        const double price = waits[o] ? 0 : p.time[o] * bytes_per_second;
        net.edge(source, node, price < 1e15 ? static_cast<i64>(price) : i64{1'000'000'000'000'000});
        auto made = [&](i32 s) {
            net.edge(node, enter(s), kEndless);
            if (!again[s]) net.edge(source, enter(s), kEndless);
        };
        for (auto s = p.defines.begin(o); s != p.defines.end(o); ++s) {
            made(*s);
            net.edge(enter(*s), leave(*s), p.size[*s]);
            if (needed[*s] || p.kept[*s]) net.edge(leave(*s), sink, kEndless);
        }
        for (auto s = p.mutates.begin(o); s != p.mutates.end(o); ++s)
            if (inside[*s]) made(*s);
        for (auto s = p.reads.begin(o); s != p.reads.end(o); ++s)
            if (inside[*s] && std::find(p.mutates.begin(o), p.mutates.end(o), *s) == p.mutates.end(o))
                net.edge(leave(*s), node, kEndless);
    }
    const auto near = net.cut(source, sink);
    std::vector<std::uint8_t> kept(p.storages, 0);
    for (i32 s = 0; s < p.storages; ++s) kept[s] = inside[s] && near[enter(s)] && !near[leave(s)];
    return kept;
}

}  // namespace tightship
