#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>

#include "place_tree.h"

namespace tightship::place {

namespace {

// Sort keys, most important first: B load of the fullest section, W sections, L time alive, S size,
// A size times time, X size times sections; all largest first.
constexpr const char* kPreferences[] = {"X", "WBA", "BAW", "BLS", "LS", "BWA"};
constexpr int kTries = 6;  // of a round
constexpr double kDisorder[] = {0.01, 0.03, 0.06};
constexpr i64 kLeastWork = 100;
constexpr auto kWatchEvery = std::chrono::milliseconds(5);

struct Try {
    std::vector<i32> rank;
    i64 capacity = 0, most = 0;
    Outcome outcome = Outcome::given_up;
    i64 work = 0, nodes = 0, needed = 0;
    std::vector<i64> offset;
    std::vector<i32> nogood;
};

// A part with the best that is known of it.
struct Job {
    Part part;
    std::vector<i64> load;     // of the fullest section of every buffer
    i64 arena = 0, bound = 0;  // in units
    std::vector<i32> clash;
    std::vector<i32> successful;  // the order of the last try that found a placement
    i64 rounds = 0, tried = 0, work = 0, proving = 0;
};

// What the tries of a round have in common.
struct Plan {
    i64 capacity, most;
    int tries;
};

double key(const Job& job, i32 b, char name) {
    const Part& p = job.part;
    const double size = static_cast<double>(p.size[b]), sections = p.last[b] - p.first[b];
    switch (name) {
        case 'B':
            return static_cast<double>(job.load[b]);
        case 'W':
            return sections;
        case 'L':
            return p.length[b];
        case 'S':
            return size;
        case 'A':
            return size * p.length[b];
        default:
            return size * sections;
    }
}

std::vector<i32> order_by(const Job& job, const char* preference) {
    std::vector<i32> order(job.part.count());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](i32 b, i32 c) {
        for (const char* k = preference; *k; ++k)
            if (const double x = key(job, b, *k), y = key(job, c, *k); x != y) return x > y;
        return false;
    });
    return order;
}

// Runs the tries of a round, on as many threads as there are. The first of them (by number) that decides
// something ends the round; those after it are stopped, and do not count.
class Round {
  public:
    Round(const Part& part, std::vector<Try>& tries, const Watch& watch)
        : part_(part), tries_(tries), watch_(watch), decided_(static_cast<i64>(tries.size())) {}

    // False: it was ended by the watch.
    bool run(int most_threads) {
        std::vector<std::thread> others;
        const int threads = std::min<int>(most_threads, static_cast<int>(tries_.size()));
        try {
            for (int k = 1; k < threads; ++k, ++busy_) others.emplace_back([this] { work_beside(); });
            work(true);
            wait();
        } catch (...) {
            ended_ = true;
            for (std::thread& t : others) t.join();
            throw;
        }
        for (std::thread& t : others) t.join();
        return !ended_;
    }

    std::size_t decided() const { return static_cast<std::size_t>(decided_.load()); }

  private:
    const Part& part_;
    std::vector<Try>& tries_;
    const Watch& watch_;
    std::atomic<i64> next_{0}, decided_;
    std::atomic<bool> ended_{false};
    std::atomic<int> busy_{0};  // threads beside the caller's
    std::mutex mutex_;
    std::condition_variable done_;

    void work_beside() {
        work(false);
        const std::lock_guard<std::mutex> lock(mutex_);
        --busy_;
        done_.notify_one();
    }

    // For the others, keeping watch.
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!done_.wait_for(lock, kWatchEvery, [this] { return busy_ == 0; }))
            if (!ended_ && watch_()) ended_ = true;
    }

    void work(bool is_caller) {
        Tree tree(part_);
        const Stop stop = [this, is_caller](i64 number) { return is_over(number, is_caller); };
        for (i64 k; (k = next_++) < decided_ && !ended_;) {
            Try& t = tries_[k];
            t.outcome = tree.run(t.rank, t.capacity, t.most, k, stop);
            t.work = tree.work(), t.nodes = tree.nodes();
            if (t.outcome == Outcome::given_up) continue;
            if (t.outcome == Outcome::found) t.offset = tree.offset();
            else t.nogood = tree.nogood(), t.needed = tree.needed();
            for (i64 first = decided_; k < first && !decided_.compare_exchange_weak(first, k);) {
            }
        }
    }

    bool is_over(i64 number, bool is_caller) {
        if (ended_ || number > decided_) return true;
        if (is_caller && watch_()) ended_ = true;
        return ended_;
    }
};

// 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ...: within a constant factor of the best restarts when nothing is known of
// the times that tries take (Luby, Sinclair and Zuckerman 1993).
i64 luby(i64 k) {
    for (i64 power = 1;; power *= 2) {
        if (k == 2 * power - 1) return power;
        if (k < 2 * power - 1) return luby(k - power + 1);
    }
}

