// A file system that fails, or a process that ends, at the n-th time a file under a folder is written.
//
// Preloaded, it counts every call that writes, makes, renames, links or reads back by place (pread) a file under the
// folder that `failing_disk_arm` was given, in this process and, by a counter in shared memory, in its children.
// At the n-th, and with `stays` at all later ones, it does what was asked for: an error, a write of half the bytes,
// a signal, or a clock that is set. Removing files is never hindered: full disks let that happen.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

// Beside numbers of errors, which are positive; signals are -(100 + their number).
enum { SHORT = -1, LATER = -2, EARLIER = -3 };

enum { JUMP = 400 * 24 * 3600 };  // seconds

static char under[PATH_MAX];
static long at, stays, what;
static atomic_long* count;  // [0] calls, [1] those that were hindered, [2] seconds by which the clock was set

#define NEXT(name) ((__typeof__(&name))next(#name))

static void* next(const char* name) { return dlsym(RTLD_NEXT, name); }

// `folder` empty: nothing is counted.
void failing_disk_arm(const char* folder, long n, long kind, long stay) {
    if (!count)
        count = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    count[0] = count[1] = count[2] = 0;
    at = n, what = kind, stays = stay;
    snprintf(under, sizeof under, "%s", folder);
}

// From now on nothing is hindered; the counts stay.
void failing_disk_rest(void) { under[0] = 0; }

long failing_disk_calls(void) { return count ? count[0] : 0; }
long failing_disk_hindered(void) { return count ? count[1] : 0; }

static int inside(const char* path) {
    const size_t n = strlen(under);
    return n && path && !strncmp(path, under, n);
}

static int of_file(int file) {
    if (!under[0]) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return inside(path);
}

// What is to be done at this call: 0 nothing, an error's number, or SHORT. A signal comes on the way.
static int asked(int counts) {
    if (!counts || !count) return 0;
    const long now = atomic_fetch_add(&count[0], 1) + 1;
    if (!at || (stays ? now < at : now != at)) return 0;
    atomic_fetch_add(&count[1], 1);
    if (what == LATER || what == EARLIER) {
        count[2] = what == LATER ? JUMP : -JUMP;
        return 0;
    }
    if (what <= -100) {
        if (now == at) kill(getpid(), (int)(-what - 100));  // whichever thread has it: this one may hear none
        return 0;
    }
    return (int)what;
}

static int refused(int counts) {
    const int error = asked(counts);
    if (error <= 0) return 0;
    errno = error;
    return 1;
}

static size_t shortened(int counts, size_t size, int* error) {
    const int kind = asked(counts);
    *error = kind > 0 ? kind : 0;
    return kind == SHORT && size > 1 ? size / 2 : size;
}

#define MOVES(name, buffer)                                                             \
    ssize_t name(int file, buffer data, size_t size, off_t offset) {                    \
        int error;                                                                      \
        size = shortened(of_file(file), size, &error);                                  \
        if (error) return errno = error, -1;                                            \
        return ((ssize_t(*)(int, buffer, size_t, off_t))next(#name))(file, data, size, offset); \
    }
MOVES(pwrite, const void*)
MOVES(pwrite64, const void*)
MOVES(pread, void*)
MOVES(pread64, void*)

ssize_t write(int file, const void* data, size_t size) {
    int error;
    size = shortened(of_file(file), size, &error);
    if (error) return errno = error, -1;
    return ((ssize_t(*)(int, const void*, size_t))next("write"))(file, data, size);
}

#define OF_FILE(name)                                      \
    int name(int file) {                                   \
        if (refused(of_file(file))) return -1;             \
        return ((int (*)(int))next(#name))(file);          \
    }
OF_FILE(fsync)
OF_FILE(fdatasync)

#define TRUNCATES(name)                                              \
    int name(int file, off_t size) {                                 \
        if (refused(of_file(file))) return -1;                       \
        return ((int (*)(int, off_t))next(#name))(file, size);       \
    }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

#define RESERVES(name)                                                          \
    int name(int file, off_t from, off_t size) {                                \
        if (refused(of_file(file))) return errno;                               \
        return ((int (*)(int, off_t, off_t))next(#name))(file, from, size);     \
    }
RESERVES(posix_fallocate)
RESERVES(posix_fallocate64)

#define OPENS(name)                                                                          \
    int name(const char* path, int flags, ...) {                                             \
        va_list more;                                                                        \
        va_start(more, flags);                                                               \
        const int mode = va_arg(more, int);                                                  \
        va_end(more);                                                                        \
        if (refused((flags & O_CREAT || flags & O_TMPFILE & ~O_DIRECTORY) && inside(path))) return -1; \
        return ((int (*)(const char*, int, ...))next(#name))(path, flags, mode);             \
    }
OPENS(open)
OPENS(open64)

#define RENAMES(name)                                                        \
    int name(const char* old, const char* new) {                             \
        if (refused(inside(new))) return -1;                                 \
        return ((int (*)(const char*, const char*))next(#name))(old, new);   \
    }
RENAMES(rename)
RENAMES(link)

int mkdir(const char* path, mode_t mode) {
    if (refused(inside(path))) return -1;
    return ((int (*)(const char*, mode_t))next("mkdir"))(path, mode);
}

// The time of day, which may be set at any time; clocks that only go forward are left alone.
int clock_gettime(clockid_t clock, struct timespec* now) {
    const int failed = NEXT(clock_gettime)(clock, now);
    if (!failed && clock == CLOCK_REALTIME && count) now->tv_sec += count[2];
    return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
    const int failed = ((int (*)(struct timeval*, void*))next("gettimeofday"))(now, zone);
    if (!failed && count) now->tv_sec += count[2];
    return failed;
}

time_t time(time_t* now) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    return now ? *now = real.tv_sec : real.tv_sec;
}
