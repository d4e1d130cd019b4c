/* Runs a list of instructions: file reads, comparisons with digests, strided copies, waits, and posts.

   The caller created the list and proved that it is correct. Here, only what could crash the process is checked: each
   entry must stay within the memory regions that it names. Nothing is allocated, and the interpreter is not used, so a
   call runs without its lock.

   Memory is a table of regions. An entry names a region by its index, and a byte offset in it. A wait sleeps until
   another process has posted. Counters are 32-bit, shared, and only grow.

   A call returns at the end of the list, when an entry fails, or after a time limit. In the last case, the caller does
   its other work, and calls again with the returned entry. Each entry may be restarted. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/syscall.h>
/* as in <linux/futex.h>, which systems with musl as the C library lack */
enum { FUTEX_WAIT, FUTEX_WAKE };
#endif

#include "hash.h"

enum { READ, COMPARE, TAKE, WAIT, POST, CALL };
enum { DONE, LATER, CALLS, OUTSIDE, ENDED, FAILED, CHANGED };

#define DIMS 8

typedef struct {
    char *at;
    int64_t nbytes;
    int64_t writable;
} region;

typedef struct {
    int64_t kind;
    /* READ     file, position in it, nbytes, region, byte
       COMPARE  region, byte, nbytes, bytes of a block, first digest
       TAKE     region, byte, nbytes, position in the file of that byte, first copy, one past the last copy, tally
       WAIT     region, byte of the first counter, at least this value, how many counters, bytes from one to the next
       POST     region, byte of the counter, value
       CALL     nothing: the caller does this one itself */
    int64_t of[7];
} entry;

/* Elements of a file, and their target. Strides are in bytes and not negative. The outermost dim is first. */
typedef struct {
    int64_t position, region, byte, itemsize, ndim;
    int64_t sizes[DIMS], from[DIMS], to[DIMS];
} copy;

typedef struct {
    const region *regions;
    const entry *entries;
    const copy *copies;
    const uint64_t *digests;
    int64_t *tallies; /* bytes copied */
    int64_t region_count, entry_count, copy_count, digest_count, tally_count;
} list;

/* Returns the address of bytes [byte, byte + nbytes) of a region, or NULL if they are not within it. */
static char *within(const list *all, int64_t index, int64_t byte, int64_t nbytes, int writes) {
    if (index < 0 || index >= all->region_count)
        return NULL;
    const region *one = &all->regions[index];
    if (byte < 0 || nbytes < 0 || byte > one->nbytes || nbytes > one->nbytes - byte || (writes && !one->writable))
        return NULL;
    return one->at + byte;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int read_all(const list *all, const int64_t *of, int64_t *detail) {
    char *to = within(all, of[3], of[4], of[2], 1);
    if (!to || of[1] < 0 || of[1] > INT64_MAX - of[2])
        return OUTSIDE;
    for (int64_t done = 0; done < of[2];) {
        ssize_t got = pread((int)of[0], to + done, (size_t)(of[2] - done), (off_t)(of[1] + done));
        if (got > 0) {
            done += got;
        } else if (got == 0) {
            *detail = of[1] + done;
            return ENDED;
        } else if (errno != EINTR) {
            *detail = errno;
            return FAILED;
        }
    }
    return DONE;
}

static int compare(const list *all, const int64_t *of, int64_t *detail) {
    const char *data = within(all, of[0], of[1], of[2], 0);
    if (!data || of[3] <= 0 || of[4] < 0 || of[4] > all->digest_count)
        return OUTSIDE;
    int64_t blocks = of[2] / of[3] + (of[2] % of[3] != 0);
    if (blocks > all->digest_count - of[4])
        return OUTSIDE;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t rest = of[2] - i * of[3];
        if (reshard_hash(data + i * of[3], rest < of[3] ? rest : of[3], WIDEST) != all->digests[of[4] + i]) {
            *detail = i;
            return CHANGED;
        }
    }
    return DONE;
}

