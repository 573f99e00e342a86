// The state of one replay: what is in memory, bytes and seconds so far, and the steps where they are asked
// for.
//
// Memory is counted as tightship.simulate counts it (that Python replay is the definition; tests hold the two
// equal): resident storages, plus everything the running op defines, plus its workspace.
#pragma once

#include "index.h"

namespace tightship {

struct Cost {
    bool valid = true;
    i64 peak = 0;
    i32 peak_at = -1;   // position whose op (or a recomputation before it) is at the peak
    double extra = 0;   // seconds of recomputation
    double excess = 0;  // sum over runs of bytes above the limit
    i64 runs = 0;       // ops recomputed
    i64 host = 0;       // most bytes offloaded at once
};

enum StepKind : std::uint8_t { kCompute, kRecompute, kFree, kOffloadStep, kFetch, kCompress, kDecompress };
enum Form : std::uint8_t { kFull, kPacked, kHost };

struct Step {
    std::uint8_t kind;
    i32 op;
    std::vector<i32> storages;
    std::uint8_t form = kFull;
    std::uint8_t stream = 0;
    std::vector<i32> waits = {};
    std::vector<i32> reuses = {};  // storage read, storage that takes its place, and so on
};

struct Replay {
    const std::uint8_t* decisions = nullptr;  // by gap
    i64 limit = 0;
    std::vector<Step>* steps = nullptr;   // filled in if not null
    std::vector<i64>* profile = nullptr;  // likewise, by position: the most bytes in use

    std::vector<std::uint8_t> resident, packed, host;  // by storage: in memory, compressed, offloaded
    std::vector<i32> version, touch,
        pin;  // by storage: writes so far; index of its next touch; who needs it now
    std::vector<std::uint8_t> crowded;  // by position: bytes above the limit there; empty if nobody asks
    i64 live = 0, most = 0;             // bytes now; the most since somebody set it to 0
    i32 position = 0;
    double now = 0;  // the clock of the stream of ops
    Cost cost;

    void reset(const Index& x) {
        resident.assign(x.p.owned.begin(), x.p.owned.end());
        for (auto* bits : {&packed, &host}) bits->assign(x.p.storages, 0);
        for (auto* numbers : {&version, &touch, &pin}) numbers->assign(x.p.storages, 0);
        live = x.static_bytes;
        position = 0;
        now = 0;
        cost = {};
        cost.peak = x.static_bytes;
        if (profile) std::fill(profile->begin(), profile->end(), 0);
        if (steps) steps->clear();
    }

    void use(i64 bytes, i32 at) {
        most = std::max(most, bytes);
        if (bytes > cost.peak) cost.peak = bytes, cost.peak_at = at;
        if (bytes > limit) {
            cost.excess += static_cast<double>(bytes - limit);
            if (!crowded.empty()) crowded[at] = 1;
        }
        if (profile) (*profile)[at] = std::max((*profile)[at], bytes);
    }
    void spend(double seconds) { cost.extra += seconds, now += seconds; }
    void wait_for(double time) {
        if (time > now) spend(time - now), now = time;
    }
};

}  // namespace tightship
