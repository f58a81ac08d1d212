/* The hot loops of kv-transport, over plain buffers. `kernels.py` is what to read and to call: it states what each
 * function does, and holds the plain twin that is its oracle and its fallback. The GIL is released in all of them.
 *
 * CRC-64/NVME (polynomial 0xAD93D23594C93659, reflected, all ones in and out) is folded by carry-less multiplication,
 * many lanes of 128 bits at a time: V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel 2009. Constants are computed at import and not copied from anywhere. Which
 * instructions there are is asked at run time.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_buffers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#else
#define HAVE_X86 0
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only"
#endif

#define POLY 0x9A6C9329AC4BC9B5ULL /* reflected */
/* How far the sum stays behind the copy. What it reads has left the store buffer (112 stores of 64 bytes on the largest
 * core so far), so it comes from the first-level cache, and it is no multiple of 4 KiB, which would look like a
 * dependency of the load on the store. */
#define LAG 9216
/* How far ahead memory is asked for: about what arrives in the time that the farthest memory takes to answer. */
#define AHEAD 4096

static uint64_t table[8][256];
static int have_pclmul, have_avx2, have_avx512;

static void make_tables(void)
{
    for (int i = 0; i < 256; i++) {
        uint64_t c = (uint64_t)i;
        for (int bit = 0; bit < 8; bit++)
            c = (c >> 1) ^ (c & 1 ? POLY : 0);
        table[0][i] = c;
    }
    for (int i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 0xff];
}

/* Without the ones in and out. */
static uint64_t crc_plain(uint64_t crc, const uint8_t *p, size_t n)
{
    while (n >= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= crc;
        crc = table[7][w & 0xff] ^ table[6][(w >> 8) & 0xff] ^ table[5][(w >> 16) & 0xff] ^ table[4][(w >> 24) & 0xff] ^
              table[3][(w >> 32) & 0xff] ^ table[2][(w >> 40) & 0xff] ^ table[1][(w >> 48) & 0xff] ^ table[0][w >> 56];
        p += 8;
        n -= 8;
    }
    while (n--)
        crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 0xff];
    return crc;
}

#if HAVE_X86
/* x**n mod P, reflected. */
static uint64_t x_to(unsigned n)
{
    uint64_t v = 1ULL << 63; /* x**0 */
    while (n--)
        v = (v >> 1) ^ (v & 1 ? POLY : 0);
    return v;
}

/* A product of reflected values comes out multiplied by x: hence the -1. */
static uint64_t fold_low[3], fold_high[3]; /* by 1024 bits, by 128 bits, by 2048 bits */

static void make_constants(void)
{
    const unsigned bits[3] = {1024, 128, 2048};
    for (int i = 0; i < 3; i++) {
        fold_low[i] = x_to(bits[i] + 64 - 1);
        fold_high[i] = x_to(bits[i] - 1);
    }
}

__attribute__((target("pclmul,sse2"))) static inline __m128i fold(__m128i x, __m128i k, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))

/* With `from`, copies it to `p` as well, `LAG` bytes ahead of the sum, which is taken of what has arrived. */
__attribute__((target("pclmul,sse2"))) static uint64_t crc_folded(uint64_t crc, uint8_t *p, const uint8_t *from, size_t n)
{
    const size_t ahead = n < LAG ? n : LAG;
    if (from)
        memcpy(p, from, ahead);
    if (n < 256) {
        if (n < 32)
            return crc_plain(crc, p, n);
        const __m128i by_block = _mm_set_epi64x((long long)fold_high[1], (long long)fold_low[1]);
        __m128i x = _mm_xor_si128(LOAD(p), _mm_cvtsi64_si128((long long)crc));
        size_t done = 16;
        for (; n - done >= 16; done += 16)
            x = fold(x, by_block, LOAD(p + done));
        uint8_t folded[16];
        _mm_storeu_si128((__m128i *)folded, x);
        return crc_plain(crc_plain(0, folded, 16), p + done, n - done);
    }
    const __m128i by_1024 = _mm_set_epi64x((long long)fold_high[0], (long long)fold_low[0]);
    const __m128i by_128 = _mm_set_epi64x((long long)fold_high[1], (long long)fold_low[1]);
    size_t copied = from ? ahead : n, at = 128;
    __m128i x0 = _mm_xor_si128(LOAD(p), _mm_cvtsi64_si128((long long)crc));
    __m128i x1 = LOAD(p + 16), x2 = LOAD(p + 32), x3 = LOAD(p + 48);
    __m128i x4 = LOAD(p + 64), x5 = LOAD(p + 80), x6 = LOAD(p + 96), x7 = LOAD(p + 112);
    for (; n - at >= 128; at += 128) {
        if (n - copied >= 128) {
            for (int i = 0; i < 128; i += 16)
                _mm_storeu_si128((__m128i *)(p + copied + i), LOAD(from + copied + i));
            copied += 128;
        } else if (copied < n) {
            memcpy(p + copied, from + copied, n - copied);
            copied = n;
        }
        x0 = fold(x0, by_1024, LOAD(p + at));
        x1 = fold(x1, by_1024, LOAD(p + at + 16));
        x2 = fold(x2, by_1024, LOAD(p + at + 32));
        x3 = fold(x3, by_1024, LOAD(p + at + 48));
        x4 = fold(x4, by_1024, LOAD(p + at + 64));
        x5 = fold(x5, by_1024, LOAD(p + at + 80));
        x6 = fold(x6, by_1024, LOAD(p + at + 96));
        x7 = fold(x7, by_1024, LOAD(p + at + 112));
    }
    x1 = fold(x0, by_128, x1);
    x2 = fold(x1, by_128, x2);
    x3 = fold(x2, by_128, x3);
    x4 = fold(x3, by_128, x4);
    x5 = fold(x4, by_128, x5);
    x6 = fold(x5, by_128, x6);
    x7 = fold(x6, by_128, x7);
    for (; n - at >= 16; at += 16)
        x7 = fold(x7, by_128, LOAD(p + at));
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, x7);
    return crc_plain(crc_plain(0, rest, 16), p + at, n - at);
}

