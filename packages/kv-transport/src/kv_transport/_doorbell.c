/* A small put in one call, and the page in which it is answered. `doorbell.py` is what to read and to call; it holds
 * the plain twins and the form of the message. The GIL is kept: what is done here takes microseconds, and whoever gives
 * it away may wait for it much longer.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include "_buffers.h"

#define MARK 0xC1
#define SEQ_AT 8
#define PUT_AT 16
#define REGION_AT 24
#define OFFSET_AT 32
#define NBYTES_AT 40
#define HEADER_AT 48
#define HEADER_NBYTES 128
#define NOTIF_AT (HEADER_AT + HEADER_NBYTES)
/* Within the header. */
#define NONCE_AT 32
#define CHECK_AT 40
#define STAMPS_END 48
#define CRC_AT 120

#define SENT 0
#define WAITS 1
#define DAMAGED 2

/* CRC-64 without the ones in and out; `_kernels` has them. */
static uint64_t (*sum)(const uint8_t *, size_t, uint64_t);
static uint64_t (*copy_and_sum_both)(uint8_t *, const uint8_t *, size_t, uint64_t, uint64_t *);

static uint64_t load(const uint8_t *at)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | at[i];
    return value;
}

static void store(uint8_t *at, uint64_t value)
{
    for (int i = 0; i < 8; i++, value >>= 8)
        at[i] = (uint8_t)value;
}

static int is_failed(uint64_t value)
{
    return value == (uint64_t)-1 && PyErr_Occurred();
}

/* put(fd, to, source, source_offset, message, seq, put, nonce): copies the piece that the message describes, completes
 * the message and sends it. Gives what became of it; with fd -1 nothing is sent. */
static PyObject *py_put(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "put takes 8 arguments");
        return NULL;
    }
    long fd = PyLong_AsLong(args[0]);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    long long source_offset = PyLong_AsLongLong(args[3]);
    if (source_offset == -1 && PyErr_Occurred())
        return NULL;
    uint64_t numbers[3];
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[5 + i]);
        if (is_failed(numbers[i]))
            return NULL;
    }
    Py_buffer to, source, message;
    PyObject *result = NULL;
    if (get(args[1], &to, PyBUF_WRITABLE, "to", -1) < 0)
        return NULL;
    if (get(args[2], &source, PyBUF_SIMPLE, "source", -1) < 0)
        goto to_only;
    if (get(args[4], &message, PyBUF_WRITABLE, "message", -1) < 0)
        goto two;
    uint8_t *text = message.buf;
    if (message.len < NOTIF_AT) {
        PyErr_SetString(PyExc_ValueError, "the message is too short");
        goto all;
    }
    const uint64_t offset = load(text + OFFSET_AT), nbytes = load(text + NBYTES_AT);
    const uint64_t room = (uint64_t)to.len, there = (uint64_t)source.len;
    if (nbytes < 1 || nbytes > room || offset > room - nbytes || source_offset < 0 || nbytes > there ||
        (uint64_t)source_offset > there - nbytes) {
        PyErr_SetString(PyExc_IndexError, "the piece lies outside its memory");
        goto all;
    }
    uint64_t read = ~0ULL;
    const uint64_t arrived =
        copy_and_sum_both((uint8_t *)to.buf + offset, (const uint8_t *)source.buf + source_offset, nbytes, ~0ULL, &read);
    if (arrived != read) {
        result = PyLong_FromLong(DAMAGED);
        goto all;
    }
    uint8_t *header = text + HEADER_AT;
    store(text + SEQ_AT, numbers[0]);
    store(text + PUT_AT, numbers[1]);
    store(header + NONCE_AT, numbers[2]);
    store(header + CHECK_AT, ~arrived);
    store(header + CRC_AT, ~sum(header, CRC_AT, ~0ULL));
    long outcome = WAITS;
    if (fd >= 0) {
        if (send((int)fd, text, (size_t)message.len, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
            outcome = SENT;
        else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            goto all;
        }
    }
    result = PyLong_FromLong(outcome);
all:
    PyBuffer_Release(&message);
two:
    PyBuffer_Release(&source);
to_only:
    PyBuffer_Release(&to);
    return result;
}

/* Whether this is a message whose header is that one under whatever nonce and checksum. */
static int is_put(const Py_buffer *message, const uint8_t *want)
{
    const uint8_t *text = message->buf, *header = text + HEADER_AT;
    return message->len >= NOTIF_AT && load(text) == MARK && !memcmp(header, want, NONCE_AT) &&
           !memcmp(header + STAMPS_END, want + STAMPS_END, CRC_AT - STAMPS_END) &&
           load(header + CRC_AT) == ~sum(header, CRC_AT, ~0ULL);
}

