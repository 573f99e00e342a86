#include "place_tree.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace tightship::place {

namespace {

constexpr i64 kAbsent = -1;
constexpr i64 kNone = std::numeric_limits<i64>::max();
constexpr i64 kLookEvery = 64;  // placements between two looks at the clock

}  // namespace

void Part::index() {
    const i32 n = count();
    sections = *std::max_element(last.begin(), last.end());
    std::vector<i64> load(sections, 0);
    alive_from.assign(sections + 1, 0);
    for (i32 b = 0; b < n; ++b)
        for (i32 s = first[b]; s < last[b]; ++s) load[s] += size[b], ++alive_from[s + 1];
    bound = *std::max_element(load.begin(), load.end());
    for (i32 s = 0; s < sections; ++s) alive_from[s + 1] += alive_from[s];
    alive.resize(alive_from[sections]);
    std::vector<i32> next(alive_from.begin(), alive_from.end() - 1);
    for (i32 b = 0; b < n; ++b)
        for (i32 s = first[b]; s < last[b]; ++s) alive[next[s]++] = b;
    std::vector<i32> starts_from(sections + 1, 0), starts(n);
    for (i32 b = 0; b < n; ++b) ++starts_from[first[b] + 1];
    for (i32 s = 0; s < sections; ++s) starts_from[s + 1] += starts_from[s];
    next.assign(starts_from.begin(), starts_from.end() - 1);
    for (i32 b = 0; b < n; ++b) starts[next[first[b]]++] = b;
    meets.clear();
    meets_from.assign(1, 0);
    for (i32 b = 0; b < n; ++b) {  // those alive when it starts, and those that start while it is alive
        for (i32 k = alive_from[first[b]]; k < alive_from[first[b] + 1]; ++k)
            if (alive[k] != b) meets.push_back(alive[k]);
        for (i32 k = starts_from[first[b] + 1]; k < starts_from[last[b]]; ++k) meets.push_back(starts[k]);
        meets_from.push_back(static_cast<i32>(meets.size()));
    }
    if (!fixed.empty()) index_fixed();
    twin.resize(n);
    std::map<std::tuple<i32, i32, i64, i64>, i32> seen;
    for (i32 b = 0; b < n; ++b)
        twin[b] = seen.try_emplace({first[b], last[b], size[b], alignment[b]}, b).first->second;
}

void Part::index_fixed() {
    for (i32 s = 0; s < sections; ++s) {
        i64 load = 0;
        join_all(fixed[s], true);
        for (const Span& span : fixed[s]) load += span.end - span.start, bound = std::max(bound, span.end);
        for (i32 k = alive_from[s]; k < alive_from[s + 1]; ++k) load += size[alive[k]];
        bound = std::max(bound, load);
    }
    around.clear();
    around_from.assign(1, 0);
    std::vector<Span> met;
    for (i32 b = 0; b < count(); ++b) {
        met.clear();
        for (i32 s = first[b]; s < last[b]; ++s) met.insert(met.end(), fixed[s].begin(), fixed[s].end());
        join_all(met, true);
        around.insert(around.end(), met.begin(), met.end());
        around_from.push_back(static_cast<i32>(around.size()));
    }
}

i64 Part::clear(i32 b, i64 offset) const {
    offset = align_up(offset, alignment[b]);
    if (around.empty()) return offset;
    for (i32 k = around_from[b]; k < around_from[b + 1]; ++k) {
        if (around[k].end <= offset) continue;
        if (around[k].start >= offset + size[b]) break;
        offset = align_up(around[k].end, alignment[b]);
    }
    return offset;
}

i64 Part::fixed_above(i32 section, i64 offset) const {
    i64 above = 0;
    for (const Span& span : fixed[section])
        if (span.end > offset) above += span.end - std::max(span.start, offset);
    return above;
}

std::vector<i32> ranks(const std::vector<i32>& order, double disorder, Random& random) {
    const std::size_t n = order.size();
    std::vector<std::pair<double, i32>> place;
    for (std::size_t k = 0; k < n; ++k) {
        const double share = static_cast<double>(random.below(1 << 20)) / (1 << 20);
        place.emplace_back(static_cast<double>(k) + disorder * static_cast<double>(n) * share, order[k]);
    }
    std::sort(place.begin(), place.end());
    std::vector<i32> rank(n);
    for (std::size_t k = 0; k < n; ++k) rank[place[k].second] = static_cast<i32>(k);
    return rank;
}

