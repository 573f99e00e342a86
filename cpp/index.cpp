#include "index.h"

#include <utility>

namespace tightship {

namespace {

// Bytes, at most: those of what is made in many ways are counted many times over.
constexpr i64 kMany = i64{1} << 60;

Rows as_rows(const std::vector<std::vector<i32>>& lists) {
    Rows r;
    r.start.push_back(0);
    for (const auto& l : lists) {
        r.item.insert(r.item.end(), l.begin(), l.end());
        r.start.push_back(static_cast<i64>(r.item.size()));
    }
    return r;
}

}  // namespace

Index::Index(Program program) : p(std::move(program)) {
    find_touches();
    find_gaps();
    find_stays();
    find_movable();
    find_offloads();
}

void Index::find_touches() {
    std::vector<std::vector<i32>> touched(p.storages), written(p.storages), versions(p.storages);
    last_write.assign(p.storages, -1);
    shared.assign(p.storages, 0);
    std::vector<i32> reader(p.storages, -1);
    for (i32 at = 0; at < p.ops; ++at) {
        const i32 o = p.order[at];
        auto touch = [&](i32 s) {
            if (!touched[s].empty() && touched[s].back() == at) return;
            touched[s].push_back(at);
            versions[s].push_back(static_cast<i32>(written[s].size()));
        };
        for (const i32 s : p.reads[o]) {
            touch(s);
            shared[s] = reader[s] >= 0;
            reader[s] = o;
        }
        for (const i32 s : p.defines[o]) {
            touch(s);
            written[s].push_back(o);
            last_write[s] = static_cast<i32>(touched[s].size()) - 1;
        }
        for (const i32 s : p.mutates[o]) {
            written[s].push_back(o);
            last_write[s] = static_cast<i32>(touched[s].size()) - 1;
        }
        base_time += p.time[o];
    }
    for (i64 s = 0; s < p.storages; ++s) {
        if (p.kept[s]) {
            touched[s].push_back(static_cast<i32>(p.ops));
            versions[s].push_back(static_cast<i32>(written[s].size()));
        }
        if (p.owned[s]) static_bytes += p.size[s];
    }
    touches = as_rows(touched);
    seen = as_rows(versions).item;
    writers = as_rows(written);
}

// Whether the ops that write a storage are pure and write nothing else.
bool Index::writes_alone(i64 s) const {
    if (p.owned[s] || writers.size(s) == 0) return false;
    for (const i32 w : writers[s]) {
        if (!p.pure[w]) return false;
        for (const i32 m : p.mutates[w])
            if (m != s && !p.updates.has(w, m)) return false;
    }
    return true;
}

// A recipe can run again when each of its ops is pure, writes nothing else, and sees final contents, or ones
// that can be made, or, up to the position (`at`, by op) at which those it sees are written over, what is
// there so far.
i32 Index::replays_until(i64 s, const std::vector<i32>& at) const {
    if (!writes_alone(s)) return -1;
    i32 last = static_cast<i32>(p.ops);
    for (const i32 w : writers[s]) {
        for (i64 j = 0; j < p.reads.size(w); ++j) {
            const i32 t = p.reads.begin(w)[j], need = p.needs.begin(w)[j];
            if (t == s || p.owned[t] || p.updates.has(w, t) || need == writers.size(t)) continue;
            if (!p.until_written || need > writers.size(t)) return -1;
            if (!versioned[t]) last = std::min(last, at[writers.begin(t)[need]]);
        }
    }
    return last;
}

bool Index::sees_final(i64 s) const {
    for (const i32 w : writers[s])
        for (i64 j = 0; j < p.reads.size(w); ++j) {
            const i32 t = p.reads.begin(w)[j];
            if (t != s && versioned[t] && p.needs.begin(w)[j] < writers.size(t)) return false;
        }
    return true;
}

void Index::find_gaps() {
    gap_of.assign(touches.item.size(), -1);
    replayable.resize(p.storages);
    until.resize(p.storages);
    versioned.resize(p.storages);
    settled.resize(p.storages);
    // What may only be kept is never made again, for a recipe either: it stays for those that read it.
    auto stays = [&](i64 s) { return p.may[s] == 1 << kKeep; };
    for (i64 s = 0; s < p.storages; ++s)
        versioned[s] = p.until_written && !stays(s) && writers.size(s) > 1 && writes_alone(s);
    std::vector<i32> at(p.ops);
    for (i32 k = 0; k < p.ops; ++k) at[p.order[k]] = k;
    for (i64 s = 0; s < p.storages; ++s) {
        until[s] = stays(s) ? -1 : replays_until(s, at);
        replayable[s] = until[s] == p.ops;
        settled[s] = replayable[s] && sees_final(s);
        if (p.size[s] == 0 || p.owned[s]) continue;
        auto possible = [&](std::uint8_t may, i32 to) -> std::uint8_t {
            if (to > until[s]) may &= ~(1 << kEvict | 1 << kPass | 1 << kDrop);
            if (!p.packed[s]) may &= ~(1 << kPack);
            return may ? may : 1 << kKeep;
        };
        const i64 written = std::max(0, last_write[s]);
        for (i64 j = 0; j + 1 < touches.size(s); ++j) {
            const i32 from = touches.begin(s)[j], to = touches.begin(s)[j + 1];
            const bool bound = p.must[s] && from < p.boundary && to >= p.boundary;
            std::uint8_t here = possible(bound ? p.must[s] : p.may[s], to);
            // Before its last write it cannot be made again, nor is it known what packs; a copy has what was
            // there.
            if (j < written) here &= 1 << kKeep | 1 << kOffload;
            // Results made again at the end gain little; a copy of them may come back there.
            if (to == p.ops && !p.until_written) here &= 1 << kKeep | 1 << kPack | 1 << kOffload;
            if (to - from < 2 || here == 1 << kKeep || here == 0) continue;
            gap_of[touches.start[s] + j] = static_cast<i32>(gaps.size());
            gaps.push_back({static_cast<i32>(s), from, to});
            allowed.push_back(here);
        }
    }
}

// A storage that no op of the backward touches may stay for what is recomputed from it: where that is more
// bytes, directly or by way of others of its kind, than it has itself, as of a concatenation's inputs, or of
// what is cast to a wider type.
void Index::find_stays() {
    stay.assign(p.storages, -1);
    std::vector<i64> saves(p.storages, 0);  // bytes that can be made again while it is there
    std::vector<i32> until_then(p.storages, 0);
    for (i32 g = 0; g < static_cast<i32>(gaps.size()); ++g) {
        const auto [s, from, to] = gaps[g];
        if (!allows(g, kEvict) || to < p.boundary) continue;
        if (from < p.boundary) saves[s] = p.size[s];
        until_then[s] = std::max(until_then[s], std::min(to, static_cast<i32>(p.ops) - 1));
    }
    std::vector<i32> end(p.storages, -1);
    std::vector<std::vector<i32>> ends(p.ops);
    for (i32 at = p.boundary; at-- > 0;)
        for (const i32 s : p.defines[p.order[at]]) {
            if (saves[s] || !p.size[s] || p.kept[s] || !replayable[s] || p.must[s]) continue;
            if (!(p.may[s] >> kEvict & 1) || touches.begin(s)[touches.size(s) - 1] >= p.boundary) continue;
            for (const i32 reader : touches[s]) {
                if (reader == at) continue;
                for (const i32 d : p.defines[p.order[reader]]) {
                    saves[s] = std::min(kMany, saves[s] + std::min(kMany, saves[d]));
                    until_then[s] = std::max(until_then[s], until_then[d]);
                }
            }
            if (saves[s] > p.size[s]) ends[end[s] = until_then[s]].push_back(s);
        }
    stay_ends = as_rows(ends);
    if (stay_ends.item.empty()) return;
    Rows longer{{0}, {}};
    std::vector<i32> gap, version;
    for (i32 s = 0; s < p.storages; ++s) {
        for (i64 j = touches.start[s]; j < touches.start[s + 1]; ++j)
            longer.item.push_back(touches.item[j]), gap.push_back(gap_of[j]), version.push_back(seen[j]);
        if (end[s] >= 0) {
            stay[s] = gap.back() = static_cast<i32>(gaps.size());
            gaps.push_back({s, longer.item.back(), end[s]});
            allowed.push_back(1 << kKeep | 1 << kStay);
            longer.item.push_back(end[s]), gap.push_back(-1);
            version.push_back(static_cast<i32>(writers.size(s)));
        }
        longer.start.push_back(static_cast<i64>(longer.item.size()));
    }
    touches = std::move(longer), gap_of = std::move(gap), seen = std::move(version);
}

std::uint8_t Index::least(i32 gap) const {
    std::uint8_t to = 0;
    while (to + 1 < kDecisions && !allows(gap, to)) ++to;
    return to;
}

void Index::find_offloads() {
    for (i32 g = 0; g < static_cast<i32>(gaps.size()); ++g)
        if (allows(g, kOffload)) by_end.push_back(g);
    std::sort(by_end.begin(), by_end.end(),
              [&](i32 a, i32 b) { return gaps[a].to != gaps[b].to ? gaps[a].to > gaps[b].to : a < b; });
    start.assign(p.ops + 1, 0);
    for (i32 at = 0; at < p.ops; ++at) start[at + 1] = start[at] + p.time[p.order[at]];
}

void Index::find_movable() {
    for (i32 at = 0; at < p.ops; ++at) {
        const i32 o = p.order[at];
        bool may = p.pure[o] && !p.fixed[o] && p.mutates.size(o) == 0, read = false;
        for (const i32 d : p.defines[o]) {
            may = may && settled[d] && writers.size(d) == 1;
            read = read || touches.size(d) > 1;
        }
        if (may && read) movable.push_back(at);
    }
}

}  // namespace tightship
