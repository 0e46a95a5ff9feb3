// What happens to each row of activations by itself: a row's result never depends on its neighbours.
#include "rows.h"

#include "functions.h"

void embed(const struct weight *weight, const int32_t *token_ids, float factor, float *y, ptrdiff_t y_stride, int first, int end)
{
    for (int r = first; r < end; r++) {
        int token = token_ids[r], inputs = weight->num_inputs, is_pair = weight->format >= WEIGHT_BF16;
        ptrdiff_t panel = (ptrdiff_t)(token / PANEL) * inputs * PANEL;
        float *to = y + r * y_stride;
        for (int k = 0; k < inputs; k++) {
            ptrdiff_t at = is_pair ? panel + (ptrdiff_t)(k / 2) * 2 * PANEL + token % PANEL * 2 + k % 2
                                   : panel + (ptrdiff_t)k * PANEL + token % PANEL;
            if (weight->format == WEIGHT_F32) {
                to[k] = factor * ((const float *)weight->panels)[at];
            } else {
                uint16_t bits[LANES] = {((const uint16_t *)weight->panels)[at]};
                to[k] = factor * (is_pair ? load_bf16(bits) : load_f16(bits))[0];
            }
        }
    }
}

static void normalize_head(const struct norm *norm, const float *x, void *y, ptrdiff_t at, int rounds)
{
    int width = norm->width, d;
    float mean = 0, squares = 0;
    vf sum = {};
    if (norm->is_centered) {
        for (d = 0; d + LANES <= width; d += LANES)
            sum += load(x + d);
        for (mean = sum_lanes(sum); d < width; d++)
            mean += x[d];
        mean /= (float)width;
        sum = (vf){};
    }
    for (d = 0; d + LANES <= width; d += LANES) {
        vf part = load(x + d) - splat(mean);
        sum += part * part;
    }
    for (squares = sum_lanes(sum); d < width; d++)
        squares += (x[d] - mean) * (x[d] - mean);
    float by = 1 / sqrtf(squares / (float)width + norm->epsilon);
    for (d = 0; d < width; d++) {
        float z = (x[d] - mean) * by * norm->scale[d] + (norm->bias ? norm->bias[d] : 0);
        if (rounds)
            ((uint16_t *)y)[at + d] = to_bf16(z);
        else
            ((float *)y)[at + d] = norm->adds ? ((float *)y)[at + d] + z : z;
    }
}

void normalize(const struct norm *norm, const float *x, ptrdiff_t x_stride, void *y, ptrdiff_t y_stride, int rounds, int first,
               int end)
{
    for (int r = first; r < end; r++)
        for (int h = 0; h < norm->num_heads; h++) {
            ptrdiff_t place = (ptrdiff_t)h * norm->width;
            normalize_head(norm, x + r * x_stride + place, y, r * y_stride + place, rounds);
        }
}

void find_angles(const struct rotation *rotation, const struct chunk *chunks, int num_chunks, float *angles, int first, int end)
{
    int pairs = rotation->pairs;
    for (const struct chunk *chunk = chunks; chunk < chunks + num_chunks; chunk++)
        for (int r = first_row_of(chunk, first); r < end_row_of(chunk, end); r++) {
            float position = (float)(chunk->start + r - chunk->first_row);
            float *cosines = angles + (ptrdiff_t)r * 2 * pairs, *sines = cosines + pairs;
            for (int i = 0; i < pairs; i++) {
                float angle = position * rotation->frequencies[i];
                cosines[i] = cosf(angle) * rotation->scaling;
                sines[i] = sinf(angle) * rotation->scaling;
            }
        }
}

void rotate(const struct rotation *rotation, const float *angles, float *x, ptrdiff_t x_stride, int first, int end)
{
    int pairs = rotation->pairs, apart = rotation->is_interleaved ? 1 : pairs, step = rotation->is_interleaved ? 2 : 1;
    for (int r = first; r < end; r++) {
        const float *cosines = angles + (ptrdiff_t)r * 2 * pairs, *sines = cosines + pairs;
        for (int h = 0; h < rotation->num_heads; h++) {
            float *head = x + r * x_stride + (ptrdiff_t)h * rotation->head_dim;
            for (int i = 0; i < pairs; i++) {
                float a = head[i * step], b = head[i * step + apart];
                head[i * step] = a * cosines[i] - b * sines[i];
                head[i * step + apart] = b * cosines[i] + a * sines[i];
            }
        }
    }
}

INLINE vf activation_of(const int activation, vf x)
{
    switch (activation) {
    case ACTIVATION_SILU:
        return x * logistic(x);
    case ACTIVATION_GELU_TANH: {
        vf inner = splat(0.7978845608028654f) * (x + splat(0.044715f) * x * x * x);
        return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
    }
    case ACTIVATION_GELU:
        for (int i = 0; i < LANES; i++)
            x[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678118654752f));
        return x;
    default: {
        vf positive = pick(x < splat(0.0f), splat(0.0f), x);
        return activation == ACTIVATION_RELU ? positive : positive * positive;
    }
    }
}