Tree::Tree(const Part& part)
    : p_(part), elder_(part.count()), placed_(part.count()), left_(part.count()),
      place_in_left_(part.count()), lowest_(part.count()), open_(part.count()), floor_(part.sections),
      rest_(part.sections), witness_(part.sections), raised_(part.count()), reason_(part.count()),
      need_(part.count(), kAbsent) {}

void Tree::reset(const std::vector<i32>& rank) {
    const i32 n = p_.count();
    rank_ = rank;
    std::fill(placed_.begin(), placed_.end(), 0);
    std::fill(floor_.begin(), floor_.end(), p_.fixed.empty() ? 0 : kNone);
    std::fill(rest_.begin(), rest_.end(), 0);
    std::fill(reason_.begin(), reason_.end(), Reason{0, 0});
    for (i32 b : members_) need_[b] = kAbsent;
    members_.clear();
    std::fill(raised_.begin(), raised_.end(), 0);
    mark_ = 0;
    lifts_.clear(), drops_.clear(), needs_.clear(), former_.clear(), candidates_.clear();
    left_.resize(n);
    std::vector<i32> order(n), latest(n, -1);
    for (i32 b = 0; b < n; ++b) order[rank[b]] = b;
    for (i32 b : order) {
        elder_[b] = latest[p_.twin[b]];
        latest[p_.twin[b]] = b;
    }
    for (i32 b = 0; b < n; ++b) {
        left_[b] = place_in_left_[b] = b;
        lowest_[b] = open_[b] = p_.clear(b, 0);
        for (i32 s = p_.first[b]; s < p_.last[b]; ++s) {
            rest_[s] += p_.size[b];
            if (lowest_[b] <= floor_[s]) floor_[s] = lowest_[b], witness_[s] = b;
        }
    }
}

Outcome Tree::run(const std::vector<i32>& rank, i64 capacity, i64 most, i64 number, const Stop& stop) {
    reset(rank);
    capacity_ = capacity;
    most_ = most;
    number_ = number;
    stop_ = &stop;
    work_ = nodes_ = 0;
    needed_ = kNone;
    return search();
}

bool Tree::over(i32 b) {
    if (work_ >= most_ || (nodes_ % kLookEvery == 0 && (*stop_)(number_))) return true;
    work_ += cost(static_cast<i64>(left_.size()), p_.meets_from[b + 1] - p_.meets_from[b]);
    ++nodes_;
    return false;
}

// As sections only become emptier on the way down, the fullest stays so until a buffer of it is placed.
void Tree::look_for_fullest(Node& node) const {
    if (!path_.empty()) {
        const Node& above = path_.back();
        if (above.fullest < p_.first[above.placed] || above.fullest >= p_.last[above.placed]) {
            node.most_rest = above.most_rest, node.fullest = above.fullest;
            return;
        }
    }
    node.most_rest = 0, node.fullest = 0;
    for (i32 s = 0; s < p_.sections; ++s)
        if (rest_[s] > node.most_rest) node.most_rest = rest_[s], node.fullest = s;
}

void Tree::look(Node& node) const {
    look_for_fullest(node);
    node.least_top = kNone, node.least = -1;
    for (i32 b : left_)
        if (lowest_[b] + p_.size[b] < node.least_top)
            node.least_top = lowest_[b] + p_.size[b], node.least = b;
}

