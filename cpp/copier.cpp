#include "copier.h"

#include <cerrno>

#if __has_include(<unistd.h>)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#endif

namespace tightship {

namespace {

#if __has_include(<unistd.h>)
// Signals are for the threads of who started these.
class Undisturbed {
  public:
    Undisturbed() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~Undisturbed() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

// A thread that wakes does not take the core of the one that woke it: ops come first where cores are short.
void yielding() {
#ifdef SCHED_BATCH
    const sched_param none{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
#endif
}

long this_process() { return static_cast<long>(getpid()); }

std::int64_t once(int file, bool out, char* at, std::int64_t size, std::int64_t offset) {
    return out ? pwrite(file, at, static_cast<std::size_t>(size), offset)
               : pread(file, at, static_cast<std::size_t>(size), offset);
}
#else
struct Undisturbed {};

void yielding() {}

long this_process() { return 0; }

std::int64_t once(int, bool, char*, std::int64_t, std::int64_t) {
    errno = ENOSYS;
    return -1;
}
#endif

}  // namespace

int move_bytes(int file, bool out, char* address, std::int64_t size, std::int64_t offset) {
    for (std::int64_t done = 0; done < size;) {
        const std::int64_t moved = once(file, out, address + done, size - done, offset + done);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return errno;
        if (moved == 0) return -1;
        done += moved;
    }
    return 0;
}

int Copy::wait() {
    if (!done.load(std::memory_order_acquire)) {
        std::unique_lock<std::mutex> held(stream->lock);
        while (!done.load(std::memory_order_acquire))
            if (!stream->next(held)) stream->finished.wait(held);
    }
    return error;
}

bool Stream::next(std::unique_lock<std::mutex>& held) {
    if (busy || queue.empty()) return false;
    busy = true;
    const std::shared_ptr<Copy> copy = std::move(queue.front());
    queue.pop_front();
    held.unlock();
    int error = 0;
    for (const auto& other : copy->after)
        if (const int theirs = other->wait(); theirs && !error) error = theirs;
    copy->after.clear();
    if (!error)
        error = move_bytes(file, copy->out, static_cast<char*>(copy->address), copy->size, copy->offset);
    copy->error = error;
    held.lock();
    copy->done.store(true, std::memory_order_release);
    busy = false;
    finished.notify_all();
    if (ending || !queue.empty()) filled.notify_one();
    return true;
}

void Stream::work() {
    yielding();
    std::unique_lock<std::mutex> held(lock);
    for (;;) {
        filled.wait(held, [this] { return !busy && (ending || !queue.empty()); });
        if (!next(held)) return;
    }
}

std::shared_ptr<Copy> Copier::begin(int number, bool out, std::uintptr_t address, std::int64_t size,
                                    std::int64_t offset, std::vector<std::shared_ptr<Copy>> after) {
    std::shared_ptr<Stream>& stream = streams_[number];
    if (!stream) {
        stream = std::make_shared<Stream>(file_);
        const Undisturbed here;
        stream->thread = std::thread([at = stream.get()] { at->work(); });
    }
    auto copy = std::make_shared<Copy>();
    copy->out = out;
    copy->address = reinterpret_cast<void*>(address);
    copy->size = size;
    copy->offset = offset;
    copy->after = std::move(after);
    copy->stream = stream;
    {
        const std::lock_guard<std::mutex> held(stream->lock);
        stream->queue.push_back(copy);
    }
    stream->filled.notify_one();
    return copy;
}

Copier::Copier(int file) : file_(file), process_(this_process()) {}

bool Copier::forked() const { return this_process() != process_; }

void Copier::drain() {
    if (forked()) return;
    for (auto& [number, stream] : streams_) {
        std::unique_lock<std::mutex> held(stream->lock);
        while (stream->busy || !stream->queue.empty())
            if (!stream->next(held)) stream->finished.wait(held);
    }
}

void Copier::close() {
    if (forked()) {  // no thread to join, and perhaps a lock that one of them held: all of it is left as it
                     // is
        static_cast<void>(new std::map<int, std::shared_ptr<Stream>>(std::move(streams_)));
        streams_.clear();
        return;
    }
    for (auto& [number, stream] : streams_) {
        {
            const std::lock_guard<std::mutex> held(stream->lock);
            stream->ending = true;
        }
        stream->filled.notify_one();
    }
    for (auto& [number, stream] : streams_)
        if (stream->thread.joinable()) stream->thread.join();
    streams_.clear();
}

namespace {

struct Job {
    int file;
    bool out;
    char* address;
    std::int64_t size, offset;
    std::shared_ptr<std::atomic<int>> error;
};

extern "C" void tightship_staged(void* given) {
    const std::unique_ptr<Job> job(static_cast<Job*>(given));
    if (job->error->load()) return;
    const int error = move_bytes(job->file, job->out, job->address, job->size, job->offset);
    int none = 0;
    if (error) job->error->compare_exchange_strong(none, error);
}

}  // namespace

std::pair<std::uintptr_t, std::uintptr_t> Staged::job(bool out, std::uintptr_t address, std::int64_t size,
                                                      std::int64_t offset) const {
    auto* made = new Job{file_, out, reinterpret_cast<char*>(address), size, offset, error_};
    return {reinterpret_cast<std::uintptr_t>(&tightship_staged), reinterpret_cast<std::uintptr_t>(made)};
}

}  // namespace tightship