/* Copies `count` items, whose strides are `from` bytes in `source` and `to` bytes in `target`. */
static void items(const char *source, char *target, int64_t count, int64_t from, int64_t to, int64_t itemsize) {
    if (from == itemsize && to == itemsize) {
        memcpy(target, source, (size_t)(count * itemsize));
        return;
    }
#define EACH(size)                                                                                                     \
    case size:                                                                                                         \
        for (int64_t i = 0; i < count; i++)                                                                            \
            memcpy(target + i * to, source + i * from, size);                                                          \
        return
    switch (itemsize) {
        EACH(1);
        EACH(2);
        EACH(4);
        EACH(8);
    }
    for (int64_t i = 0; i < count; i++)
        memcpy(target + i * to, source + i * from, (size_t)itemsize);
}

typedef struct {
    const copy *what;
    const int64_t *reach; /* by dim: bytes from the start of its first element to the start of its last */
    int64_t dims;         /* dims outside of the innermost run */
    int64_t run, run_from, run_to;
    const char *data; /* byte 0 of the segment */
    int64_t nbytes;   /* of the segment: elements that begin in it are copied */
} taking;

/* Copies the elements that begin in the segment. `start` is relative to its first byte. Returns the number copied. */
static int64_t take_dim(const taking *t, int64_t dim, int64_t start, char *target) {
    if (start >= t->nbytes || start + t->reach[dim] < 0)
        return 0;
    int last = dim == t->dims;
    int64_t count = last ? t->run : t->what->sizes[dim];
    int64_t from = last ? t->run_from : t->what->from[dim], to = last ? t->run_to : t->what->to[dim];
    int64_t inner = last ? 0 : t->reach[dim + 1], first = 0, stop = count;
    if (from > 0) {
        if (start + inner < 0) /* the first that reaches the segment */
            first = (-(start + inner) + from - 1) / from;
        if (start + (count - 1) * from >= t->nbytes) /* the first after the segment */
            stop = (t->nbytes - start + from - 1) / from;
    }
    if (first >= stop)
        return 0;
    if (last) {
        items(t->data + start + first * from, target + first * to, stop - first, from, to, t->what->itemsize);
        return stop - first;
    }
    int64_t taken = 0;
    for (int64_t i = first; i < stop; i++)
        taken += take_dim(t, dim + 1, start + i * from, target + i * to);
    return taken;
}

/* Returns the target of a copy, or NULL if its elements are not within their region, or numbers exceed 63 bits. */
static char *target_of(const list *all, const copy *what, int64_t *reach) {
    int64_t to = 0, from = 0, some;
    if (what->ndim < 0 || what->ndim > DIMS || what->itemsize <= 0 || what->position < 0)
        return NULL;
    reach[what->ndim] = 0;
    for (int64_t d = what->ndim - 1; d >= 0; d--) {
        if (what->sizes[d] <= 0 || what->from[d] < 0 || what->to[d] < 0)
            return NULL;
        if (__builtin_mul_overflow(what->sizes[d] - 1, what->to[d], &some) || __builtin_add_overflow(to, some, &to))
            return NULL;
        if (__builtin_mul_overflow(what->sizes[d] - 1, what->from[d], &some) ||
            __builtin_add_overflow(from, some, &from))
            return NULL;
        reach[d] = from;
    }
    if (__builtin_add_overflow(to, what->itemsize, &to) || __builtin_add_overflow(from, what->position, &from))
        return NULL;
    return within(all, what->region, what->byte, to, 1);
}

