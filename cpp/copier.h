// Copies between memory and a file, by threads that know nothing of Python.
//
// Each stream is a thread and a queue: copies of one stream run one after the other, and after those of others that
// they are told to wait for. To begin a copy takes the caller a lock and, where the thread sleeps, waking it; to wait
// for one that is done takes neither.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tightship {

// `size` bytes from or to `offset` of a file; an error of errno, -1 if the file ended, or 0.
int move_bytes(int file, bool out, char* address, std::int64_t size, std::int64_t offset);

// What waits for copies sleeps on this. It outlives the copier as long as anyone holds one of its copies.
struct Bell {
    std::mutex lock;
    std::condition_variable rung;
};

// One copy: `size` bytes at `address` of memory and `offset` of the file. `error` (of errno; -1: the file ended) is
// set once it is done.
struct Copy {
    bool out = false;
    void* address = nullptr;
    std::int64_t size = 0, offset = 0;
    std::vector<std::shared_ptr<Copy>> after;
    std::shared_ptr<Bell> bell;
    std::atomic<bool> done{false};
    int error = 0;

    int wait();  // until it is done; its error
};

class Copier {
  public:
    explicit Copier(int file) : file_(file), bell_(std::make_shared<Bell>()) {}
    ~Copier() { close(); }
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // The caller keeps the memory until the copy is done.
    std::shared_ptr<Copy> begin(int stream, bool out, std::uintptr_t address, std::int64_t size, std::int64_t offset,
                                std::vector<std::shared_ptr<Copy>> after);
    void drain();  // waits for every copy, whether it fails or not
    void close();  // the same, and ends the threads

  private:
    struct Stream {
        std::mutex lock;
        std::condition_variable filled;
        std::deque<std::shared_ptr<Copy>> queue;
        std::shared_ptr<Copy> last;
        bool ending = false;
        std::thread thread;
    };

    int file_;
    std::shared_ptr<Bell> bell_;
    std::map<int, Stream> streams_;  // used by one thread, that of who begins copies

    void work(Stream& stream) const;
    int move(const Copy& copy) const;
};

}  // namespace tightship
