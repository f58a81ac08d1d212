/* The loop over the blocks of a prompt: XXH3-128 and CRC-32C, each chained from block to block. `hash_chain.py` is
 * what to read and to call; it states what each function does, and holds the plain twin, which is the oracle and the
 * fallback. Written from the published definitions (XXH3: xxHash specification, variants for 17 to 240 bytes without
 * a seed; CRC-32C: RFC 3720, appendix B.4), whose constants these are.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only"
#endif
#ifndef __SIZEOF_INT128__
#error "needs a 128-bit product"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#else
#define HAVE_X86 0
#endif

#define NAME 16         /* bytes of a sequence hash */
#define PACKED 20       /* with its check hash behind it */
#define LONGEST 240     /* bytes that the variants below take */
#define POLY 0x82F63B78 /* CRC-32C, reflected */

#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define AVALANCHE 0x165667919E3779F9ULL

/* The default secret of XXH3. */
static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint32_t crc_table[4][256];
static int have_crc;

static inline uint64_t word(const uint8_t *p)
{
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static inline uint64_t folded(uint64_t a, uint64_t b)
{
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t mix16(const uint8_t *p, const uint8_t *key)
{
    return folded(word(p) ^ word(key), word(p + 8) ^ word(key + 8));
}

typedef struct {
    uint64_t low, high;
} Pair;

static inline Pair mix32(Pair acc, const uint8_t *left, const uint8_t *right, const uint8_t *key)
{
    acc.low = (acc.low + mix16(left, key)) ^ (word(right) + word(right + 8));
    acc.high = (acc.high + mix16(right, key + 16)) ^ (word(left) + word(left + 8));
    return acc;
}

static inline uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= AVALANCHE;
    return h ^ (h >> 32);
}

/* XXH3-128 of 17 to 240 bytes, in canonical (big-endian) form. */
static inline void xxh3_128(const uint8_t *p, size_t n, uint8_t *out)
{
    Pair acc = {n * P64_1, 0};
    if (n <= 128) {
        if (n > 96)
            acc = mix32(acc, p + 48, p + n - 64, secret + 96);
        if (n > 64)
            acc = mix32(acc, p + 32, p + n - 48, secret + 64);
        if (n > 32)
            acc = mix32(acc, p + 16, p + n - 32, secret + 32);
        acc = mix32(acc, p, p + n - 16, secret);
    } else {
        for (size_t i = 0; i < 128; i += 32)
            acc = mix32(acc, p + i, p + i + 16, secret + i);
        acc.low = avalanche(acc.low);
        acc.high = avalanche(acc.high);
        for (size_t i = 128; i + 32 <= n; i += 32)
            acc = mix32(acc, p + i, p + i + 16, secret + 3 + (i - 128));
        acc = mix32(acc, p + n - 16, p + n - 32, secret + 103);
    }
    uint64_t low = avalanche(acc.low + acc.high);
    uint64_t high = 0 - avalanche(acc.low * P64_1 + acc.high * P64_4 + n * P64_2);
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(high >> (56 - 8 * i));
        out[8 + i] = (uint8_t)(low >> (56 - 8 * i));
    }
}

static void make_table(void)
{
    for (int i = 0; i < 256; i++) {
        uint32_t c = (uint32_t)i;
        for (int bit = 0; bit < 8; bit++)
            c = (c >> 1) ^ (c & 1 ? POLY : 0);
        crc_table[0][i] = c;
    }
    for (int i = 0; i < 256; i++)
        for (int k = 1; k < 4; k++)
            crc_table[k][i] = (crc_table[k - 1][i] >> 8) ^ crc_table[0][crc_table[k - 1][i] & 0xff];
}

/* CRC-32C of whole 32-bit words, without the ones in and out. */
static uint32_t crc_plain(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n; p += 4, n -= 4) {
        uint32_t w;
        memcpy(&w, p, 4);
        w ^= crc;
        crc = crc_table[3][w & 0xff] ^ crc_table[2][(w >> 8) & 0xff] ^ crc_table[1][(w >> 16) & 0xff] ^
              crc_table[0][w >> 24];
    }
    return crc;
}

