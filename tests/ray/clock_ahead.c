/* Preloaded on one host: the wall clock of Baton's processes there is an hour ahead.
 *
 * Of Ray's it is not: its waits have deadlines by the wall clock, which the kernel would compare with
 * the right one. libfaketime shifts or breaks waits by the monotonic clock, too (Python 3.11).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define AN_HOUR_S 3600

static time_t ahead_s;

__attribute__((constructor)) static void find_process(void) {
    char line[4096];
    int fd = open("/proc/self/cmdline", O_RDONLY);
    ssize_t length = fd < 0 ? 0 : read(fd, line, sizeof line);
    if (fd >= 0) close(fd);
    if (length > 0 && memmem(line, (size_t)length, "baton.cli\0worker", 16)) ahead_s = AN_HOUR_S;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += ahead_s;
    return failed;
}

time_t time(time_t *store) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (store) *store = now.tv_sec;
    return now.tv_sec;
}
