// How storages leave memory and come back other than by recomputation: compressed in place, or offloaded by
// one stream and fetched by another.
#pragma once

#include <deque>
#include <limits>
#include <utility>

#include "replay.h"

namespace tightship {

class Copies {
  public:
    Copies(const Index& index, Replay& replay);

    bool any() const { return any_; }  // whether anything may be offloaded
    i64 host_limit = std::numeric_limits<i64>::max();

    // Before the attempts at one set of decisions; before each of them, which begins with `reset`; and
    // whether another one may do better.
    void plan();
    void begin_attempt();
    bool try_again(const Cost& cost);
    void reset();

    void pack(i32 storage);
    void unpack(i32 storage);
    void offload(i32 storage);
    void fetch(i32 storage);
    void leave(i32 storage);  // its bytes are free from here on

    // Around an op, in this order: what it reads stays and fetches begin; the steps it waits for; what is
    // back in the host's memory leaves, and more where room is short; the copies of what has arrived go.
    void begin(const i32* reads, const i32* end, i32 position);
    std::vector<i32> await(const i32* reads, const i32* end);
    void make_room(i64 bytes);
    void clear();

    void stay(i32 storage);
    void land_all();  // at the end
    double finished() const { return std::max(sent_, fetched_); }

  private:
    const Index& x_;
    const Program& p_ = x_.p;
    Replay& s_;
    const bool any_ = !x_.by_end.empty();

    double sent_ = 0, fetched_ = 0;  // the clocks of the two streams
    i64 host_live_ = 0;
    std::vector<double> ready_;  // by storage: when its copy out, or back, is done
    std::vector<std::uint8_t>
        coming_;               // by storage: 1 fetched, 2 offloaded for nothing; and not yet waited for
    std::deque<i32> leaving_;  // offloaded, bytes not yet given back
    std::vector<std::vector<i32>> fetches_;  // by position: gaps whose fetches are to be issued there
    std::vector<i32> late_;                  // gaps: no room where they were to be issued
    std::vector<i32> room_until_;  // by position: the next one that an earlier attempt found crowded
    int attempts_ = 0;
    bool early_ = false;       // something was fetched before it was read, in this attempt
    std::vector<i32> landed_;  // waited for: their copies can go
    std::vector<i32> offload_step_, fetch_step_;

    void schedule();
    std::vector<i32> arrivals(const i32* begin, const i32* end);
    void settle();
    void issue(i32 position);
    void give_back(std::size_t which = 0);
    void land(const i32* begin, const i32* end);
    bool fits(i32 storage, i32 position) const;
    std::vector<i32> last_compute() const;
};

}  // namespace tightship
