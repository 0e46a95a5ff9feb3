// Operations on rows of activations; see rows.c. Strides are in elements. Rows first … end - 1 are computed.
#ifndef PDSERVE_ROWS_H
#define PDSERVE_ROWS_H

#include "attention.h"
#include "product.h"

struct norm {
    const float *scale; // [width]
    const float *bias;  // [width], or NULL
    float epsilon;
    int32_t num_heads; // each of `width`, one behind the other in a row, is normed by itself
    int32_t width;
    int32_t is_centered; // LayerNorm: less its mean; else RMS norm
    int32_t adds;        // y += norm(x) in the place of y = norm(x)
};

enum activation { ACTIVATION_SILU, ACTIVATION_GELU_TANH, ACTIVATION_GELU, ACTIVATION_RELU, ACTIVATION_RELU_SQUARED };

struct rotation {
    const float *frequencies; // [pairs]
    float scaling;            // of cosine and sine
    int32_t num_heads;
    int32_t head_dim;
    int32_t pairs;          // the first 2 * pairs dims of a head turn
    int32_t is_interleaved; // dims 2i and 2i + 1 are a pair; else i and i + pairs
};

// y[r] = factor * the weight's row token_ids[r], from its panels.
void embed(const struct weight *weight, const int32_t *token_ids, float factor, float *y, ptrdiff_t y_stride, int first, int end);

// y is of float, or of bfloat16 if `rounds` (then nothing can be added).
void normalize(const struct norm *norm, const float *x, ptrdiff_t x_stride, void *y, ptrdiff_t y_stride, int rounds, int first,
               int end);

// angles[r] = cosine [pairs], then sine [pairs], of the row's position * frequency, scaled.
void find_angles(const struct rotation *rotation, const struct chunk *chunks, int num_chunks, float *angles, int first, int end);

// Turn the heads of x in place.
void rotate(const struct rotation *rotation, const float *angles, float *x, ptrdiff_t x_stride, int first, int end);

// y[r, i] = f(x[r, i]) * x[r, width + i], or f(x[r, i]) if not `is_gated`.
void activate(int activation, int is_gated, const float *x, ptrdiff_t x_stride, int width, void *y, ptrdiff_t y_stride, int rounds,
              int first, int end);

// Put each row's keys [kv_heads * key_dim] and values into the cache, at its position of its sequence.
void write_cache(const struct attention *layer, const struct chunk *chunks, int num_chunks, const float *keys, const float *values,
                 ptrdiff_t stride, int first, int end);

// What choosing a token asks of a row of logits; NaN in `norm` if one of them is NaN or +infinity, or all are -infinity.
struct summary {
    float norm;      // log of the sum of e^x
    float best;      // the largest
    int32_t best_id; // the first of the largest
};

void summarize(const float *x, ptrdiff_t stride, int width, struct summary *summaries, int first, int end);

// x = cap * tanh(factor * x / cap), or factor * x if cap is 0.
void scale_and_cap(float *x, ptrdiff_t stride, int width, float factor, float cap, int first, int end);

#endif
