// Elementary functions on vectors, to one or two units in the last place. Source of the exponential's coefficients: Cephes, expf.
#ifndef PDSERVE_FUNCTIONS_H
#define PDSERVE_FUNCTIONS_H

#include "vec.h"

// e^x for x <= 88. 0 below -87.3, where the result would be subnormal; NaN gives NaN.
INLINE vf exponential(vf x)
{
    const vf round = splat(0x1.8p23f); // adding it leaves the nearest integer in the low bits
    vi is_zero = x < splat(-87.3f);
    x = pick(is_zero, splat(0.0f), x);
    vf n = x * splat(1.44269504088896341f) + round;
    vi exponent = (vi)n << 23;
    n -= round;
    vf r = x - n * splat(0.693145751953125f) - n * splat(1.42860682030941723212e-6f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    return pick(is_zero, splat(0.0f), p * (vf)(exponent + (vi)splat(1.0f)));
}

// 1 / (1 + e^-x).
INLINE vf logistic(vf x)
{
    vf e = exponential(pick(x < splat(0.0f), x, -x)); // of -|x|
    return pick(x < splat(0.0f), e, splat(1.0f)) / (splat(1.0f) + e);
}

INLINE vf hyperbolic_tangent(vf x)
{
    // Near 0 the quotient would lose what the tangent is made of; there its series says it better.
    vf square = x * x;
    vf series = x * (splat(1.0f) + square * (splat(-1.0f / 3) + square * (splat(2.0f / 15) + square * splat(-17.0f / 315))));
    vf e = exponential(splat(-2.0f) * (vf)((vi)x & 0x7fffffff));
    vf quotient = (splat(1.0f) - e) / (splat(1.0f) + e);
    vf far = (vf)((vi)quotient | ((vi)x & (int32_t)0x80000000));
    return pick(square < splat(0.04f), series, far);
}

#endif
