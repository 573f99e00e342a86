#include "search.h"

#include <algorithm>
#include <cmath>

#include "neighborhood.h"

namespace tightship {

bool better(const Cost& a, const Cost& b, i64 limit) {
    if (!a.valid || !b.valid) return a.valid && !b.valid;
    const bool fa = a.peak <= limit, fb = b.peak <= limit;
    if (fa != fb) return fa;
    if (fa) return a.extra < b.extra || (a.extra == b.extra && a.peak < b.peak);
    return a.peak < b.peak || (a.peak == b.peak && a.extra < b.extra);
}

Found begin(Engine& engine, i64 limit, const Bits& start) {
    Found best{start, engine.evaluate(start, limit)};
    best.met = best.cost.valid && best.cost.peak <= limit;
    return best;
}

bool offer(Found& best, const Bits& evict, const Cost& cost, i64 limit) {
    if (!better(cost, best.cost, limit)) return false;
    best.evict = evict;
    best.cost = cost;
    best.met = cost.valid && cost.peak <= limit;
    return true;
}

Found greedy(Engine& engine, i64 limit, const Bits& start, const Budget& budget) {
    const Index& x = engine.index();
    const Program& p = x.p;
    const auto& gaps = x.gaps;
    Meter meter(engine, budget);
    Found best = begin(engine, limit, start);
    std::vector<double> recipe(p.storages, 0);  // seconds of all ops that write it
    for (i64 s = 0; s < p.storages; ++s)
        for (const i32 w : x.writers[s]) recipe[s] += p.again[w];
    std::vector<std::uint8_t> banned(gaps.size(), 0);
    Bits now = best.evict;
    Cost cost = best.cost;
    while (cost.valid && cost.peak > limit && !meter.over(best)) {
        struct Candidate {
            double price;
            i32 gap;
        };
        std::vector<Candidate> found;
        for (i32 g = 0; g < static_cast<i32>(gaps.size()); ++g) {
            const auto [s, from, to] = gaps[g];
            if (now[g] || banned[g] || !x.allows(g, kEvict) || from >= cost.peak_at || to <= cost.peak_at)
                continue;
            found.push_back({recipe[s] / double(p.size[s]), g});
        }
        if (found.empty()) break;
        std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
            return a.price < b.price || (a.price == b.price && a.gap < b.gap);
        });
        // Take as many as the excess at this point asks for; halve the batch when that made things worse.
        i64 need = cost.peak - limit;
        std::size_t take = 0;
        while (take < found.size() && need > 0) need -= p.size[gaps[found[take++].gap].storage];
        for (;; take = (take + 1) / 2) {
            Bits next = now;
            for (std::size_t j = 0; j < take; ++j) next[found[j].gap] = 1;
            const Cost c = engine.evaluate(next, limit);
            meter.spend(c);
            const bool down =
                c.valid && (c.peak < cost.peak || (c.peak == cost.peak && c.excess < cost.excess));
            if (down) {
                now = std::move(next);
                cost = c;
                offer(best, now, cost, limit);
                break;
            }
            if (take == 1) {
                banned[found[0].gap] = 1;
                break;
            }
        }
    }
    best.work = meter.work();
    return best;
}

Found relax(Engine& engine, const Rows& groups, i64 limit, const Bits& start, const Budget& budget) {
    Meter meter(engine, budget);
    Found best = begin(engine, limit, start);
    Bits now = best.evict;
    for (i64 g = groups.count(); g-- > 0;) {
        for (const std::uint8_t to : {kKeep, kEvict, kPass}) {
            if (meter.over(best)) break;
            Bits next = now;
            for (const i32 gap : groups[g])
                if (next[gap] > to && (to < kPass || next[gap] == kDrop) && engine.index().allows(gap, to))
                    next[gap] = to;
            if (next == now) continue;
            const Cost c = engine.evaluate(next, limit, best.cost.extra);
            meter.spend(c);
            if (offer(best, next, c, limit)) now = std::move(next);
        }
    }
    best.work = meter.work();
    return best;
}

Found anneal(Engine& engine, const Rows& groups, const IsomorphicLayers& layers, i64 limit, const Bits& start,
             const Cooling& cooling, double exchanges, std::uint64_t seed, const Budget& budget) {
    const Index& x = engine.index();
    Found best = begin(engine, limit, start);
    if (x.gaps.empty()) return best;
    Meter meter(engine, budget);
    Neighborhood moves(x, groups, layers, exchanges, seed);
    const double base = std::max(1e-12, x.base_time);
    const double room = std::max<double>(1, double(limit - x.static_bytes));
    const double ops = double(std::max<i64>(1, x.p.ops));
    const double hot = cooling.heat, cold = hot / 100, span = double(std::max<i64>(1, cooling.span));
    ExcessPrice price;
    auto energy = [&](const Cost& c) {
        const double over = std::max<double>(0, double(c.peak - limit)) / room;
        return c.extra / base + price.value() * (over + c.excess / (room * ops));
    };
    Bits now = best.evict;
    Cost cost = best.cost;
    double at = energy(cost);
    Changes changes;
    i64 calls = 0;
    engine.follow(now, limit);
    while (!meter.over(best)) {
        const double t = hot * std::pow(cold / hot, std::min(1.0, double(meter.work()) / span));
        moves.apply(now, changes);
        if (changes.empty()) {
            meter.spend(Cost{});
            continue;
        }
        const double reject_above = at - t * std::log(std::max(1e-12, moves.uniform()));
        engine.price_excess(price.value() * base / room, price.value() * base / (room * ops));
        const Cost c = engine.evaluate_near(now, changes, limit, reject_above * base);
        engine.price_excess(0, 0);
        meter.spend(c);
        const double e = c.valid ? energy(c) : std::numeric_limits<double>::infinity();
        if (e <= reject_above) {
            cost = c;
            at = e;
            engine.accept();
            offer(best, now, c, limit);
        } else {
            for (auto it = changes.rbegin(); it != changes.rend(); ++it) now[it->first] = it->second;
        }
        if (price.turn(cost.peak <= limit)) at = energy(cost);
        if (++calls % 2000 == 0) {  // start again from the best now and then
            if (energy(best.cost) + 4 * t < at) {
                now = best.evict, cost = best.cost, at = energy(cost);
                engine.follow(now, limit);
            }
        }
    }
    best.cost = engine.evaluate(best.evict, limit);
    best.work = meter.work();
    return best;
}

}  // namespace tightship
