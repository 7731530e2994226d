/* Stands between a program and the system, and makes reads go wrong as FAULT says. Loaded with LD_PRELOAD by loading.rs and pack_folder.rs.
   FAULT is one of: open-einval (O_DIRECT refused at open), read-einval, read-eopnotsupp (refused at read), short (every read gives less
   than asked for, at odd lengths), eintr (every other read is interrupted), eio (reads over the byte at FAULT_AT fail), truncate (the
   file is cut at FAULT_AT before the first large read), header-cut, header-touch (the file is cut at FAULT_AT, or a byte written there,
   when its header has just been read), uring-enosys, uring-eperm (no io_uring), uring-enter (a ring that cannot be entered), uring-later
   (that cannot be entered a second time, with requests under way), ring-short, ring-einval, ring-eio (requests that give less, that are
   refused, that fail: the request in the ring is changed so that the kernel itself answers so; reads by threads where there is no ring),
   kill-rename (the program is killed when it would put a file named FAULT_FILE in its place), slab-eio (reads of the prompt cache's
   slabs fail while the file FAULT_FILE is there; wants FAULT_URING). FAULT_URING: no io_uring besides. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef IORING_SETUP_NO_SQARRAY
#define IORING_SETUP_NO_SQARRAY (1U << 16)
#endif

static int fault(const char *name) {
    const char *now = getenv("FAULT");
    return now && !strcmp(now, name);
}

/* Set where the system has no io_uring: containers often have none, nor has qemu-user. */
static int no_ring;

static int fault_of_either(const char *reads, const char *rings) { return fault(reads) || (no_ring && fault(rings)); }

static long long at(void) {
    const char *text = getenv("FAULT_AT");
    return text ? atoll(text) : -1;
}

static int is_direct(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT);
}

static int is_named(int fd, const char *end) {
    char link[64], path[4096];
    strcpy(link, "/proc/self/fd/");
    char *digit = link + strlen(link);
    int n = fd, len = 1;
    while (n >= 10) n /= 10, len++;
    digit[len] = 0;
    for (n = fd; len--; n /= 10) digit[len] = '0' + n % 10;
    ssize_t got = readlink(link, path, sizeof path - 1);
    ssize_t length = strlen(end);
    return got > length && !memcmp(path + got - length, end, length);
}

static int is_weights(int fd) { return is_named(fd, ".safetensors"); }

static int is_bad_slab(int fd) {
    const char *file = getenv("FAULT_FILE");
    return fault("slab-eio") && file && !access(file, F_OK) && is_named(fd, ".slab");
}

#define OPEN(name)                                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                                       \
        va_list list;                                                                                                                  \
        va_start(list, flags);                                                                                                         \
        int mode = va_arg(list, int);                                                                                                  \
        va_end(list);                                                                                                                  \
        if ((flags & O_DIRECT) && fault("open-einval")) return errno = EINVAL, -1;                                                    \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                                                                 \
        return real(path, flags, mode);                                                                                                \
    }
OPEN(open)
OPEN(open64)

static ssize_t preadv_at(int fd, const struct iovec *vec, int count, off64_t offset) {
    static int calls;
    ssize_t (*real)(int, const struct iovec *, int, off64_t) = dlsym(RTLD_NEXT, "preadv64");
    if (is_bad_slab(fd)) return errno = EIO, -1;
    if (!is_weights(fd)) return real(fd, vec, count, offset);
    if (is_direct(fd) && fault_of_either("read-einval", "ring-einval")) return errno = EINVAL, -1;
    if (is_direct(fd) && fault("read-eopnotsupp")) return errno = EOPNOTSUPP, -1;
    if (fault("eintr") && __sync_fetch_and_add(&calls, 1) % 2 == 0) return errno = EINTR, -1;
    if (fault_of_either("eio", "ring-eio") && at() >= offset && at() < offset + (long long)vec->iov_len) return errno = EIO, -1;
    if (fault("truncate") && vec->iov_len > 1 << 20 && __sync_fetch_and_add(&calls, 1) == 0) {
        const char *path = getenv("FAULT_FILE");
        if (truncate(path, at())) abort();
    }
    if (fault_of_either("short", "ring-short") && vec->iov_len > 1) {
        struct iovec part = {vec->iov_base, vec->iov_len};
        /* A direct read gives whole blocks; this one is cut where no block ends. */
        ssize_t got = real(fd, &part, 1, offset);
        return got > 5000 ? got / 3 * 2 + 1 : got > 1 && !is_direct(fd) ? got / 2 : got;
    }
    return real(fd, vec, count, offset);
}

