#include <algorithm>
#include <cstdlib>

#include "place_tree.h"

namespace tightship::place {

namespace {

constexpr i32 kFreed[] = {12, 24, 48, 96};  // buffers of a window, by attempt
constexpr int kWays = 4;                    // to choose them
constexpr i64 kFar = i64{1} << 30;
constexpr int kAttempts = 12;  // at one buffer, before the aim is given up for now
constexpr int kPreferences = 4;
constexpr double kDisorder = 0.1;
constexpr double kLeastStep = 1.0 / 256;

class Improver {
  public:
    Improver(const Buffers& b, std::vector<i64> offset, const WindowLimits& limits, const Watch& watch)
        : b_(b), limits_(limits), watch_(watch), alive_(b, -1), random_(limits.seed), is_free_(b.count(), 0) {
        best_.offset = std::move(offset);
        for (i64 i = 0; i < b.count(); ++i)
            if (!b.size[i] && b.pinned[i] == kFree) best_.offset[i] = 0;  // in nobody's way
    }

    Windows run() {
        for (double step = 0.25; !over();) {
            const i64 arena = reached();
            if (arena <= limits_.goal) break;
            const i64 way =
                std::max<i64>(1, static_cast<i64>(step * static_cast<double>(arena - limits_.goal)));
            const bool met = lower(arena - way);
            step = met ? std::min(0.5, 1.5 * step) : std::max(kLeastStep, 0.5 * step);
        }
        return std::move(best_);
    }

  private:
    const Buffers& b_;
    const WindowLimits& limits_;
    const Watch& watch_;
    ByFirst alive_;
    Random random_;
    Windows best_;
    bool stopped_ = false;
    std::vector<char> is_free_;
    std::vector<i32> near_, freed_;

    i64 top(i32 i) const { return best_.offset[i] + b_.size[i]; }
    bool over() { return stopped_ = stopped_ || best_.work >= limits_.work || watch_(); }

    i64 reached() const {
        i64 most = 0;
        for (i64 i = 0; i < b_.count(); ++i) most = std::max(most, top(static_cast<i32>(i)));
        return most;
    }

    // Those alive anywhere in sections [from, to).
    void find(i32 from, i32 to) {
        near_.clear();
        alive_.visit(0, to, -from - 1, [this](i32 i) {
            if (b_.size[i]) near_.push_back(i);
        });
    }

    // Whether no buffer is left above the aim. What was placed below it stays there in any case.
    bool lower(i64 aim) {
        best_.work += 1 + b_.count() / 256;
        std::vector<i32> above;
        for (i32 i = 0; i < b_.count(); ++i)
            if (top(i) > aim) above.push_back(i);
        std::stable_sort(above.begin(), above.end(),
                         [this](i32 x, i32 y) { return b_.size[x] > b_.size[y]; });
        for (i32 i : above) {
            if (top(i) <= aim) continue;  // freed with another
            if (b_.pinned[i] != kFree) return false;
            bool done = false;
            for (int k = 0; k < kAttempts && !done && !over(); ++k) done = repair(i, aim, k);
            if (!done) return false;
        }
        return true;
    }

    // Places buffer i and about `count` others anew below the aim.
    bool repair(i32 i, i64 aim, int attempt) {
        const i32 count = kFreed[attempt / kWays % 4];
        if (attempt % kWays == 0) free_around(i, count);
        else free_beside(i, count, attempt % kWays);
        i32 from = b_.sections, to = 0;
        for (i32 f : freed_) {
            is_free_[f] = 1;
            from = std::min(from, b_.first[f]), to = std::max(to, b_.last[f]);
        }
        find(from, to);
        Part part = make(aim);
        for (i32 f : freed_) is_free_[f] = 0;
        best_.work += 1 + static_cast<i64>(near_.size()) / 64;
        return part.bound <= aim && solve(part, aim);
    }

    // Those that are alive only about the time of buffer i.
    void free_around(i32 i, i32 count) {
        i32 from = b_.first[i], to = b_.last[i];
        for (i64 reach = std::max<i32>(1, (to - from) / 4);; reach *= 2) {
            find(from, to);
            freed_.clear();
            for (i32 f : near_)
                if (b_.pinned[f] == kFree && from <= b_.first[f] && b_.last[f] <= to) freed_.push_back(f);
            if (static_cast<i32>(freed_.size()) >= count || (from == 0 && to == b_.sections)) break;
            from = static_cast<i32>(std::max<i64>(0, from - reach));
            to = static_cast<i32>(std::min<i64>(b_.sections, to + reach));
        }
        keep(i, count, [this](i32) { return random_.below(kFar); });
    }