class Search {
  public:
    Search(const Buffers& b, std::vector<i64> offset, const ExactLimits& limits, const Watch& watch)
        : b_(b), limits_(limits), watch_(watch) {
        best_.offset = std::move(offset);
        measure();
        split();
    }

    Exact run() {
        for (Job* job; !stopped_ && !spent_ && (job = worst());) improve(*job);
        finish();
        return std::move(best_);
    }

  private:
    const Buffers& b_;
    const ExactLimits& limits_;
    const Watch& watch_;
    Exact best_;
    std::vector<Job> jobs_;
    std::vector<i64> alignment_;
    i64 unit_ = 1, goal_ = 0;
    bool spent_ = false;    // the work left is less than a try takes
    bool stopped_ = false;  // by the watch

    bool is_pinned(i64 k) const { return b_.pinned[k] != kFree; }
    void measure();
    void split();
    void fix(Part& part, i32 first) const;
    void open(const std::vector<i32>& members, i32 first);
    Job* worst();
    Plan next(Job& job) const;
    void improve(Job& job);
    i64 patience(const Job& job) const;
    void note(Job& job, const Try& done);
    void finish();
};

// The unit: the largest number that divides every size and whatever alignment is not implied by it.
void Search::measure() {
    i64 unit = 0;
    for (i64 k = 0; k < b_.count(); ++k)
        if (b_.size[k]) unit = std::gcd(std::gcd(unit, b_.size[k]), is_pinned(k) ? b_.pinned[k] : 0);
    unit_ = std::max<i64>(unit, 1);
    for (bool changed = true; changed;) {
        changed = false;
        for (i64 k = 0; k < b_.count(); ++k) {
            if (!b_.size[k] || unit_ % b_.alignment[k] == 0) continue;
            const i64 finer = std::gcd(unit_, b_.alignment[k]);
            changed = changed || finer != unit_;
            unit_ = finer;
        }
    }
    alignment_.resize(b_.count());
    for (i64 k = 0; k < b_.count(); ++k)
        alignment_[k] = unit_ % b_.alignment[k] == 0 ? 1 : b_.alignment[k] / unit_;
    goal_ = limits_.goal / unit_;
}

// Parts that share no time can be placed one by one.
void Search::split() {
    std::vector<i32> order;
    for (i64 k = 0; k < b_.count(); ++k) {
        if (b_.size[k] && is_pinned(k)) goal_ = std::max(goal_, (b_.pinned[k] + b_.size[k]) / unit_);
        if (b_.size[k] && !is_pinned(k)) order.push_back(static_cast<i32>(k));
        if (!b_.size[k] && b_.pinned[k] == kFree) best_.offset[k] = 0;
    }
    std::stable_sort(order.begin(), order.end(), [this](i32 x, i32 y) { return b_.first[x] < b_.first[y]; });
    std::vector<i32> members;
    i32 reach = 0;
    for (i32 k : order) {
        if (!members.empty() && b_.first[k] >= reach) {
            open(members, b_.first[members[0]]);
            members.clear();
        }
        members.push_back(k);
        reach = std::max(reach, b_.last[k]);
    }
    if (!members.empty()) open(members, b_.first[members[0]]);
}

void Search::open(const std::vector<i32>& members, i32 first) {
    Job& job = jobs_.emplace_back();
    Part& p = job.part;
    std::vector<i32> by_index = members;
    std::sort(by_index.begin(), by_index.end());
    for (i32 k : by_index) {
        p.id.push_back(k);
        p.first.push_back(b_.first[k] - first);
        p.last.push_back(b_.last[k] - first);
        p.size.push_back(b_.size[k] / unit_);
        p.alignment.push_back(alignment_[k]);
        p.length.push_back(b_.length[k]);
        job.arena = std::max(job.arena, (best_.offset[k] + b_.size[k] + unit_ - 1) / unit_);
    }
    fix(p, first);
    p.index();
    job.bound = p.bound;
    std::vector<i64> load(p.sections, 0);
    for (i32 b = 0; b < p.count(); ++b)
        for (i32 s = p.first[b]; s < p.last[b]; ++s) load[s] += p.size[b];
    for (i32 b = 0; b < p.count(); ++b)
        job.load.push_back(*std::max_element(load.begin() + p.first[b], load.begin() + p.last[b]));
}

// The pinned buffers alive with a part that begins with section `first`.
void Search::fix(Part& p, i32 first) const {
    const i32 sections = *std::max_element(p.last.begin(), p.last.end());
    for (i64 k = 0; k < b_.count(); ++k) {
        const i32 from = std::max(b_.first[k] - first, 0), to = std::min(b_.last[k] - first, sections);
        if (!is_pinned(k) || !b_.size[k] || from >= to) continue;
        p.fixed.resize(sections);
        const Span span{b_.pinned[k] / unit_, (b_.pinned[k] + b_.size[k]) / unit_};
        for (i32 s = from; s < to; ++s) p.fixed[s].push_back(span);
    }
}

