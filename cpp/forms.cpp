// The other ways out of memory: packed in place, or copied out by one stream and back by another.

#include <algorithm>

#include "engine.h"

namespace tightship {

// When to issue each fetch so that it is done when its storage is read, going by the order's own times, last first:
// recomputation only adds time. What has no time for it is fetched when it is read.
void Engine::schedule() {
    for (auto& row : fetches_) row.clear();
    double before = std::numeric_limits<double>::infinity();
    for (i32 g : by_end_) {
        if (evict_[g] != kOffload) continue;
        const Gap& gap = gaps_[g];
        before = std::min(before, start_[gap.to]) - p_.fetch[gap.storage];
        const auto after = std::upper_bound(start_.begin(), start_.end(), before);
        const i32 at = static_cast<i32>(after - start_.begin()) - 1;
        if (at > gap.from + 1 && at < gap.to) fetches_[at].push_back(g);
    }
}

// What is fetched early has room where that begins, and perhaps not at every op until it is read. So where bytes are
// above the limit, once more, with nothing fetched across the places where they were; then with nothing fetched early.
Cost Engine::attempt_with_copies() {
    const i32 end = static_cast<i32>(p_.ops);
    room_until_.assign(p_.ops + 1, end + 1);
    Cost cost;
    for (int tried = 0;; ++tried) {
        crowded_.assign(p_.ops + 1, 0);
        early_ = false;
        cost = attempt();
        if (cost.peak <= limit_ || !early_ || tried == 2) return cost;
        if (tried == 1) std::fill(crowded_.begin(), crowded_.end(), 1);
        for (i32 at = end, next = end + 1; at >= 0; --at) {
            if (crowded_[at]) next = at;
            room_until_[at] = next;
        }
    }
}

void Engine::pack(i32 s) {
    if (copies_ && coming_[s] == 1) land(&s, &s + 1);
    if (copies_) make_room(p_.packed[s]);
    use(s_.live + p_.packed[s], s_.position);
    s_.live += p_.packed[s];
    s_.packed[s] = 1;
    spend(p_.pack[s]);
    if (out_) out_->push_back({kCompress, -1, {s}, kFull, 0, {}});
    leave(s);
}

void Engine::unpack(i32 s) {
    make_room(p_.size[s]);
    use(s_.live + p_.size[s], s_.position);
    s_.live += p_.size[s] - p_.packed[s];
    s_.packed[s] = 0;
    s_.resident[s] = 1;
    spend(p_.unpack[s]);
    if (!out_) return;
    out_->push_back({kDecompress, -1, {s}, kFull, 0, {}});
    out_->push_back({kFree, -1, {s}, kPacked, 0, {}});
}

// Copied out from now on; the bytes are given back once that is done, and at once only where they are short.
void Engine::send(i32 s) {
    if (coming_[s] == 1) land(&s, &s + 1);  // fetched for an op that runs later
    coming_[s] = 0;
    sent_ = std::max(sent_, now_) + p_.offload[s];
    s_.host[s] = 1;
    host_live_ += p_.size[s];
    s_.cost.host = std::max(s_.cost.host, host_live_);
    ready_[s] = sent_;
    spend(p_.lost[s]);
    leaving_now_.push_back(s);
    if (out_) {
        offload_step_[s] = static_cast<i32>(out_->size());
        out_->push_back({kOffloadStep, -1, {s}, kFull, 1, last_compute()});
    }
}

// Bytes of what has been copied out, given back as far as that costs no waiting.
void Engine::settle() {
    while (!leaving_now_.empty() && ready_[leaving_now_.front()] <= now_ && !pin_[leaving_now_.front()]) give_back();
}

void Engine::make_room(i64 bytes) {
    for (std::size_t k = 0; k < leaving_now_.size() && s_.live + bytes > limit_;)
        pin_[leaving_now_[k]] ? void(++k) : give_back(k);
}

void Engine::give_back(std::size_t which) {
    const i32 s = leaving_now_[which];
    leaving_now_.erase(leaving_now_.begin() + static_cast<std::ptrdiff_t>(which));
    wait_for(ready_[s]);
    s_.resident[s] = 0;
    s_.live -= p_.size[s];
    if (out_) out_->push_back({kFree, -1, {s}, kFull, 0, {offload_step_[s]}});
}

// Read again before its bytes were given back: it stays, the copy was for nothing and is waited for.
void Engine::stay(i32 s) {
    const auto at = std::find(leaving_now_.begin(), leaving_now_.end(), s);
    if (at == leaving_now_.end()) return;
    leaving_now_.erase(at);
    s_.host[s] = 0;
    host_live_ -= p_.size[s];
    if (out_) out_->push_back({kFree, -1, {s}, kHost, 1, {}});
    coming_[s] = 2;
    fetch_step_[s] = offload_step_[s];
}

void Engine::fetch(i32 s) {
    make_room(p_.size[s]);
    use(s_.live + p_.size[s], s_.position);
    s_.live += p_.size[s];
    s_.resident[s] = 1;
    s_.host[s] = 0;
    fetched_ = std::max({fetched_, now_, ready_[s]}) + p_.fetch[s];
    ready_[s] = fetched_;
    coming_[s] = 1;
    spend(p_.lost[s]);
    if (!out_) return;
    std::vector<i32> waits = last_compute();
    waits.push_back(offload_step_[s]);
    fetch_step_[s] = static_cast<i32>(out_->size());
    out_->push_back({kFetch, -1, {s}, kFull, 2, std::move(waits)});
}

// The fetches that are to begin here, or were to begin before and had no room.
void Engine::issue(i32 at) {
    late_fetches_.insert(late_fetches_.end(), fetches_[at].begin(), fetches_[at].end());
    std::size_t left = 0;
    for (i32 g : late_fetches_) {
        const i32 s = gaps_[g].storage;
        if (!s_.host[s] || gaps_[g].to <= at) continue;  // read meanwhile, or now
        if (room_until_[at] < gaps_[g].to || !fits(s, at)) {
            late_fetches_[left++] = g;
            continue;
        }
        stay(s);
        if (!s_.resident[s]) fetch(s), early_ = true;
    }
    late_fetches_.resize(left);
}

// Whether the op at a position still has room beside a storage that comes back before it.
bool Engine::fits(i32 s, i32 at) const {
    const i32 o = p_.order[at];
    i64 bytes = s_.live + (s_.resident[s] ? 0 : p_.size[s]) + p_.extra[o];
    for (auto d = p_.defines.begin(o); d != p_.defines.end(o); ++d) bytes += p_.size[*d];
    for (auto r = p_.reads.begin(o); r != p_.reads.end(o); ++r) bytes += s_.resident[*r] ? 0 : p_.size[*r];
    return bytes <= limit_;
}

// Wait for what is on its way of the storages an op reads; the steps it waits for.
std::vector<i32> Engine::arrivals(const i32* begin, const i32* end) {
    std::vector<i32> waits;
    for (auto s = begin; s != end; ++s) {
        if (!coming_[*s]) continue;
        if (coming_[*s] == 1) landed_.push_back(*s);
        coming_[*s] = 0;
        wait_for(ready_[*s]);
        if (out_) waits.push_back(fetch_step_[*s]);
    }
    return waits;
}

// The copies of what has arrived, given back on the stream that knows it.
void Engine::clear_copies() {
    for (i32 s : landed_) {
        host_live_ -= p_.size[s];
        if (out_) out_->push_back({kFree, -1, {s}, kHost, 0, {}});
    }
    landed_.clear();
}

// Wait for what is on its way, with no op that does.
void Engine::land(const i32* begin, const i32* end) {
    const auto waits = arrivals(begin, end);
    const std::size_t first = out_ ? out_->size() : 0;
    clear_copies();
    if (out_ && first < out_->size()) (*out_)[first].waits = waits;
}

// At the end: results are waited for; what came back for an op that ran later, and cannot be made again, goes.
void Engine::land_all() {
    std::vector<i32> results;
    for (i32 s = 0; s < static_cast<i32>(p_.storages); ++s)
        if (p_.kept[s]) results.push_back(s);
    land(results.data(), results.data() + results.size());
    for (i32 s = 0; s < static_cast<i32>(p_.storages); ++s)
        if (s_.resident[s] && !p_.kept[s] && !p_.owned[s]) leave(s);
}

void Engine::wait_for(double time) {
    if (time <= now_) return;
    s_.cost.extra += time - now_;
    now_ = time;
}

void Engine::spend(double seconds) {
    s_.cost.extra += seconds;
    now_ += seconds;
}

std::vector<i32> Engine::last_compute() const {
    for (std::size_t k = out_->size(); k-- > 0;)
        if ((*out_)[k].stream == 0) return {static_cast<i32>(k)};
    return {};
}

}  // namespace tightship
