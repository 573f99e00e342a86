#include "copies.h"

namespace tightship {

Copies::Copies(const Index& index, Replay& replay) : x_(index), s_(replay) {
    fetches_.resize(any() ? p_.ops + 1 : 0);
    offload_step_.assign(p_.storages, -1);
    fetch_step_.assign(p_.storages, -1);
}

// When to issue each fetch so that it is done when its storage is read, going by the order's own times, last
// first: recomputation only adds time. What has no time for it is fetched when it is read.
void Copies::schedule() {
    for (auto& row : fetches_) row.clear();
    double before = std::numeric_limits<double>::infinity();
    for (i32 g : x_.by_end) {
        if (s_.decisions[g] != kOffload) continue;
        const Gap& gap = x_.gaps[g];
        before = std::min(before, x_.start[gap.to]) - p_.fetch[gap.storage];
        const auto after = std::upper_bound(x_.start.begin(), x_.start.end(), before);
        const i32 at = static_cast<i32>(after - x_.start.begin()) - 1;
        if (at > gap.from + 1 && at < gap.to) fetches_[at].push_back(g);
    }
}

void Copies::plan() {
    attempts_ = 0;
    s_.crowded.clear();
    if (any()) room_until_.assign(p_.ops + 1, static_cast<i32>(p_.ops) + 1);
}

void Copies::begin_attempt() {
    early_ = false;
    if (any()) s_.crowded.assign(p_.ops + 1, 0);
}

// What is fetched early has room where that begins, and perhaps not at every op until it is read. So where
// bytes are above the limit, once more, with nothing fetched across the places where they were; then with
// nothing fetched early.
bool Copies::try_again(const Cost& cost) {
    if (cost.peak <= s_.limit || !early_ || attempts_ == 2) return false;
    if (attempts_++ == 1) std::fill(s_.crowded.begin(), s_.crowded.end(), 1);
    const i32 end = static_cast<i32>(p_.ops);
    for (i32 at = end, next = end + 1; at >= 0; --at) {
        if (s_.crowded[at]) next = at;
        room_until_[at] = next;
    }
    return true;
}

void Copies::reset() {
    sent_ = fetched_ = 0;
    host_live_ = 0;
    leaving_.clear();
    landed_.clear();
    late_.clear();
    if (!any()) return;
    ready_.assign(p_.storages, 0);
    coming_.assign(p_.storages, 0);
    schedule();
}

void Copies::begin(const i32* reads, const i32* end, i32 at) {
    for (auto s = reads; s != end; ++s) stay(*s);
    issue(at);
}

// The bytes of `s` are free from here on; a copy of it that is under way is waited for.
void Copies::leave(i32 s) {
    s_.resident[s] = 0;
    s_.live -= p_.size[s];
    std::vector<i32> waits;
    if (any() && coming_[s]) waits = arrivals(&s, &s + 1);
    if (s_.steps) {
        auto& steps = *s_.steps;
        const bool joins = !steps.empty() && steps.back().kind == kFree && steps.back().form == kFull &&
                           steps.back().stream == 0 && steps.back().waits.empty();
        if (!joins || !waits.empty()) steps.push_back({kFree, -1, {}, kFull, 0, std::move(waits)});
        steps.back().storages.push_back(s);
    }
    if (any()) clear();
}

void Copies::pack(i32 s) {
    if (any() && coming_[s] == 1) land(&s, &s + 1);
    make_room(p_.packed[s]);
    s_.use(s_.live + p_.packed[s], s_.position);
    s_.live += p_.packed[s];
    s_.packed[s] = 1;
    s_.spend(p_.pack[s]);
    if (s_.steps) s_.steps->push_back({kCompress, -1, {s}, kFull, 0, {}});
    leave(s);
}

void Copies::unpack(i32 s) {
    make_room(p_.size[s]);
    s_.use(s_.live + p_.size[s], s_.position);
    s_.live += p_.size[s] - p_.packed[s];
    s_.packed[s] = 0;
    s_.resident[s] = 1;
    s_.spend(p_.unpack[s]);
    if (!s_.steps) return;
    s_.steps->push_back({kDecompress, -1, {s}, kFull, 0, {}});
    s_.steps->push_back({kFree, -1, {s}, kPacked, 0, {}});
}

// Copied out from now on; the bytes are given back once that is done, and at once only where they are short.
void Copies::offload(i32 s) {
    if (coming_[s] == 1) land(&s, &s + 1);  // fetched for an op that runs later
    coming_[s] = 0;
    sent_ = std::max(sent_, s_.now) + p_.offload[s];
    s_.host[s] = 1;
    host_live_ += p_.size[s];
    s_.cost.host = std::max(s_.cost.host, host_live_);
    ready_[s] = sent_;
    s_.spend(p_.lost[s]);
    leaving_.push_back(s);
    if (s_.steps) {
        offload_step_[s] = static_cast<i32>(s_.steps->size());
        s_.steps->push_back({kOffloadStep, -1, {s}, kFull, 1, last_compute()});
    }
}

// Bytes of what has been copied out, given back as far as that costs no waiting.
void Copies::settle() {
    while (!leaving_.empty() && ready_[leaving_.front()] <= s_.now && !s_.pin[leaving_.front()]) give_back();
}

void Copies::make_room(i64 bytes) {
    for (std::size_t k = 0; k < leaving_.size() && s_.live + bytes > s_.limit;)
        s_.pin[leaving_[k]] ? void(++k) : give_back(k);
}

void Copies::give_back(std::size_t which) {
    const i32 s = leaving_[which];
    leaving_.erase(leaving_.begin() + static_cast<std::ptrdiff_t>(which));
    s_.wait_for(ready_[s]);
    s_.resident[s] = 0;
    s_.live -= p_.size[s];
    if (s_.steps) s_.steps->push_back({kFree, -1, {s}, kFull, 0, {offload_step_[s]}});
}

// Read again before its bytes were given back: it stays, the copy was for nothing and is waited for.
void Copies::stay(i32 s) {
    const auto at = std::find(leaving_.begin(), leaving_.end(), s);
    if (at == leaving_.end()) return;
    leaving_.erase(at);
    s_.host[s] = 0;
    host_live_ -= p_.size[s];
    if (s_.steps) s_.steps->push_back({kFree, -1, {s}, kHost, 1, {}});
    coming_[s] = 2;
    fetch_step_[s] = offload_step_[s];
}

void Copies::fetch(i32 s) {
    make_room(p_.size[s]);
    s_.use(s_.live + p_.size[s], s_.position);
    s_.live += p_.size[s];
    s_.resident[s] = 1;
    s_.host[s] = 0;
    fetched_ = std::max({fetched_, s_.now, ready_[s]}) + p_.fetch[s];
    ready_[s] = fetched_;
    coming_[s] = 1;
    s_.spend(p_.lost[s]);
    if (!s_.steps) return;
    std::vector<i32> waits = last_compute();
    waits.push_back(offload_step_[s]);
    fetch_step_[s] = static_cast<i32>(s_.steps->size());
    s_.steps->push_back({kFetch, -1, {s}, kFull, 2, std::move(waits)});
}

// The fetches that are to begin here, or were to begin before and had no room.
void Copies::issue(i32 at) {
    late_.insert(late_.end(), fetches_[at].begin(), fetches_[at].end());
    std::size_t left = 0;
    for (i32 g : late_) {
        const i32 s = x_.gaps[g].storage;
        if (!s_.host[s] || x_.gaps[g].to <= at) continue;  // read meanwhile, or now
        if (room_until_[at] < x_.gaps[g].to || !fits(s, at)) {
            late_[left++] = g;
            continue;
        }
        stay(s);
        if (!s_.resident[s]) fetch(s), early_ = true;
    }
    late_.resize(left);
}

// Whether the op at a position still has room beside a storage that comes back before it.
bool Copies::fits(i32 s, i32 at) const {
    const i32 o = p_.order[at];
    i64 bytes = s_.live + (s_.resident[s] ? 0 : p_.size[s]) + p_.extra[o];
    for (const i32 d : p_.defines[o]) bytes += p_.size[d];
    for (const i32 r : p_.reads[o]) bytes += s_.resident[r] ? 0 : p_.size[r];
    return bytes <= s_.limit;
}

// Wait for what is on its way of the storages an op reads; the steps it waits for.
std::vector<i32> Copies::arrivals(const i32* begin, const i32* end) {
    std::vector<i32> waits;
    for (auto s = begin; s != end; ++s) {
        if (!coming_[*s]) continue;
        if (coming_[*s] == 1) landed_.push_back(*s);
        coming_[*s] = 0;
        s_.wait_for(ready_[*s]);
        if (s_.steps) waits.push_back(fetch_step_[*s]);
    }
    return waits;
}

std::vector<i32> Copies::await(const i32* reads, const i32* end) {
    std::vector<i32> waits = arrivals(reads, end);
    settle();
    return waits;
}

// The copies of what has arrived, given back on the stream that knows it.
void Copies::clear() {
    for (i32 s : landed_) {
        host_live_ -= p_.size[s];
        if (s_.steps) s_.steps->push_back({kFree, -1, {s}, kHost, 0, {}});
    }
    landed_.clear();
}

// Wait for what is on its way, with no op that does.
void Copies::land(const i32* begin, const i32* end) {
    const auto waits = arrivals(begin, end);
    const std::size_t first = s_.steps ? s_.steps->size() : 0;
    clear();
    if (s_.steps && first < s_.steps->size()) (*s_.steps)[first].waits = waits;
}

// At the end: results are waited for; what came back for an op that ran later, and cannot be made again,
// goes.
void Copies::land_all() {
    if (any()) {
        std::vector<i32> results;
        for (i32 s = 0; s < static_cast<i32>(p_.storages); ++s)
            if (p_.kept[s]) results.push_back(s);
        land(results.data(), results.data() + results.size());
    }
    for (i32 s = 0; s < static_cast<i32>(p_.storages); ++s)
        if (s_.resident[s] && !p_.kept[s] && !p_.owned[s]) leave(s);
}

std::vector<i32> Copies::last_compute() const {
    for (std::size_t k = s_.steps->size(); k-- > 0;)
        if ((*s_.steps)[k].stream == 0) return {static_cast<i32>(k)};
    return {};
}

}  // namespace tightship
