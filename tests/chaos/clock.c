/* The time of day of the processes that it is loaded into (LD_PRELOAD), off by the seconds that a file holds: eight
   bytes, which may change while they run. No other clock is touched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *off;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *off, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) off = at;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, at);
    if (!done && off && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *off;
    return done;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}
