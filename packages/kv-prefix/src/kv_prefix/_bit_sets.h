/* The layout of the table, and its interned sets of small numbers. Included by `_bit_table.c` alone.
 *
 * A set is a sorted array of bits with a count of its users, known by a number; equal sets are one. Its last user's
 * going frees it. The shards of the directory grow one at a time.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define HAVE_MMAP 1
#else
#define HAVE_MMAP 0
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only"
#endif

#if defined(__GNUC__)
#define PREFETCH(p) __builtin_prefetch(p)
#else
#define PREFETCH(p) ((void)(p))
#endif

#define NAME 16
#define PACKED 20
#define SHARD_BITS 8
#define NUM_SHARDS (1 << SHARD_BITS)
#define SET_SHARDS 256
#define CHUNK 4096
#define TIERS 4
#define MAX_BITS 4096
#define REGION_BITS 12
#define REGION (1u << REGION_BITS)
#define REGION_NBYTES (REGION * sizeof(Entry) + sizeof(Links))
#define NOWHERE UINT32_MAX
#define MIN_SLOTS 8
#define MAPPED (32 * 1024)
#define AHEAD 16

typedef struct {
    uint64_t low, high;
    uint32_t check, set; /* set 0: nothing here */
} Entry;

/* Two bits an entry. follows: the entry before it in the region is its parent. goes_on: and has the same set. Both are
 * 0 unless both entries are there. */
typedef struct {
    uint64_t follows[REGION / 64], goes_on[REGION / 64];
} Links;

typedef struct {
    Entry *entries; /* REGION of them, then their Links; NULL: this number is free */
    uint32_t used, live;
} Region;

typedef struct {
    uint32_t tag, at; /* at: 1 + number of the entry; 0: nothing here */
} Place;

typedef struct {
    Place *places;
    uint32_t size, used; /* size: 0 or a power of two */
} Shard;

typedef struct {
    uint32_t refs, hash;
    uint32_t n;
    uint16_t bits[];
} Set;

typedef struct {
    uint32_t *ids;
    uint32_t size, used;
} SetShard;

typedef struct {
    PyObject_HEAD
    Region *regions;
    uint32_t num_regions, open; /* open: 1 + the region that is being filled */
    uint32_t turn;
    int sweeping;
    Shard shards[NUM_SHARDS];
    SetShard interned[SET_SHARDS];
    Set ***chunks; /* set number -> set; a free number holds the next free one, shifted, with its lowest bit set */
    uint32_t num_chunks, next_id, free_id;
    uint64_t num_entries, nbytes;
} Table;

static inline uint32_t lowest_bit(uint64_t bits)
{
#if defined(__GNUC__)
    return (uint32_t)__builtin_ctzll(bits);
#else
    uint32_t i = 0;
    while (!(bits >> i & 1))
        i++;
    return i;
#endif
}

/* Zeroed. What is large is a mapping of its own, and goes back to the system when it is given back. */
static void *take(Table *t, size_t nbytes)
{
    void *p;
#if HAVE_MMAP
    if (nbytes >= MAPPED) {
        p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            return NULL;
        t->nbytes += nbytes;
        return p;
    }
#endif
    p = calloc(1, nbytes);
    if (p)
        t->nbytes += nbytes;
    return p;
}

static void give(Table *t, void *p, size_t nbytes)
{
    if (!p)
        return;
    t->nbytes -= nbytes;
#if HAVE_MMAP
    if (nbytes >= MAPPED) {
        munmap(p, nbytes);
        return;
    }
#endif
    free(p);
}

static inline Set *set_of(Table *t, uint32_t id)
{
    return t->chunks[id / CHUNK][id % CHUNK];
}

static inline size_t set_size(uint32_t n)
{
    return sizeof(Set) + n * sizeof(uint16_t);
}

static uint32_t hash_bits(const uint16_t *bits, uint32_t n)
{
    uint64_t h = 0x9E3779B97F4A7C15ULL ^ n;
    for (uint32_t i = 0; i < n; i++) {
        h ^= bits[i];
        h *= 0xFF51AFD7ED558CCDULL;
        h ^= h >> 32;
    }
    return (uint32_t)h;
}

static int set_shard_resize(Table *t, SetShard *s, uint32_t size)
{
    uint32_t *ids = take(t, size * sizeof(uint32_t));
    if (!ids)
        return -1;
    for (uint32_t i = 0; i < s->size; i++)
        if (s->ids[i]) {
            uint32_t at = (set_of(t, s->ids[i])->hash >> 8) & (size - 1);
            while (ids[at])
                at = (at + 1) & (size - 1);
            ids[at] = s->ids[i];
        }
    give(t, s->ids, s->size * sizeof(uint32_t));
    s->ids = ids;
    s->size = size;
    return 0;
}

