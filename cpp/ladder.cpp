#include <algorithm>
#include <queue>

#include "meter.h"
#include "search.h"

namespace tightship {

namespace {

// Set the first gaps of a row that are kept: 1/part of them, at least one.
struct Rung {
    i64 row;
    std::uint8_t to;
    i32 part;
    double price;  // seconds per byte-run of excess gone, when last tried
    i64 tried;     // how many rungs had been taken then
};

struct Dearer {
    bool operator()(const Rung& a, const Rung& b) const {
        if (a.price != b.price) return a.price > b.price;
        if (a.row != b.row) return a.row > b.row;
        return a.to != b.to ? a.to > b.to : a.part > b.part;
    }
};

bool climb(const Engine& engine, const Rows& rows, const Rung& rung, Bits& bits) {
    auto open = [&](i32 gap) { return bits[gap] == kKeep && engine.allowed(gap, rung.to); };
    i64 kept = 0;
    for (auto g = rows.begin(rung.row); g != rows.end(rung.row); ++g) kept += open(*g);
    if (kept == 0 || (rung.part > 1 && kept < rung.part)) return false;
    i64 take = (kept + rung.part - 1) / rung.part;
    for (auto g = rows.begin(rung.row); take > 0 && g != rows.end(rung.row); ++g)
        if (open(*g)) bits[*g] = rung.to, --take;
    return true;
}

}  // namespace

Found ladder(Engine& engine, const Rows& rows, i64 limit, const Bits& start, const Budget& budget) {
    Meter meter(engine, budget);
    Found best{start, engine.evaluate(start.data(), limit)};
    best.met = best.cost.valid && best.cost.peak <= limit;
    Bits now = best.evict;
    Cost cost = best.cost;
    i64 taken = 0;
    // What a rung costs per excess gone; false where it does not help.
    Cost tried;
    Bits next;
    auto attempt = [&](Rung& rung) {
        next = now;
        rung.tried = taken;
        if (!climb(engine, rows, rung, next)) return false;
        tried = engine.evaluate(next.data(), limit);
        meter.spend(tried);
        if (!tried.valid || tried.excess >= cost.excess) return false;
        rung.price = std::max(0.0, tried.extra - cost.extra) / (cost.excess - tried.excess);
        return true;
    };
    std::priority_queue<Rung, std::vector<Rung>, Dearer> open;
    std::vector<Rung> resting;
    for (i64 r = 0; r + 1 < static_cast<i64>(rows.start.size()); ++r)
        for (const std::uint8_t to : {kEvict, kPass, kDrop, kPack, kOffload}) {
            if ((to == kPass || to == kDrop) && rows.size(r) == 1) continue;
            const auto may = [&](i32 gap) { return engine.allowed(gap, to); };
            if (std::none_of(rows.begin(r), rows.end(r), may)) continue;
            for (i32 part = 1; part <= rows.size(r); part *= 3) resting.push_back({r, to, part, 0, -1});
        }
    while (cost.valid && cost.peak > limit && !meter.over(best)) {
        if (open.empty()) {  // what did not help before may help now
            bool any = false;
            std::vector<Rung> idle;
            for (Rung& rung : resting) {
                if (meter.over(best)) break;
                if (rung.tried < taken && attempt(rung)) open.push(rung), any = true;
                else idle.push_back(rung);
            }
            resting = std::move(idle);
            if (!any) break;
        }
        Rung rung = open.top();
        open.pop();
        if (!attempt(rung)) {
            resting.push_back(rung);
            continue;
        }
        if (!open.empty() && Dearer{}(rung, open.top())) {
            open.push(rung);
            continue;
        }
        now = next;
        cost = tried;
        ++taken;
        offer(best, now, cost, limit);
        open.push(rung);
    }
    best.work = meter.work();
    return best;
}

}  // namespace tightship
