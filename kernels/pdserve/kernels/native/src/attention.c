// For the row at position p, head h, KV head g = h // (heads / kv_heads):
//
//     s_j = cap(scaling * <q, K[slot(j), g]>)           j in max(0, p - window + 1) … p
//     out = sum_j exp(s_j) V[slot(j), g] / (sum_j exp(s_j) + exp(sink[h]))
//
// A line is one head of one row. Lines of one KV head are worked on together, so that each key and value is read once for all of
// them: the heads of a group in decode, those of several rows in prefill. Positions come in stretches of 64 that begin at multiples
// of 64, with the running maximum of FlashAttention (Dao et al., arXiv:2205.14135).
//
// What is added up for a line, and in which order, depends on its position alone: a row's result is the same, bit by bit, in decode,
// in any cut of a prompt into chunks, and beside any neighbours.
#include "attention.h"

#include "functions.h"

#define STRETCH 64
#define LINES 24    // worked on together
#define MIX_LINES 6 // whose sums stay in registers
#define VECS(dim) (((dim) + LANES - 1) / LANES)

struct lines {
    float query[LINES][MAX_DIM]; // padded with zeros to whole vectors
    float out[LINES][MAX_DIM];
    float scores[LINES][STRETCH]; // then weights
    float top[LINES];
    float total[LINES];
    float fade[LINES]; // what the sums so far are to be multiplied by
    int from[LINES];   // first and last position + 1 that the line sees
    int to[LINES];
    int count;
};

struct stretch {
    const float *keys[STRETCH];
    const float *values[STRETCH];
    int start;
    int begin; // places begin … count - 1 are seen by some line
    int count;
    // Copies, where the cache holds other numbers than floats, or vectors would reach past a head.
    float key_copies[STRETCH][MAX_DIM];
    float value_copies[STRETCH][MAX_DIM];
};

// One vector whose lane i is the sum of the lanes of part[i].
INLINE vf sums_of(vf *part)
{
#pragma GCC unroll 8
    for (int bit = 1; bit < LANES; bit <<= 1) {
        vi own, other;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            own[i] = i & bit ? LANES + i : i;
            other[i] = own[i] ^ bit;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2 * bit)
            part[i] = __builtin_shuffle(part[i], part[i + bit], own) + __builtin_shuffle(part[i], part[i + bit], other);
    }
    return part[0];
}

// Scores of a line with a stretch's keys; `vecs` may be a constant.
INLINE void score(const int vecs, const float *query, const float *const *keys, float *scores)
{
    for (int first = 0; first < STRETCH; first += LANES) {
        vf part[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const float *key = keys[first + i];
            part[i] = load(query) * load(key);
#pragma GCC unroll 16
            for (int v = 1; v < vecs; v++)
                part[i] += load(query + v * LANES) * load(key + v * LANES);
        }
        store(scores + first, sums_of(part));
    }
}

// Scores become weights: scaled, capped, those out of sight 0, and e to what remains.
static void weigh(const struct attention *layer, struct lines *lines, int line, int start)
{
    float *scores = lines->scores[line];
    vf top = splat(-INFINITY);
    vi places;
    for (int i = 0; i < LANES; i++)
        places[i] = i;
    for (int first = 0; first < STRETCH; first += LANES) {
        vf s = load(scores + first) * splat(layer->scaling);
        if (layer->softcap != 0)
            s = splat(layer->softcap) * hyperbolic_tangent(s / splat(layer->softcap));
        vi at = places + (start + first);
        s = pick((at >= lines->from[line]) & (at < lines->to[line]), s, splat(-INFINITY));
        store(scores + first, s);
        top = largest(top, s);
    }
    float before = lines->top[line], now = largest_lane(top);
    now = before > now ? before : now;
    vf total = {};
    for (int first = 0; first < STRETCH; first += LANES) {
        vf weight = exponential(load(scores + first) - splat(now));
        store(scores + first, weight);
        total += weight;
    }
    lines->top[line] = now;
    lines->fade[line] = exponential(splat(before - now))[0];
    lines->total[line] = lines->total[line] * lines->fade[line] + sum_lanes(total);
}