// The part with the largest arena, if a smaller one would help.
Job* Search::worst() {
    i64 enough = goal_;
    Job* most = nullptr;
    for (Job& job : jobs_) {
        enough = std::max(enough, job.bound);
        if (!most || job.arena > most->arena) most = &job;
    }
    return most && most->arena > enough ? most : nullptr;
}

// The next round's tries. Of a capacity that is wanted two thirds ask; else rounds 1, 2, 4, 8, ... ask for
// the lowest. The others ask for a random one below the arena, more often a near one. A tenth of the work
// goes into proofs: two tries that need not be short.
Plan Search::next(Job& job) const {
    i64 lowest = goal_;
    for (const Job& other : jobs_) lowest = std::max(lowest, other.bound);
    const bool wanted = limits_.wanted && lowest == goal_;
    const i64 highest = job.arena - 1, most = patience(job);
    if (job.rounds > 2 && 9 * job.proving < job.work)
        return {wanted ? lowest : highest, std::max(most, job.work / 10), 2};
    const i64 round = ++job.rounds;
    if (wanted ? round % 3 != 0 : (round & (round - 1)) == 0) return {lowest, most, kTries};
    Random random(limits_.seed + static_cast<std::uint64_t>(round));
    const double share = static_cast<double>(random.below(1 << 20)) / (1 << 20);
    return {highest - static_cast<i64>(share * share * static_cast<double>(highest - lowest)), most, kTries};
}

// Work that a try may do: enough to get to the bottom of a tree a few times, and now and then more.
i64 Search::patience(const Job& job) const {
    const i64 n = job.part.count(), meets = static_cast<i64>(job.part.meets.size()) / n;
    return (kLeastWork + 4 * n * Tree::cost(n / 2, meets)) * luby(job.rounds / 3 + 1);
}

// The next round. What it does, and so the answer, depends on the work limit only in where it ends.
void Search::improve(Job& job) {
    const Plan plan = next(job);
    const i64 count = std::min<i64>(plan.tries, std::max<i64>(0, limits_.work - best_.work) / plan.most);
    if (!count) {
        spent_ = true;
        return;
    }
    const bool proves = plan.tries != kTries;
    std::vector<Try> tries(count);
    for (i64 k = 0; k < count; ++k, ++job.tried) {
        Random random(limits_.seed * 0x2545f4914f6cdd1du + static_cast<std::uint64_t>(job.tried));
        const double disorder = job.rounds < 3 ? 0 : kDisorder[random.below(3)];
        const bool repeats = k % 2 == 1 && !job.successful.empty();
        const std::vector<i32> order =
            repeats ? job.successful : order_by(job, kPreferences[job.tried % kTries]);
        tries[k].rank = ranks(order, disorder, random);
        tries[k].capacity = plan.capacity;
        tries[k].most = plan.most;
    }
    Round round(job.part, tries, watch_);
    stopped_ = !round.run(limits_.threads);
    const std::size_t decided = round.decided();
    for (std::size_t k = 0; k < tries.size() && k <= decided; ++k) {
        best_.work += tries[k].work, best_.nodes += tries[k].nodes;
        job.work += tries[k].work, job.proving += proves ? tries[k].work : 0;
    }
    if (decided < tries.size()) note(job, tries[decided]);
}

// Takes down what a try decided.
void Search::note(Job& job, const Try& done) {
    const Part& p = job.part;
    if (done.outcome == Outcome::refuted) {
        job.bound = std::min(done.needed, job.arena);
        job.clash.clear();
        for (i32 b : done.nogood) job.clash.push_back(p.id[b]);
        return;
    }
    job.arena = 0;
    job.successful.resize(p.count());
    for (i32 b = 0; b < p.count(); ++b) job.successful[done.rank[b]] = b;
    for (i32 b = 0; b < p.count(); ++b) {
        best_.offset[p.id[b]] = done.offset[b] * unit_;
        job.arena = std::max(job.arena, done.offset[b] + p.size[b]);
    }
}

void Search::finish() {
    for (i64 k = 0; k < b_.count(); ++k) best_.arena = std::max(best_.arena, best_.offset[k] + b_.size[k]);
    for (Job& job : jobs_) {
        if (job.bound * unit_ <= best_.bound) continue;
        best_.bound = job.bound * unit_;
        best_.clash = std::move(job.clash);
    }
    std::sort(best_.clash.begin(), best_.clash.end());
}

}  // namespace

Exact place_exactly(const Buffers& buffers, std::vector<i64> offset, const ExactLimits& limits,
                    const Watch& watch) {
    return Search(buffers, std::move(offset), limits, watch).run();
}

}  // namespace tightship::place
