/* What the thread that a UCX worker lives in does most: waiting for news, and putting memory whose sums nobody knows.
 * `backends/ucx_io.py` is what to read and to call: it states what each function does, and holds the plain twins. UCX's
 * functions come by their addresses, for which library a binding has opened is not known before. The GIL is released:
 * an interpreted turn for each segment would wait for it, too.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#include "_buffers.h"

#define IN_PROGRESS 1    /* UCS_INPROGRESS */
#define STATUS_LAST -200 /* errors of UCX lie above it, by far */
/* One of so many turns in which nothing moved asks after messages and requests all the same. */
#define LOOK 16
/* What is summed and then put: it stays in the second-level cache, and fits two of our segments with their heads. */
#define PIECE (2 * 254 * 1024)

typedef unsigned (*Progress)(void *worker);
typedef void *(*Probe)(void *worker, uint64_t tag, uint64_t mask, int remove, void *info);
typedef int (*Status)(void *request);
typedef void *(*Put)(void *endpoint, const void *from, size_t n, uint64_t to, void *key, const void *parameters);

/* CRC-64 without the ones in and out; `_kernels` has it. */
static uint64_t (*sum)(const uint8_t *, size_t, uint64_t);

static inline void *at(unsigned long long address)
{
    return (void *)(uintptr_t)address;
}

typedef struct {
    Progress progress;
    Probe probe;
    Status status;
    void *worker;
    uint64_t tag;
    const int *wanted;
    const uint64_t *requests;
    size_t count;
} Watch;

/* Whether a message is here or a request is over. */
static int found(const Watch *watch)
{
    uint64_t info[8]; /* ucp_tag_recv_info_t, with room for what later versions add */
    if (watch->probe(watch->worker, watch->tag, UINT64_MAX, 0, info))
        return 1;
    for (size_t i = 0; i < watch->count; i++)
        if (watch->status(at(watch->requests[i])) != IN_PROGRESS)
            return 1;
    return 0;
}

static int wait_for_news(const Watch *watch, unsigned turns)
{
    if (found(watch))
        return 1;
    for (unsigned quiet = 0; quiet < turns;) {
        if (__atomic_load_n(watch->wanted, __ATOMIC_ACQUIRE))
            return 1;
        const int moved = watch->progress(watch->worker) != 0;
        if ((moved || quiet % LOOK == 0) && found(watch))
            return 1;
        /* Who gave up the processor here would not get it back from those that want all of it. */
        quiet = moved ? 0 : quiet + 1;
    }
    return 0;
}

/* poll(progress, probe, status, worker, tag, wanted, requests, turns) */
static PyObject *py_poll(PyObject *self, PyObject *args)
{
    unsigned long long progress, probe, status, worker, tag;
    PyObject *wanted_object, *requests_object;
    unsigned turns;
    Py_buffer wanted, requests;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKOOI", &progress, &probe, &status, &worker, &tag, &wanted_object, &requests_object,
                          &turns))
        return NULL;
    if (get(wanted_object, &wanted, PyBUF_SIMPLE, "wanted", sizeof(int)) < 0)
        return NULL;
    if (get(requests_object, &requests, PyBUF_SIMPLE, "requests", -1) < 0) {
        PyBuffer_Release(&wanted);
        return NULL;
    }
    const Watch watch = {(Progress)at(progress), (Probe)at(probe), (Status)at(status),       at(worker), tag,
                         wanted.buf,             requests.buf,     (size_t)requests.len / 8};
    int news;
    Py_BEGIN_ALLOW_THREADS
    news = wait_for_news(&watch, turns);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&wanted);
    PyBuffer_Release(&requests);
    return PyBool_FromLong(news);
}

typedef struct {
    int64_t local, remote, nbytes;
} Cell;

typedef struct {
    Put put;
    void *endpoint, *key;
    const void *parameters;
    const uint8_t *memory;
    uint64_t remote;
    const Cell *cells;
    size_t count;
    uint64_t *checks, *requests;
    size_t room;
} Job;

