/* Template: vectors of W floats. */

typedef float AT_W(vec) __attribute__((vector_size(W * 4)));
typedef int32_t AT_W(ivec) __attribute__((vector_size(W * 4)));
typedef float AT_W(unaligned) __attribute__((vector_size(W * 4), aligned(4), may_alias));

static INLINE AT_W(vec) AT_W(load)(const float *p) { return *(const AT_W(unaligned) *)p; }

static INLINE void AT_W(store)(float *p, AT_W(vec) v) { *(AT_W(unaligned) *)p = v; }

/* x - 0 is x for every x, -0 and NaN too, so the subtraction is left out; x + 0 is not. */
static INLINE AT_W(vec) AT_W(splat)(float x) { return x - (AT_W(vec)){0}; }

/* a > b ? a : b for each lane: where either is NaN, b. */
static INLINE AT_W(vec) AT_W(max)(AT_W(vec) a, AT_W(vec) b) {
#if W == 16
    return (AT_W(vec))_mm512_max_ps((__m512)a, (__m512)b);
#elif W == 8
    return (AT_W(vec))_mm256_max_ps((__m256)a, (__m256)b);
#else
    AT_W(ivec) greater = a > b;
    return (AT_W(vec))((greater & (AT_W(ivec))a) | (~greater & (AT_W(ivec))b));
#endif
}

/* a < b ? a : b for each lane: where either is NaN, b. */
static INLINE AT_W(vec) AT_W(min)(AT_W(vec) a, AT_W(vec) b) {
#if W == 16
    return (AT_W(vec))_mm512_min_ps((__m512)a, (__m512)b);
#elif W == 8
    return (AT_W(vec))_mm256_min_ps((__m256)a, (__m256)b);
#else
    AT_W(ivec) less = a < b;
    return (AT_W(vec))((less & (AT_W(ivec))a) | (~less & (AT_W(ivec))b));
#endif
}

/* Sum and maximum of the lanes, four at a time, always in this order. */
static INLINE float AT_W(lane_sum)(AT_W(vec) v) {
    four_t part[W / 4];
    memcpy(part, &v, sizeof part);
    four_t sum = part[0];
    for (int i = 1; i < W / 4; i++) sum += part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

static INLINE float AT_W(lane_max)(AT_W(vec) v) {
    four_t part[W / 4];
    memcpy(part, &v, sizeof part);
    four_t max = part[0];
    for (int i = 1; i < W / 4; i++)
        for (int lane = 0; lane < 4; lane++)
            max[lane] = max[lane] > part[i][lane] ? max[lane] : part[i][lane];
    const float left = max[0] > max[2] ? max[0] : max[2];
    const float right = max[1] > max[3] ? max[1] : max[3];
    return left > right ? left : right;
}

/* 2^x for x <= 127, relative error 1e-7; 0 for x <= -127 and -infinity; NaN stays NaN.
 * x = n + f with n whole and |f| <= 1/2: the polynomial gives 2^f, the exponent's bits 2^n. */
static INLINE AT_W(vec) AT_W(exp2)(AT_W(vec) x) {
    const AT_W(vec) round = AT_W(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    x = AT_W(max)(AT_W(splat)(-127.0f), x);
    AT_W(vec) shifted = x + round;
    AT_W(vec) f = x - (shifted - round);
    AT_W(ivec) n = (AT_W(ivec))shifted - (AT_W(ivec))round;
    AT_W(vec) p = AT_W(splat)(1.535336160e-04f);
    p = p * f + 1.339887452e-03f;
    p = p * f + 9.618437360e-03f;
    p = p * f + 5.550332471e-02f;
    p = p * f + 2.402264791e-01f;
    p = p * f + 6.931472029e-01f;
    p = p * f + 1.0f;
    return p * (AT_W(vec))((n + 127) << 23);
}
