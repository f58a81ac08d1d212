/* Blocks in the order in which they came, and the directory that finds them. Included by `_bit_table.c` alone.
 *
 * Entries are appended to regions of 4,096. Blocks of one prompt come one after the other, so whoever walks a prefix
 * mostly finds the next block next to the last one, in the order in which memory is fast, and asks the directory only
 * where that fails: names are compared either way. A region less than half full is emptied into the open one, so that
 * at most half of the memory is holes. The shards of the directory grow one at a time and touch no entry.
 *
 * Contiguity is kept beside the entries, a bit for each: it goes on from the entry before, which is its parent and is
 * held by the same holders in the same tiers. A change of one block's set, its coming or its going touches its own bit
 * and that of the one behind it, never more. A stretch of set bits is as many blocks that need not be looked at singly.
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

static inline Links *links_of(Table *t, uint32_t region)
{
    return (Links *)(t->regions[region].entries + REGION);
}

static inline int bit_at(const uint64_t *bits, uint32_t i)
{
    return bits[i / 64] >> i % 64 & 1;
}

static inline void put_bit(uint64_t *bits, uint32_t i, int on)
{
    bits[i / 64] = (bits[i / 64] & ~(1ULL << i % 64)) | (uint64_t)on << i % 64;
}

/* The set of entry `i` of a region was changed: whether it goes on from the one before, and the one behind from it. */
static inline void relink(Table *t, uint32_t region, uint32_t i)
{
    const Entry *entry = &t->regions[region].entries[i];
    Links *links = links_of(t, region);
    if (bit_at(links->follows, i))
        put_bit(links->goes_on, i, entry->set == entry[-1].set);
    if (i + 1 < REGION && bit_at(links->follows, i + 1))
        put_bit(links->goes_on, i + 1, entry->set == entry[1].set);
}

/* The entry before this one in its region is its parent. Not for the first of a region. */
static inline void link_to_last(Table *t, uint32_t number)
{
    uint32_t region = number >> REGION_BITS, i = number & (REGION - 1);
    Links *links = links_of(t, region);
    if (bit_at(links->follows, i))
        return;
    put_bit(links->follows, i, 1);
    relink(t, region, i);
}

/* How many blocks from this one on, itself included and at most `most`, each go on from the one before. */
static inline uint32_t stretch_from(Table *t, uint32_t number, uint32_t most)
{
    uint32_t first = number & (REGION - 1), i = first + 1;
    const uint64_t *goes_on = links_of(t, number >> REGION_BITS)->goes_on;
    while (i < REGION && i - first < most) {
        uint64_t breaks = ~goes_on[i / 64] >> i % 64;
        if (breaks) {
            i += lowest_bit(breaks);
            break;
        }
        i += 64 - i % 64;
    }
    return i - first < most ? i - first : most;
}

/* How many names from `p` on, of at most `most`, are those of entry `number` and of the entries behind it; the first one
 * is. Each entry here is the child of the one before, and so is each name: a name is hashed over its parent's, hence
 * where one is equal all before it are, and the last equal one can be searched for. */
static inline uint32_t shared_from(Table *t, const uint8_t *p, uint32_t number, uint32_t most)
{
    uint32_t same = 1, probe = most; /* mostly the whole stretch is */
    while (same < most) {
        uint64_t low, high;
        uint32_t check;
        read_name(p + (size_t)(probe - 1) * PACKED, &low, &high, &check);
        Entry *entry = entry_at(t, number + probe - 1);
        if (entry->low == low && entry->high == high && entry->check == check)
            same = probe;
        else
            most = probe - 1;
        probe = same + (most - same + 1) / 2;
    }
    return same;
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

/* Whether entry `number` lies in the same region as entry `last`, behind it. */
static inline int is_behind(uint32_t number, uint32_t last)
{
    return number == last + 1 && number & (REGION - 1);
}

/* The number of a free entry at the end of the open region; NOWHERE when memory is out. */
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
            return NOWHERE;
        t->regions = more;
        t->regions[t->num_regions++] = (Region){NULL, 0, 0};
    }
    Entry *entries = take(t, REGION_NBYTES);
    if (!entries)
        return NOWHERE;
    t->regions[free_number] = (Region){entries, 1, 1};
    t->open = free_number + 1;
    return free_number << REGION_BITS;
}

static void drop_entry(Table *t, uint32_t number)
{
    Region *r = &t->regions[number >> REGION_BITS];
    Links *links = links_of(t, number >> REGION_BITS);
    uint32_t first = number & (REGION - 1);
    r->entries[first].set = 0;
    for (uint32_t i = first; i < REGION && i < first + 2; i++) {
        put_bit(links->follows, i, 0);
        put_bit(links->goes_on, i, 0);
    }
    if (--r->live)
        return;
    give(t, r->entries, REGION_NBYTES);
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
    uint64_t follows[REGION / 64]; /* as it was: an entry that has gone takes its links with it */
    memcpy(follows, links_of(t, region)->follows, sizeof(follows));
    uint32_t last = NOWHERE; /* where the one before it went */
    for (uint32_t i = 0, used = t->regions[region].used; i < used; i++) {
        Entry moved = t->regions[region].entries[i];
        if (!moved.set)
            continue;
        uint32_t number = append(t);
        if (number == NOWHERE)
            return;
        *entry_at(t, number) = moved;
        if (bit_at(follows, i) && is_behind(number, last))
            link_to_last(t, number);
        last = number;
        Place *place = find(t, shard_of(t, moved.low), moved.low, moved.high);
        place->at = number + 1;
        int emptied = t->regions[region].live == 1;
        drop_entry(t, region << REGION_BITS | i);
        if (emptied)
            return;
    }
}

/* The number of a name's entry, or NOWHERE. `guess` is where it lies if it came with the block before. */
static inline uint32_t seek(Table *t, uint32_t guess, uint64_t low, uint64_t high)
{
    if (guess & (REGION - 1)) {
        Entry *entry = entry_at(t, guess);
        if (entry->set && entry->low == low && entry->high == high)
            return guess;
    }
    Shard *s = shard_of(t, low);
    return s->size ? find(t, s, low, high)->at - 1 : NOWHERE; /* a free place has 0 */
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

static void move_to(Table *t, uint32_t number, uint32_t set)
{
    Entry *entry = entry_at(t, number);
    set_of(t, set)->refs++;
    if (entry->set)
        release_set(t, entry->set);
    entry->set = set;
    relink(t, number >> REGION_BITS, number & (REGION - 1));
}
