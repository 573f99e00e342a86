#include "flow.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tightship {

namespace {

// Capacities above 2^62 count as endless, and so do their sums.
i64 plus(i64 a, i64 b) {
    return b > std::numeric_limits<i64>::max() - a ? std::numeric_limits<i64>::max() : a + b;
}

constexpr i64 kAskEvery = 4096;  // paths
constexpr i64 kMost = i64{1} << 62;

class Dinic {
  public:
    Dinic(i32 nodes, const Network& of) : n_(nodes), first_(nodes + 1, 0), level_(nodes), at_(nodes) {
        for (std::size_t e = 0; e < of.tail.size(); ++e) ++first_[of.tail[e] + 1], ++first_[of.head[e] + 1];
        for (i32 v = 0; v < n_; ++v) first_[v + 1] += first_[v];
        to_.resize(2 * of.tail.size()), back_.resize(2 * of.tail.size()), room_.resize(2 * of.tail.size());
        std::vector<i64> next(first_.begin(), first_.end() - 1);
        for (std::size_t e = 0; e < of.tail.size(); ++e) {
            const i64 a = next[of.tail[e]]++, b = next[of.head[e]]++;
            to_[a] = of.head[e], back_[a] = b, room_[a] = of.capacity[e];
            to_[b] = of.tail[e], back_[b] = a, room_[b] = 0;
        }
    }

    Cut run(i32 source, i32 sink, const Watch& watch) {
        Cut cut;
        while (label(source, sink), level_[sink] >= 0) {
            std::copy(first_.begin(), first_.end() - 1, at_.begin());
            cut.value = plus(cut.value, push(source, sink, watch));
            if (stopped_ || watch()) return {cut.value, {}, false};
        }
        for (i32 level : level_) cut.near.push_back(level >= 0);
        return cut;
    }

  private:
    i32 n_;
    std::vector<i64> first_;
    std::vector<i32> to_;
    std::vector<i64> back_, room_;
    std::vector<i32> level_;
    std::vector<i64> at_;
    bool stopped_ = false;

    void label(i32 source, i32 sink) {
        std::fill(level_.begin(), level_.end(), -1);
        std::vector<i32> queue{source};
        level_[source] = 0;
        for (std::size_t q = 0; q < queue.size() && level_[sink] < 0; ++q) {
            const i32 v = queue[q];
            for (i64 e = first_[v]; e < first_[v + 1]; ++e)
                if (room_[e] > 0 && level_[to_[e]] < 0)
                    level_[to_[e]] = level_[v] + 1, queue.push_back(to_[e]);
        }
    }

    // A blocking flow, with an explicit stack.
    i64 push(i32 source, i32 sink, const Watch& watch) {
        i64 total = 0, found = 0;
        std::vector<i64> path;
        i32 v = source;
        for (;;) {
            if (v == sink) {
                i64 flow = std::numeric_limits<i64>::max();
                for (i64 e : path) flow = std::min(flow, room_[e]);
                std::size_t keep = path.size();
                for (std::size_t j = path.size(); j-- > 0;) {
                    room_[path[j]] -= flow, room_[back_[path[j]]] += flow;
                    if (room_[path[j]] == 0) keep = j;
                }
                total = plus(total, flow);
                v = to_[back_[path[keep]]];  // go on from the first edge that is full now
                path.resize(keep);
                if (++found % kAskEvery == 0 && watch()) {
                    stopped_ = true;
                    return total;
                }
                continue;
            }
            i64& e = at_[v];
            while (e < first_[v + 1] && !(room_[e] > 0 && level_[to_[e]] == level_[v] + 1)) ++e;
            if (e < first_[v + 1]) {
                path.push_back(e);
                v = to_[e];
            } else if (!path.empty()) {
                level_[v] = -2;  // a dead end
                const i64 back = path.back();
                path.pop_back();
                v = to_[back_[back]];
                ++at_[v];
            } else {
                return total;
            }
        }
    }
};

}  // namespace

std::vector<std::uint8_t> reached(const std::vector<i32>& start, const std::vector<i64>& rows,
                                  const std::vector<i32>& heads) {
    std::vector<std::uint8_t> seen(rows.size() - 1, 0);
    std::vector<i32> stack = start;
    while (!stack.empty()) {
        const i32 v = stack.back();
        stack.pop_back();
        for (i64 e = rows[v]; e < rows[v + 1]; ++e)
            if (!seen[heads[e]]) seen[heads[e]] = 1, stack.push_back(heads[e]);
    }
    return seen;
}