// The rules, in this order: bottom up; no gap that another would fit in; the fullest section still fits; of
// twins the elder first. Adds a node with those of the buffers left that may be placed next.
void Tree::enter(i64 level, i32 rank) {
    const std::size_t begin = candidates_.size();
    Node node{level, rank, 0, 0, 0, 0, begin, begin, begin, needs_.size(), former_.size()};
    look(node);
    for (i32 b : left_) {
        const i64 at = lowest_[b];
        if (at >= node.least_top || at < level || (at == level && rank_[b] < rank)) continue;
        if (at + node.most_rest > capacity_) needed_ = std::min(needed_, at + node.most_rest);
        else if (elder_[b] < 0 || placed_[elder_[b]]) candidates_.emplace_back(at, b);
    }
    node.end = candidates_.size();
    std::sort(candidates_.begin() + static_cast<std::ptrdiff_t>(begin), candidates_.end(),
              [this](const auto& x, const auto& y) {
                  return x.first != y.first ? x.first < y.first : rank_[x.second] < rank_[y.second];
              });
    path_.push_back(node);
}

void Tree::leave() {
    const Node& node = path_.back();
    for (; former_.size() > node.former; former_.pop_back())
        reason_[former_.back().first] = former_.back().second;
    needs_.resize(node.needs);
    candidates_.resize(node.begin);
    path_.pop_back();
}

// Depth first; the nodes on the way down stand in `path_`, however many there are.
Outcome Tree::search() {
    path_.clear();
    if (left_.empty()) return Outcome::found;
    enter(0, -1);
    while (!path_.empty()) {
        Node& node = path_.back();
        if (node.next == node.end) {
            blame_node(node);
            leave();
            fail();
            continue;
        }
        const auto [at, b] = candidates_[node.next++];
        if (over(b)) return Outcome::given_up;
        node.placed = b, node.lifts = lifts_.size(), node.drops = drops_.size();
        if (!place(b, at)) {
            blame_section();
            fail();
        } else if (left_.empty()) {
            return Outcome::found;
        } else {
            enter(at, rank_[b]);
        }
    }
    return Outcome::refuted;
}

// Takes back the last placement, for which a nogood was just made, and those before it as long as it holds
// without them, too: it is the nogood of their nodes, then.
void Tree::fail() {
    while (!path_.empty()) {
        const Node& node = path_.back();
        bool needed = false;
        for (std::size_t k = node.lifts; k < lifts_.size() && !needed; ++k)
            needed = need_[lifts_[k].at] > lifts_[k].was;
        take_back(node.placed, node.lifts, node.drops);
        if (needed) return remember(node.placed);
        leave();
    }
}

// The nogood just made is why b cannot come next.
void Tree::remember(i32 b) {
    const std::size_t from = needs_.size();
    for (i32 m : members_) needs_.push_back({m, need_[m]});
    former_.emplace_back(b, reason_[b]);
    reason_[b] = {from, needs_.size()};
}

// False: a section has too little left above its floor. Everything is to be taken back in either case.
bool Tree::place(i32 b, i64 offset) {
    const i64 size = p_.size[b], top = offset + size;
    placed_[b] = 1;
    open_[b] = kNone;
    const i32 last = left_.back(), hole = place_in_left_[b];
    left_[hole] = last, place_in_left_[last] = hole;
    left_.pop_back();
    i32 from = p_.first[b], to = p_.last[b];
    for (i32 s = from; s < to; ++s) rest_[s] -= size;
    ++mark_;
    raised_[b] = mark_;
    for (i32 k = p_.meets_from[b]; k < p_.meets_from[b + 1]; ++k) {
        const i32 c = p_.meets[k];
        if (open_[c] >= top) continue;
        lifts_.push_back({c, lowest_[c]});
        lowest_[c] = open_[c] = p_.clear(c, top);
        raised_[c] = mark_;
        from = std::min(from, p_.first[c]), to = std::max(to, p_.last[c]);
    }
    return settle(from, to, top, b);
}

// Floors of the sections whose lowest buffer was raised.
bool Tree::settle(i32 from, i32 to, i64 top, i32 b) {
    for (i32 s = from; s < to; ++s) {
        if (!rest_[s] || raised_[witness_[s]] != mark_) continue;
        const i64 reach = s >= p_.first[b] && s < p_.last[b] ? top : floor_[s];  // no buffer can be lower
        i64 floor = kNone;
        i32 witness = -1;
        for (i32 k = p_.alive_from[s]; k < p_.alive_from[s + 1] && floor > reach; ++k) {
            const i32 c = p_.alive[k];
            if (open_[c] < floor) floor = open_[c], witness = c;
        }
        drops_.push_back({s, witness_[s], floor_[s]});
        floor_[s] = floor, witness_[s] = witness;
        const i64 filled = floor + rest_[s] + (p_.fixed.empty() ? 0 : p_.fixed_above(s, floor));
        if (filled > capacity_) {
            needed_ = std::min(needed_, filled);
            clash_ = s;
            return false;
        }
    }
    return true;
}