/* read(message, header): what it says, or None unless it is a message with that header. */
static PyObject *py_read(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "read takes 2 arguments");
        return NULL;
    }
    Py_buffer message, expected;
    if (get(args[0], &message, PyBUF_SIMPLE, "message", -1) < 0)
        return NULL;
    if (get(args[1], &expected, PyBUF_SIMPLE, "header", HEADER_NBYTES) < 0) {
        PyBuffer_Release(&message);
        return NULL;
    }
    const uint8_t *text = message.buf, *header = text + HEADER_AT;
    PyObject *result;
    if (!is_put(&message, expected.buf)) {
        result = Py_None;
        Py_INCREF(result);
    } else
        result = Py_BuildValue("(KKKKKKy#)", (unsigned long long)load(text + SEQ_AT),
                               (unsigned long long)load(text + PUT_AT), (unsigned long long)load(text + REGION_AT),
                               (unsigned long long)load(text + OFFSET_AT), (unsigned long long)load(text + NBYTES_AT),
                               (unsigned long long)load(header + NONCE_AT), (const char *)text + NOTIF_AT,
                               message.len - NOTIF_AT);
    PyBuffer_Release(&expected);
    PyBuffer_Release(&message);
    return result;
}

/* The page of answers: a word that says whether its owner wants to be woken, and from the second cache line on a word
 * for each of some numbers. Every access is sequentially consistent: the one writes its answer and then looks whether
 * somebody waits, the other says that he waits and then looks for the answer, and so at least one of them sees. */
#define ANSWERS_AT 64

static int get_page(PyObject *object, Py_buffer *view, int flags)
{
    if (get(object, view, flags, "page", -1) < 0)
        return -1;
    if (view->len >= ANSWERS_AT + 8 && (uintptr_t)view->buf % 8 == 0)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "not a page of answers");
    return -1;
}

static uint64_t *place_of(const Py_buffer *view, uint64_t number)
{
    return (uint64_t *)((uint8_t *)view->buf + ANSWERS_AT) + number % ((uint64_t)(view->len - ANSWERS_AT) / 8);
}

/* Whether the owner of the page waits. */
static int give_answer(const Py_buffer *view, uint64_t number)
{
    __atomic_store_n(place_of(view, number), number, __ATOMIC_SEQ_CST);
    return __atomic_load_n((uint64_t *)view->buf, __ATOMIC_SEQ_CST) != 0;
}

static PyObject *page(PyObject *object, uint64_t number, int how)
{
    Py_buffer view;
    if (get_page(object, &view, how ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    int found = 1;
    if (how == 0)
        found = __atomic_load_n(place_of(&view, number), __ATOMIC_SEQ_CST) == number;
    else if (how == 1)
        found = give_answer(&view, number);
    else
        __atomic_store_n((uint64_t *)view.buf, number, __ATOMIC_SEQ_CST);
    PyBuffer_Release(&view);
    return PyBool_FromLong(found);
}

static PyObject *numbered(PyObject *const *args, Py_ssize_t count, int how)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "a page and a number");
        return NULL;
    }
    uint64_t number = PyLong_AsUnsignedLongLong(args[1]);
    return is_failed(number) ? NULL : page(args[0], number, how);
}

static PyObject *py_answered(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    return numbered(args, count, 0);
}

static PyObject *py_answer(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    return numbered(args, count, 1);
}

static PyObject *py_await(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    return numbered(args, count, 2);
}

/* Which of the last numbers are marked, as `replay.py` says. */
#define MARKS_AT 8

static uint64_t window_of(const Py_buffer *marks)
{
    return (uint64_t)marks->len - MARKS_AT;
}

static int is_forgotten(const Py_buffer *marks, uint64_t number)
{
    const uint64_t newest = load(marks->buf);
    return number <= newest && newest - number >= window_of(marks);
}

static int is_marked(const Py_buffer *marks, uint64_t number)
{
    return number <= load(marks->buf) && ((const uint8_t *)marks->buf)[MARKS_AT + number % window_of(marks)];
}

static void mark(Py_buffer *marks, uint64_t number)
{
    uint8_t *at = (uint8_t *)marks->buf + MARKS_AT;
    const uint64_t newest = load(marks->buf), window = window_of(marks);
    if (number > newest) {
        /* None of those in between was marked; what lies in their places is too old now. */
        if (number - newest > window)
            memset(at, 0, window);
        else
            for (uint64_t between = newest + 1; between < number; between++)
                at[between % window] = 0;
        store(marks->buf, number);
    }
    at[number % window] = 1;
}