#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,prfchw")))
#define LOAD512(at) _mm512_loadu_si512((const void *)(at))
#define LANES 256

/* The same by sixteen lanes. What is left in them is 256 bytes with the sum of all before. */
typedef struct {
    __m512i a, b, c, d;
} Lanes;

WIDE static inline __m512i fold512(__m512i x, __m512i k, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next,
                                     0x96);
}

WIDE static inline Lanes load_lanes(const uint8_t *p)
{
    return (Lanes){LOAD512(p), LOAD512(p + 64), LOAD512(p + 128), LOAD512(p + 192)};
}

WIDE static inline void store_lanes(uint8_t *p, Lanes x)
{
    _mm512_storeu_si512(p, x.a);
    _mm512_storeu_si512(p + 64, x.b);
    _mm512_storeu_si512(p + 128, x.c);
    _mm512_storeu_si512(p + 192, x.d);
}

WIDE static inline Lanes begin_lanes(Lanes first, uint64_t crc)
{
    first.a = _mm512_xor_si512(first.a, _mm512_zextsi128_si512(_mm_cvtsi64_si128((long long)crc)));
    return first;
}

WIDE static inline Lanes fold_lanes(Lanes x, __m512i k, Lanes next)
{
    return (Lanes){fold512(x.a, k, next.a), fold512(x.b, k, next.b), fold512(x.c, k, next.c), fold512(x.d, k, next.d)};
}

/* With the fewer than `LANES` bytes after them. */
WIDE static uint64_t end_lanes(Lanes x, const uint8_t *p, size_t n)
{
    uint8_t rest[LANES];
    store_lanes(rest, x);
    return crc_folded(crc_folded(0, rest, NULL, LANES), (uint8_t *)p, NULL, n);
}

WIDE static inline __m512i by_2048(void)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold_high[2], (long long)fold_low[2]));
}

WIDE static uint64_t crc_folded512(uint64_t crc, const uint8_t *p, size_t n)
{
    if (n < 1024)
        return crc_folded(crc, (uint8_t *)p, NULL, n);
    const __m512i k = by_2048();
    Lanes x = begin_lanes(load_lanes(p), crc);
    size_t at = LANES;
    for (; n - at >= LANES; at += LANES) {
        if (n - at > AHEAD)
            for (int i = 0; i < LANES; i += 64)
                _mm_prefetch((const char *)(p + at + AHEAD + i), _MM_HINT_T0);
        x = fold_lanes(x, k, load_lanes(p + at));
    }
    return end_lanes(x, p + at, n - at);
}

/* Copies one block and asks for those to come: the source to read, the destination to own, which spares the processor
 * half of what a store to a line that is not in the cache costs. Its own prefetching ends with each page. */
WIDE static inline Lanes copy_lanes(uint8_t *to, const uint8_t *from, size_t left)
{
    if (left > AHEAD)
        for (int i = 0; i < LANES; i += 64) {
            _mm_prefetch((const char *)(from + AHEAD + i), _MM_HINT_T0);
            __builtin_prefetch(to + AHEAD + i, 1, 3);
        }
    const Lanes block = load_lanes(from);
    store_lanes(to, block);
    return block;
}

