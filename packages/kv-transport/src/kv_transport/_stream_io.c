/* Bytes between a stream socket and memory, each piece summed while it is in the second-level cache. `stream_io.py` is
 * what to read and to call; it holds the plain twins. The GIL is released in both functions, and the thread waits in
 * them as long as nothing else wants it: an interpreted turn after each buffer-full would cost more than the copy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "_buffers.h"

/* What one system call moves, and is summed right after it: what was received, from the second-level cache. What is to
 * be sent is not there, and fewer calls of more bytes are the cheaper ones. */
#define RECEIVE_PIECE 262144
#define SEND_PIECE 4194304
#define PARTS 64
/* The kernel wakes who waits to receive when so much is there, or all that is to come: one that keeps up with its
 * sender would otherwise be woken for each packet, at the cost of both. */
#define WORTH_WAKING 524288
/* Some kernels do not wake it then although the sender can send no more, and a sender may pause: nobody waits for much
 * longer than this. */
#define PATIENCE_MS 20

/* CRC-64 without the ones in and out; `_kernels` has it. */
static uint64_t (*sum)(const uint8_t *, size_t, uint64_t);

typedef struct {
    int64_t offset, nbytes;
} Span;

/* Some memory, its spans in order, a sum for each (or none), and where in them we are. */
typedef struct {
    Py_buffer memory, spans, checks, state;
    uint8_t *base;
    const Span *span;
    uint64_t *check;
    int64_t *at; /* index of the span at hand, bytes of it that are done */
    Py_ssize_t count;
} Run;

static void release(Run *run)
{
    Py_buffer *views[] = {&run->memory, &run->spans, &run->checks, &run->state};
    for (int i = 0; i < 4; i++)
        if (views[i]->obj)
            PyBuffer_Release(views[i]);
}

static int check_run(const Run *run)
{
    if (run->spans.len % (Py_ssize_t)sizeof(Span)) {
        PyErr_SetString(PyExc_ValueError, "spans are pairs of int64");
        return -1;
    }
    for (Py_ssize_t i = 0; i < run->count; i++) {
        const Span *span = &run->span[i];
        if (span->offset < 0 || span->nbytes < 1 || span->offset > run->memory.len - span->nbytes) {
            PyErr_Format(PyExc_IndexError, "span %zd lies outside its memory", i);
            return -1;
        }
    }
    const int64_t *at = run->at;
    int inside = at[0] >= 0 && at[0] < run->count ? at[1] >= 0 && at[1] < run->span[at[0]].nbytes
                                                  : at[0] == run->count && at[1] == 0;
    if (!inside) {
        PyErr_SetString(PyExc_IndexError, "the state lies outside the spans");
        return -1;
    }
    return 0;
}

/* 0, or -1 with nothing held. */
static int take(Run *run, PyObject *memory, int writable, PyObject *spans, PyObject *checks, PyObject *state,
                Py_ssize_t numbers)
{
    *run = (Run){.base = NULL};
    if (get(memory, &run->memory, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE, "memory", -1) < 0)
        return -1;
    if (get(spans, &run->spans, PyBUF_SIMPLE, "spans", -1) < 0)
        goto failed;
    run->count = run->spans.len / (Py_ssize_t)sizeof(Span);
    if (checks != Py_None && get(checks, &run->checks, PyBUF_WRITABLE, "checks", run->count * 8) < 0)
        goto failed;
    if (get(state, &run->state, PyBUF_WRITABLE, "state", numbers * 8) < 0)
        goto failed;
    run->base = run->memory.buf;
    run->span = run->spans.buf;
    run->check = run->checks.buf;
    run->at = run->state.buf;
    if (check_run(run) == 0)
        return 0;
failed:
    release(run);
    return -1;
}

/* Up to `room` bytes from where we are, behind those that are in `parts` already: PARTS at most. */
static size_t gather(const Run *run, struct iovec *parts, size_t filled, size_t room)
{
    Py_ssize_t index = (Py_ssize_t)run->at[0];
    int64_t skip = run->at[1];
    for (; index < run->count && room && filled < PARTS; index++, skip = 0) {
        size_t want = (size_t)(run->span[index].nbytes - skip);
        want = want < room ? want : room;
        parts[filled++] = (struct iovec){run->base + run->span[index].offset + skip, want};
        room -= want;
    }
    return filled;
}

/* Continues the sums over the bytes that have just been moved. */
static void sum_moved(const Run *run, size_t nbytes)
{
    Py_ssize_t index = (Py_ssize_t)run->at[0];
    int64_t skip = run->at[1];
    for (; nbytes; index++, skip = 0) {
        size_t size = (size_t)(run->span[index].nbytes - skip);
        size = size < nbytes ? size : nbytes;
        run->check[index] = ~sum(run->base + run->span[index].offset + skip, size, ~run->check[index]);
        nbytes -= size;
    }
}

static void advance(const Run *run, size_t nbytes)
{
    while (nbytes) {
        size_t left = (size_t)(run->span[run->at[0]].nbytes - run->at[1]);
        if (nbytes < left) {
            run->at[1] += (int64_t)nbytes;
            return;
        }
        nbytes -= left;
        run->at[0]++;
        run->at[1] = 0;
    }
}

enum { WANTED, READY, IN_VAIN };

/* Waits, for so many ms at most (-1: for ever), until a socket is `READY` that was not, or something happens on `others`
 * (an epoll with everything that the thread serves): then it is `WANTED` there. Without `others` (-1) nobody waits. */
