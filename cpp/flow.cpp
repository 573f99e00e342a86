#include "flow.h"

#include <algorithm>
#include <limits>

namespace tightship {

namespace {

// Capacities above 2^62 count as endless, and so do their sums.
i64 plus(i64 a, i64 b) {
    return b > std::numeric_limits<i64>::max() - a ? std::numeric_limits<i64>::max() : a + b;
}

constexpr i64 kAskEvery = 4096;  // paths

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

}  // namespace tightship