/* One pass over at least `LANES` bytes: what was read is summed in registers, and what has arrived `LAG` bytes behind. */
WIDE static inline uint64_t copy_folded512(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc, uint64_t *read)
{
    const __m512i k = by_2048();
    const size_t whole = n - n % LANES, first = whole < LAG ? whole : LAG;
    Lanes source = begin_lanes(copy_lanes(to, from, whole), read ? *read : 0);
    size_t at = LANES, summed = LANES;
    for (; at < first; at += LANES) {
        const Lanes block = copy_lanes(to + at, from + at, whole - at);
        if (read)
            source = fold_lanes(source, k, block);
    }
    /* What was stored is read from memory, not remembered. */
    __asm__ volatile("" ::: "memory");
    Lanes target = begin_lanes(load_lanes(to), crc);
    for (; at < whole; at += LANES, summed += LANES) {
        const Lanes block = copy_lanes(to + at, from + at, whole - at);
        if (read)
            source = fold_lanes(source, k, block);
        target = fold_lanes(target, k, load_lanes(to + summed));
    }
    for (; summed < whole; summed += LANES)
        target = fold_lanes(target, k, load_lanes(to + summed));
    memcpy(to + whole, from + whole, n - whole);
    __asm__ volatile("" ::: "memory");
    if (read)
        *read = end_lanes(source, from + whole, n - whole);
    return end_lanes(target, to + whole, n - whole);
}

WIDE static uint64_t copy_and_sum512(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc)
{
    return copy_folded512(to, from, n, crc, NULL);
}

WIDE static uint64_t copy_and_sum_both512(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc, uint64_t *read)
{
    return copy_folded512(to, from, n, crc, read);
}
#endif

static uint64_t copy_and_sum(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc)
{
#if HAVE_X86
    if (have_avx512 && n >= 1024)
        return copy_and_sum512(to, from, n, crc);
    if (have_pclmul)
        return crc_folded(crc, to, from, n);
#endif
    while (n) {
        size_t piece = n < LAG ? n : LAG;
        memcpy(to, from, piece);
        /* What has arrived, not what was read. */
        crc = crc_plain(crc, to, piece);
        to += piece;
        from += piece;
        n -= piece;
    }
    return crc;
}

static uint64_t sum(const uint8_t *p, size_t n, uint64_t crc)
{
#if HAVE_X86
    if (have_avx512)
        return crc_folded512(crc, p, n);
    if (have_pclmul) /* nothing is written when there is nothing to copy */
        return crc_folded(crc, (uint8_t *)p, NULL, n);
#endif
    return crc_plain(crc, p, n);
}

static void detect(int pclmul, int avx2, int avx512)
{
#if HAVE_X86
    __builtin_cpu_init();
    have_pclmul = pclmul && __builtin_cpu_supports("pclmul");
    have_avx2 = avx2 && __builtin_cpu_supports("avx2");
    have_avx512 = avx512 && have_pclmul && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("vpclmulqdq");
#else
    (void)pclmul, (void)avx2, (void)avx512;
#endif
}

/* What is summed at the source before it is copied: then the copy finds it in the second-level cache. */
#define READ_PIECE 65536

/* Both sums: of what was read, and of what has arrived. */
static uint64_t copy_and_sum_both(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc, uint64_t *read)
{
#if HAVE_X86
    if (have_avx512 && n >= 1024)
        return copy_and_sum_both512(to, from, n, crc, read);
#endif
    while (n) {
        size_t piece = n < READ_PIECE ? n : READ_PIECE;
        *read = sum(from, piece, *read);
        crc = copy_and_sum(to, from, piece, crc);
        to += piece;
        from += piece;
        n -= piece;
    }
    return crc;
}

/* What is copied, and where the sums go: `cells` are int64 triples (to, from, nbytes); the sum of each continues the
 * uint64 that is in `checks`, and that of its source the one in `read`, where there is one. */
typedef struct {
    Py_buffer to, from, cells, checks, read;
    Py_ssize_t count;
} Copy;

static void copy_release(Copy *copy)
{
    if (copy->read.obj)
        PyBuffer_Release(&copy->read);
    PyBuffer_Release(&copy->checks);
    PyBuffer_Release(&copy->cells);
    PyBuffer_Release(&copy->from);
    PyBuffer_Release(&copy->to);
}

