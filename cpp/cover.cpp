#include <algorithm>
#include <utility>

#include "search.h"

namespace tightship {

namespace {

constexpr double kShare = 0.3;           // of the excess, that one batch is to take away
constexpr double kHolds = 0.5;           // of what a batch was to take away, that it has to
constexpr std::size_t kParts = 32;       // that a batch is taken apart to
constexpr double kTail = 0.98;           // of the excess, still there after a batch: no more such batches
constexpr double kStuck = 0.9;           // the same after all kinds of them
constexpr i64 kFirst = 16, kLast = 128;  // ops of recipes, at most: in the first rounds, and in the last ones
constexpr i64 kStretches = 512;          // that positions above the limit are taken together to

// Where bytes are above the limit, in stretches of as many positions each, with the mean of what is above it.
class Excess {
  public:
    Excess(const std::vector<i64>& profile, i64 limit) : before_(profile.size() + 1) {
        for (std::size_t at = 0; at < profile.size(); ++at)
            before_[at + 1] = before_[at] + (profile[at] > limit);
        width_ = std::max<i64>(1, (before_.back() + kStretches - 1) / kStretches);
        mean_.assign((before_.back() + width_ - 1) / width_, 0);
        for (std::size_t at = 0; at < profile.size(); ++at)
            if (profile[at] > limit) mean_[before_[at] / width_] += static_cast<double>(profile[at] - limit);
        for (std::size_t k = 0; k < mean_.size(); ++k) mean_[k] /= static_cast<double>(positions(k));
    }

    // Positions above the limit during a gap.
    i64 covered(const Gap& g) const { return std::max<i64>(0, before_[g.to] - before_[g.from + 1]); }

    // What is gone of the excess if so many bytes are during a gap; with `take` from now on.
    double gone(const Gap& g, i64 bytes, bool take) {
        double sum = 0;
        const i64 from = before_[g.from + 1], to = before_[g.to];
        for (i64 k = from / width_; k * width_ < to; ++k) {
            const double share = std::min(to, (k + 1) * width_) - std::max(from, k * width_);
            sum += share * std::clamp<double>(mean_[k], 0, static_cast<double>(bytes));
            if (take) mean_[k] -= static_cast<double>(bytes) * share / positions(k);
        }
        return sum;
    }

  private:
    std::vector<i64> before_;  // by position: how many before it are above the limit
    std::vector<double> mean_;
    i64 width_ = 1;
    double positions(i64 k) const {
        return static_cast<double>(std::min(width_, before_.back() - k * width_));
    }
};

// What has to run for one storage to be restored at a position, and the gaps that are to be kept for that.
struct Recipe {
    double seconds = 0;
    i64 bytes = 0, ops = 0;
    std::vector<i32> kept;
};

class Cover {
  public:
    Cover(Engine& engine, i64 limit, const Bits& start, const Budget& budget)
        : engine_(engine), x_(engine.index()), limit_(limit), meter_(engine, budget),
          best_(begin(engine, limit, start)), now_(start), cost_(best_.cost), seen_(x_.p.ops, -1),
          banned_(x_.gaps.size()) {}

    Found run() {
        double before = cost_.excess;
        i64 most = kFirst;
        bool strict = true;
        while (cost_.valid && cost_.peak > limit_ && !meter_.over(best_)) {
            if (round(most, strict)) continue;
            std::fill(banned_.begin(), banned_.end(), 0);
            strict = !strict;
            if (!strict) continue;
            if ((most *= 2) > kLast || cost_.excess > kStuck * before) break;
            before = cost_.excess;
        }
        best_.work = meter_.work();
        return best_;
    }

  private:
    struct Candidate {
        double price;
        i32 gap;
    };
    struct Chosen {
        i32 gap;
        double gone;
    };

    Engine& engine_;
    const Index& x_;
    const i64 limit_;
    Meter meter_;
    Found best_;
    Bits now_;
    Cost cost_;
    std::vector<i32> seen_;             // by op: the last recipe that it is part of
    std::vector<std::uint8_t> banned_;  // by gap: made things worse
    std::vector<i64> since_;            // by storage: the first position after which it is there
    i32 recipes_ = 0;
    i64 looked_ = 0;

    // One batch of gaps that together take a share of the excess away. False: there is none.
    bool round(i64 most, bool strict) {
        const std::vector<i64> profile = engine_.profile(now_);
        find_first();
        std::vector<std::uint8_t> needed(x_.gaps.size());
        if (strict) need_recipes(needed, most);
        Excess excess(profile, limit_);
        std::vector<Candidate> open = candidates(profile, excess, needed, most, strict);
        std::sort(open.begin(), open.end(), [](const Candidate& a, const Candidate& b) {
            return a.price != b.price ? a.price < b.price : a.gap < b.gap;
        });
        std::vector<Chosen> batch;
        double gone = 0;
        for (const auto& [_, gap] : open) {
            if (gone > kShare * cost_.excess) break;
            if (needed[gap]) continue;
            const Gap& g = x_.gaps[gap];
            const double here = excess.gone(g, x_.p.size[g.storage], true);
            if (here <= 0) continue;
            for (const i32 k : recipe(g.storage, g.to, most).kept) needed[k] = 1;
            batch.push_back({gap, here}), gone += here;
        }
        meter_.spend_on(std::exchange(looked_, 0));
        const double before = cost_.excess;
        take(batch);
        const bool apart = batch.size() < 2 * kParts;  // what did not hold is known one by one
        return apart ? !batch.empty() : cost_.excess < kTail * before;
    }