void Tree::take_back(i32 b, std::size_t lifts, std::size_t drops) {
    for (; drops_.size() > drops; drops_.pop_back()) {
        const Drop& d = drops_.back();
        floor_[d.section] = d.floor, witness_[d.section] = d.witness;
    }
    for (; lifts_.size() > lifts; lifts_.pop_back())
        lowest_[lifts_.back().at] = open_[lifts_.back().at] = lifts_.back().was;
    for (i32 s = p_.first[b]; s < p_.last[b]; ++s) rest_[s] += p_.size[b];
    placed_[b] = 0;
    open_[b] = lowest_[b];
    if (const i32 hole = place_in_left_[b]; hole < static_cast<i32>(left_.size())) {
        const i32 other = left_[hole];
        place_in_left_[other] = static_cast<i32>(left_.size());
        left_.push_back(other);
        left_[hole] = b;
    } else {
        left_.push_back(b);
    }
}

void Tree::add(i32 b, i64 offset) {
    if (need_[b] == kAbsent) members_.push_back(b);
    need_[b] = std::max(need_[b], offset);
}

// Nogood: those left in one section, none of them lower than what makes them overflow it.
void Tree::blame_section() {
    for (i32 b : members_) need_[b] = kAbsent;
    members_.clear();
    const i64 offset = floor_[clash_];
    for (i32 k = p_.alive_from[clash_]; k < p_.alive_from[clash_ + 1]; ++k)
        if (!placed_[p_.alive[k]]) add(p_.alive[k], offset);
}

bool Tree::skipped_for_section(const Node& n, i32 b) const {
    const bool in_order = lowest_[b] > n.level || (lowest_[b] == n.level && rank_[b] > n.rank);
    return in_order && lowest_[b] + n.most_rest > capacity_;
}

// Nogood of a node from those of its children. Suppose the members of a set had a placement with none lower
// than it is now; take one that cannot be lowered. The first of those left, in order of offset, lies at its
// lowest offset, or it could be lowered. So if the set has, with every such buffer, all that its own failure
// needs, there is no such placement. The set is closed under that, starting from the buffer with the least
// top: no member that starts at or above this top can come first.
void Tree::blame_node(const Node& n) {
    for (i32 b : members_) need_[b] = kAbsent;
    members_.clear();
    add(n.least, 0);
    bool on_placed = false;
    for (std::size_t k = 0; k < members_.size(); ++k) {
        const i32 b = members_[k];
        if (placed_[b] || lowest_[b] >= n.least_top) continue;
        if (skipped_for_section(n, b)) {
            for (i32 j = p_.alive_from[n.fullest]; j < p_.alive_from[n.fullest + 1]; ++j)
                if (!placed_[p_.alive[j]]) add(p_.alive[j], 0);
        } else if (elder_[b] >= 0 && !placed_[elder_[b]]) {
            add(elder_[b], 0);  // whoever is first of the two: both are members, and alike
        } else {
            for (std::size_t j = reason_[b].from; j < reason_[b].to; ++j) {
                const Need& need = needs_[j];
                add(need.buffer, placed_[need.buffer] ? need.offset : 0);
                on_placed = on_placed || placed_[need.buffer];
            }
        }
    }
    for (i32 b : members_)
        if (!placed_[b]) need_[b] = std::min(lowest_[b], n.least_top);
    if (!on_placed) return;
    // The argument lets placed members lie where they are: those left are to stay above them.
    for (i32 b : members_) {
        if (!placed_[b]) continue;
        for (i32 k = p_.meets_from[b]; k < p_.meets_from[b + 1]; ++k)
            if (const i32 c = p_.meets[k]; !placed_[c] && need_[c] != kAbsent)
                need_[c] = std::max(need_[c], lowest_[b] + p_.size[b]);
    }
}

}  // namespace tightship::place