/* From four objects, and `read` or NULL or None. Everything is checked: 0, or -1 with an error set and nothing held. */
static int copy_arguments(Copy *copy, PyObject *const *objects, PyObject *read)
{
    copy->read.obj = NULL;
    if (get(objects[0], &copy->to, PyBUF_WRITABLE, "to", -1) < 0)
        return -1;
    if (get(objects[1], &copy->from, PyBUF_SIMPLE, "from", -1) < 0)
        goto to_only;
    if (get(objects[2], &copy->cells, PyBUF_SIMPLE, "cells", -1) < 0)
        goto two;
    copy->count = copy->cells.len / 24;
    if (get(objects[3], &copy->checks, PyBUF_WRITABLE, "checks", copy->count * 8) < 0)
        goto three;
    if (read && read != Py_None && get(read, &copy->read, PyBUF_WRITABLE, "read", copy->count * 8) < 0) {
        copy->read.obj = NULL;
        goto all;
    }
    if (copy->cells.len % 24) {
        PyErr_SetString(PyExc_ValueError, "cells are triples of int64");
        goto all;
    }
    const int64_t *cell = copy->cells.buf;
    for (Py_ssize_t i = 0; i < copy->count; i++) {
        int64_t a = cell[3 * i], b = cell[3 * i + 1], n = cell[3 * i + 2];
        if (n < 0 || a < 0 || b < 0 || n > copy->to.len || n > copy->from.len || a > copy->to.len - n ||
            b > copy->from.len - n) {
            PyErr_Format(PyExc_IndexError, "cell %zd lies outside its memory", i);
            goto all;
        }
    }
    return 0;
all:
    copy_release(copy);
    return -1;
three:
    PyBuffer_Release(&copy->cells);
two:
    PyBuffer_Release(&copy->from);
to_only:
    PyBuffer_Release(&copy->to);
    return -1;
}

static void copy_cell(const Copy *copy, Py_ssize_t i)
{
    const int64_t *cell = (const int64_t *)copy->cells.buf + 3 * i;
    uint64_t *check = (uint64_t *)copy->checks.buf + i, *read = copy->read.obj ? (uint64_t *)copy->read.buf + i : NULL;
    uint8_t *to = (uint8_t *)copy->to.buf + cell[0];
    const uint8_t *from = (const uint8_t *)copy->from.buf + cell[1];
    if (read) {
        uint64_t source = ~*read;
        *check = ~copy_and_sum_both(to, from, (size_t)cell[2], ~*check, &source);
        *read = ~source;
    } else
        *check = ~copy_and_sum(to, from, (size_t)cell[2], ~*check);
}

/* copy_cells(to, from, cells, checks[, read]): everything is checked before the first byte is written. */
static PyObject *py_copy_cells(PyObject *self, PyObject *args)
{
    PyObject *objects[4], *read = NULL;
    Copy copy;
    if (!PyArg_ParseTuple(args, "OOOO|O", &objects[0], &objects[1], &objects[2], &objects[3], &read))
        return NULL;
    if (copy_arguments(&copy, objects, read) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < copy.count; i++)
        copy_cell(&copy, i);
    Py_END_ALLOW_THREADS
    copy_release(&copy);
    Py_RETURN_NONE;
}

/* How a copy stands that several threads share. `next` is the cell that is taken next; `inside` counts the threads that
 * hold the memory; `stop` is set from outside; `over` when its outcome was given. What is not atomic is only touched
 * under the GIL. */
typedef struct {
    uint64_t next, stop, inside, over;
} Shared;

/* copy_shared(state, to, from, cells, checks, read): takes one cell after the other until none is left or it is told to
 * stop. Gives True or False, whether all are copied, to the last thread that leaves, which holds nothing by then, and
 * None to every other. */
static PyObject *py_copy_shared(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "copy_shared takes 6 arguments");
        return NULL;
    }
    Py_buffer state;
    Copy copy;
    if (get(args[0], &state, PyBUF_WRITABLE, "state", sizeof(Shared)) < 0)
        return NULL;
    if ((uintptr_t)state.buf % 8) {
        PyBuffer_Release(&state);
        PyErr_SetString(PyExc_ValueError, "not the state of a copy");
        return NULL;
    }
    Shared *shared = state.buf;
    PyObject *result = Py_None;
    if (shared->over)
        goto out;
    if (copy_arguments(&copy, args + 1, args[5]) < 0) {
        if (shared->inside) { /* what is wrong is wrong with this thread: the last one out says that it was stopped */
            PyErr_Clear();
            __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
        } else {
            shared->over = 1;
            result = NULL;
        }
        goto out;
    }
    const uint64_t cells = (uint64_t)copy.count;
    shared->inside++;
    Py_BEGIN_ALLOW_THREADS
    while (!__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST)) {
        const uint64_t taken = __atomic_fetch_add(&shared->next, 1, __ATOMIC_SEQ_CST);
        if (taken >= cells)
            break;
        copy_cell(&copy, (Py_ssize_t)taken);
    }
    Py_END_ALLOW_THREADS
    copy_release(&copy);
    /* Whoever took a cell is inside until it is copied. */
    if (!--shared->inside && !shared->over) {
        shared->over = 1;
        result = __atomic_load_n(&shared->next, __ATOMIC_SEQ_CST) >= cells ? Py_True : Py_False;
    }