    // The batch, or those parts of it that hold what they promise.
    void take(const std::vector<Chosen>& batch) {
        std::vector<std::pair<std::size_t, std::size_t>> parts{{0, batch.size()}};
        const std::size_t least = std::max<std::size_t>(1, batch.size() / kParts);
        while (!parts.empty() && !meter_.over(best_)) {
            const auto [from, to] = parts.back();
            parts.pop_back();
            if (from == to) continue;
            Bits next = now_;
            double promised = 0;
            for (std::size_t j = from; j < to; ++j) next[batch[j].gap] = kEvict, promised += batch[j].gone;
            const Cost cost = engine_.evaluate(next, limit_);
            meter_.spend(cost);
            if (cost.valid && cost.excess <= cost_.excess - kHolds * promised) {
                now_ = std::move(next), cost_ = cost;
                offer(best_, now_, cost_, limit_);
            } else if (to - from <= least) {
                for (std::size_t j = from; j < to; ++j) banned_[batch[j].gap] = 1;
            } else {
                const std::size_t middle = from + (to - from) / 2;
                parts.push_back({middle, to}), parts.push_back({from, middle});
            }
        }
    }

    std::vector<Candidate> candidates(const std::vector<i64>& profile, const Excess& excess,
                                      const std::vector<std::uint8_t>& needed, i64 most, bool strict) {
        std::vector<Candidate> open;
        for (i32 gap = 0; gap < static_cast<i32>(x_.gaps.size()); ++gap) {
            if (now_[gap] != kKeep || banned_[gap] || needed[gap] || !x_.allows(gap, kEvict)) continue;
            const Gap& g = x_.gaps[gap];
            const i64 covered = excess.covered(g), size = x_.p.size[g.storage];
            if (!covered) continue;
            const Recipe r = recipe(g.storage, g.to, most);
            // What stays until the end is made again after the last op.
            const i64 room = limit_ - profile[std::min<i64>(g.to, x_.p.ops - 1)];
            if (r.ops > most || (strict && r.bytes > size && r.bytes > room + size)) continue;
            open.push_back({r.seconds / (static_cast<double>(size) * static_cast<double>(covered)), gap});
        }
        return open;
    }

    // What recipes of storages evicted so far read is not to be evicted as well.
    void need_recipes(std::vector<std::uint8_t>& needed, i64 most) {
        for (i32 gap = 0; gap < static_cast<i32>(now_.size()); ++gap)
            if (recomputed(now_[gap]))
                for (const i32 k : recipe(x_.gaps[gap].storage, x_.gaps[gap].to, 2 * most).kept)
                    needed[k] = 1;
    }

    // From when on storages are there: what is made late, not before the first op that needs it at once.
    void find_first() {
        since_.assign(x_.p.storages, x_.p.ops + 1);
        for (i64 s = 0; s < x_.p.storages; ++s)
            for (const i32 at : x_.touches[s])
                if (at == x_.p.ops || !engine_.late(at)) {
                    since_[s] = at;
                    break;
                }
    }

    // The gap of `s` that lies over a position: -1, it is there; -2, it is not.
    i32 state(i32 s, i32 at) const {
        if (x_.p.owned[s]) return -1;
        const i32 *first = x_.touches.begin(s), *last = x_.touches.end(s);
        const i32* next = std::lower_bound(first, last, at);
        if (next == first || next == last || since_[s] >= at) return -2;
        const i32 gap = x_.gap_of[next - x_.touches.item.data() - 1];
        return gap >= 0 && x_.absent(gap, now_[gap]) ? -2 : gap;
    }

    // More ops than `most`: it takes more, or what cannot be made again.
    Recipe recipe(i32 wanted, i32 at, i64 most) {
        Recipe r;
        std::vector<i32> open{wanted};
        ++recipes_;
        while (!open.empty()) {
            const i32 s = open.back();
            open.pop_back();
            if (!x_.replayable[s]) r.ops = most;
            for (const i32 o : x_.writers[s]) {
                if (std::exchange(seen_[o], recipes_) == recipes_) continue;
                ++looked_;
                if (++r.ops > most) return r;
                r.seconds += x_.p.again[o];
                for (const i32 d : x_.p.defines[o]) r.bytes += x_.p.size[d];
                for (const i32 t : x_.p.reads[o]) {
                    if (t == s || (x_.p.updates.size(o) && x_.p.updates.has(o, t))) continue;
                    const i32 gap = state(t, at);
                    if (gap == -2) open.push_back(t);
                    else if (gap >= 0) r.kept.push_back(gap);
                }
            }
        }
        return r;
    }
};

}  // namespace

Found cover(Engine& engine, i64 limit, const Bits& start, const Budget& budget) {
    return Cover(engine, limit, start, budget).run();
}

}  // namespace tightship
