/* How the compiled parts take memory from Python, and functions from each other. Include it after Python.h. */
#ifndef KV_TRANSPORT_BUFFERS_H
#define KV_TRANSPORT_BUFFERS_H

/* A view of the object's memory, of `need` bytes unless that is negative: 0, or -1 with an error set and nothing held. */
static inline int get(PyObject *object, Py_buffer *view, int flags, const char *name, Py_ssize_t need)
{
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if (need >= 0 && view->len != need) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not %zd", name, view->len, need);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* A function that `_kernels` offers under its full name; NULL with an error set. */
static inline void *offered(const char *full_name)
{
    void *function = PyCapsule_Import(full_name, 0);
    if (!function) { /* with an exception pending nothing else could be imported */
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "kv_transport._kernels is not there");
    }
    return function;
}

#endif
