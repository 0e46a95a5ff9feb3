// Matrix products with weights in panels; see product.c.
#ifndef PDSERVE_PRODUCT_H
#define PDSERVE_PRODUCT_H

#include "vec.h"

#define PANEL 32 // outputs in a panel

enum weight_format {
    WEIGHT_F32,      // [panel][k][32] float
    WEIGHT_F16,      // [panel][k][32] half precision
    WEIGHT_BF16,     // [panel][k / 2][32][2] bfloat16, times float activations
    WEIGHT_BF16_DOT, // the same, times bfloat16 activations, two at a time
};

struct weight {
    const void *panels;
    const float *bias; // [num_outputs], or NULL
    int32_t format;
    int32_t num_outputs;
    int32_t num_inputs; // even for both bf16 formats
};

// y[r, n] = sum_k x[r, k] w[n, k] (+ bias[n]) (+ y[r, n] if `adds`), for the outputs of panels first_panel … end_panel - 1.
// x is [rows, num_inputs], of bfloat16 for WEIGHT_BF16_DOT and of float otherwise; strides are in elements.
void product(const struct weight *weight, const void *x, ptrdiff_t x_stride, float *y, ptrdiff_t y_stride, int rows, int adds,
             int first_panel, int end_panel);

INLINE int num_panels(const struct weight *weight) { return (weight->num_outputs + PANEL - 1) / PANEL; }

#endif