static uint32_t new_id(Table *t)
{
    if (t->free_id) {
        uint32_t id = t->free_id;
        t->free_id = (uint32_t)((uintptr_t)set_of(t, id) >> 1);
        return id;
    }
    if (t->next_id / CHUNK == t->num_chunks) {
        Set ***more = realloc(t->chunks, (t->num_chunks + 1) * sizeof(Set **));
        if (!more)
            return 0;
        t->chunks = more;
        Set **chunk = take(t, CHUNK * sizeof(Set *));
        if (!chunk)
            return 0;
        t->chunks[t->num_chunks++] = chunk;
    }
    return t->next_id++;
}

/* The number of the set of these bits, made if need be, without a reference for the caller; 0 when memory is out. */
static uint32_t intern(Table *t, const uint16_t *bits, uint32_t n)
{
    uint32_t hash = hash_bits(bits, n);
    SetShard *s = &t->interned[hash % SET_SHARDS];
    if ((s->used + 1) * 4 > s->size * 3 && set_shard_resize(t, s, s->size ? s->size * 2 : MIN_SLOTS) < 0)
        return 0;
    uint32_t at = (hash >> 8) & (s->size - 1);
    while (s->ids[at]) {
        Set *set = set_of(t, s->ids[at]);
        if (set->hash == hash && set->n == n && !memcmp(set->bits, bits, n * sizeof(uint16_t)))
            return s->ids[at];
        at = (at + 1) & (s->size - 1);
    }
    Set *set = take(t, set_size(n));
    if (!set)
        return 0;
    uint32_t id = new_id(t);
    if (!id) {
        give(t, set, set_size(n));
        return 0;
    }
    set->hash = hash;
    set->n = n;
    memcpy(set->bits, bits, n * sizeof(uint16_t));
    t->chunks[id / CHUNK][id % CHUNK] = set;
    s->ids[at] = id;
    s->used++;
    return id;
}

static void release_set(Table *t, uint32_t id)
{
    Set *set = set_of(t, id);
    if (--set->refs)
        return;
    SetShard *s = &t->interned[set->hash % SET_SHARDS];
    uint32_t mask = s->size - 1, at = (set->hash >> 8) & mask;
    while (s->ids[at] != id)
        at = (at + 1) & mask;
    /* What probed past this place moves back, so that no probe ends early. */
    for (uint32_t next = (at + 1) & mask; s->ids[next]; next = (next + 1) & mask) {
        uint32_t home = (set_of(t, s->ids[next])->hash >> 8) & mask;
        if (((next - home) & mask) >= ((next - at) & mask)) {
            s->ids[at] = s->ids[next];
            at = next;
        }
    }
    s->ids[at] = 0;
    s->used--;
    if (s->size > 64 && s->used * 8 < s->size)
        set_shard_resize(t, s, s->size / 2); /* without memory for it, it stays as it is */
    give(t, set, set_size(set->n));
    t->chunks[id / CHUNK][id % CHUNK] = (Set *)(((uintptr_t)t->free_id << 1) | 1);
    t->free_id = id;
}

static int has_bit(const Set *set, uint16_t bit)
{
    uint32_t low = 0, high = set->n;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (set->bits[middle] < bit)
            low = middle + 1;
        else
            high = middle;
    }
    return low < set->n && set->bits[low] == bit;
}

/* The set `id` (0: the empty one) with `bit`; 0 when memory is out. */
static uint32_t set_with(Table *t, uint32_t id, uint16_t bit)
{
    uint16_t bits[MAX_BITS];
    uint32_t n = 0;
    if (id) {
        Set *set = set_of(t, id);
        if (has_bit(set, bit))
            return id;
        while (n < set->n && set->bits[n] < bit) {
            bits[n] = set->bits[n];
            n++;
        }
        bits[n] = bit;
        memcpy(bits + n + 1, set->bits + n, (set->n - n) * sizeof(uint16_t));
        n = set->n;
    } else {
        bits[0] = bit;
    }
    return intern(t, bits, n + 1);
}

/* What is left of set `id` without the bits that `gone` names; 0 when nothing is. -1 in `*failed` when memory is out. */
static uint32_t set_without(Table *t, uint32_t id, const uint8_t *gone, int *failed)
{
    uint16_t bits[MAX_BITS];
    Set *set = set_of(t, id);
    uint32_t n = 0;
    for (uint32_t i = 0; i < set->n; i++)
        if (!gone[set->bits[i]])
            bits[n++] = set->bits[i];
    if (n == set->n)
        return id;
    if (!n)
        return 0;
    uint32_t left = intern(t, bits, n);
    if (!left)
        *failed = -1;
    return left;
}

