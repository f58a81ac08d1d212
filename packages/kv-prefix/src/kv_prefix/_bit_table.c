/* The memory behind the prefix index: blocks, and the bits set for each. `index_table.py` is what to read and to call;
 * it states what each method does, and holds the plain twin, which is the oracle and the fallback.
 *
 * An entry is 24 bytes: a block's name, its check hash, and the number of its bit set (`_bit_sets.h`). Sets are
 * interned: most blocks of a cluster have one of few sets, and so a block costs the same with one holder or with
 * hundreds. Entries lie in the order in which they came (`_bit_entries.h`). No call copies more than a small part of
 * the whole. Not safe without the GIL.
 */
#include "_bit_entries.h"

/* `form`: "y*i", or "y*i|p" with `consecutive`. */
static int get_names(PyObject *args, const char *form, Py_buffer *names, int *bit, int *consecutive)
{
    if (!PyArg_ParseTuple(args, form, names, bit, consecutive))
        return -1;
    if (names->len % PACKED || *bit < 0 || *bit >= MAX_BITS) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of names, bit %d", names->len, *bit);
        PyBuffer_Release(names);
        return -1;
    }
    return 0;
}

static PyObject *table_set(PyObject *self, PyObject *args)
{
    Table *t = (Table *)self;
    Py_buffer names;
    int bit, consecutive = 0;
    if (get_names(args, "y*i|p", &names, &bit, &consecutive) < 0)
        return NULL;
    const uint8_t *p = names.buf, *end = p + names.len;
    /* The step taken last. Whatever makes another set takes another step, so that a number used again is not mistaken. */
    uint32_t from = 0, to = 0;
    uint32_t guess = 0, last = NOWHERE; /* last: the block's parent, when that is known */
    int failed = 0;
    for (; p < end; p += PACKED) {
        uint64_t low, high;
        uint32_t check;
        read_name(p, &low, &high, &check);
        look_ahead(t, p, end);
        uint32_t number = seek(t, guess, low, high), before = 0;
        if (number != NOWHERE) {
            Entry *entry = entry_at(t, number);
            guess = number + 1;
            before = entry->set;
            if (entry->check != check) {
                last = NOWHERE;
                continue;
            }
        }
        if (!to || before != from) {
            from = before;
            to = set_with(t, before, (uint16_t)bit);
            if (!to) {
                failed = 1;
                break;
            }
        }
        if (!before) {
            Shard *s = shard_of(t, low);
            if (shard_reserve(t, s) < 0 || (number = append(t)) == NOWHERE) {
                failed = 1;
                break;
            }
            Entry fresh = {low, high, check, 0};
            *find(t, s, low, high) = (Place){tag_of(low), number + 1};
            *entry_at(t, number) = fresh;
            s->used++;
            t->num_entries++;
            guess = number + 1;
        }
        if (is_behind(number, last))
            link_to_last(t, number);
        if (consecutive)
            last = number;
        if (to != before)
            move_to(t, number, to);
    }
    PyBuffer_Release(&names);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Takes a block out of the table. */
static void erase(Table *t, uint32_t number)
{
    Entry *entry = entry_at(t, number);
    Shard *s = shard_of(t, entry->low);
    release_set(t, entry->set);
    forget_place(t, s, find(t, s, entry->low, entry->high));
    drop_entry(t, number);
    t->num_entries--;
}

static PyObject *table_clear(PyObject *self, PyObject *args)
{
    Table *t = (Table *)self;
    Py_buffer names;
    int bit, failed = 0;
    if (get_names(args, "y*i", &names, &bit, NULL) < 0)
        return NULL;
    uint8_t gone[MAX_BITS] = {0};
    gone[bit] = 1;
    for (const uint8_t *p = names.buf, *end = p + names.len; p < end; p += PACKED) {
        uint64_t low, high;
        uint32_t check;
        read_name(p, &low, &high, &check);
        look_ahead(t, p, end);
        uint32_t number = seek(t, 0, low, high);
        if (number == NOWHERE || !has_bit(set_of(t, entry_at(t, number)->set), (uint16_t)bit))
            continue;
        uint32_t left = set_without(t, entry_at(t, number)->set, gone, &failed);
        if (failed)
            break;
        if (left) {
            move_to(t, number, left);
            continue;
        }
        erase(t, number);
        /* Not during a sweep: what is not swept yet must not move to where the sweep has been. */
        if (!t->sweeping && is_sparse(t, number >> REGION_BITS))
            evacuate(t, number >> REGION_BITS);
    }
    PyBuffer_Release(&names);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *table_get(PyObject *self, PyObject *arg)
{
    Table *t = (Table *)self;
    char *name;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(arg, &name, &size) < 0)
        return NULL;
    if (size != PACKED)
        return PyErr_Format(PyExc_ValueError, "a name of %zd bytes", size);
    uint64_t low, high;
    uint32_t check;
    read_name((const uint8_t *)name, &low, &high, &check);
    uint32_t number = seek(t, 0, low, high);
    if (number == NOWHERE || entry_at(t, number)->check != check)
        return PyTuple_New(0);
    Set *set = set_of(t, entry_at(t, number)->set);
    PyObject *bits = PyTuple_New(set->n);
    for (uint32_t i = 0; bits && i < set->n; i++) {
        PyObject *bit = PyLong_FromUnsignedLong(set->bits[i]);
        if (!bit) {
            Py_DECREF(bits);
            return NULL;
        }
        PyTuple_SetItem(bits, i, bit);
    }
    return bits;
}

/* A holder in the running: its column, its rank in the answer, and what it has had by tier. */
typedef struct {
    uint32_t column, rank, total, by_tier[TIERS];
} Runner;

static int order_runners(const void *left, const void *right)
{
    const Runner *a = left, *b = right;
    if (a->total != b->total)
        return a->total > b->total ? -1 : 1;
    return a->rank < b->rank ? -1 : 1;
}

static inline void count_runs(Runner *runners, uint32_t num, uint32_t length)
{
    for (uint32_t i = 0; i < num; i++) {
        runners[i].by_tier[runners[i].rank >> 16] += length;
        runners[i].total += length;
    }
}

/* Goes along the names, from one stretch of blocks with equal sets to the next; fills `runners` with every holder of
 * block 0 and its unbroken run. `ranks` has one number a column, 0xFFFF for those that are not to be answered with. On
 * the way, the upper half of a runner's rank is its fastest tier in the present set. */
static uint32_t walk(Table *t, const uint8_t *names, size_t n, const uint16_t *ranks, size_t num_columns,
                     Runner *runners)
{
    uint32_t started = 0, running = 0, current = 0, since = 0, guess = 0;
    int scattered = 0;
    const uint8_t *end = names + n * PACKED;
    for (uint32_t i = 0, step; i < n; i += step) {
        const uint8_t *p = names + (size_t)i * PACKED;
        uint64_t low, high;
        uint32_t check;
        read_name(p, &low, &high, &check);
        if (scattered)
            look_ahead(t, p, end);
        uint32_t number = seek(t, guess, low, high);
        scattered = number != guess;
        Entry *entry = number == NOWHERE ? NULL : entry_at(t, number);
        uint32_t set_id = entry && entry->check == check ? entry->set : 0;
        step = set_id ? shared_from(t, p, number, stretch_from(t, number, (uint32_t)n - i)) : 1;
        guess = number + step;
        if (i && set_id == current)
            continue;
        count_runs(runners, running, i - since);
        since = i;
        current = set_id;
        if (!set_id) {
            running = 0;
            break;
        }
        Set *set = set_of(t, set_id);
        if (!i) {
            for (uint32_t k = 0; k < set->n; k++) {
                uint32_t column = set->bits[k] / TIERS;
                if (column >= num_columns || ranks[column] == 0xFFFF)
                    continue;
                if (started && runners[started - 1].column == column)
                    continue;
                Runner fresh = {column, ranks[column] | (uint32_t)(set->bits[k] % TIERS) << 16, 0, {0}};
                runners[started++] = fresh;
            }
            running = started;
            continue;
        }
        /* Both are in order of column. Whoever is not in the set has ended, and moves behind those that run on. */
        uint32_t k = 0, kept = 0;
        for (uint32_t r = 0; r < running; r++) {
            while (k < set->n && set->bits[k] / TIERS < runners[r].column)
                k++;
            if (k < set->n && set->bits[k] / TIERS == runners[r].column) {
                Runner ended = runners[kept];
                runners[kept] = runners[r];
                if (kept != r)
                    runners[r] = ended;
                runners[kept].rank = (runners[kept].rank & 0xFFFF) | (uint32_t)(set->bits[k] % TIERS) << 16;
                kept++;
            }
        }
        running = kept;
        if (!running)
            break;
    }
    if (running)
        count_runs(runners, running, (uint32_t)n - since);
    for (uint32_t r = 0; r < started; r++)
        runners[r].rank &= 0xFFFF;
    return started;
}

static PyObject *table_lookup(PyObject *self, PyObject *args)
{
    Table *t = (Table *)self;
    Py_buffer names, ranks;
    PyObject *found = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &names, &ranks))
        return NULL;
    size_t num_columns = (size_t)ranks.len / 2;
    if (names.len % PACKED || ranks.len % 2 || num_columns > MAX_BITS / TIERS) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of names, %zd of ranks", names.len, ranks.len);
        goto out;
    }
    Runner few[64], *runners = few;
    if (num_columns > 64 && !(runners = malloc(num_columns * sizeof(Runner)))) {
        PyErr_NoMemory();
        goto out;
    }
    uint32_t n = walk(t, names.buf, (size_t)names.len / PACKED, ranks.buf, num_columns, runners);
    qsort(runners, n, sizeof(Runner), order_runners);
    found = PyList_New(n);
    for (uint32_t i = 0; found && i < n; i++) {
        Runner *r = &runners[i];
        PyObject *one = Py_BuildValue("(II(IIII))", r->column, r->total, r->by_tier[0], r->by_tier[1], r->by_tier[2],
                                      r->by_tier[3]);
        if (!one) {
            Py_DECREF(found);
            found = NULL;
            break;
        }
        PyList_SetItem(found, i, one);
    }
    if (runners != few)
        free(runners);
