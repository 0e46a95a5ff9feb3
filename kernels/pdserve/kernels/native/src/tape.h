// A model's forward pass as a list of operations; see tape.c.
#ifndef PDSERVE_TAPE_H
#define PDSERVE_TAPE_H

#include "rows.h"
#include "team.h"

enum operation_kind {
    OPERATION_EMBED,     // y = factor * rows of the weight
    OPERATION_KEEP,      // y = those rows of x whose logits are wanted
    OPERATION_NORM,      // y = norm(x)
    OPERATION_PRODUCT,   // y = x w (+ y)
    OPERATION_ANGLES,    // y = cosines and sines of the rows' positions
    OPERATION_ROTATE,    // x turned in place by the angles in y
    OPERATION_WRITE,     // keys in x and values in y into the layer's cache
    OPERATION_ATTEND,    // y = attention of the queries in x
    OPERATION_ACTIVATE,  // y = activation(x), gated or not
    OPERATION_SCALE,     // x scaled and capped in place
    OPERATION_SUMMARIZE, // y, of struct summary, = what choosing a token asks of x
};

// One operation on the step's rows, or, where `of_kept` says so, on the kept ones. Strides are in elements.
struct operation {
    int32_t kind;
    int32_t of_kept;
    int32_t rounds;  // y is of bfloat16
    int32_t adds;    // to what stands in y
    int32_t width;   // of KEEP, ACTIVATE (of y), SCALE and SUMMARIZE
    int32_t activation;
    int32_t is_gated;
    float factor;
    float cap;
    void *x;
    void *y;
    int64_t x_stride;
    int64_t y_stride;
    struct weight weight;
    struct norm norm;
    struct rotation rotation;
    struct attention attention;
};

// What a step is about.
struct step {
    const int32_t *token_ids; // [num_rows]
    const int32_t *kept;      // [num_kept]: rows
    const struct chunk *chunks;
    int32_t num_rows;
    int32_t num_kept;
    int32_t num_chunks;
};

// Run operations first … end - 1 for a step.
EXPORTED void tape_run(struct team *team, const struct operation *operations, int first, int end, const struct step *step);

// Sizes in bytes of operation, step and chunk as compiled here: who calls from another language compares them with its own.
EXPORTED void tape_sizes(int32_t sizes[3]);

#endif
