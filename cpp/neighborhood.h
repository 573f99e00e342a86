// Random changes of decisions: what annealing tries.
#pragma once

#include <random>
#include <utility>
#include <vector>

#include "search.h"

namespace tightship {

// A move sets a group of gaps (or part of it) to what most of it is not, or gives some layers of a family
// what another has, swaps what two gaps of one role have, or (a part `exchanges` of the moves) what two roles
// of about as many bytes have; sometimes two moves at once.
class Neighborhood {
  public:
    Neighborhood(const Index& index, const Rows& groups, const IsomorphicLayers& layers, double exchanges,
                 std::uint64_t seed);

    double uniform() { return std::uniform_real_distribution<double>(0, 1)(rng_); }
    void apply(Bits& bits, Changes& changes);

  private:
    const Index& index_;
    const Rows& groups_;
    const IsomorphicLayers& layers_;
    i64 gaps_;
    double exchanges_;
    std::mt19937_64 rng_;
    int others_ = 0;  // decisions beyond recomputing that any gap allows

    i64 below(i64 n) { return static_cast<i64>(rng_() % static_cast<std::uint64_t>(n)); }
    std::pair<i64, i64> part(i64 n);
    std::uint8_t other(std::uint8_t now);
    void one(Bits& bits, Changes& changes);
    void flip(Bits& bits, Changes& changes);
    void copy(Bits& bits, Changes& changes);
    void swap(Bits& bits, Changes& changes);
    void exchange(Bits& bits, Changes& changes);
    void set(Bits& bits, Changes& changes, i32 gap, std::uint8_t to);
};

}  // namespace tightship
