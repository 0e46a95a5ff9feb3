// y[r, n] = sum_k x[r, k] w[n, k]
//
// Weights lie in panels of 32 outputs, in the order in which they are read: all of a panel's outputs for the first input, then for
// the second, and so on. So one row of x reads memory in order and no faster than memory allows, and many rows are a product of
// outer products whose sums stay in registers (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication").
//
// Every y[r, n] is summed over k in one order, whatever the number of rows: a row's result does not depend on its neighbours.
#include "product.h"

#define VECS (PANEL / LANES)
#if LANES == 16
#define TILE_ROWS 12 // times 2 vectors of sums: 24 of 32 registers
#elif LANES == 8
#define TILE_ROWS 3 // times 4: 12 of 16
#else
#define TILE_ROWS 2 // times 8: 16; compilers for 16 registers spill some, those for 32 do not
#endif
#define GROUP_ROWS (8 * TILE_ROWS) // rows whose sums wait beside while the inputs are gone through in parts
#define PART_BYTES 32768           // of a panel: stays in the first cache while a group's tiles use it
#define AHEAD_BYTES 4096           // how far one tile's reading is announced; found by trial, flat between 2 and 8 KiB

INLINE int bytes_per_weight(const int format) { return format == WEIGHT_F32 ? 4 : 2; }

// The sums of a tile of `rows` (a constant) over `count` inputs, added to those in `sums` [rows][PANEL] unless they `begin`.
INLINE void tile(const int format, const int rows, const char *x, ptrdiff_t x_bytes, const char *w, int count, float *sums,
                 int begin)
{
    const int inputs = format == WEIGHT_BF16 || format == WEIGHT_BF16_DOT ? 2 : 1; // in a turn of the loop
    const int turn_bytes = inputs * PANEL * bytes_per_weight(format);
    vf sum[TILE_ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++)
            sum[r][v] = begin ? (vf){} : load(sums + r * PANEL + v * LANES);
    for (int k = 0; k < count; k += inputs, w += turn_bytes, x += inputs * (format == WEIGHT_BF16_DOT ? 2 : 4)) {
#pragma GCC unroll 4
        for (int line = 0; line < turn_bytes; line += 64)
            __builtin_prefetch(w + AHEAD_BYTES + line, 0, 3);
        vf first[VECS], second[VECS];
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) {
            if (format == WEIGHT_F32) {
                first[v] = load((const float *)w + v * LANES);
            } else if (format == WEIGHT_F16) {
                first[v] = load_f16((const uint16_t *)w + v * LANES);
            } else {
                vi pair = load_words(w + v * LANES * 4);
                first[v] = format == WEIGHT_BF16 ? (vf)(pair << 16) : (vf)pair;
                second[v] = (vf)(pair & (int32_t)0xffff0000);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const char *at = x + r * x_bytes;
#if defined(__AVX512BF16__)
            if (format == WEIGHT_BF16_DOT) {
                int32_t pair;
                memcpy(&pair, at, 4);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++)
                    sum[r][v] = (vf)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)first[v]);
                continue;
            }
#endif
            vf one = splat(((const float *)at)[0]);
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                sum[r][v] += one * first[v];
            if (format == WEIGHT_BF16) {
                vf other = splat(((const float *)at)[1]);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++)
                    sum[r][v] += other * second[v];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++)
            store(sums + r * PANEL + v * LANES, sum[r][v]);
}

INLINE void tiles(const int format, int rows, const char *x, ptrdiff_t x_bytes, const char *w, int count, float *sums, int begin)
{
    switch (rows) {
#define CASE(n)                                                                                                              \
    case n:                                                                                                                  \
        tile(format, n, x, x_bytes, w, count, sums, begin);                                                                  \
        break;
        CASE(1)
        CASE(2)
#if TILE_ROWS > 2
        CASE(3)
#endif
#if TILE_ROWS > 3
        CASE(4)
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
        CASE(9)
        CASE(10)
        CASE(11)
        CASE(12)
#endif
#undef CASE
    }
}

static void finish(const struct weight *weight, const float *sums, float *y, ptrdiff_t y_stride, int rows, int adds, int panel)
{
    int outputs = at_most(PANEL, weight->num_outputs - panel * PANEL);
    for (int r = 0; r < rows; r++) {
        float *to = y + r * y_stride + panel * PANEL;
        const float *from = sums + r * PANEL, *bias = weight->bias ? weight->bias + panel * PANEL : NULL;
        for (int n = 0; n < outputs; n++)
            to[n] = (bias ? from[n] + bias[n] : from[n]) + (adds ? to[n] : 0);
    }
}

INLINE void panels(const int format, const struct weight *weight, const char *x, ptrdiff_t x_bytes, float *y,
                   ptrdiff_t y_stride, int rows, int adds, int first_panel, int end_panel)
{
    const int input_bytes = PANEL * bytes_per_weight(format), x_size = format == WEIGHT_BF16_DOT ? 2 : 4;
    const int inputs = weight->num_inputs;
    const int part = rows <= TILE_ROWS ? inputs : PART_BYTES / input_bytes;
    float sums[GROUP_ROWS][PANEL];
    for (int panel = first_panel; panel < end_panel; panel++) {
        const char *w = (const char *)weight->panels + (ptrdiff_t)panel * inputs * input_bytes;
        for (int group = 0; group < rows; group += GROUP_ROWS) {
            int in_group = at_most(GROUP_ROWS, rows - group), num_tiles = (in_group + TILE_ROWS - 1) / TILE_ROWS;
            for (int k = 0; k < inputs; k += part)
                for (int t = 0, row = 0; t < num_tiles; t++) {
                    int height = (in_group - row + num_tiles - t - 1) / (num_tiles - t); // as even as can be
                    tiles(format, height, x + (group + row) * x_bytes + (ptrdiff_t)k * x_size, x_bytes,
                          w + (ptrdiff_t)k * input_bytes, at_most(part, inputs - k), sums[row], k == 0);
                    row += height;
                }
            finish(weight, sums[0], y + group * y_stride, y_stride, in_group, adds, panel);
        }
    }
}

void product(const struct weight *weight, const void *x, ptrdiff_t x_stride, float *y, ptrdiff_t y_stride, int rows, int adds,
             int first_panel, int end_panel)
{
#define RUN(format, size) panels(format, weight, x, x_stride * size, y, y_stride, rows, adds, first_panel, end_panel)
    switch (weight->format) {
    case WEIGHT_F32:
        RUN(WEIGHT_F32, 4);
        break;
    case WEIGHT_F16:
        RUN(WEIGHT_F16, 4);
        break;
    case WEIGHT_BF16:
        RUN(WEIGHT_BF16, 4);
        break;
#if defined(__AVX512BF16__)
    case WEIGHT_BF16_DOT:
        RUN(WEIGHT_BF16_DOT, 2);
        break;
#endif
    }
#undef RUN
}
