#include "flow.h"

#include <algorithm>
#include <limits>

namespace tightship {

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

// Capacities above 2^62 count as endless, and so do their sums.
i64 plus(i64 a, i64 b) { return b > std::numeric_limits<i64>::max() - a ? std::numeric_limits<i64>::max() : a + b; }

class Network {
  public:
    Network(i32 nodes, const std::vector<i32>& tail, const std::vector<i32>& head, const std::vector<i64>& capacity)
        : n_(nodes), first_(nodes + 1, 0), level_(nodes), at_(nodes) {
        for (std::size_t e = 0; e < tail.size(); ++e) ++first_[tail[e] + 1], ++first_[head[e] + 1];
        for (i32 v = 0; v < n_; ++v) first_[v + 1] += first_[v];
        to_.resize(2 * tail.size()), back_.resize(2 * tail.size()), room_.resize(2 * tail.size());
        std::vector<i64> next(first_.begin(), first_.end() - 1);
        for (std::size_t e = 0; e < tail.size(); ++e) {
            const i64 a = next[tail[e]]++, b = next[head[e]]++;
            to_[a] = head[e], back_[a] = b, room_[a] = capacity[e];
            to_[b] = tail[e], back_[b] = a, room_[b] = 0;
        }
    }

    i64 run(i32 source, i32 sink) {
        i64 flow = 0;
        while (label(source), level_[sink] >= 0) {
            std::copy(first_.begin(), first_.end() - 1, at_.begin());
            flow = plus(flow, push(source, sink));
        }
        return flow;
    }

    std::vector<std::uint8_t> near() const {
        std::vector<std::uint8_t> in(n_);
        for (i32 v = 0; v < n_; ++v) in[v] = level_[v] >= 0;
        return in;
    }

  private:
    i32 n_;
    std::vector<i64> first_;
    std::vector<i32> to_;
    std::vector<i64> back_, room_;
    std::vector<i32> level_;
    std::vector<i64> at_;

    void label(i32 source) {
        std::fill(level_.begin(), level_.end(), -1);
        std::vector<i32> queue{source};
        level_[source] = 0;
        for (std::size_t q = 0; q < queue.size(); ++q) {
            const i32 v = queue[q];
            for (i64 e = first_[v]; e < first_[v + 1]; ++e)
                if (room_[e] > 0 && level_[to_[e]] < 0) level_[to_[e]] = level_[v] + 1, queue.push_back(to_[e]);
        }
    }

    // A blocking flow, with an explicit stack.
    i64 push(i32 source, i32 sink) {
        i64 total = 0;
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

Cut min_cut(i32 nodes, const std::vector<i32>& tail, const std::vector<i32>& head, const std::vector<i64>& capacity,
            i32 source, i32 sink) {
    Network network(nodes, tail, head, capacity);
    Cut cut;
    cut.value = network.run(source, sink);
    cut.near = network.near();
    return cut;
}

}  // namespace tightship