    // Those alive together with buffer i that begin or end with it, lie near it, or any.
    void free_beside(i32 i, i32 count, int way) {
        find(b_.first[i], b_.last[i]);
        freed_.clear();
        for (i32 f : near_)
            if (b_.pinned[f] == kFree) freed_.push_back(f);
        const i64 level =
            best_.offset[random_.below(2) ? i : freed_[random_.below(static_cast<i64>(freed_.size()))]];
        keep(i, count, [&](i32 f) -> i64 {
            if (way == 1)
                return std::min(std::abs(b_.first[f] - b_.first[i]), std::abs(b_.last[f] - b_.last[i]));
            if (way == 2) return std::max(best_.offset[f] - level, level - top(f));
            return random_.below(kFar);
        });
    }

    // Keeps buffer i and those of the freed that are nearest, `count` in all.
    template <class Distance> void keep(i32 i, i32 count, Distance distance) {
        if (static_cast<i32>(freed_.size()) > count) {
            std::vector<std::pair<i64, i32>> rank;
            for (i32 f : freed_) rank.emplace_back(f == i ? -kNoLimit : distance(f), f);
            std::nth_element(rank.begin(), rank.begin() + count, rank.end());
            freed_.clear();
            for (i32 k = 0; k < count; ++k) freed_.push_back(rank[k].second);
        }
        std::sort(freed_.begin(), freed_.end());
    }

    Part make(i64 aim) const {
        std::vector<i32> cuts;
        for (i32 f : freed_) cuts.push_back(b_.first[f]), cuts.push_back(b_.last[f]);
        std::sort(cuts.begin(), cuts.end());
        cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
        const auto before = [&](i32 section) {
            return static_cast<i32>(std::lower_bound(cuts.begin(), cuts.end(), section) - cuts.begin());
        };
        Part p;
        for (i32 f : freed_) {
            p.id.push_back(f);
            p.first.push_back(before(b_.first[f])), p.last.push_back(before(b_.last[f]));
            p.size.push_back(b_.size[f]), p.alignment.push_back(b_.alignment[f]),
                p.length.push_back(b_.length[f]);
        }
        const i32 sections = static_cast<i32>(cuts.size()) - 1;
        p.fixed.resize(sections);
        for (i32 f : near_) {
            const Span span{best_.offset[f], std::min(top(f), aim)};
            if (is_free_[f] || span.start >= span.end) continue;
            const auto after = std::upper_bound(cuts.begin(), cuts.end(), b_.first[f]) - cuts.begin();
            const i32 end = std::min(before(b_.last[f]), sections);
            for (i32 s = std::max<i32>(static_cast<i32>(after) - 1, 0); s < end; ++s)
                p.fixed[s].push_back(span);
        }
        p.index();
        return p;
    }

    bool solve(const Part& part, i64 aim) {
        Tree tree(part);
        const Stop stop = [this](i64) { return watch_(); };
        const i64 n = part.count(), meets = static_cast<i64>(part.meets.size()) / n;
        const i64 most = 20 + 4 * n * Tree::cost(n / 2, meets);
        for (int k = 0; k < kPreferences; ++k) {
            const Outcome outcome = tree.run(ranks(part, k), aim, most, k, stop);
            best_.work += tree.work(), best_.nodes += tree.nodes();
            if (outcome == Outcome::refuted) return false;
            if (outcome != Outcome::found) continue;
            for (i32 b = 0; b < part.count(); ++b) best_.offset[part.id[b]] = tree.offset()[b];
            return true;
        }
        return false;
    }

    // By size times sections, by sections, by size, as they lie; the second time of each with some disorder.
    std::vector<i32> ranks(const Part& p, int preference) {
        const i32 n = p.count();
        std::vector<std::pair<double, i32>> order;
        for (i32 b = 0; b < n; ++b) {
            const double size = static_cast<double>(p.size[b]), sections = p.last[b] - p.first[b];
            const double keys[] = {-size * sections, -sections, static_cast<double>(best_.offset[p.id[b]]),
                                   -size};
            order.emplace_back(keys[preference], b);
        }
        std::sort(order.begin(), order.end());
        std::vector<i32> by;
        for (const auto& [key, b] : order) by.push_back(b);
        return place::ranks(by, kDisorder, random_);
    }
};

}  // namespace

Windows place_in_windows(const Buffers& buffers, std::vector<i64> offset, const WindowLimits& limits,
                         const Watch& watch) {
    return Improver(buffers, std::move(offset), limits, watch).run();
}

}  // namespace tightship::place
