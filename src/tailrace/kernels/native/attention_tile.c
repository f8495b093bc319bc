/* Template: the two products of attention, for R rows and vectors of W floats.
 *
 * R, the rows that share each loaded vector, is a constant in every instance, so that the
 * accumulators live in registers: R * VECTORS of them.
 */

/* 32 vector registers hold 6 x 4 accumulators, 16 hold 6 x 2. */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define VECTORS 4
#else
#define VECTORS 2
#endif

/* scores[r][0 .. n*W) = sum over d of q[d][r] * k[d][token].
 *
 *   k[v] points at d = 0 of W neighbouring tokens of one block, `stride` floats from d to d + 1
 *   ahead[v] is as far into a block of V, which is fetched meanwhile in the same steps
 */
static INLINE void AT_W(score_rows)(const int R, const float *q, const float *const *k,
                                    const float *const *ahead, int64_t stride, int64_t dim,
                                    float *scores) {
    AT_W(vec) sum[MAX_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sum[r][v] = AT_W(splat)(0.0f);
    for (int64_t d = 0, at = 0; d < dim; d++, at += stride, q += R) {
        AT_W(vec) key[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            key[v] = AT_W(load)(k[v] + at);
            IN_REGISTER(key[v]);
            FETCH(ahead[v] + at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            AT_W(vec) query = AT_W(splat)(q[r]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][v] += query * key[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            AT_W(store)(scores + r * TILE + v * W, sum[r][v]);
}

/* out[r][0 .. N*W) = out[r] * rescale[r] + sum over t of weights[r][t] * v[t].
 *
 *   values[b] points at the first token of block b, `dim` floats from token to token;
 *   out has the same row stride; ahead[b] is the block of the next tile's K, fetched meanwhile
 */
static INLINE void AT_W(value_rows)(const int R, const int N, const float *weights,
                                    const float *rescale, const float *const *values,
                                    const float *const *ahead, int64_t num_tokens,
                                    int64_t block_size, int64_t dim, int64_t column, float *out) {
    AT_W(vec) sum[MAX_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            sum[r][n] = AT_W(load)(out + r * dim + column + n * W) * rescale[r];
    for (int64_t left = num_tokens; left > 0; left -= block_size) {
        const float *value = *values++ + column, *next = *ahead++ + column;
        const int64_t count = min64(left, block_size);
        for (int64_t t = 0; t < count; t++, value += dim, next += dim, weights++) {
            AT_W(vec) v[VECTORS];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                v[n] = AT_W(load)(value + n * W);
                IN_REGISTER(v[n]);
                FETCH(next + n * W);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                AT_W(vec) weight = AT_W(splat)(weights[r * TILE]);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sum[r][n] += weight * v[n];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            AT_W(store)(out + r * dim + column + n * W, sum[r][n]);
}

#define FOR_ROWS(call)       \
    switch (rows) {          \
        case 1: call(1); break; \
        case 2: call(2); break; \
        case 3: call(3); break; \
        case 4: call(4); break; \
        case 5: call(5); break; \
        default: call(6); break; \
    }

/* Scores of a whole tile for `rows` rows. */
static void AT_W(score_tile)(int rows, const float *q, const float *const *k,
                             const float *const *ahead, int64_t stride, int64_t dim,
                             float *scores) {
    for (int v = 0; v < TILE / W; v += VECTORS) {
#define CALL(R) AT_W(score_rows)(R, q, k + v, ahead + v, stride, dim, scores + v * W)
        FOR_ROWS(CALL)
#undef CALL
    }
}

/* Weighted values of a tile; returns the first column not done, for the narrower template. */
static int64_t AT_W(value_tile)(int rows, const float *weights, const float *rescale,
                                const float *const *values, const float *const *ahead,
                                int64_t num_tokens, int64_t block_size, int64_t dim,
                                int64_t column, float *out) {
    for (; column + VECTORS * W <= dim; column += VECTORS * W) {
#define CALL(R)                                                                                \
    AT_W(value_rows)(R, VECTORS, weights, rescale, values, ahead, num_tokens, block_size, dim, \
                     column, out)
        FOR_ROWS(CALL)
#undef CALL
    }
    for (; column + W <= dim; column += W) {
#define CALL(R) \
    AT_W(value_rows)(R, 1, weights, rescale, values, ahead, num_tokens, block_size, dim, column, \
                     out)
        FOR_ROWS(CALL)
#undef CALL
    }
    return column;
}

#undef FOR_ROWS
#undef VECTORS