/* What lies together at both ends, a piece at a time: sum it, then put it. 0, or the status with which UCX refused. */
static long run(const Job *job, long *num_requests)
{
    size_t index = 0;
    int64_t skip = 0;
    *num_requests = 0;
    while (index < job->count) {
        const int64_t local = job->cells[index].local + skip, remote = job->cells[index].remote + skip;
        int64_t filled = 0;
        while (index < job->count && filled < PIECE) {
            const Cell *cell = &job->cells[index];
            if (cell->local + skip != local + filled || cell->remote + skip != remote + filled)
                break;
            const int64_t left = cell->nbytes - skip, here = left < PIECE - filled ? left : PIECE - filled;
            job->checks[index] = ~sum(job->memory + local + filled, (size_t)here, ~job->checks[index]);
            filled += here;
            skip = here < left ? skip + here : 0;
            index += here == left;
        }
        void *request = job->put(job->endpoint, job->memory + local, (size_t)filled, job->remote + (uint64_t)remote,
                                 job->key, job->parameters);
        const intptr_t status = (intptr_t)request;
        if (status < 0 && status > STATUS_LAST)
            return (long)status;
        if (request)
            job->requests[(*num_requests)++] = (uint64_t)(uintptr_t)request;
    }
    return 0;
}

static int check_job(const Job *job, Py_ssize_t nbytes)
{
    size_t most = 0;
    for (size_t i = 0; i < job->count; i++) {
        const Cell *cell = &job->cells[i];
        if (cell->local < 0 || cell->remote < 0 || cell->nbytes < 1 || cell->local > nbytes - cell->nbytes) {
            PyErr_Format(PyExc_IndexError, "cell %zu lies outside its memory", i);
            return -1;
        }
        most += (size_t)((cell->nbytes - 1) / PIECE + 2);
    }
    if (most > job->room) {
        PyErr_Format(PyExc_ValueError, "room for %zu requests, not %zu", job->room, most);
        return -1;
    }
    return 0;
}

/* put(put, endpoint, key, parameters, memory, remote, cells, checks, requests) -> status, number of requests */
static PyObject *py_put(PyObject *self, PyObject *args)
{
    unsigned long long put, endpoint, key, parameters, remote;
    PyObject *objects[4];
    Py_buffer views[4];
    const char *const names[4] = {"memory", "cells", "checks", "requests"};
    int held = 0;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKOKOOO", &put, &endpoint, &key, &parameters, &objects[0], &remote, &objects[1],
                          &objects[2], &objects[3]))
        return NULL;
    for (; held < 4; held++) {
        const Py_ssize_t need = held == 2 ? views[1].len / (Py_ssize_t)sizeof(Cell) * 8 : -1;
        if (get(objects[held], &views[held], held < 2 ? PyBUF_SIMPLE : PyBUF_WRITABLE, names[held], need) < 0)
            goto done;
    }
    const Job job = {(Put)at(put),
                     at(endpoint),
                     at(key),
                     at(parameters),
                     views[0].buf,
                     remote,
                     views[1].buf,
                     (size_t)views[1].len / sizeof(Cell),
                     views[2].buf,
                     views[3].buf,
                     (size_t)views[3].len / 8};
    if (check_job(&job, views[0].len) < 0)
        goto done;
    long status, num_requests;
    Py_BEGIN_ALLOW_THREADS
    status = run(&job, &num_requests);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("ll", status, num_requests);
done:
    while (held--)
        PyBuffer_Release(&views[held]);
    return result;
}

static PyMethodDef methods[] = {
    {"poll", py_poll, METH_VARARGS, NULL},
    {"put", py_put, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module)
{
    (void)module;
    sum = (uint64_t(*)(const uint8_t *, size_t, uint64_t))offered("kv_transport._kernels.crc64");
    return sum ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kv_transport._ucx_io", NULL, 0, methods, slots, NULL,
                                    NULL, NULL};

PyMODINIT_FUNC PyInit__ucx_io(void)
{
    return PyModuleDef_Init(&module);
}
