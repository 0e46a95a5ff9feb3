// Attention over paged keys and values; see attention.c.
#ifndef PDSERVE_ATTENTION_H
#define PDSERVE_ATTENTION_H

#include "vec.h"

enum cache_format { CACHE_F32, CACHE_F16, CACHE_BF16 };

// A chunk of a step: `num_rows` new tokens of one sequence from position `start`, whose rows begin at `first_row`.
struct chunk {
    const int32_t *block_ids; // [ceil((start + num_rows) / block_size)]
    int32_t start;
    int32_t num_rows;
    int32_t first_row;
};

// The rows of a chunk among rows first … end - 1 of the step, for a loop; none: it ends where it begins.
INLINE int first_row_of(const struct chunk *chunk, int first) { return first > chunk->first_row ? first : chunk->first_row; }
INLINE int end_row_of(const struct chunk *chunk, int end) { return at_most(end, chunk->first_row + chunk->num_rows); }

INLINE ptrdiff_t slot_of(const struct chunk *chunk, int position, int block_size)
{
    return (ptrdiff_t)chunk->block_ids[position / block_size] * block_size + position % block_size;
}

struct attention {
    const void *keys;   // [slots, kv_heads, key_dim], of `format`; a layer's cache, the step's own tokens included
    const void *values; // [slots, kv_heads, value_dim]
    const float *sinks; // [heads], or NULL
    int32_t format;
    int32_t block_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t window;  // positions that a row sees, its own included; 0: all
    float scaling;
    float softcap; // 0: none
};

#define MAX_DIM 256 // of a head; Python asks for no more

// out[row, head] for all rows of `chunks`; query is [rows, heads, key_dim], out [rows, heads, value_dim] of float, or of bfloat16
// if `rounds`; strides are in elements. Of the work, thread `thread` of `num_threads` does its share.
void attend(const struct attention *layer, const struct chunk *chunks, int num_chunks, const float *query, ptrdiff_t query_stride,
            void *out, ptrdiff_t out_stride, int rounds, int thread, int num_threads);

#endif
