#include <algorithm>
#include <queue>

#include "search.h"

namespace tightship {

namespace {

// Set the first gaps of a row that are kept: 1/part of them, at least one.
struct Candidate {
    i64 row;
    std::uint8_t to;
    i32 part;
    double price;  // seconds per byte-run of excess gone, when last tried
    i64 tried;     // how many candidates had been taken then
};

struct Dearer {
    bool operator()(const Candidate& a, const Candidate& b) const {
        if (a.price != b.price) return a.price > b.price;
        if (a.row != b.row) return a.row > b.row;
        return a.to != b.to ? a.to > b.to : a.part > b.part;
    }
};

bool apply(const Index& index, const Rows& rows, const Candidate& candidate, Bits& bits) {
    auto open = [&](i32 gap) { return bits[gap] == kKeep && index.allows(gap, candidate.to); };
    i64 kept = 0;
    for (const i32 g : rows[candidate.row]) kept += open(g);
    if (kept == 0 || (candidate.part > 1 && kept < candidate.part)) return false;
    i64 take = (kept + candidate.part - 1) / candidate.part;
    for (auto g = rows.begin(candidate.row); take > 0 && g != rows.end(candidate.row); ++g)
        if (open(*g)) bits[*g] = candidate.to, --take;
    return true;
}

}  // namespace

Found lazy_greedy(Engine& engine, const Rows& rows, i64 limit, const Bits& start, const Budget& budget) {
    Meter meter(engine, budget);
    Found best = begin(engine, limit, start);
    Bits now = best.evict;
    Cost cost = best.cost;
    i64 taken = 0;
    // What a candidate costs per excess gone; false where it does not help.
    Cost tried;
    Bits next;
    auto attempt = [&](Candidate& candidate) {
        next = now;
        candidate.tried = taken;
        if (!apply(engine.index(), rows, candidate, next)) return false;
        tried = engine.evaluate(next, limit);
        meter.spend(tried);
        if (!tried.valid || tried.excess >= cost.excess) return false;
        candidate.price = std::max(0.0, tried.extra - cost.extra) / (cost.excess - tried.excess);
        return true;
    };
    std::priority_queue<Candidate, std::vector<Candidate>, Dearer> open;
    std::vector<Candidate> resting;
    for (i64 r = 0; r < rows.count(); ++r)
        for (const std::uint8_t to : {kEvict, kPass, kDrop, kPack, kOffload}) {
            if ((to == kPass || to == kDrop) && rows.size(r) == 1) continue;
            const auto may = [&](i32 gap) { return engine.index().allows(gap, to); };
            if (std::none_of(rows.begin(r), rows.end(r), may)) continue;
            for (i32 part = 1; part <= rows.size(r); part *= 3) resting.push_back({r, to, part, 0, -1});
        }
    while (cost.valid && cost.peak > limit && !meter.over(best)) {
        if (open.empty()) {  // what did not help before may help now
            bool any = false;
            std::vector<Candidate> idle;
            for (Candidate& candidate : resting) {
                if (meter.over(best)) break;
                if (candidate.tried < taken && attempt(candidate)) open.push(candidate), any = true;
                else idle.push_back(candidate);
            }
            resting = std::move(idle);
            if (!any) break;
        }
        Candidate candidate = open.top();
        open.pop();
        if (!attempt(candidate)) {
            resting.push_back(candidate);
            continue;
        }
        if (!open.empty() && Dearer{}(candidate, open.top())) {
            open.push(candidate);
            continue;
        }
        now = next;
        cost = tried;
        ++taken;
        offer(best, now, cost, limit);
        open.push(candidate);
    }
    best.work = meter.work();
    return best;
}

}  // namespace tightship