#if HAVE_X86
__attribute__((target("sse4.2"))) static uint32_t crc_x86(uint32_t crc, const uint8_t *p, size_t n)
{
    uint64_t wide = crc;
    for (; n >= 8; p += 8, n -= 8)
        wide = _mm_crc32_u64(wide, word(p));
    crc = (uint32_t)wide;
    if (n) {
        uint32_t w;
        memcpy(&w, p, 4);
        crc = _mm_crc32_u32(crc, w);
    }
    return crc;
}
#endif

static inline uint32_t crc32c(uint32_t crc, const uint8_t *p, size_t n)
{
#if HAVE_X86
    if (have_crc)
        return crc_x86(crc, p, n);
#endif
    return crc_plain(crc, p, n);
}

static void chain(const uint8_t *raw, size_t num_blocks, size_t nbytes, const uint8_t *parent, uint32_t check,
                  uint8_t *out)
{
    uint8_t text[LONGEST];
    memcpy(text, parent, NAME);
    check = ~check;
    for (size_t i = 0; i < num_blocks; i++, raw += nbytes, out += PACKED) {
        memcpy(text + NAME, raw, nbytes);
        xxh3_128(text, NAME + nbytes, out);
        memcpy(text, out, NAME);
        check = crc32c(check, raw, nbytes);
        uint32_t told = ~check;
        memcpy(out + NAME, &told, 4);
    }
}

static PyObject *chain_blocks(PyObject *self, PyObject *args)
{
    Py_buffer raw, parent;
    Py_ssize_t nbytes;
    unsigned int check;
    PyObject *packed = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*ny*I", &raw, &nbytes, &parent, &check))
        return NULL;
    if (parent.len != NAME || nbytes < 4 || nbytes % 4 || nbytes + NAME > LONGEST) {
        PyErr_Format(PyExc_ValueError, "a parent of %zd bytes, blocks of %zd", parent.len, nbytes);
    } else {
        Py_ssize_t num_blocks = raw.len / nbytes;
        packed = PyBytes_FromStringAndSize(NULL, num_blocks * PACKED);
        if (packed) {
            uint8_t *out = (uint8_t *)PyBytes_AsString(packed);
            Py_BEGIN_ALLOW_THREADS
            chain(raw.buf, (size_t)num_blocks, (size_t)nbytes, parent.buf, check, out);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&raw);
    PyBuffer_Release(&parent);
    return packed;
}

static PyObject *pack_columns(PyObject *self, PyObject *args)
{
    PyObject *names, *checks;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &names, &PyList_Type, &checks))
        return NULL;
    Py_ssize_t n = PyList_Size(names);
    if (PyList_Size(checks) != n) {
        PyErr_Format(PyExc_ValueError, "%zd names, %zd checks", n, PyList_Size(checks));
        return NULL;
    }
    PyObject *packed = PyBytes_FromStringAndSize(NULL, n * PACKED);
    if (!packed)
        return NULL;
    char *out = PyBytes_AsString(packed);
    for (Py_ssize_t i = 0; i < n; i++, out += PACKED) {
        char *name;
        Py_ssize_t size;
        unsigned long check = PyLong_AsUnsignedLong(PyList_GetItem(checks, i));
        if (check == (unsigned long)-1 && PyErr_Occurred())
            goto refused;
        if (PyBytes_AsStringAndSize(PyList_GetItem(names, i), &name, &size) < 0)
            goto refused;
        if (size != NAME || check > UINT32_MAX) {
            PyErr_Format(PyExc_ValueError, "name %zd of %zd bytes, check %lu", i, size, check);
            goto refused;
        }
        uint32_t narrow = (uint32_t)check;
        memcpy(out, name, NAME);
        memcpy(out + NAME, &narrow, 4);
    }
    return packed;
refused:
    Py_DECREF(packed);
    return NULL;
}

static PyMethodDef methods[] = {
    {"chain_blocks", chain_blocks, METH_VARARGS, NULL},
    {"pack_columns", pack_columns, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_hash_chain", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__hash_chain(void)
{
    make_table();
#if HAVE_X86
    __builtin_cpu_init();
    have_crc = __builtin_cpu_supports("sse4.2");
#endif
    return PyModule_Create(&module);
}
