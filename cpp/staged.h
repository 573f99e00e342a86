// Copies between pinned memory and a file in the order of a CUDA stream: what cudaLaunchHostFunc is told to call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace tightship {

class Staged {
  public:
    explicit Staged(int file) : file_(file), error_(std::make_shared<std::atomic<int>>(0)) {}

    // A function and what to call it with, once, as addresses. After one that failed, others do nothing.
    std::pair<std::uintptr_t, std::uintptr_t> job(bool out, std::uintptr_t address, std::int64_t size,
                                                  std::int64_t offset) const;
    // What the first to fail failed with (of errno; -1: the file ended), or 0. Asked once, it is forgotten.
    int take_error() const { return error_->exchange(0); }

  private:
    int file_;
    std::shared_ptr<std::atomic<int>> error_;
};

}  // namespace tightship