static int take(const list *all, const int64_t *of) {
    const char *data = within(all, of[0], of[1], of[2], 0);
    int64_t copied = 0;
    if (!data || of[3] < 0 || of[6] < 0 || of[6] >= all->tally_count || of[4] < 0 || of[4] > of[5] || of[5] > all->copy_count)
        return OUTSIDE;
    for (const copy *what = all->copies + of[4]; what < all->copies + of[5]; what++) {
        int64_t reach[DIMS + 1];
        char *target = target_of(all, what, reach);
        /* an element that begins in the last byte ends `itemsize - 1` bytes after it */
        if (!target || what->region == of[0] || !within(all, of[0], of[1], of[2] + what->itemsize - 1, 0))
            return OUTSIDE;
        taking t = {what, reach, what->ndim, 1, 0, 0, data, of[2]};
        if (t.dims) { /* merge the innermost dims without gaps on both sides into one run */
            t.dims--;
            t.run = what->sizes[t.dims], t.run_from = what->from[t.dims], t.run_to = what->to[t.dims];
            while (t.dims && what->from[t.dims - 1] == t.run * t.run_from && what->to[t.dims - 1] == t.run * t.run_to)
                t.run *= what->sizes[--t.dims];
        }
        copied += take_dim(&t, 0, what->position - of[3], target) * what->itemsize;
    }
    all->tallies[of[6]] += copied;
    return DONE;
}

static void sleep_until_changed(uint32_t *counter, uint32_t seen, int64_t ns) {
    struct timespec most = {ns / 1000000000, ns % 1000000000};
#ifdef __linux__
    syscall(SYS_futex, counter, FUTEX_WAIT, seen, &most, NULL, 0);
#else
    if (most.tv_sec || most.tv_nsec > 50000)
        most.tv_sec = 0, most.tv_nsec = 50000;
    nanosleep(&most, NULL);
#endif
}

static int await(const list *all, const int64_t *of, int64_t until, int64_t *detail) {
    int64_t last;
    if (of[3] < 1 || of[4] < 0 || __builtin_mul_overflow(of[3] - 1, of[4], &last) || last > INT64_MAX - 4)
        return OUTSIDE;
    char *first = within(all, of[0], of[1], last + 4, 0);
    if (!first || ((uintptr_t)first | (uintptr_t)of[4]) % 4)
        return OUTSIDE;
    for (int64_t i = 0; i < of[3];) {
        uint32_t *counter = (uint32_t *)(void *)(first + i * of[4]);
        uint32_t seen = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
        if (seen >= (uint32_t)of[2]) {
            i++;
            continue;
        }
        int64_t left = until - now_ns();
        if (left <= 0) {
            *detail = i;
            return LATER;
        }
        sleep_until_changed(counter, seen, left);
    }
    return DONE;
}

static int post(const list *all, const int64_t *of) {
    uint32_t *counter = (uint32_t *)(void *)within(all, of[0], of[1], 4, 1);
    if (!counter || (uintptr_t)counter % 4)
        return OUTSIDE;
    __atomic_store_n(counter, (uint32_t)of[2], __ATOMIC_RELEASE);
#ifdef __linux__
    syscall(SYS_futex, counter, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
#endif
    return DONE;
}

/* Runs entries from `first` on, for at most `limit_ns`. Returns the entry at which it stopped, or `entry_count` at the
   end. The reason is in said[0]. said[1] is the file's size for ENDED, an errno for FAILED, the number of the entry's
   block for CHANGED, and for LATER the number of the counter that it still waits for, or -1. */
int64_t reshard_run(const list *all, int64_t first, int64_t limit_ns, int64_t *said) {
    int64_t until = now_ns() + limit_ns, i = first;
    said[0] = first < 0 ? OUTSIDE : DONE, said[1] = 0;
    for (; said[0] == DONE && i < all->entry_count; i++) {
        const int64_t *of = all->entries[i].of;
        switch (all->entries[i].kind) {
        case READ: said[0] = read_all(all, of, &said[1]); break;
        case COMPARE: said[0] = compare(all, of, &said[1]); break;
        case TAKE: said[0] = take(all, of); break;
        case WAIT: said[0] = await(all, of, until, &said[1]); break;
        case POST: said[0] = post(all, of); break;
        case CALL: said[0] = CALLS; break;
        default: said[0] = OUTSIDE;
        }
        if (said[0] != DONE)
            return i;
        if (now_ns() >= until) {
            said[0] = i + 1 < all->entry_count ? LATER : DONE, said[1] = -1;
            return i + 1;
        }
    }
    return i;
}
