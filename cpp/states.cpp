#include "states.h"

#include <cstring>
#include <numeric>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>

namespace tightship {

namespace {

constexpr i64 kOut = -1;  // the offset of what is handed out
constexpr std::size_t kMostOffsets = 400;
constexpr std::size_t kMostStates = 3'000'000;
constexpr i64 kAsked = 1 << 12;  // pieces of work between two looks at the clock

struct State {
    std::uint64_t ran = 0;
    std::vector<std::uint8_t> version;  // by storage: 0 is not there (of the caller's: not written yet)
    std::vector<i64> at;                // by storage: its offset
};

struct Run {
    i32 op = -1;
    std::vector<i32> stays;   // what it defines that is there after it
    std::vector<i32> reuses;  // storage read, storage that takes its place, and so on
};

// A block of the op that runs: what stays of it, or what passes (storage -1).
struct Block {
    i32 storage;
    i64 size;
    i32 first, last;
};

class Search {
  public:
    Search(const StateProblem& problem, const StateLimits& limits) : q_(problem), p_(problem.p), l_(limits) {
        prepare();
    }
    StatePath go();

  private:
    struct Node {
        i32 parent;
        Run run;
        double cost;
        bool closed = false;
    };
    struct Open {
        double cost;
        i32 left, node;
        bool operator<(const Open& o) const {
            if (cost != o.cost) return cost > o.cost;
            return left != o.left ? left > o.left : node < o.node;
        }
    };

    // Counts a piece of work; whether there is no more of it, or no time.
    bool spent() { return ++work_ >= l_.work || (work_ % kAsked == 0 && l_.watch()); }

    const StateProblem& q_;
    const Program& p_;
    const StateLimits& l_;
    i64 room_ = 0;  // bytes of the arena
    std::uint64_t every_ = 0;
    std::vector<std::uint64_t> before_;
    std::vector<std::uint8_t> repeatable_, last_version_;
    std::vector<i64> offsets_;
    std::vector<Node> nodes_;
    std::vector<std::string> keys_;
    std::unordered_map<std::string, i32> known_;
    std::priority_queue<Open> open_;
    i64 work_ = 0;
    bool cut_ = false;      // out of work or time
    bool partial_ = false;  // something was left out

    // The run that is looked at.
    const State* from_ = nullptr;
    i32 node_ = -1, op_ = -1;
    bool again_ = false;
    double cost_ = 0;
    Run run_;
    std::vector<std::uint8_t> there_;  // by storage: is there before it, and not gone for it