Cut min_cut(i32 nodes, const Network& network, i32 source, i32 sink, const Watch& watch) {
    return Dinic(nodes, network).run(source, sink, watch);
}

Cuts::Cuts(i32 nodes, const Network& of, i32 source, i32 sink, i64 switches)
    : nodes_(nodes), source_(source), sink_(sink), first_(nodes + 1, 0), switches_(switches) {
    const std::size_t edges = of.tail.size();
    for (std::size_t e = 0; e < edges; ++e) ++first_[of.tail[e] + 1], ++first_[of.head[e] + 1];
    for (i32 v = 0; v < nodes_; ++v) first_[v + 1] += first_[v];
    to_.resize(2 * edges), back_.resize(2 * edges), room_.resize(2 * edges), arc_.resize(edges);
    std::vector<i64> next(first_.begin(), first_.end() - 1);
    for (std::size_t e = 0; e < edges; ++e) {
        const i64 a = next[of.tail[e]]++, b = next[of.head[e]]++;
        to_[a] = of.head[e], back_[a] = b, room_[a] = of.capacity[e];
        to_[b] = of.tail[e], back_[b] = a, room_[b] = 0;
        arc_[e] = a;
    }
    open_.assign(edges - static_cast<std::size_t>(switches), 0);
    came_.resize(nodes_), seen_.assign(nodes_, 0);
}

void Cuts::set(i64 arc, i64 room) {
    if (noting_) before_.emplace_back(arc, room_[arc]);
    room_[arc] = room;
}

// Send as much as there is a way for, at most so much; on the shortest ways.
i64 Cuts::push(i32 from, i32 to, i64 most) {
    i64 sent = 0;
    while (sent < most) {
        ++searches_;
        queue_.assign(1, from);
        seen_[from] = searches_;
        for (std::size_t q = 0; q < queue_.size() && seen_[to] != searches_; ++q) {
            const i32 v = queue_[q];
            for (i64 a = first_[v]; a < first_[v + 1]; ++a)
                if (room_[a] > 0 && seen_[to_[a]] != searches_)
                    seen_[to_[a]] = searches_, came_[to_[a]] = a, queue_.push_back(to_[a]);
        }
        if (seen_[to] != searches_) break;
        i64 flow = most - sent;
        for (i32 v = to; v != from; v = to_[back_[came_[v]]]) flow = std::min(flow, room_[came_[v]]);
        for (i32 v = to; v != from; v = to_[back_[came_[v]]]) {
            const i64 a = came_[v], b = back_[a];
            set(a, room_[a] - flow);
            set(b, room_[b] + flow);
        }
        sent += flow;
    }
    return sent;
}

// The edge has no capacity any more; what ran along it goes another way, or back to the source.
void Cuts::take_away(i64 arc) {
    const i32 tail = to_[back_[arc]], head = to_[arc];
    const i64 flow = room_[back_[arc]];
    set(arc, 0);
    set(back_[arc], 0);
    const i64 left = flow - (flow > 0 ? push(tail, head, flow) : 0);
    if (left == 0) return;
    value_ -= left;
    if (tail != source_) push(tail, source_, left);
    if (head != sink_) push(sink_, head, left);
}

i64 Cuts::value(const std::vector<std::uint8_t>& open, const std::vector<i64>& free) {
    for (std::size_t k = 0; k < open.size(); ++k)
        if (!open[k] && open_[k]) take_away(arc_[switches_ + static_cast<i64>(k)]);
    for (std::size_t k = 0; k < open.size(); ++k)
        if (open[k] && !open_[k]) room_[arc_[switches_ + static_cast<i64>(k)]] = Network::kEndless;
    open_ = open;
    value_ += push(source_, sink_, kMost - value_);
    if (free.empty()) return value_;
    const i64 whole = value_;
    noting_ = true;
    for (const i64 e : free) take_away(arc_[e]);
    noting_ = false;
    for (auto note = before_.rbegin(); note != before_.rend(); ++note) room_[note->first] = note->second;
    before_.clear();
    return std::exchange(value_, whole);
}

}  // namespace tightship
