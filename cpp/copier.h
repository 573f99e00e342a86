// Copies between memory and a file, by threads that know nothing of Python.
//
// Each stream is a queue and a thread: copies of one stream run one after the other, and after those of
// others that they are told to wait for. To begin a copy takes the caller a lock and, where the thread
// sleeps, waking it; to wait for one that is done takes neither. Who waits for a copy that its thread has not
// begun makes it itself, with those before it in the queue: where cores are short, the thread that is to copy
// has none yet.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tightship {

// `size` bytes from or to `offset` of a file; an error of errno, -1 if the file ended, or 0.
int move_bytes(int file, bool out, char* address, std::int64_t size, std::int64_t offset);

struct Stream;

// One copy: `size` bytes at `address` of memory and `offset` of the file. `error` (of errno; -1: the file
// ended) is set once it is done.
struct Copy {
    bool out = false;
    void* address = nullptr;
    std::int64_t size = 0, offset = 0;
    std::vector<std::shared_ptr<Copy>> after;  // begun before it, so that nothing waits in a circle
    std::shared_ptr<Stream> stream;
    std::atomic<bool> done{false};
    int error = 0;

    int wait();  // until it is done; its error
};

struct Stream {
    explicit Stream(int to) : file(to) {}

    int file;
    std::mutex lock;
    std::condition_variable filled, finished;
    std::deque<std::shared_ptr<Copy>> queue;
    bool busy = false, ending = false;  // someone copies; no more will come
    std::thread thread;

    void work();
    bool next(std::unique_lock<std::mutex>&
                  held);  // makes the first of the queue, if there is one and nobody copies
};

class Copier {
  public:
    explicit Copier(int file);
    ~Copier() { close(); }
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // The caller keeps the memory until the copy is done.
    std::shared_ptr<Copy> begin(int stream, bool out, std::uintptr_t address, std::int64_t size,
                                std::int64_t offset, std::vector<std::shared_ptr<Copy>> after);
    void drain();  // waits for every copy, whether it fails or not
    void close();  // the same, and ends the threads; in a forked child, which has none of them, neither does
                   // anything
    bool forked() const;  // whether this process is a child of the one that made it

  private:
    int file_;
    long process_;                                    // that made it
    std::map<int, std::shared_ptr<Stream>> streams_;  // used by one thread, that of who begins copies
};

// The same in the order of a CUDA stream: what cudaLaunchHostFunc is told to call.
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
