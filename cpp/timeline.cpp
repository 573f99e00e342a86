#include "timeline.h"

#include <map>

namespace tightship {

namespace {

class Machine {
  public:
    Machine(const Values& g, const Uses& u, const std::vector<i64>& size, const Costs& c, const PlanSteps& p)
        : g_(g), u_(u), size_(size), c_(c), p_(p), full_(g.caller), ran_(c.time.size()),
          saved_(c.time.size()), host_(size.size()), packed_(size.size()), version_(size.size()),
          of_packed_(size.size()), of_host_(size.size()) {
        for (std::size_t s = 0; s < size.size(); ++s)
            if (g.caller[s]) live_ += size[s];
    }

    Timeline run() {
        Timeline t;
        t.peak = live_;
        clock_[0] = 0;
        const auto count = static_cast<i64>(p_.kind.size());
        for (std::vector<i64>* column : {&t.during, &t.resident}) column->reserve(count);
        for (i64 i = 0; i < count; ++i) {
            i64 now = live_;
            if (!step(t, i, now)) return {};
            if (now > t.peak) t.peak = now, t.peak_step = i;
            t.during.push_back(now), t.resident.push_back(live_);
        }
        t.host_peak = host_peak_, t.legal = true;
        for (const auto& [_, at] : clock_) t.time = std::max(t.time, at);
        return t;
    }

  private:
    const Values& g_;
    const Uses& u_;
    const std::vector<i64>& size_;
    const Costs& c_;
    const PlanSteps& p_;
    std::vector<std::uint8_t> full_, ran_, saved_, host_;
    std::vector<i64> packed_;
    std::vector<i32> version_, of_packed_, of_host_;
    i64 live_ = 0, host_live_ = 0, host_peak_ = 0;
    std::map<i64, double> clock_;

    bool step(Timeline& t, i64 i, i64& now) {
        for (const i32 s : p_.storages[i])
            if (s < 0 || s >= static_cast<i64>(size_.size())) return false;
        for (const i32 w : p_.waits[i])
            if (w < 0 || w >= i) return false;
        const bool runs = p_.kind[i] <= kRecomputes;
        if (p_.op[i] >= static_cast<i64>(ran_.size()) || (p_.op[i] < 0 && runs)) return false;
        if (runs) return op(t, i, now);
        return p_.kind[i] == kFrees ? free(t, i) : p_.kind[i] < kFrees && move(t, i, now);
    }

    bool op(Timeline& t, i64 i, i64& now) {
        const auto k = static_cast<i32>(p_.op[i]);
        const bool again = p_.kind[i] == kRecomputes, saves = p_.saves[i];
        if (again != static_cast<bool>(ran_[k])) return false;
        if (again && (g_.effect[k] || (g_.random[k] && !saved_[k]))) return false;
        if (saves && (again || !c_.state[k])) return false;
        ran_[k] = 1;
        if (!reads(k, again)) return false;
        for (const i32 s : u_.mutates[k])
            if (!(again && c_.updates.has(k, s))) ++version_[s];
        if (!overwrite(i, k, again)) return false;
        now = live_ + c_.extra[k] + (saves || again ? c_.state[k] : 0);
        for (const i32 s : u_.defines[k]) now += size_[s];
        if (saves) saved_[k] = 1, live_ += c_.state[k];
        for (const i32 s : again ? p_.storages[i] : u_.defines[k]) {
            if (full_[s] || !u_.defines.has(k, s)) return false;
            full_[s] = 1, version_[s] = 1;
            live_ += size_[s];
        }
        double seconds = c_.time[k];
        if (g_.random[k]) seconds += c_.save * (int(saves) + 3 * int(again));
        t.compute_time += seconds;
        advance(t, i, seconds);
        return true;
    }