out:
    PyBuffer_Release(&state);
    Py_XINCREF(result);
    return result;
}

/* The sum of two pieces one after the other, from theirs: the first is multiplied by x**(bits of the second). The
 * method of zlib's crc32_combine: powers by squaring. */
static uint64_t x_to_2[64]; /* x**(2**i) mod P, reflected */

static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product = 0;
    for (uint64_t bit = 1ULL << 63; bit; bit >>= 1) {
        product ^= a & bit ? b : 0;
        b = (b >> 1) ^ (b & 1 ? POLY : 0);
    }
    return product;
}

static void make_powers(void)
{
    x_to_2[0] = 1ULL << 62;
    for (int i = 1; i < 64; i++)
        x_to_2[i] = times(x_to_2[i - 1], x_to_2[i - 1]);
}

static uint64_t x_to_bytes(uint64_t nbytes)
{
    uint64_t power = 1ULL << 63;
    for (int i = 3; nbytes; nbytes >>= 1, i++)
        if (nbytes & 1)
            power = times(x_to_2[i & 63], power);
    return power;
}

/* combine(checks, sizes): the sum of all pieces one after the other. */
static PyObject *py_combine(PyObject *self, PyObject *args)
{
    PyObject *checks_object, *sizes_object;
    Py_buffer checks, sizes;
    if (!PyArg_ParseTuple(args, "OO", &checks_object, &sizes_object))
        return NULL;
    if (get(checks_object, &checks, PyBUF_SIMPLE, "checks", -1) < 0)
        return NULL;
    if (get(sizes_object, &sizes, PyBUF_SIMPLE, "sizes", checks.len) < 0) {
        PyBuffer_Release(&checks);
        return NULL;
    }
    const uint64_t *check = checks.buf, *size = sizes.buf;
    Py_ssize_t count = checks.len / 8;
    uint64_t total = 0, last = 0, power = 1ULL << 63;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        if (size[i] != last) {
            last = size[i];
            power = x_to_bytes(last);
        }
        total = times(power, total) ^ check[i];
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&checks);
    return PyLong_FromUnsignedLongLong(total);
}