out:
    PyBuffer_Release(&names);
    PyBuffer_Release(&ranks);
    return found;
}

/* Clears the bits of dead columns in one region; answers (next position or -1, entries looked at, [names gone], [the
 * column of each]). */
static PyObject *table_sweep(PyObject *self, PyObject *args)
{
    Table *t = (Table *)self;
    int position, max_told, failed = 0;
    Py_buffer dead;
    if (!PyArg_ParseTuple(args, "iy*i", &position, &dead, &max_told))
        return NULL;
    if (position < 0 || dead.len > MAX_BITS / TIERS) {
        PyErr_Format(PyExc_ValueError, "position %d, %zd columns", position, dead.len);
        PyBuffer_Release(&dead);
        return NULL;
    }
    uint8_t gone[MAX_BITS] = {0};
    for (Py_ssize_t c = 0; c < dead.len; c++)
        memset(gone + c * TIERS, ((const uint8_t *)dead.buf)[c] != 0, TIERS);
    PyBuffer_Release(&dead);
    PyObject *names = PyList_New(0), *columns = PyList_New(0);
    if (!names || !columns)
        goto refused;
    uint32_t looked_at = 0, region = (uint32_t)position;
    uint32_t used = region < t->num_regions && t->regions[region].entries ? t->regions[region].used : 0;
    uint32_t from = 0, left = 0; /* the step taken last, as in `set` */
    t->sweeping = 1;
    for (uint32_t i = 0; i < used && t->regions[region].entries; i++) {
        Entry *entry = &t->regions[region].entries[i];
        if (!entry->set)
            continue;
        looked_at++;
        if (i + AHEAD < used && entry[AHEAD].set)
            PREFETCH(home_of(t, entry[AHEAD].low));
        if (entry->set != from) {
            from = entry->set;
            left = set_without(t, from, gone, &failed);
            if (failed) {
                PyErr_NoMemory();
                goto refused;
            }
        }
        if (left == from)
            continue;
        if (left) {
            move_to(t, region << REGION_BITS | i, left);
            continue;
        }
        if (PyList_Size(names) < max_told) {
            PyObject *name = PyBytes_FromStringAndSize((const char *)entry, NAME);
            PyObject *column = PyLong_FromUnsignedLong(set_of(t, entry->set)->bits[0] / TIERS);
            int added = name && column && !PyList_Append(names, name) && !PyList_Append(columns, column);
            Py_XDECREF(name);
            Py_XDECREF(column);
            if (!added)
                goto refused;
        }
        erase(t, region << REGION_BITS | i);
    }
    if (region < t->num_regions && is_sparse(t, region))
        evacuate(t, region);
    int next = region + 1 < t->num_regions ? position + 1 : -1;
    t->sweeping = next >= 0;
    return Py_BuildValue("(iINN)", next, looked_at, names, columns);
refused:
    Py_XDECREF(names);
    Py_XDECREF(columns);
    return NULL;
}