/* admit(message, header, nonces, puts, region, region_nbytes, nbytes_max, page): admits a put of that region in which
 * nothing is wrong: marks its nonce, and its number if it has a notification, and answers it in the page (None: there
 * is none). Gives which message it was, the notification if it is to be given out, else nothing, and whether the writer
 * waits for a frame. Or None, and nothing has changed. */
static PyObject *py_admit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "admit takes 8 arguments");
        return NULL;
    }
    uint64_t numbers[3];
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[4 + i]);
        if (is_failed(numbers[i]))
            return NULL;
    }
    const uint64_t region_nbytes = numbers[1];
    Py_buffer message, expected, nonces, puts, answers;
    const int answered = args[7] != Py_None;
    PyObject *result = NULL;
    if (get(args[0], &message, PyBUF_SIMPLE, "message", -1) < 0)
        return NULL;
    if (get(args[1], &expected, PyBUF_SIMPLE, "header", HEADER_NBYTES) < 0)
        goto message_only;
    if (get(args[2], &nonces, PyBUF_WRITABLE, "nonces", -1) < 0)
        goto two;
    if (get(args[3], &puts, PyBUF_WRITABLE, "puts", -1) < 0)
        goto three;
    if (answered && get_page(args[7], &answers, PyBUF_WRITABLE) < 0)
        goto four;
    if (nonces.len <= MARKS_AT) {
        PyErr_SetString(PyExc_ValueError, "not marks of nonces");
        goto all;
    }
    const uint8_t *text = message.buf;
    int right = is_put(&message, expected.buf);
    if (right) {
        const uint64_t offset = load(text + OFFSET_AT), nbytes = load(text + NBYTES_AT);
        const uint64_t put = load(text + PUT_AT), nonce = load(text + HEADER_AT + NONCE_AT);
        const int told = message.len > NOTIF_AT;
        right = load(text + REGION_AT) == numbers[0] && nbytes >= 1 && nbytes <= numbers[2] &&
                nbytes <= region_nbytes && offset <= region_nbytes - nbytes && !is_forgotten(&nonces, nonce) &&
                !is_marked(&nonces, nonce) && (!told || (put >= 1 && puts.len > MARKS_AT && !is_forgotten(&puts, put)));
        if (right) {
            const int fresh = told && !is_marked(&puts, put);
            const uint64_t seq = load(text + SEQ_AT);
            /* Made first: it may fail, and then nothing has changed. */
            result = Py_BuildValue("(Ky#O)", (unsigned long long)seq, (const char *)text + NOTIF_AT,
                                   fresh ? message.len - NOTIF_AT : (Py_ssize_t)0, Py_False);
            if (result) {
                mark(&nonces, nonce);
                if (fresh)
                    mark(&puts, put);
                if (answered && give_answer(&answers, seq)) {
                    Py_INCREF(Py_True);
                    PyTuple_SetItem(result, 2, Py_True);
                }
            }
        }
    }
    if (!right) {
        result = Py_None;
        Py_INCREF(result);
    }
all:
    if (answered)
        PyBuffer_Release(&answers);
four:
    PyBuffer_Release(&puts);
three:
    PyBuffer_Release(&nonces);
two:
    PyBuffer_Release(&expected);
message_only:
    PyBuffer_Release(&message);
    return result;
}

static PyMethodDef methods[] = {
    {"admit", (PyCFunction)(void (*)(void))py_admit, METH_FASTCALL, NULL},
    {"put", (PyCFunction)(void (*)(void))py_put, METH_FASTCALL, NULL},
    {"read", (PyCFunction)(void (*)(void))py_read, METH_FASTCALL, NULL},
    {"answered", (PyCFunction)(void (*)(void))py_answered, METH_FASTCALL, NULL},
    {"answer", (PyCFunction)(void (*)(void))py_answer, METH_FASTCALL, NULL},
    {"await_answers", (PyCFunction)(void (*)(void))py_await, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module)
{
    (void)module;
    sum = (uint64_t(*)(const uint8_t *, size_t, uint64_t))offered("kv_transport._kernels.crc64");
    if (sum) /* to import anything with an exception pending would leave the lock of imports held */
        copy_and_sum_both = (uint64_t(*)(uint8_t *, const uint8_t *, size_t, uint64_t, uint64_t *))offered(
            "kv_transport._kernels.copy_and_sum_both");
    return sum && copy_and_sum_both ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kv_transport._doorbell", NULL, 0, methods, slots, NULL,
                                    NULL, NULL};

PyMODINIT_FUNC PyInit__doorbell(void)
{
    return PyModuleDef_Init(&module);
}