static int ready(int fd, short events, int others, int wait_ms)
{
    struct pollfd both[2] = {{fd, events, 0}, {others, POLLIN, 0}};
    if (others < 0)
        return WANTED;
    for (;;) {
        int found = poll(both, 2, wait_ms);
        if (found > 0)
            return both[0].revents != 0 ? READY : WANTED;
        if (found == 0)
            return IN_VAIN;
        if (errno != EINTR)
            return WANTED;
    }
}

/* Lets the kernel wake us for no less than that. It is a wish: where it is refused we are woken more often. */
static void wake_at(int fd, int *at, int nbytes)
{
    if (nbytes != *at)
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &nbytes, sizeof(nbytes));
    *at = nbytes;
}

/* Bytes that are still to come, or `most` if they are more. */
static int to_come(const Run *run, int most)
{
    int64_t left = -run->at[1];
    for (Py_ssize_t i = (Py_ssize_t)run->at[0]; i < run->count && left < most; i++)
        left += run->span[i].nbytes;
    return left < most ? (int)left : most;
}

static int blocked(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK;
}

/* receive(fd, others, memory, spans, checks, state): into the spans, continuing their sums, until they are full or the
 * thread is wanted. Gives how many bytes came, 0 at the end of the stream, or -errno. */
static PyObject *py_receive(PyObject *self, PyObject *args)
{
    int fd, others;
    PyObject *memory, *spans, *checks, *state;
    Run run;
    if (!PyArg_ParseTuple(args, "iiOOOO", &fd, &others, &memory, &spans, &checks, &state))
        return NULL;
    if (take(&run, memory, 1, spans, checks, state, 2) < 0)
        return NULL;
    if (run.at[0] == run.count || !run.check) {
        PyErr_SetString(PyExc_IndexError, "every span is full, or there is nowhere to sum");
        release(&run);
        return NULL;
    }
    long long total = 0, ended = 0;
    int woken_at = 1, patient = 1;
    Py_BEGIN_ALLOW_THREADS
    while (run.at[0] < run.count) {
        struct iovec parts[PARTS];
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = gather(&run, parts, 0, RECEIVE_PIECE)};
        ssize_t came = recvmsg(fd, &message, MSG_DONTWAIT);
        if (came <= 0) {
            int error = came ? errno : 0;
            if (error == EINTR)
                continue;
            if (blocked(error) && others >= 0) {
                wake_at(fd, &woken_at, patient ? to_come(&run, WORTH_WAKING) : 1);
                const int found = ready(fd, POLLIN, others, woken_at > 1 ? PATIENCE_MS : -1);
                /* Whatever came meanwhile is taken; if it was nothing, the next byte wakes us. */
                patient = patient && found != IN_VAIN;
                if (found != WANTED)
                    continue;
            }
            ended = -error;
            break;
        }
        patient = 1;
        sum_moved(&run, (size_t)came);
        advance(&run, (size_t)came);
        total += came;
    }
    wake_at(fd, &woken_at, 1); /* what comes next may be short */
    Py_END_ALLOW_THREADS
    release(&run);
    return PyLong_FromLongLong(total ? total : ended);
}

/* send(fd, others, head, memory, spans, checks, state): the head, then the spans; with `checks`, their sums are taken
 * on the way: after the kernel has read each piece, which it does faster from far memory than we. `state` goes on with
 * the bytes of the head that are sent. Gives 1 when all is sent, 0 when the thread is wanted, or -errno. */
static PyObject *py_send(PyObject *self, PyObject *args)
{
    int fd, others;
    PyObject *head_object, *memory, *spans, *checks, *state;
    Py_buffer head;
    Run run;
    if (!PyArg_ParseTuple(args, "iiOOOOO", &fd, &others, &head_object, &memory, &spans, &checks, &state))
        return NULL;
    if (take(&run, memory, 0, spans, checks, state, 3) < 0)
        return NULL;
    if (get(head_object, &head, PyBUF_SIMPLE, "head", -1) < 0) {
        release(&run);
        return NULL;
    }
    int64_t *of_head = &run.at[2];
    if (*of_head < 0 || *of_head > head.len) {
        PyErr_SetString(PyExc_IndexError, "the state lies outside the head");
        PyBuffer_Release(&head);
        release(&run);
        return NULL;
    }
    long result = 1;
    Py_BEGIN_ALLOW_THREADS
    while (*of_head < head.len || run.at[0] < run.count) {
        struct iovec parts[PARTS] = {{(char *)head.buf + *of_head, (size_t)(head.len - *of_head)}};
        struct msghdr message = {.msg_iov = parts,
                                 .msg_iovlen = gather(&run, parts, *of_head < head.len, SEND_PIECE)};
        ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            int error = errno;
            if (error == EINTR || (blocked(error) && ready(fd, POLLOUT, others, -1) == READY))
                continue;
            result = blocked(error) ? 0 : -error;
            break;
        }
        int64_t head_left = head.len - *of_head, to_head = sent < head_left ? sent : head_left;
        *of_head += to_head;
        if (run.check)
            sum_moved(&run, (size_t)(sent - to_head));
        advance(&run, (size_t)(sent - to_head));
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&head);
    release(&run);
    return PyLong_FromLong(result);
}

static PyMethodDef methods[] = {
    {"receive", py_receive, METH_VARARGS, NULL},
    {"send", py_send, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module)
{
    (void)module;
    sum = (uint64_t(*)(const uint8_t *, size_t, uint64_t))offered("kv_transport._kernels.crc64");
    return sum ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kv_transport._stream_io", NULL, 0, methods, slots, NULL,
                                    NULL, NULL};

PyMODINIT_FUNC PyInit__stream_io(void)
{
    return PyModuleDef_Init(&module);
}