static Py_ssize_t table_len(PyObject *self)
{
    return (Py_ssize_t)((Table *)self)->num_entries;
}

static PyObject *table_nbytes(PyObject *self, PyObject *unused)
{
    Table *t = (Table *)self;
    (void)unused;
    return PyLong_FromUnsignedLongLong(t->nbytes + t->num_chunks * sizeof(Set **) + t->num_regions * sizeof(Region) +
                                       sizeof(Table));
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Table *t = (Table *)alloc(type, 0); /* zeroed */
    if (t)
        t->next_id = 1;
    return (PyObject *)t;
}

static void table_dealloc(PyObject *self)
{
    Table *t = (Table *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < NUM_SHARDS; i++)
        give(t, t->shards[i].places, t->shards[i].size * sizeof(Place));
    for (uint32_t i = 0; i < t->num_regions; i++)
        give(t, t->regions[i].entries, REGION * sizeof(Entry));
    free(t->regions);
    for (uint32_t id = 1; id < t->next_id; id++) {
        Set *set = set_of(t, id);
        if (!((uintptr_t)set & 1))
            give(t, set, set_size(set->n));
    }
    for (int i = 0; i < SET_SHARDS; i++)
        give(t, t->interned[i].ids, t->interned[i].size * sizeof(uint32_t));
    for (uint32_t i = 0; i < t->num_chunks; i++)
        give(t, t->chunks[i], CHUNK * sizeof(Set *));
    free(t->chunks);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"set", table_set, METH_VARARGS, NULL},       {"clear", table_clear, METH_VARARGS, NULL},
    {"get", table_get, METH_O, NULL},             {"lookup", table_lookup, METH_VARARGS, NULL},
    {"sweep", table_sweep, METH_VARARGS, NULL},   {"nbytes", table_nbytes, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},       {Py_tp_dealloc, table_dealloc}, {Py_tp_methods, table_methods},
    {Py_sq_length, table_len},    {0, NULL},
};

static PyType_Spec table_spec = {"kv_prefix._bit_table.BitTable", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};

static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_bit_table", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__bit_table(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *type = made ? PyType_FromSpec(&table_spec) : NULL;
    if (!type || PyModule_AddObjectRef(made, "BitTable", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(made);
        return NULL;
    }
    Py_DECREF(type);
    return made;
}