/* sum_cells(from, cells, checks): cells are int64 pairs (offset, nbytes); `checks` takes the sum of each. */
static PyObject *py_sum_cells(PyObject *self, PyObject *args)
{
    PyObject *from_object, *cells_object, *checks_object, *result = NULL;
    Py_buffer from, cells, checks;
    if (!PyArg_ParseTuple(args, "OOO", &from_object, &cells_object, &checks_object))
        return NULL;
    if (get(from_object, &from, PyBUF_SIMPLE, "from", -1) < 0)
        return NULL;
    if (get(cells_object, &cells, PyBUF_SIMPLE, "cells", -1) < 0)
        goto from_only;
    if (get(checks_object, &checks, PyBUF_WRITABLE, "checks", cells.len / 16 * 8) < 0)
        goto two;
    const int64_t *cell = cells.buf;
    uint64_t *check = checks.buf;
    Py_ssize_t count = cells.len / 16;
    if (cells.len % 16) {
        PyErr_SetString(PyExc_ValueError, "cells are pairs of int64");
        goto all;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (cell[2 * i] < 0 || cell[2 * i + 1] < 0 || cell[2 * i] > from.len - cell[2 * i + 1]) {
            PyErr_Format(PyExc_IndexError, "cell %zd lies outside its memory", i);
            goto all;
        }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        check[i] = ~sum((const uint8_t *)from.buf + cell[2 * i], (size_t)cell[2 * i + 1], ~0ULL);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
all:
    PyBuffer_Release(&checks);
two:
    PyBuffer_Release(&cells);
from_only:
    PyBuffer_Release(&from);
    return result;
}

/* FP8. One (plane, head) is a matrix of `rows` tokens by `columns` channels, of bf16. */

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

#define COLUMNS_MAX 1024

/* A scale byte stands for 2**((byte - 176) / 4). Larger magnitudes than TOP_MAX (|bf16| bits) have no scale. */
#define CANDIDATES 4
#define SCALE_BYTE_MAX 255
#define TOP_MAX 0x4dc3u

static float scale_of[256];

/* The bits of 2**((n - 176) / 4), rounded to nearest. */
static inline uint32_t quarter_power(uint32_t n)
{
    uint32_t root = n & 2 ? (n & 1 ? 0x3fd744fdu : 0x3fb504f3u) : (n & 1 ? 0x3f9837f0u : 0x3f800000u);
    return root + (n >> 2 << 23) - (44u << 23);
}

static void make_scales(void)
{
    for (unsigned byte = 0; byte < 256; byte++)
        scale_of[byte] = as_float(quarter_power(byte));
}

/* The least scale that brings `top` to at most 464, which rounds to 448, the largest E4M3. */
static inline int32_t least_scale(int32_t top)
{
    int32_t m = top & 0x7f, byte = 4 * (top >> 7) - 367 + (m > 9) + (m > 36) + (m > 67) + (m > 104);
    byte = byte < 0 ? 0 : byte;
    return byte > SCALE_BYTE_MAX ? SCALE_BYTE_MAX : byte;
}

/* Compiled once for every instruction set, by being inlined into the functions below. */
#define BODY static inline __attribute__((always_inline))

/* The squared error of rounding to the 4 bits that E4M3 keeps of a number. Veltkamp's splitting: 20 of 24 bits go. What
   is smaller than 2**-6 loses more than that, and too little to matter beside the largest of its channel. */
BODY float squared_error(float value)
{
    float split = value * 1048577.0f;
    float error = value - (split - (split - value));
    return error * error;
}

/* For every column the scale byte of least error among CANDIDATES, and its inverse; the largest magnitude of all. */
BODY unsigned choose_scales(uint8_t *restrict scales, float *restrict factor, const uint16_t *restrict from,
                            size_t rows, size_t columns)
{
    int16_t top[COLUMNS_MAX], worst = 0;
    int32_t least[COLUMNS_MAX], best[COLUMNS_MAX];
    float inverse[CANDIDATES][COLUMNS_MAX], errors[CANDIDATES][COLUMNS_MAX];
    memset(top, 0, sizeof(int16_t) * columns);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            int16_t magnitude = (int16_t)(from[r * columns + c] & 0x7fff);
            top[c] = magnitude > top[c] ? magnitude : top[c];
        }
    for (size_t c = 0; c < columns; c++) {
        worst = top[c] > worst ? top[c] : worst;
        least[c] = least_scale(top[c]);
        best[c] = 0;
    }
    for (int32_t k = 0; k < CANDIDATES; k++)
        for (size_t c = 0; c < columns; c++) {
            int32_t byte = least[c] + k > SCALE_BYTE_MAX ? SCALE_BYTE_MAX : least[c] + k;
            inverse[k][c] = as_float(quarter_power((uint32_t)(352 - byte)));
            errors[k][c] = 0;
        }
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            float value = as_float((uint32_t)from[r * columns + c] << 16);
            errors[0][c] += squared_error(value * inverse[0][c]);
            errors[1][c] += squared_error(value * inverse[1][c]);
            errors[2][c] += squared_error(value * inverse[2][c]);
            errors[3][c] += squared_error(value * inverse[3][c]);
        }
    memcpy(factor, inverse[0], sizeof(float) * columns);
    for (int32_t k = 1; k < CANDIDATES; k++) {
        /* A step of the scale, squared: errors are in units of their scale. Beyond the last scale nothing is better. */
        float step = scale_of[176 + 2 * k];
        for (size_t c = 0; c < columns; c++) {
            float error = errors[k][c] * step;
            int32_t better = error < errors[0][c];
            errors[0][c] = better ? error : errors[0][c];
            factor[c] = better ? inverse[k][c] : factor[c];
            best[c] = better ? k : best[c];
        }
    }
    for (size_t c = 0; c < columns; c++)
        scales[c] = (uint8_t)(least[c] + best[c]);
    return (unsigned)worst;
}