ssize_t preadv(int fd, const struct iovec *vec, int count, off_t offset) { return preadv_at(fd, vec, count, offset); }
ssize_t preadv64(int fd, const struct iovec *vec, int count, off64_t offset) { return preadv_at(fd, vec, count, offset); }

static ssize_t pread_at(int fd, void *to, size_t len, off64_t offset) {
    ssize_t (*real)(int, void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pread64");
    if (is_bad_slab(fd)) return errno = EIO, -1;
    ssize_t got = real(fd, to, len, offset);
    const char *path = getenv("FAULT_FILE");
    if (offset == 8 && is_weights(fd)) {
        if (fault("header-cut") && truncate(path, at())) abort();
        if (fault("header-touch")) {
            int file = open(path, O_WRONLY);
            if (pwrite(file, "", 1, at()) != 1) abort();
            close(file);
        }
    }
    return got;
}

ssize_t pread(int fd, void *to, size_t len, off_t offset) { return pread_at(fd, to, len, offset); }
ssize_t pread64(int fd, void *to, size_t len, off64_t offset) { return pread_at(fd, to, len, offset); }

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    const char *file = getenv("FAULT_FILE"), *name = strrchr(to, '/');
    if (file && fault("kill-rename") && !strcmp(name ? name + 1 : to, file)) kill(getpid(), SIGKILL);
    return real(from, to);
}

/* The ring of this thread: where its requests lie. */
static __thread struct {
    int fd;
    struct io_uring_params params;
    char *ring;
    struct io_uring_sqe *sqes;
} ring;

static void *mmap_at(void *addr, size_t len, int prot, int flags, int fd, off64_t offset) {
    void *(*real)(void *, size_t, int, int, int, off64_t) = dlsym(RTLD_NEXT, "mmap64");
    void *got = real(addr, len, prot, flags, fd, offset);
    if (ring.fd && fd == ring.fd && offset == IORING_OFF_SQ_RING) ring.ring = got;
    if (ring.fd && fd == ring.fd && offset == IORING_OFF_SQES) ring.sqes = got;
    return got;
}

void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset) { return mmap_at(addr, len, prot, flags, fd, offset); }
void *mmap64(void *addr, size_t len, int prot, int flags, int fd, off64_t offset) { return mmap_at(addr, len, prot, flags, fd, offset); }

static void change_requests(unsigned count) {
    if (!ring.ring || !ring.sqes) abort();
    unsigned mask = *(unsigned *)(ring.ring + ring.params.sq_off.ring_mask);
    unsigned *array = (unsigned *)(ring.ring + ring.params.sq_off.array);
    unsigned tail = *(unsigned *)(ring.ring + ring.params.sq_off.tail);
    int flat = ring.params.flags & IORING_SETUP_NO_SQARRAY;
    for (unsigned i = tail - count; i != tail; i++) {
        struct io_uring_sqe *sqe = &ring.sqes[flat ? (i & mask) : array[i & mask]];
        if (fault("ring-short") && sqe->len > 8192) sqe->len = sqe->len / 8192 * 4096;
        /* What the kernel refuses itself: a direct read at an odd offset. */
        if (fault("ring-einval") && is_direct(sqe->fd)) sqe->off += 1;
        if (fault("ring-eio") && sqe->off <= (uint64_t)at() && (uint64_t)at() < sqe->off + sqe->len) {
            static int mem;
            if (!mem) mem = open("/proc/self/mem", O_RDONLY);
            sqe->fd = mem;
            sqe->off = 0; /* no memory there: EIO */
        }
    }
}

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_io_uring_setup) {
        if (fault("uring-enosys") || getenv("FAULT_URING")) return errno = ENOSYS, -1;
        if (fault("uring-eperm")) return errno = EPERM, -1;
        long fd = real(number, a[0], a[1]);
        no_ring = fd < 0;
        if (fd >= 0) ring.fd = fd, ring.params = *(struct io_uring_params *)a[1];
        return fd;
    }
    if (number == SYS_io_uring_enter) {
        if (fault("uring-enter")) return errno = EPERM, -1;
        static __thread int entered;
        if (fault("uring-later")) {
            if (entered++) return errno = EPERM, -1;
            if (a[1] > 1) a[1] = 1; /* the rest wants a second time, even if the first is done by then */
            a[2] = 0; /* waits for nothing */
        }
        if (getenv("FAULT") && !strncmp(getenv("FAULT"), "ring-", 5)) change_requests(a[1]);
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
