/* One loop over the cells of a file: read a piece, copy it to where it belongs, and sum it on the way. `cell_io.py` is
 * what to read and to call: it states what the function does, and holds the plain twin, which is its oracle and its
 * fallback. The GIL is released while it reads.
 *
 * A piece is read into a buffer that stays in the second-level cache, and goes on from there by stores that pass by the
 * caches. What a copy to memory that is not in the cache costs is mostly the fetching of the lines that it then writes
 * over; without that, there is time for the sum. CRC-64/NVME (polynomial 0xAD93D23594C93659, reflected, all ones in and
 * out) is folded by carry-less multiplication, sixteen lanes of 128 bits at a time: V. Gopal and others, "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009. Constants are computed at import.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

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
#define LINE 64
#define LANES 256
#define CHECK 8 /* bytes of a check */

static uint64_t table[8][256];
static int have_wide;

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
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= crc;
        crc = table[7][w & 0xff] ^ table[6][(w >> 8) & 0xff] ^ table[5][(w >> 16) & 0xff] ^ table[4][(w >> 24) & 0xff] ^
              table[3][(w >> 32) & 0xff] ^ table[2][(w >> 40) & 0xff] ^ table[1][(w >> 48) & 0xff] ^ table[0][w >> 56];
    }
    while (n--)
        crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 0xff];
    return crc;
}

static uint64_t copy_plain(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc)
{
    memcpy(to, from, n);
    return crc_plain(crc, from, n);
}

#if HAVE_X86
static uint64_t fold_low[3], fold_high[3]; /* by 2048 bits, by 512, by 128 */

/* x**n mod P, reflected. */
static uint64_t x_to(unsigned n)
{
    uint64_t v = 1ULL << 63; /* x**0 */
    while (n--)
        v = (v >> 1) ^ (v & 1 ? POLY : 0);
    return v;
}

static void make_constants(void)
{
    const unsigned bits[3] = {2048, 512, 128};
    for (int i = 0; i < 3; i++) {
        /* A product of reflected values comes out multiplied by x: hence the -1. */
        fold_low[i] = x_to(bits[i] + 64 - 1);
        fold_high[i] = x_to(bits[i] - 1);
    }
}

#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul")))

WIDE static inline __m128i by(int i)
{
    return _mm_set_epi64x((long long)fold_high[i], (long long)fold_low[i]);
}

WIDE static inline __m512i fold512(__m512i x, __m512i k, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next,
                                     0x96);
}

WIDE static inline __m128i fold128(__m128i x, __m128i k, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

/* What is read is stored and summed from the same register. */
WIDE static inline __m512i pass(uint8_t *to, const uint8_t *from)
{
    const __m512i x = _mm512_loadu_si512((const void *)from);
    _mm512_stream_si512((void *)to, x);
    return x;
}

/* `to` at the beginning of a line, `n` a multiple of `LANES` and not 0. */
WIDE static uint64_t stream_wide(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc)
{
    const __m512i far = _mm512_broadcast_i32x4(by(0)), near = _mm512_broadcast_i32x4(by(1));
    __m512i a = pass(to, from), b = pass(to + 64, from + 64);
    __m512i c = pass(to + 128, from + 128), d = pass(to + 192, from + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi64_si128((long long)crc)));
    for (size_t at = LANES; at < n; at += LANES) {
        a = fold512(a, far, pass(to + at, from + at));
        b = fold512(b, far, pass(to + at + 64, from + at + 64));
        c = fold512(c, far, pass(to + at + 128, from + at + 128));
        d = fold512(d, far, pass(to + at + 192, from + at + 192));
    }
    d = fold512(fold512(fold512(a, near, b), near, c), near, d);
    const __m128i k = by(2);
    __m128i x = _mm512_castsi512_si128(d);
    x = fold128(x, k, _mm512_extracti32x4_epi32(d, 1));
    x = fold128(x, k, _mm512_extracti32x4_epi32(d, 2));
    x = fold128(x, k, _mm512_extracti32x4_epi32(d, 3));
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, x);
    return crc_plain(0, rest, sizeof(rest));
}
#endif

/* Copies, and goes on with the sum. */
static uint64_t pass_on(uint8_t *to, const uint8_t *from, size_t n, uint64_t crc)
{
#if HAVE_X86
    if (have_wide && n >= LANES + LINE) {
        const size_t head = (0 - (uintptr_t)to) & (LINE - 1), whole = (n - head) & ~(size_t)(LANES - 1);
        crc = copy_plain(to, from, head, crc);
        crc = stream_wide(to + head, from + head, whole, crc);
        to += head + whole, from += head + whole, n -= head + whole;
    }
#endif
    return copy_plain(to, from, n, crc);
}

