// What the engine knows of a program before the first decision: touches, gaps and what may be decided in them.

#include <algorithm>
#include <utility>

#include "engine.h"

namespace tightship {

namespace {

Rows transpose(const std::vector<std::vector<i32>>& lists) {
    Rows r;
    r.start.push_back(0);
    for (const auto& l : lists) {
        r.item.insert(r.item.end(), l.begin(), l.end());
        r.start.push_back(static_cast<i64>(r.item.size()));
    }
    return r;
}
}  // namespace

Engine::Engine(Program program) : p_(std::move(program)) {
    index();
    find_gaps();
    find_movable();
    find_copies();
}

void Engine::index() {
    std::vector<std::vector<i32>> touches(p_.storages), writers(p_.storages);
    last_write_.assign(p_.storages, -1);
    shared_.assign(p_.storages, 0);
    std::vector<i32> reader(p_.storages, -1);
    for (i32 at = 0; at < p_.ops; ++at) {
        const i32 o = p_.order[at];
        auto touch = [&](i32 s) {
            if (touches[s].empty() || touches[s].back() != at) touches[s].push_back(at);
        };
        for (auto s = p_.reads.begin(o); s != p_.reads.end(o); ++s) {
            touch(*s);
            shared_[*s] = reader[*s] >= 0;
            reader[*s] = o;
        }
        for (auto s = p_.defines.begin(o); s != p_.defines.end(o); ++s) {
            touch(*s);
            writers[*s].push_back(o);
            last_write_[*s] = static_cast<i32>(touches[*s].size()) - 1;
        }
        for (auto s = p_.mutates.begin(o); s != p_.mutates.end(o); ++s) {
            writers[*s].push_back(o);
            last_write_[*s] = static_cast<i32>(touches[*s].size()) - 1;
        }
        base_time_ += p_.time[o];
    }
    for (i64 s = 0; s < p_.storages; ++s) {
        if (p_.kept[s]) touches[s].push_back(static_cast<i32>(p_.ops));
        if (p_.owned[s]) static_bytes_ += p_.size[s];
    }
    touches_ = transpose(touches);
    writers_ = transpose(writers);
}

// A recipe can run again when each of its ops is pure, writes nothing else, and sees final contents only.
bool Engine::recipe_is_replayable(i64 s) const {
    if (p_.owned[s] || writers_.size(s) == 0) return false;
    for (auto w = writers_.begin(s); w != writers_.end(s); ++w) {
        if (!p_.pure[*w]) return false;
        for (auto m = p_.mutates.begin(*w); m != p_.mutates.end(*w); ++m)
            if (*m != s && !contains(p_.updates, *w, *m)) return false;
        for (i64 j = 0; j < p_.reads.size(*w); ++j) {
            const i32 t = p_.reads.begin(*w)[j];
            if (t == s || p_.owned[t] || contains(p_.updates, *w, t)) continue;
            if (p_.needs.begin(*w)[j] != writers_.size(t)) return false;
        }
    }
    return true;
}

void Engine::find_gaps() {
    gap_of_.assign(touches_.item.size(), -1);
    replayable_.resize(p_.storages);
    for (i64 s = 0; s < p_.storages; ++s) {
        replayable_[s] = recipe_is_replayable(s);
        if (p_.size[s] == 0 || p_.owned[s]) continue;
        auto possible = [&](std::uint8_t may) -> std::uint8_t {
            if (!replayable_[s]) may &= ~(1 << kEvict | 1 << kPass | 1 << kDrop);
            if (!p_.packed[s]) may &= ~(1 << kPack);
            return may ? may : 1 << kKeep;
        };
        const i64 written = std::max(0, last_write_[s]);
        for (i64 j = 0; j + 1 < touches_.size(s); ++j) {
            const i32 from = touches_.begin(s)[j], to = touches_.begin(s)[j + 1];
            const bool bound = p_.must[s] && from < p_.boundary && to >= p_.boundary;
            std::uint8_t here = possible(bound ? p_.must[s] : p_.may[s]);
            // Before its last write it cannot be made again, nor is it known what packs; a copy has what was there.
            if (j < written) here &= 1 << kKeep | 1 << kOffload;
            // Results made again at the end would gain nothing; a copy of them may come back there.
            if (to == p_.ops) here &= 1 << kKeep | 1 << kPack | 1 << kOffload;
            if (to - from < 2 || here == 1 << kKeep || here == 0) continue;
            gap_of_[touches_.start[s] + j] = static_cast<i32>(gaps_.size());
            gaps_.push_back({static_cast<i32>(s), from, to});
            allowed_.push_back(here);
        }
    }
}

std::uint8_t Engine::least(i32 gap) const {
    std::uint8_t to = 0;
    while (to + 1 < kDecisions && !allowed(gap, to)) ++to;
    return to;
}

void Engine::find_copies() {
    for (i32 g = 0; g < static_cast<i32>(gaps_.size()); ++g)
        if (allowed(g, kOffload)) by_end_.push_back(g);
    std::sort(by_end_.begin(), by_end_.end(), [&](i32 a, i32 b) {
        return gaps_[a].to != gaps_[b].to ? gaps_[a].to > gaps_[b].to : a < b;
    });
    copies_ = !by_end_.empty();
    start_.assign(p_.ops + 1, 0);
    for (i32 at = 0; at < p_.ops; ++at) start_[at + 1] = start_[at] + p_.time[p_.order[at]];
    fetches_.resize(copies_ ? p_.ops + 1 : 0);
    offload_step_.assign(p_.storages, -1);
    fetch_step_.assign(p_.storages, -1);
}

void Engine::find_movable() {
    for (i32 at = 0; at < p_.ops; ++at) {
        const i32 o = p_.order[at];
        bool movable = p_.pure[o] && !p_.fixed[o] && p_.mutates.size(o) == 0, read = false;
        for (auto d = p_.defines.begin(o); d != p_.defines.end(o); ++d) {
            movable = movable && replayable_[*d] && writers_.size(*d) == 1;
            read = read || touches_.size(*d) > 1;
        }
        if (movable && read) movable_.push_back(at);
    }
    late_.assign(p_.ops, 0);
}

}  // namespace tightship
