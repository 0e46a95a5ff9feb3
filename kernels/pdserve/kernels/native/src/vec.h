// Vectors of floats, as wide as the instruction set that this file is compiled for.
//
// Written with the vector extensions of GCC and Clang, so that one source serves every set. What they cannot say well (a maximum,
// half precision, the bf16 dot product) is written per set, with a plain form for the rest.
#ifndef PDSERVE_VEC_H
#define PDSERVE_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
// The same in memory that is aligned to its elements only.
typedef float vf_memory __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi_memory __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t half_vector __attribute__((vector_size(LANES * 2)));
typedef uint16_t half_memory __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vf load(const float *from) { return *(const vf_memory *)from; }
INLINE void store(float *to, vf x) { *(vf_memory *)to = x; }
INLINE vi load_words(const void *from) { return *(const vi_memory *)from; }
INLINE vf splat(float x) { return x - (vf){}; }
INLINE int at_most(int a, int b) { return a < b ? a : b; }

// Lane by lane: `yes` where the mask (0 or all bits) is set, else `no`.
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE vf largest(vf a, vf b)
{
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

// Sum and maximum of all lanes, always in this order.
INLINE float sum_lanes(vf x)
{
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
}

INLINE float largest_lane(vf x)
{
    float top = x[0];
    for (int i = 1; i < LANES; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

// LANES numbers of 16 bits, as floats.
INLINE vf load_bf16(const uint16_t *from)
{
    return (vf)(__builtin_convertvector((half_vector)*(const half_memory *)from, vi) << 16);
}

INLINE vf load_f16(const uint16_t *from)
{
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    // Exponent and mantissa in their places of a float, then scaled by 2^112; that is exact for subnormal numbers as well.
    vi bits = __builtin_convertvector((half_vector)*(const half_memory *)from, vi);
    vi sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
    vf scaled = (vf)rest * splat(0x1p112f);
    return (vf)((vi)pick(rest >= (0x7c00 << 13), (vf)(rest | 0x7f800000), scaled) | sign);
#endif
}

// One float as bf16: to the nearest, ties to even. NaN stays NaN.
INLINE uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One float as half precision, to the nearest, ties to even; beyond 65504 infinity.
INLINE uint16_t to_f16(float x)
{
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x7f800000) // infinity, NaN
        return (uint16_t)(sign | 0x7c00 | (bits > 0x7f800000 ? 0x200 : 0));
    if (bits >= 0x477ff000) // 65520: rounds to infinity
        return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { // below 2^-14 the steps are 2^-24 wide: adding 0.5 leaves their number in the low bits
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

// LANES floats as bf16, rounded in the same way as one.
INLINE void store_bf16(uint16_t *to, vf x)
{
    vi bits = (vi)x;
    vi is_nan = (bits & 0x7fffffff) > 0x7f800000;
    vi rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vi kept = (is_nan & (bits | 0x400000)) | (~is_nan & rounded);
    *(half_memory *)to = __builtin_convertvector((kept >> 16) & 0xffff, half_vector);
}

#endif