BODY unsigned quantise(uint8_t *restrict to, uint8_t *restrict scales, const uint16_t *restrict from, size_t matrices,
                       size_t rows, size_t columns)
{
    float factor[COLUMNS_MAX];
    unsigned worst = 0;
    for (size_t m = 0; m < matrices; m++) {
        unsigned top = choose_scales(scales, factor, from, rows, columns);
        worst = top > worst ? top : worst;
        if (worst > TOP_MAX)
            return worst;
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < columns; c++) {
                uint32_t bits = as_bits(as_float((uint32_t)from[r * columns + c] << 16) * factor[c]);
                uint32_t size = bits & 0x7fffffffu;
                uint32_t small = as_bits(as_float(size) + as_float(141u << 23)) - (141u << 23);
                uint32_t large = (size + 0x7ffffu + ((size >> 20) & 1) - (120u << 23)) >> 20;
                uint32_t is_small = (uint32_t)((int32_t)(size - (121u << 23)) >> 31);
                uint32_t code = (small & is_small) | (large & ~is_small);
                to[r * columns + c] = (uint8_t)(code | ((bits >> 24) & 0x80));
            }
        from += rows * columns;
        to += rows * columns;
        scales += columns;
    }
    return worst;
}

BODY void dequantise(uint16_t *restrict to, const uint8_t *restrict scales, const uint8_t *restrict from,
                     size_t matrices, size_t rows, size_t columns)
{
    float factor[COLUMNS_MAX];
    for (size_t m = 0; m < matrices; m++) {
        for (size_t c = 0; c < columns; c++)
            factor[c] = scale_of[scales[c]];
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < columns; c++) {
                uint32_t code = from[r * columns + c];
                uint32_t size = code & 0x7f;
                /* Subnormals: an integer worth 2**-9 each; else the exponent is moved from bias 7 to 127. */
                uint32_t small = as_bits((float)(int32_t)size * (1.0f / 512.0f));
                uint32_t large = (size << 20) + (120u << 23);
                uint32_t is_small = (uint32_t)((int32_t)(size - 8) >> 31);
                uint32_t bits = as_bits(as_float((small & is_small) | (large & ~is_small)) * factor[c]);
                bits = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
                uint32_t is_nan = (uint32_t)((int32_t)(0x7e - size) >> 31);
                bits = (0x7fc0u & is_nan) | (bits & ~is_nan);
                to[r * columns + c] = (uint16_t)(bits | ((code & 0x80) << 8));
            }
        from += rows * columns;
        to += rows * columns;
        scales += columns;
    }
}

static unsigned quantise_base(uint8_t *to, uint8_t *scales, const uint16_t *from, size_t m, size_t r, size_t c)
{
    return quantise(to, scales, from, m, r, c);
}

static void dequantise_base(uint16_t *to, const uint8_t *scales, const uint8_t *from, size_t m, size_t r, size_t c)
{
    dequantise(to, scales, from, m, r, c);
}

#if HAVE_X86
#define FOR(features) __attribute__((target(features))) static

FOR("avx2") unsigned quantise_avx2(uint8_t *to, uint8_t *scales, const uint16_t *from, size_t m, size_t r, size_t c)
{
    return quantise(to, scales, from, m, r, c);
}

FOR("avx2") void dequantise_avx2(uint16_t *to, const uint8_t *scales, const uint8_t *from, size_t m, size_t r, size_t c)
{
    dequantise(to, scales, from, m, r, c);
}

#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq"

FOR(AVX512) unsigned quantise_avx512(uint8_t *to, uint8_t *scales, const uint16_t *from, size_t m, size_t r, size_t c)
{
    return quantise(to, scales, from, m, r, c);
}

FOR(AVX512) void dequantise_avx512(uint16_t *to, const uint8_t *scales, const uint8_t *from, size_t m, size_t r, size_t c)
{
    dequantise(to, scales, from, m, r, c);
}
#endif

/* Buffers of bf16, scales and codes, and the shape, checked against each other. */
typedef struct {
    Py_buffer to, scales, from;
    Py_ssize_t matrices, rows, columns;
} Fp8Args;

static int fp8_arguments(PyObject *args, Fp8Args *a, int to_width, int from_width, int scales_flag)
{
    PyObject *to, *scales, *from;
    if (!PyArg_ParseTuple(args, "OOOnnn", &to, &scales, &from, &a->matrices, &a->rows, &a->columns))
        return -1;
    if (a->matrices < 0 || a->rows < 1 || a->columns < 1 || a->columns > COLUMNS_MAX || a->rows > (1 << 24) ||
        a->matrices > (1 << 24)) {
        PyErr_Format(PyExc_ValueError, "shape %zd x %zd x %zd", a->matrices, a->rows, a->columns);
        return -1;
    }
    Py_ssize_t cells = a->matrices * a->columns;
    if (cells > PY_SSIZE_T_MAX / 2 / a->rows) {
        PyErr_SetString(PyExc_ValueError, "shape too large");
        return -1;
    }
    if (get(to, &a->to, PyBUF_WRITABLE, "to", cells * a->rows * to_width) < 0)
        return -1;
    if (get(scales, &a->scales, scales_flag, "scales", cells) < 0) {
        PyBuffer_Release(&a->to);
        return -1;
    }
    if (get(from, &a->from, PyBUF_SIMPLE, "from", cells * a->rows * from_width) < 0) {
        PyBuffer_Release(&a->scales);
        PyBuffer_Release(&a->to);
        return -1;
    }
    return 0;
}