    void prepare();
    void stack_offsets();
    std::string key(const State& s) const;
    State state(const std::string& key) const;
    bool done(const State& s) const;
    bool out(const State& s, i32 storage) const { return p_.kept[storage] && s.at[storage] == kOut; }
    bool handed(i32 s) const { return q_.hand_out && p_.kept[s] && p_.size[s] > 0; }
    void expand(i32 node, const State& s);
    void run(const State& s, i32 op);
    void choose_reuses(i64 pair, State& s);
    void choose_stays(i64 at, State& s);
    void choose_out(std::size_t at, State& s);
    void make_room(State& s);
    void drop(State& s, const std::vector<i32>& loose, std::size_t at, i64 need);
    void lay(State& s, const std::vector<Block>& blocks, std::size_t at,
             std::vector<std::pair<i64, i64>>& ends);
    void reach(const State& s);
    bool reads(i32 s) const { return p_.reads.has(op_, s); }
    StatePath path(i32 node) const;
};

void Search::prepare() {
    const i64 n = p_.ops;
    every_ = n == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
    before_.assign(n, 0), repeatable_.assign(n, 0);
    last_version_.assign(p_.storages, 0);
    room_ = q_.limit;
    for (i32 s = 0; s < p_.storages; ++s) {
        if (p_.owned[s]) room_ -= p_.size[s];
        if (handed(s)) room_ -= p_.size[s];
    }
    for (i32 o = 0; o < n; ++o) {
        for (const i32 b : q_.before[o]) before_[o] |= std::uint64_t{1} << b;
        bool may = p_.pure[o] && p_.defines.size(o) + p_.mutates.size(o) > 0;
        for (const i32 s : p_.mutates[o]) may &= !p_.owned[s] || p_.updates.has(o, s);
        repeatable_[o] = may;
        for (const i32 s : p_.defines[o]) ++last_version_[s];
        for (const i32 s : p_.mutates[o]) ++last_version_[s];
    }
    if (q_.place) stack_offsets();
}

// Pushed down as far as it goes, everything lies on a stack of others.
void Search::stack_offsets() {
    std::set<i64> sums{0};
    const auto add = [&](i64 size) {
        if (size <= 0) return;
        std::vector<i64> more;
        for (const i64 x : sums)
            if (x + size < room_) more.push_back(x + size);
        sums.insert(more.begin(), more.end());
        while (sums.size() > kMostOffsets) sums.erase(std::prev(sums.end())), partial_ = true;
    };
    for (i32 s = 0; s < p_.storages; ++s)
        if (!p_.owned[s]) add(p_.size[s]);
    for (const auto& row : q_.temporaries)
        for (const Temporary& t : row) add(t.size);
    offsets_.assign(sums.begin(), sums.end());
}

std::string Search::key(const State& s) const {
    std::string k(8 + p_.storages + (q_.place || q_.hand_out ? 4 * p_.storages : 0), '\0');
    std::memcpy(k.data(), &s.ran, 8);
    std::memcpy(k.data() + 8, s.version.data(), p_.storages);
    if (q_.place || q_.hand_out)
        for (i64 j = 0; j < p_.storages; ++j) {
            // Offsets by number: bytes do not fit.
            i32 x = -1;
            if (s.at[j] >= 0)
                x = q_.place ? static_cast<i32>(std::lower_bound(offsets_.begin(), offsets_.end(), s.at[j]) -
                                                offsets_.begin())
                             : 0;
            std::memcpy(k.data() + 8 + p_.storages + 4 * j, &x, 4);
        }
    return k;
}

State Search::state(const std::string& k) const {
    State s{0, std::vector<std::uint8_t>(p_.storages), std::vector<i64>(p_.storages, 0)};
    std::memcpy(&s.ran, k.data(), 8);
    std::memcpy(s.version.data(), k.data() + 8, p_.storages);
    if (q_.place || q_.hand_out)
        for (i64 j = 0; j < p_.storages; ++j) {
            i32 x;
            std::memcpy(&x, k.data() + 8 + p_.storages + 4 * j, 4);
            s.at[j] = x < 0 ? kOut : q_.place ? offsets_[x] : 0;
        }
    return s;
}

bool Search::done(const State& s) const {
    if (s.ran != every_) return false;
    for (i32 j = 0; j < p_.storages; ++j)
        if (p_.kept[j] && !p_.owned[j] &&
            (s.version[j] != last_version_[j] || (handed(j) && s.at[j] != kOut)))
            return false;
    return true;
}

void Search::expand(i32 node, const State& s) {
    node_ = node, cost_ = nodes_[node].cost;
    for (i32 o = 0; o < p_.ops && !cut_; ++o) run(s, o);
}

void Search::run(const State& s, i32 o) {
    again_ = s.ran >> o & 1;
    if (again_ ? !repeatable_[o] : (before_[o] & ~s.ran) != 0) return;
    if (again_ && cost_ + p_.time[o] > l_.cutoff) return;
    const i32* need = p_.needs.begin(o);
    for (const i32 r : p_.reads[o]) {
        const i32 wanted = *need++;
        if (again_ && p_.updates.size(o) && p_.updates.has(o, r)) continue;
        if (s.version[r] != wanted) return;
    }
    bool fresh = false;
    for (const i32 d : p_.defines[o]) {
        if (!again_ && s.version[d]) return;  // made before its time: cannot be
        fresh |= s.version[d] != 1;
    }
    if (again_ && !fresh && p_.mutates.size(o) == 0) return;
    if (spent() || nodes_.size() > kMostStates) {
        cut_ = true;
        return;
    }
    op_ = o, from_ = &s, run_ = {o, {}, {}}, there_ = s.version;
    State next = s;
    next.ran |= std::uint64_t{1} << o;
    for (const i32 m : p_.mutates[o])
        if (!(again_ && p_.updates.has(o, m))) ++next.version[m];
    choose_reuses(0, next);
}

// Which results take the places of inputs.
void Search::choose_reuses(i64 pair, State& s) {
    if (cut_) return;
    if (2 * pair == p_.overwrites.size(op_)) return choose_stays(0, s);
    choose_reuses(pair + 1, s);
    const i32 a = p_.overwrites.begin(op_)[2 * pair], b = p_.overwrites.begin(op_)[2 * pair + 1];
    if (p_.owned[a] || p_.kept[b] || out(s, a) || !there_[a] || out(s, b) || reads(b)) return;
    if (std::find(run_.stays.begin(), run_.stays.end(), b) != run_.stays.end()) return;
    const std::uint8_t version = s.version[a], was = s.version[b];
    const i64 at = s.at[a], lay = s.at[b];
    s.version[a] = there_[a] = there_[b] = 0, s.at[a] = 0, s.version[b] = 1, s.at[b] = at;
    run_.stays.push_back(b);
    run_.reuses.insert(run_.reuses.end(), {a, b});
    choose_reuses(pair + 1, s);
    run_.stays.pop_back();
    run_.reuses.resize(run_.reuses.size() - 2);
    s.version[b] = was, s.at[b] = lay, s.version[a] = version, s.at[a] = at;
    there_[a] = from_->version[a], there_[b] = from_->version[b];
}

// Which results are there after a recomputation.
void Search::choose_stays(i64 at, State& s) {
    if (cut_) return;  // an op may have many results
    if (at == p_.defines.size(op_)) return choose_out(0, s);
    const i32 d = p_.defines.begin(op_)[at];
    const std::uint8_t version = s.version[d];
    if (version) choose_stays(at + 1, s);
    if (version && (!there_[d] || reads(d) || out(s, d))) return;
    // What is there goes, to be made again or not.
    const i64 x = s.at[d];
    s.version[d] = there_[d] = 0, s.at[d] = 0;
    if (again_) choose_stays(at + 1, s);
    s.version[d] = 1;
    run_.stays.push_back(d);
    choose_stays(at + 1, s);
    run_.stays.pop_back();
    s.version[d] = version, s.at[d] = x, there_[d] = from_->version[d];
}

// Which of them are the caller's from here on: those that nothing writes any more are.
void Search::choose_out(std::size_t at, State& s) {
    if (cut_) return;
    if (at == run_.stays.size()) return make_room(s);
    const i32 d = run_.stays[at];
    if (!handed(d)) return choose_out(at + 1, s);
    s.at[d] = kOut;
    choose_out(at + 1, s);
    s.at[d] = 0;
    if (last_version_[d] > 1) choose_out(at + 1, s);
}

void Search::make_room(State& s) {
    if (q_.place) {
        std::vector<Block> blocks;
        const i32* define = p_.defines.begin(op_);
        for (std::size_t j = 0; j < q_.first[op_].size(); ++j) {
            const i32 d = define[j];
            const bool took = std::find(run_.reuses.begin(), run_.reuses.end(), d) != run_.reuses.end();
            const bool stays = std::find(run_.stays.begin(), run_.stays.end(), d) != run_.stays.end();
            if (took || (stays && out(s, d)) || !p_.size[d]) continue;
            blocks.push_back({stays ? d : -1, p_.size[d], q_.first[op_][j], std::numeric_limits<i32>::max()});
        }
        for (const Temporary& t : q_.temporaries[op_])
            if (t.size) blocks.push_back({-1, t.size, t.first, t.last});
        std::vector<std::pair<i64, i64>> placed;
        return lay(s, blocks, 0, placed);
    }
    i64 live = p_.extra[op_];
    std::vector<i32> loose;
    for (i32 j = 0; j < p_.storages; ++j) {
        if (p_.owned[j] || !there_[j] || out(*from_, j)) continue;
        live += p_.size[j];
        if (!reads(j) && p_.size[j] && !p_.defines.has(op_, j)) loose.push_back(j);
    }
    for (const i32 d : p_.defines[op_]) live += there_[d] || !out(s, d) ? p_.size[d] : 0;
    drop(s, loose, 0, live - room_);
}

// Every least set of what is not read that makes room.
void Search::drop(State& s, const std::vector<i32>& loose, std::size_t at, i64 need) {
    if (cut_) return;
    if (spent()) {  // there may be many sets
        cut_ = true;
        return;
    }
    if (need <= 0) {
        for (std::size_t j = 0; j < at; ++j)  // none of them in vain
            if (!s.version[loose[j]] && need + p_.size[loose[j]] <= 0) return;
        return reach(s);
    }
    for (std::size_t j = at; j < loose.size(); ++j) {
        const std::uint8_t version = s.version[loose[j]];
        s.version[loose[j]] = 0;
        drop(s, loose, j + 1, need - p_.size[loose[j]]);
        s.version[loose[j]] = version;
    }
}

// A place for each block: over whatever is there that the op does not read.
void Search::lay(State& s, const std::vector<Block>& blocks, std::size_t at,
                 std::vector<std::pair<i64, i64>>& ends) {
    if (cut_) return;
    if (at == blocks.size() && at > 0) return reach(s);
    if (spent()) {
        cut_ = true;
        return;
    }
    if (blocks.empty()) return reach(s);
    const Block& b = blocks[at];
    const auto taken = [&](i64 x, i64 other, i64 size) { return x < other + size && other < x + b.size; };
    for (const i64 x : offsets_) {
        if (x + b.size > room_) break;
        bool clear = true;
        for (std::size_t j = 0; j < at && clear; ++j)
            clear = !taken(x, ends[j].first, ends[j].second) || b.first >= blocks[j].last ||
                    blocks[j].first >= b.last;
        for (std::size_t j = 1; j < run_.reuses.size() && clear; j += 2)
            clear = !taken(x, s.at[run_.reuses[j]], p_.size[run_.reuses[j]]);
        std::vector<std::pair<i32, std::uint8_t>> gone;
        for (i32 j = 0; j < p_.storages && clear; ++j) {
            if (p_.owned[j] || !there_[j] || !s.version[j] || out(s, j) || !p_.size[j]) continue;
            if (!taken(x, s.at[j], p_.size[j])) continue;
            if (reads(j) || p_.defines.has(op_, j)) clear = false;
            else gone.emplace_back(j, s.version[j]);
        }
        if (!clear) continue;
        std::vector<i64> were;
        for (const auto& [j, version] : gone) were.push_back(s.at[j]), s.version[j] = 0, s.at[j] = 0;
        const i64 was = b.storage >= 0 ? s.at[b.storage] : 0;
        if (b.storage >= 0) s.at[b.storage] = x;
        ends.emplace_back(x, b.size);
        lay(s, blocks, at + 1, ends);
        ends.pop_back();
        if (b.storage >= 0) s.at[b.storage] = was;
        for (std::size_t j = 0; j < gone.size(); ++j)
            s.version[gone[j].first] = gone[j].second, s.at[gone[j].first] = were[j];
    }
}

void Search::reach(const State& s) {
    const double cost = cost_ + (again_ ? p_.time[op_] : 0.0);
    ++work_;
    if (cost > l_.cutoff) return;
    const auto [it, fresh] = known_.try_emplace(key(s), static_cast<i32>(nodes_.size()));
    const i32 left = static_cast<i32>(p_.ops) - __builtin_popcountll(s.ran);
    if (fresh) {
        nodes_.push_back({node_, run_, cost});
        keys_.push_back(it->first);
    } else {
        Node& n = nodes_[it->second];
        if (n.closed || cost >= n.cost) return;
        n.parent = node_, n.run = run_, n.cost = cost;
    }
    open_.push({cost, left, it->second});
}

StatePath Search::go() {
    StatePath found;
    if (room_ < 0) {
        found.all = true;
        return found;
    }
    State start{0, std::vector<std::uint8_t>(p_.storages, 0), std::vector<i64>(p_.storages, 0)};
    nodes_.push_back({-1, {}, 0});
    keys_.push_back(key(start));
    known_.emplace(keys_[0], 0);
    open_.push({0, static_cast<i32>(p_.ops), 0});
    i64 asked = 0;
    while (!open_.empty() && !cut_) {
        const Open top = open_.top();
        open_.pop();
        if (nodes_[top.node].closed) continue;
        nodes_[top.node].closed = true;
        const State s = state(keys_[top.node]);
        if (done(s)) {
            found = path(top.node);
            found.all = !partial_;
            break;
        }
        expand(top.node, s);
        if (++asked % 256 == 0 && l_.watch()) break;
    }
    if (!found.found) found.all = open_.empty() && !cut_ && !partial_;
    found.work = work_;
    return found;
}

// The steps of a path: everything goes after its last use.
StatePath Search::path(i32 node) const {
    StatePath found;
    found.found = true, found.extra = nodes_[node].cost;
    std::vector<const Run*> runs;
    for (i32 n = node; nodes_[n].parent >= 0; n = nodes_[n].parent) runs.push_back(&nodes_[n].run);
    std::reverse(runs.begin(), runs.end());
    std::vector<std::vector<i32>> ends(runs.size());
    std::vector<i32> last(p_.storages, -1);  // run that touched what is there last
    const auto end = [&](i32 s) {
        if (last[s] >= 0 && !p_.owned[s]) ends[last[s]].push_back(s);
        last[s] = -1;
    };
    std::uint64_t ran = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const i32 o = runs[i]->op;
        const bool again = ran >> o & 1;
        ran |= std::uint64_t{1} << o;
        for (const i32 r : p_.reads[o])
            if (!again || !p_.updates.has(o, r)) last[r] = static_cast<i32>(i);
        for (std::size_t j = 0; j < runs[i]->reuses.size(); j += 2) last[runs[i]->reuses[j]] = -1;
        for (const i32 d : runs[i]->stays) end(d), last[d] = static_cast<i32>(i);
    }
    for (i32 s = 0; s < p_.storages; ++s)
        if (!p_.kept[s]) end(s);
    ran = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const i32 o = runs[i]->op;
        const bool again = ran >> o & 1;
        ran |= std::uint64_t{1} << o;
        Step step{again ? kRecompute : kCompute, o, {}};
        if (again) step.storages = runs[i]->stays;
        step.reuses = runs[i]->reuses;
        found.steps.push_back(std::move(step));
        if (!ends[i].empty()) found.steps.push_back({kFree, -1, ends[i]});
    }
    return found;
}

}  // namespace

StatePath search_states(const StateProblem& problem, const StateLimits& limits) {
    return Search(problem, limits).go();
}

}  // namespace tightship