INLINE void activate_rows(const int activation, int is_gated, const float *x, ptrdiff_t x_stride, int width, void *y,
                          ptrdiff_t y_stride, int rounds, int first, int end)
{
    for (int r = first; r < end; r++)
        for (int d = 0; d < width; d += LANES) {
            const float *from = x + r * x_stride + d;
            int count = at_most(LANES, width - d);
            float value[LANES] = {0}, gate[LANES] = {0};
            memcpy(value, from, sizeof(float) * (size_t)count);
            vf z = activation_of(activation, load(value));
            if (is_gated) {
                memcpy(gate, from + width, sizeof(float) * (size_t)count);
                z *= load(gate);
            }
            if (rounds) {
                uint16_t half[LANES];
                store_bf16(half, z);
                memcpy((uint16_t *)y + r * y_stride + d, half, sizeof(uint16_t) * (size_t)count);
            } else {
                store(value, z);
                memcpy((float *)y + r * y_stride + d, value, sizeof(float) * (size_t)count);
            }
        }
}

void activate(int activation, int is_gated, const float *x, ptrdiff_t x_stride, int width, void *y, ptrdiff_t y_stride, int rounds,
              int first, int end)
{
    switch (activation) {
#define CASE(kind)                                                                                                           \
    case kind:                                                                                                               \
        activate_rows(kind, is_gated, x, x_stride, width, y, y_stride, rounds, first, end);                                  \
        break;
        CASE(ACTIVATION_SILU)
        CASE(ACTIVATION_GELU_TANH)
        CASE(ACTIVATION_GELU)
        CASE(ACTIVATION_RELU)
        CASE(ACTIVATION_RELU_SQUARED)
#undef CASE
    }
}

static void write_heads(int format, void *cache, ptrdiff_t place, const float *from, int count)
{
    for (int d = 0; d < count; d++)
        switch (format) {
        case CACHE_F32:
            ((float *)cache)[place + d] = from[d];
            break;
        case CACHE_F16:
            ((uint16_t *)cache)[place + d] = to_f16(from[d]);
            break;
        default:
            ((uint16_t *)cache)[place + d] = to_bf16(from[d]);
        }
}

void write_cache(const struct attention *layer, const struct chunk *chunks, int num_chunks, const float *keys, const float *values,
                 ptrdiff_t stride, int first, int end)
{
    int key_width = layer->num_kv_heads * layer->key_dim, value_width = layer->num_kv_heads * layer->value_dim;
    for (const struct chunk *chunk = chunks; chunk < chunks + num_chunks; chunk++)
        for (int r = first_row_of(chunk, first); r < end_row_of(chunk, end); r++) {
            ptrdiff_t slot = slot_of(chunk, chunk->start + r - chunk->first_row, layer->block_size);
            write_heads(layer->format, (void *)layer->keys, slot * key_width, keys + r * stride, key_width);
            write_heads(layer->format, (void *)layer->values, slot * value_width, values + r * stride, value_width);
        }
}

void scale_and_cap(float *x, ptrdiff_t stride, int width, float factor, float cap, int first, int end)
{
    for (int r = first; r < end; r++)
        for (int d = 0; d < width; d += LANES) {
            float *at = x + r * stride + d, part[LANES] = {0};
            size_t bytes = sizeof(float) * (size_t)at_most(LANES, width - d);
            memcpy(part, at, bytes);
            vf z = load(part) * splat(factor);
            if (cap != 0)
                z = splat(cap) * hyperbolic_tangent(z / splat(cap));
            store(part, z);
            memcpy(at, part, bytes);
        }
}

static struct summary summary_of(const float *x, int width)
{
    const int step = 4 * LANES;
    vf top[4], total[4] = {};
    float best = -INFINITY, rest = 0;
    int d, best_id = 0;
    for (int i = 0; i < 4; i++)
        top[i] = splat(-INFINITY);
    // Where a number is NaN the processor takes the second operand: the largest so far.
    for (d = 0; d + step <= width; d += step)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            top[i] = largest(load(x + d + i * LANES), top[i]);
    for (best = largest_lane(largest(largest(top[0], top[1]), largest(top[2], top[3]))); d < width; d++)
        best = x[d] > best ? x[d] : best;
    while (best_id + 1 < width && x[best_id] != best)
        best_id++;
    for (d = 0; d + step <= width; d += step)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            total[i] += exponential(load(x + d + i * LANES) - splat(best));
    for (; d < width; d++)
        rest += exponential(splat(x[d] - best))[0];
    rest += sum_lanes((total[0] + total[1]) + (total[2] + total[3]));
    return (struct summary){best + logf(rest), best, best_id};
}

void summarize(const float *x, ptrdiff_t stride, int width, struct summary *summaries, int first, int end)
{
    for (int r = first; r < end; r++)
        summaries[r] = summary_of(x + r * stride, width);
}
