// Orders and packings that other systems are known for, where they need more than an order by keys.

#include <bit>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>

#include "place.h"

namespace tightship::place {

namespace {

// Those not placed, found by the sections that they are alive within: by first section, a tree of the least last one.
class Left {
  public:
    explicit Left(const Buffers& b) : b_(b), by_first_(b.count()), place_(b.count()) {
        std::iota(by_first_.begin(), by_first_.end(), 0);
        std::stable_sort(by_first_.begin(), by_first_.end(),
                         [&](i32 x, i32 y) { return b.first[x] < b.first[y]; });
        leaves_ = std::bit_ceil(static_cast<std::size_t>(std::max<i64>(b.count(), 1)));
        soonest_.assign(2 * leaves_, kGone);
        for (std::size_t k = 0; k < by_first_.size(); ++k) {
            place_[by_first_[k]] = k;
            soonest_[leaves_ + k] = b.last[by_first_[k]];
        }
        for (std::size_t k = leaves_; --k;) soonest_[k] = std::min(soonest_[2 * k], soonest_[2 * k + 1]);
    }

    void remove(i32 i) {
        std::size_t k = leaves_ + place_[i];
        soonest_[k] = kGone;
        while (k /= 2) soonest_[k] = std::min(soonest_[2 * k], soonest_[2 * k + 1]);
    }

    template <class Visit> void within(i32 first, i32 last, Visit visit) const {
        const auto starts = [&](i32 section) {
            return std::partition_point(by_first_.begin(), by_first_.end(),
                                        [&](i32 i) { return b_.first[i] < section; }) -
                   by_first_.begin();
        };
        go(1, 0, leaves_, starts(first), starts(last), last, visit);
    }

  private:
    static constexpr i32 kGone = std::numeric_limits<i32>::max();

    const Buffers& b_;
    std::vector<i32> by_first_;
    std::vector<std::size_t> place_;
    std::size_t leaves_;
    std::vector<i32> soonest_;

    template <class Visit>
    void go(std::size_t node, i64 from, i64 to, i64 since, i64 until, i32 last, Visit& visit) const {
        if (to <= since || until <= from || soonest_[node] > last) return;
        if (node >= leaves_) {
            visit(by_first_[from]);
            return;
        }
        const i64 middle = (from + to) / 2;
        go(2 * node, from, middle, since, until, last, visit);
        go(2 * node + 1, middle, to, since, until, last, visit);
    }
};

struct Stretch {
    i32 last;
    i64 height;
};

}  // namespace

std::vector<i32> skyline(const Buffers& b, Sky rule, const Watch& watch) {
    Left left(b);
    std::map<i32, Stretch> sky{{0, {b.sections, 0}}};  // by first section
    using Entry = std::tuple<i64, i32, i32>;  // height, first, last: outdated if the sky says otherwise
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lowest;
    lowest.push({0, 0, b.sections});
    std::vector<i32> order;
    const auto set = [&](i32 first, i32 last, i64 height) {
        if (first >= last) return;
        sky[first] = {last, height};
        lowest.push({height, first, last});
    };
    while (static_cast<i64>(order.size()) < b.count()) {
        if (watch()) return {};
        const auto [height, first, last] = lowest.top();
        const auto at = sky.find(first);
        if (at == sky.end() || at->second.height != height || at->second.last != last) {
            lowest.pop();
            continue;
        }
        i32 best = -1;
        double most = 0;
        left.within(first, last, [&, first = first, last = last](i32 i) {
            const double sections = b.last[i] - b.first[i],
                         area = static_cast<double>(b.size[i]) * b.length[i];
            const i32 ends = (b.first[i] == first) + (b.last[i] == last);
            const double worth = rule == Sky::longest   ? b.length[i]
                                 : rule == Sky::largest ? area
                                                        : ends + sections / (1.0 + b.sections);
            if (best < 0 || worth > most || (worth == most && b.size[i] > b.size[best]))
                best = i, most = worth;
        });
        if (best >= 0) {
            order.push_back(best);
            left.remove(best);
            sky.erase(at);
            set(first, b.first[best], height);
            set(b.first[best], b.last[best], height + b.size[best]);
            set(b.last[best], last, height);
            continue;
        }
        // Raised to the lower neighbour, and joined with those of its height.
        const auto next = std::next(at);
        const bool has_left = at != sky.begin(), has_right = next != sky.end();
        if (!has_left && !has_right) break;
        i64 to = kNoLimit;
        if (has_left) to = std::min(to, std::prev(at)->second.height);
        if (has_right) to = std::min(to, next->second.height);
        i32 from = first, end = last;
        if (has_right && next->second.height == to) end = next->second.last, sky.erase(next);
        if (has_left && std::prev(at)->second.height == to)
            from = std::prev(at)->first, sky.erase(std::prev(at));
        sky.erase(at);
        set(from, end, to);
    }
    return order;
}

std::vector<i64> pack_sets(const Buffers& b, const std::vector<i32>& set, const std::vector<i64>& size,
                           const std::vector<i64>& alignment, const std::vector<i32>& order,
                           const Watch& watch) {
    const i32 sets = static_cast<i32>(size.size());
    std::vector<std::vector<Span>> residences(sets);  // in sections
    for (i64 i = 0; i < b.count(); ++i) residences[set[i]].push_back({b.first[i], b.last[i]});
    for (auto& of : residences) join_all(of, false);
    Space space(b.sections);
    std::vector<i64> offset(sets, 0);
    for (i32 s : order) {
        if (watch()) return {};
        if (!size[s] || residences[s].empty()) continue;
        offset[s] = space.best_fit_all(residences[s], size[s], alignment[s]);
        for (const auto [first, last] : residences[s])
            space.take(static_cast<i32>(first), static_cast<i32>(last), offset[s], offset[s] + size[s], 1);
    }
    return offset;
}

}  // namespace tightship::place