/* Bytes that came: fewer at the end of the file only, -1 on an error. */
static Py_ssize_t fill(int fd, uint8_t *to, size_t n, off_t offset)
{
    size_t done = 0;
    while (done < n) {
        const ssize_t got = pread(fd, to + done, n - done, offset + (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (!got)
            break;
        done += (size_t)got;
    }
    return (Py_ssize_t)done;
}

typedef struct {
    int fd;
    off_t offset;
    const Py_buffer *cells;
    size_t nbytes;
    const uint8_t *checks;
    uint8_t *scratch;
    size_t room;
} Source;

/* Cells `first` to `last`: all, or those before the end of the file, or none when reading fails. What goes through the
 * buffer in several parts is one cell, and counts with its last byte. */
static void read_piece(const Source *source, size_t first, size_t last, uint8_t *sound)
{
    const size_t total = (last - first) * source->nbytes;
    const off_t offset = source->offset + (off_t)(first * source->nbytes);
    size_t cell = first, in_cell = 0;
    uint64_t crc = ~0ULL;
    for (size_t done = 0; done < total;) {
        const size_t wanted = total - done < source->room ? total - done : source->room;
        const Py_ssize_t got = fill(source->fd, source->scratch, wanted, offset + (off_t)done);
        if (got < 0)
            return;
        for (size_t at = 0; at < (size_t)got;) {
            const size_t left = source->nbytes - in_cell, here = (size_t)got - at;
            const size_t n = here < left ? here : left;
            crc = pass_on((uint8_t *)source->cells[cell].buf + in_cell, source->scratch + at, n, crc);
            at += n;
            in_cell += n;
            if (in_cell == source->nbytes) {
                uint64_t told;
                memcpy(&told, source->checks + cell * CHECK, CHECK);
                sound[cell++] = (crc ^ ~0ULL) == told;
                in_cell = 0;
                crc = ~0ULL;
            }
        }
        if ((size_t)got < wanted)
            return;
        done += (size_t)got;
    }
}

static PyObject *read_cells(PyObject *self, PyObject *args)
{
    Py_buffer checks, scratch;
    PyObject *list, *sound = NULL;
    long long offset;
    Py_ssize_t nbytes, most, num_held = 0;
    int fd;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLO!nny*w*", &fd, &offset, &PyList_Type, &list, &nbytes, &most, &checks, &scratch))
        return NULL;
    const Py_ssize_t num_cells = PyList_Size(list);
    Py_buffer *cells = NULL;
    if (num_cells < 0 || nbytes < 1 || most < 1 || scratch.len < 1 || (most > 1 && most > scratch.len / nbytes) ||
        checks.len != num_cells * CHECK) {
        PyErr_Format(PyExc_ValueError, "%zd cells of %zd bytes, %zd a piece of %zd bytes, %zd bytes of checks", num_cells,
                     nbytes, most, scratch.len, checks.len);
        goto done;
    }
    cells = PyMem_Calloc((size_t)num_cells + 1, sizeof(Py_buffer));
    if (!cells) {
        PyErr_NoMemory();
        goto done;
    }
    for (; num_held < num_cells; num_held++) {
        PyObject *cell = PyList_GetItem(list, num_held);
        if (!cell || PyObject_GetBuffer(cell, &cells[num_held], PyBUF_WRITABLE) < 0)
            goto done;
        if (cells[num_held].len != nbytes) {
            PyErr_Format(PyExc_ValueError, "cell %zd has %zd bytes, not %zd", num_held, cells[num_held].len, nbytes);
            num_held++;
            goto done;
        }
    }
    sound = PyBytes_FromStringAndSize(NULL, num_cells);
    if (!sound)
        goto done;
    uint8_t *flags = (uint8_t *)PyBytes_AsString(sound);
    const Source source = {fd,           (off_t)offset, cells, (size_t)nbytes, checks.buf, scratch.buf,
                           (size_t)scratch.len};
    Py_BEGIN_ALLOW_THREADS
    memset(flags, 0, (size_t)num_cells);
    for (Py_ssize_t first = 0; first < num_cells; first += most)
        read_piece(&source, (size_t)first, (size_t)(num_cells - first < most ? num_cells : first + most), flags);
#if HAVE_X86
    /* Stores that pass by the caches may be seen late by other processors, until here. */
    _mm_sfence();
#endif
    Py_END_ALLOW_THREADS
done:
    while (num_held)
        PyBuffer_Release(&cells[--num_held]);
    PyMem_Free(cells);
    PyBuffer_Release(&checks);
    PyBuffer_Release(&scratch);
    return sound;
}

static PyObject *wide(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return PyBool_FromLong(have_wide);
}

static PyMethodDef methods[] = {
    {"read_cells", read_cells, METH_VARARGS, NULL},
    {"wide", wide, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cell_io", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cell_io(void)
{
    make_tables();
#if HAVE_X86
    make_constants();
    __builtin_cpu_init();
    have_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("pclmul") &&
                __builtin_cpu_supports("vpclmulqdq");
#endif
    return PyModule_Create(&module);
}