// out[line] = fade[line] * out[line] + sum_j weight[line][j] value[j], for `count` lines and `vecs` vectors (both constants).
INLINE void mix(const int count, const int vecs, struct lines *lines, int first, const struct stretch *stretch, int dim)
{
    vf sum[MIX_LINES][4];
#pragma GCC unroll 8
    for (int l = 0; l < count; l++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sum[l][v] = load(lines->out[first + l] + dim + v * LANES) * splat(lines->fade[first + l]);
    for (int j = stretch->begin; j < stretch->count; j++) {
        const float *value = stretch->values[j] + dim;
#pragma GCC unroll 8
        for (int l = 0; l < count; l++) {
            vf weight = splat(lines->scores[first + l][j]);
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++)
                sum[l][v] += weight * load(value + v * LANES);
        }
    }
#pragma GCC unroll 8
    for (int l = 0; l < count; l++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            store(lines->out[first + l] + dim + v * LANES, sum[l][v]);
}

INLINE void mix_vecs(const int vecs, struct lines *lines, int first, const struct stretch *stretch, int dim)
{
    switch (lines->count - first) {
#define CASE(n, label)                                                                                                       \
    label:                                                                                                                   \
    mix(n, vecs, lines, first, stretch, dim);                                                                                \
    break;
        CASE(1, case 1)
        CASE(2, case 2)
        CASE(3, case 3)
        CASE(4, case 4)
        CASE(5, case 5)
        CASE(6, default)
#undef CASE
    }
}

static void mix_all(struct lines *lines, const struct stretch *stretch, int vecs)
{
    for (int first = 0; first < lines->count; first += MIX_LINES) {
        int v = 0;
        for (; v + 4 <= vecs; v += 4)
            mix_vecs(4, lines, first, stretch, v * LANES);
        for (; v + 2 <= vecs; v += 2)
            mix_vecs(2, lines, first, stretch, v * LANES);
        if (v < vecs)
            mix_vecs(1, lines, first, stretch, v * LANES);
    }
}

// Copy `dim` numbers of a cache as floats; what is left of the last vector is zero.
INLINE void copy_head(const int format, const char *from, int dim, float *to)
{
    int d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(to + d, format == CACHE_F32   ? load((const float *)from + d)
                      : format == CACHE_F16 ? load_f16((const uint16_t *)from + d)
                                            : load_bf16((const uint16_t *)from + d));
    if (d < dim) {
        char rest[4 * LANES] = {0};
        int size = format == CACHE_F32 ? 4 : 2;
        memcpy(rest, from + (ptrdiff_t)d * size, (size_t)(dim - d) * size);
        store(to + d, format == CACHE_F32   ? load((const float *)rest)
                      : format == CACHE_F16 ? load_f16((const uint16_t *)rest)
                                            : load_bf16((const uint16_t *)rest));
    }
}

static const float *head_at(const struct attention *layer, const void *cache, ptrdiff_t slot, int kv_head, int dim, float *copy)
{
    ptrdiff_t place = (slot * layer->num_kv_heads + kv_head) * dim;
    switch (layer->format) {
    case CACHE_F32:
        if (dim % LANES == 0)
            return (const float *)cache + place;
        copy_head(CACHE_F32, (const char *)cache + 4 * place, dim, copy);
        break;
    case CACHE_F16:
        copy_head(CACHE_F16, (const char *)cache + 2 * place, dim, copy);
        break;
    default:
        copy_head(CACHE_BF16, (const char *)cache + 2 * place, dim, copy);
    }
    return copy;
}

// Find the positions of the stretch at `start` that lie in from … to - 1. Others may hold anything: their places name the last one's
// key, whose score is not used there, and no value.
static void find(const struct attention *layer, struct stretch *stretch, const int32_t *block_ids, int kv_head, int start, int from,
                 int to)
{
    stretch->start = start;
    stretch->begin = from > start ? from - start : 0;
    stretch->count = at_most(STRETCH, to - start);
    int size = layer->block_size, block = (start + stretch->begin) / size, place = (start + stretch->begin) % size;
    for (int j = stretch->begin; j < stretch->count; j++) {
        ptrdiff_t slot = (ptrdiff_t)block_ids[block] * size + place;
        if (++place == size) {
            place = 0;
            block++;
        }
        stretch->keys[j] = head_at(layer, layer->keys, slot, kv_head, layer->key_dim, stretch->key_copies[j]);
        stretch->values[j] = head_at(layer, layer->values, slot, kv_head, layer->value_dim, stretch->value_copies[j]);
    }
    for (int j = 0; j < STRETCH; j++)
        if (j < stretch->begin || j >= stretch->count)
            stretch->keys[j] = stretch->keys[stretch->count - 1];
}

static void attend_lines(const struct attention *layer, struct lines *lines, const int32_t *block_ids, int kv_head)
{
    struct stretch stretch;
    int key_vecs = VECS(layer->key_dim), from = lines->from[0], to = 0;
    for (int l = 0; l < lines->count; l++) {
        from = at_most(from, lines->from[l]);
        to = lines->to[l] > to ? lines->to[l] : to;
    }
    for (int start = from - from % STRETCH; start < to; start += STRETCH) {
        find(layer, &stretch, block_ids, kv_head, start, from, to);
        for (int l = 0; l < lines->count; l++) {
            if (lines->to[l] <= start || lines->from[l] >= start + STRETCH) {
                lines->fade[l] = 1;
                memset(lines->scores[l], 0, sizeof lines->scores[l]);
                continue;
            }
            if (key_vecs == 64 / LANES)
                score(64 / LANES, lines->query[l], stretch.keys, lines->scores[l]);
            else if (key_vecs == 128 / LANES)
                score(128 / LANES, lines->query[l], stretch.keys, lines->scores[l]);
            else
                score(key_vecs, lines->query[l], stretch.keys, lines->scores[l]);
            weigh(layer, lines, l, start);
        }
        mix_all(lines, &stretch, VECS(layer->value_dim));
    }
}

static void begin_line(const struct attention *layer, struct lines *lines, int line, const float *query, int head, int position)
{
    memset(lines->query[line], 0, sizeof(float) * LANES * VECS(layer->key_dim));
    memcpy(lines->query[line], query, sizeof(float) * layer->key_dim);
    memset(lines->out[line], 0, sizeof(float) * LANES * VECS(layer->value_dim));
    lines->top[line] = layer->sinks ? layer->sinks[head] : -INFINITY;
    lines->total[line] = layer->sinks ? 1 : 0;
    lines->to[line] = position + 1;
    lines->from[line] = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
}

static void end_line(const struct attention *layer, const struct lines *lines, int line, void *out, ptrdiff_t place, int rounds)
{
    float by = 1 / lines->total[line];
    for (int d = 0; d < layer->value_dim; d++) {
        float x = lines->out[line][d] * by;
        if (rounds)
            ((uint16_t *)out)[place + d] = to_bf16(x);
        else
            ((float *)out)[place + d] = x;
    }
}

void attend(const struct attention *layer, const struct chunk *chunks, int num_chunks, const float *query, ptrdiff_t query_stride,
            void *out, ptrdiff_t out_stride, int rounds, int thread, int num_threads)
{
    struct lines lines;
    int group = layer->num_heads / layer->num_kv_heads, task = 0;
    for (int c = 0; c < num_chunks; c++) {
        const struct chunk *chunk = chunks + c;
        int num_lines = chunk->num_rows * group;
        for (int kv_head = 0; kv_head < layer->num_kv_heads; kv_head++)
            for (int first = 0; first < num_lines; first += LINES, task++) {
                if (task % num_threads != thread)
                    continue;
                lines.count = at_most(LINES, num_lines - first);
                for (int l = 0; l < lines.count; l++) {
                    int row = (first + l) / group, head = kv_head * group + (first + l) % group;
                    const float *from = query + (chunk->first_row + row) * query_stride + (ptrdiff_t)head * layer->key_dim;
                    begin_line(layer, &lines, l, from, head, chunk->start + row);
                }
                attend_lines(layer, &lines, chunk->block_ids, kv_head);
                for (int l = 0; l < lines.count; l++) {
                    int row = (first + l) / group, head = kv_head * group + (first + l) % group;
                    ptrdiff_t place = (chunk->first_row + row) * out_stride + (ptrdiff_t)head * layer->value_dim;
                    end_line(layer, &lines, l, out, place, rounds);
                }
            }
    }
}
