/* Blocks in the order in which they came, and the directory that finds them. Included by `_bit_table.c` alone.
 *
 * Entries are appended to regions of 4,096. Blocks of one prompt come one after the other, so whoever walks a prefix
 * mostly finds the next block next to the last one, in the order in which memory is fast, and asks the directory only
 * where that fails: names are compared either way. A region less than half full is emptied into the open one, so that
 * at most half of the memory is holes. The shards of the directory grow one at a time and touch no entry.
 */
#include "_bit_sets.h"

static inline void read_name(const uint8_t *p, uint64_t *low, uint64_t *high, uint32_t *check)
{
    memcpy(low, p, 8);
    memcpy(high, p + 8, 8);
    memcpy(check, p + NAME, 4);
}

static inline Entry *entry_at(Table *t, uint32_t number)
{
    return &t->regions[number >> REGION_BITS].entries[number & (REGION - 1)];
}

static inline Shard *shard_of(Table *t, uint64_t low)
{
    return &t->shards[low & (NUM_SHARDS - 1)];
}

static inline uint32_t tag_of(uint64_t low)
{
    return (uint32_t)(low >> SHARD_BITS);
}

static int shard_resize(Table *t, Shard *s, uint32_t size)
{
    Place *places = NULL;
    if (size) {
        places = take(t, size * sizeof(Place));
        if (!places)
            return -1;
        for (uint32_t i = 0; i < s->size; i++)
            if (s->places[i].at) {
                uint32_t at = s->places[i].tag & (size - 1);
                while (places[at].at)
                    at = (at + 1) & (size - 1);
                places[at] = s->places[i];
            }
    }
    give(t, s->places, s->size * sizeof(Place));
    s->places = places;
    s->size = size;
    return 0;
}

static int shard_reserve(Table *t, Shard *s)
{
    if ((uint64_t)(s->used + 1) * 8 <= (uint64_t)s->size * 7)
        return 0;
    return shard_resize(t, s, s->size ? s->size * 2 : MIN_SLOTS);
}

/* The place of a name, or the free one where it would go. The shard has a free place. */
static inline Place *find(Table *t, const Shard *s, uint64_t low, uint64_t high)
{
    uint32_t tag = tag_of(low), at = tag & (s->size - 1);
    for (; s->places[at].at; at = (at + 1) & (s->size - 1)) {
        if (s->places[at].tag != tag)
            continue;
        Entry *entry = entry_at(t, s->places[at].at - 1);
        if (entry->low == low && entry->high == high)
            break;
    }
    return &s->places[at];
}

static void shrink(Table *t, Shard *s)
{
    uint32_t size = s->size;
    while (size > MIN_SLOTS && s->used * 4 < size)
        size /= 2;
    if (!s->used)
        size = 0;
    if (size != s->size)
        shard_resize(t, s, size); /* without memory for it, it stays as it is */
}

static void forget_place(Table *t, Shard *s, Place *place)
{
    uint32_t mask = s->size - 1, at = (uint32_t)(place - s->places);
    /* What probed past this place moves back, so that no probe ends early. */
    for (uint32_t next = (at + 1) & mask; s->places[next].at; next = (next + 1) & mask) {
        uint32_t home = s->places[next].tag & mask;
        if (((next - home) & mask) >= ((next - at) & mask)) {
            s->places[at] = s->places[next];
            at = next;
        }
    }
    s->places[at].at = 0;
    s->used--;
    /* All large shards get too large at about the same time: they take turns, so that no call shrinks them all. A shard
     * of `size` is too large when size / 4 of its places are used; until nothing is left, every shard gets size / 1024
     * turns. Those that might get none are small, and shrink at once. */
    if (s->size <= 1024)
        shrink(t, s);
    if (t->num_entries % 256 == 0)
        shrink(t, &t->shards[t->turn++ % NUM_SHARDS]);
}

/* The number of a free entry at the end of the open region; UINT32_MAX when memory is out. */
static uint32_t append(Table *t)
{
    if (t->open && t->regions[t->open - 1].used < REGION) {
        Region *r = &t->regions[t->open - 1];
        r->live++;
        return (t->open - 1) << REGION_BITS | r->used++;
    }
    uint32_t free_number = 0;
    while (free_number < t->num_regions && t->regions[free_number].entries)
        free_number++;
    if (free_number == t->num_regions) {
        Region *more = realloc(t->regions, (t->num_regions + 1) * sizeof(Region));
        if (!more)
            return UINT32_MAX;
        t->regions = more;
        t->regions[t->num_regions++] = (Region){NULL, 0, 0};
    }
    Entry *entries = take(t, REGION * sizeof(Entry));
    if (!entries)
        return UINT32_MAX;
    t->regions[free_number] = (Region){entries, 1, 1};
    t->open = free_number + 1;
    return free_number << REGION_BITS;
}

static void drop_entry(Table *t, uint32_t number)
{
    Region *r = &t->regions[number >> REGION_BITS];
    r->entries[number & (REGION - 1)].set = 0;
    if (--r->live)
        return;
    give(t, r->entries, REGION * sizeof(Entry));
    *r = (Region){NULL, 0, 0};
    if (t->open == (number >> REGION_BITS) + 1)
        t->open = 0;
}

static int is_sparse(Table *t, uint32_t region)
{
    Region *r = &t->regions[region];
    return r->entries && t->open != region + 1 && r->live * 2 < REGION;
}

/* Moves what lives in a region to the end of the open one; without memory for it, the rest stays where it is. */
static void evacuate(Table *t, uint32_t region)
{
    for (uint32_t i = 0, used = t->regions[region].used; i < used; i++) {
        Entry moved = t->regions[region].entries[i];
        if (!moved.set)
            continue;
        uint32_t number = append(t);
        if (number == UINT32_MAX)
            return;
        *entry_at(t, number) = moved;
        Place *place = find(t, shard_of(t, moved.low), moved.low, moved.high);
        place->at = number + 1;
        int last = t->regions[region].live == 1;
        drop_entry(t, region << REGION_BITS | i);
        if (last)
            return;
    }
}

/* The number of a name's entry, or UINT32_MAX. `guess` is where it lies if it came with the block before. */
static inline uint32_t seek(Table *t, uint32_t guess, uint64_t low, uint64_t high)
{
    if (guess & (REGION - 1)) {
        Entry *entry = entry_at(t, guess);
        if (entry->set && entry->low == low && entry->high == high)
            return guess;
    }
    Shard *s = shard_of(t, low);
    return s->size ? find(t, s, low, high)->at - 1 : UINT32_MAX; /* a free place has 0 */
}

/* Where a probe for a name begins; NULL where there is nothing to probe. */
static inline const Place *home_of(Table *t, uint64_t low)
{
    Shard *s = shard_of(t, low);
    return s->size ? &s->places[tag_of(low) & (s->size - 1)] : NULL;
}

/* Fetches what the directory needs for names further on: first the shard, and by the time that is there, the place. */
static inline void look_ahead(Table *t, const uint8_t *p, const uint8_t *end)
{
    uint64_t low;
    if (end - p > 2 * AHEAD * PACKED) {
        memcpy(&low, p + 2 * AHEAD * PACKED, 8);
        PREFETCH(shard_of(t, low));
    }
    if (end - p > AHEAD * PACKED) {
        memcpy(&low, p + AHEAD * PACKED, 8);
        PREFETCH(home_of(t, low));
    }
}

static void move_to(Table *t, Entry *entry, uint32_t set)
{
    set_of(t, set)->refs++;
    if (entry->set)
        release_set(t, entry->set);
    entry->set = set;
}