    bool reads(i32 k, bool again) const {
        const i32* need = u_.needs.begin(k);
        for (const i32 s : u_.reads[k]) {
            const bool right = version_[s] == *need++ && full_[s];
            if (!right && !(again && c_.updates.has(k, s))) return false;
        }
        for (const i32 v : g_.inputs[k])
            if (u_.maker[v] >= 0 && !ran_[u_.maker[v]]) return false;
        return true;
    }

    bool overwrite(i64 i, i32 k, bool again) {
        const auto pairs = p_.reuses[i];
        if (p_.reuses.size(i) % 2) return false;
        for (const i32* pair = pairs.begin(); pair != pairs.end(); pair += 2) {
            const i32 a = pair[0], b = pair[1];
            bool allowed = false;
            for (const i32* may = c_.overwrites.begin(k); may != c_.overwrites.end(k); may += 2)
                allowed |= may[0] == a && may[1] == b;
            if (!allowed || !(again ? p_.storages : u_.defines).has(again ? i : k, b)) return false;
            for (const i32* before = pairs.begin(); before != pair; before += 2)
                if (before[1] == b) return false;
            if (g_.caller[a] || !full_[a] || full_[b]) return false;
            full_[a] = 0;
            live_ -= size_[a];
        }
        return true;
    }

    bool move(Timeline& t, i64 i, i64& now) {
        const std::uint8_t kind = p_.kind[i];
        for (const i32 s : p_.storages[i]) {
            const bool out = kind == kOffloads || kind == kCompresses,
                       host = kind == kOffloads || kind == kFetches;
            if (!(out ? full_[s] : host ? host_[s] : packed_[s] > 0)) return false;
            i32& copied = (host ? of_host_ : of_packed_)[s];
            (out ? copied : version_[s]) = out ? version_[s] : copied;
            if (kind == kOffloads) {
                if (host_[s]) return false;
                host_[s] = 1;
                host_live_ += size_[s];
                host_peak_ = std::max(host_peak_, host_live_);
            } else if (kind == kCompresses) {
                if (packed_[s] || p_.nbytes[i] < 1) return false;
                packed_[s] = p_.nbytes[i];
                live_ += packed_[s];
            } else {
                if (full_[s]) return false;
                full_[s] = 1;
                live_ += size_[s];
            }
        }
        now = live_;
        if (p_.stream[i] == 0) {
            t.compute_time += p_.seconds[i];
            advance(t, i, p_.seconds[i]);
            return true;
        }
        double& at = clock_[p_.stream[i]];
        at = std::max(at, clock_[0]);
        advance(t, i, p_.seconds[i]);
        t.compute_time += p_.lost[i];
        clock_[0] += p_.lost[i];
        return true;
    }

    bool free(Timeline& t, i64 i) {
        const std::uint8_t form = p_.form[i];
        if (form > kStateForm) return false;
        if (form == kStateForm) {
            if (p_.op[i] < 0 || !saved_[p_.op[i]] || p_.storages.size(i)) return false;
            saved_[p_.op[i]] = 0;
            live_ -= c_.state[p_.op[i]];
        }
        for (const i32 s : p_.storages[i]) {
            if (form == kFullForm) {
                if (g_.caller[s] || !full_[s]) return false;
                full_[s] = 0, live_ -= size_[s];
            } else if (form == kHostForm) {
                if (!host_[s]) return false;
                host_[s] = 0, host_live_ -= size_[s];
            } else {
                if (!packed_[s]) return false;
                live_ -= packed_[s], packed_[s] = 0;
            }
        }
        advance(t, i, 0);
        return true;
    }

    void advance(Timeline& t, i64 i, double seconds) {
        double& at = clock_[p_.stream[i]];
        double start = at;
        for (const i32 w : p_.waits[i]) start = std::max(start, t.ends[w]);
        at = start + seconds;
        t.begins.push_back(start), t.ends.push_back(at);
    }
};

}  // namespace

Timeline timeline(const Values& g, const Uses& u, const std::vector<i64>& size, const Costs& costs,
                  const PlanSteps& steps) {
    return Machine(g, u, size, costs, steps).run();
}

}  // namespace tightship