static void fp8_release(Fp8Args *a)
{
    PyBuffer_Release(&a->from);
    PyBuffer_Release(&a->scales);
    PyBuffer_Release(&a->to);
}

static PyObject *py_quantise(PyObject *self, PyObject *args)
{
    Fp8Args a;
    if (fp8_arguments(args, &a, 1, 2, PyBUF_WRITABLE) < 0)
        return NULL;
    unsigned worst;
    Py_BEGIN_ALLOW_THREADS
#if HAVE_X86
    if (have_avx512)
        worst = quantise_avx512(a.to.buf, a.scales.buf, a.from.buf, (size_t)a.matrices, (size_t)a.rows, (size_t)a.columns);
    else if (have_avx2)
        worst = quantise_avx2(a.to.buf, a.scales.buf, a.from.buf, (size_t)a.matrices, (size_t)a.rows, (size_t)a.columns);
    else
#endif
        worst = quantise_base(a.to.buf, a.scales.buf, a.from.buf, (size_t)a.matrices, (size_t)a.rows, (size_t)a.columns);
    Py_END_ALLOW_THREADS
    fp8_release(&a);
    return PyBool_FromLong(worst <= TOP_MAX);
}

static PyObject *py_dequantise(PyObject *self, PyObject *args)
{
    Fp8Args a;
    if (fp8_arguments(args, &a, 2, 1, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
#if HAVE_X86
    if (have_avx512)
        dequantise_avx512(a.to.buf, a.scales.buf, a.from.buf, (size_t)a.matrices, (size_t)a.rows, (size_t)a.columns);
    else if (have_avx2)
        dequantise_avx2(a.to.buf, a.scales.buf, a.from.buf, (size_t)a.matrices, (size_t)a.rows, (size_t)a.columns);
    else
#endif
        dequantise_base(a.to.buf, a.scales.buf, a.from.buf, (size_t)a.matrices, (size_t)a.rows, (size_t)a.columns);
    Py_END_ALLOW_THREADS
    fp8_release(&a);
    Py_RETURN_NONE;
}

/* set_features(pclmul, avx2, avx512): use no more than these; returns what is in use. For tests of the slower paths. */
static PyObject *py_set_features(PyObject *self, PyObject *args)
{
    int pclmul, avx2, avx512;
    if (!PyArg_ParseTuple(args, "ppp", &pclmul, &avx2, &avx512))
        return NULL;
    detect(pclmul, avx2, avx512);
    return Py_BuildValue("(NNN)", PyBool_FromLong(have_pclmul), PyBool_FromLong(have_avx2), PyBool_FromLong(have_avx512));
}

static PyMethodDef methods[] = {
    {"copy_cells", py_copy_cells, METH_VARARGS, NULL},
    {"copy_shared", (PyCFunction)(void (*)(void))py_copy_shared, METH_FASTCALL, NULL},
    {"sum_cells", py_sum_cells, METH_VARARGS, NULL},
    {"combine", py_combine, METH_VARARGS, NULL},
    {"quantise_bf16", py_quantise, METH_VARARGS, NULL},
    {"dequantise_bf16", py_dequantise, METH_VARARGS, NULL},
    {"set_features", py_set_features, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* A function for the package's other compiled parts. */
static int offer(PyObject *module, void *function, const char *name, const char *full_name)
{
    PyObject *capsule = PyCapsule_New(function, full_name, NULL);
    if (capsule == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, name, capsule);
    Py_DECREF(capsule);
    return failed;
}

static int prepare(PyObject *module)
{
    make_tables();
    make_powers();
    make_scales();
#if HAVE_X86
    make_constants();
#endif
    detect(1, 1, 1);
    if (offer(module, (void *)sum, "crc64", "kv_transport._kernels.crc64") < 0)
        return -1;
    return offer(module, (void *)copy_and_sum_both, "copy_and_sum_both", "kv_transport._kernels.copy_and_sum_both");
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kv_transport._kernels", NULL, 0, methods, slots, NULL, NULL,
                                    NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&module);
}
