#include "staged.h"

#include "copier.h"

namespace tightship {

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
