/* Row by row: RMS norm, rotary embedding with the cache write, and the gated activation. */

#define W WIDE
typedef AT_W(vec) vec;

static INLINE vec load_tail(const float *p, int64_t count) {
    float lanes[W] = {0};
    memcpy(lanes, p, (size_t)count * sizeof(float));
    return AT_W(load)(lanes);
}

static INLINE void store_tail(float *p, vec v, int64_t count) {
    memcpy(p, &v, (size_t)count * sizeof(float));
}

/* y = x / sqrt(mean(x^2) + eps) * weight over n elements. y may be x. */
static void norm_row(const float *x, const float *weight, float *y, int64_t n, float eps) {
    vec sum = AT_W(splat)(0.0f), sum2 = sum;
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        vec a = AT_W(load)(x + i), b = AT_W(load)(x + i + W);
        sum = a * a + sum;
        sum2 = b * b + sum2;
    }
    for (; i < n; i += W) {
        vec a = load_tail(x + i, min64(W, n - i));
        sum = a * a + sum;
    }
    float factor = 1.0f / sqrtf(AT_W(lane_sum)(sum + sum2) / (float)n + eps);
    for (i = 0; i + W <= n; i += W)
        AT_W(store)(y + i, AT_W(load)(x + i) * factor * AT_W(load)(weight + i));
    if (i < n) {
        const int64_t left = n - i;
        store_tail(y + i, load_tail(x + i, left) * factor * load_tail(weight + i, left), left);
    }
}

typedef struct {
    const float *x, *weight;
    float *residual, *y; /* residual: NULL where nothing is added */
    int64_t width;
    float eps;
} norm_t;

static void norm_rows(const void *args, int64_t from, int64_t to) {
    const norm_t *n = args;
    for (int64_t at = from * n->width; at < to * n->width; at += n->width) {
        const float *x = n->x + at;
        if (n->residual) {
            float *sum = n->residual + at;
            for (int64_t i = 0; i < n->width; i++) sum[i] += x[i];
            x = sum;
        }
        norm_row(x, n->weight, n->y + at, n->width, n->eps);
    }
}

/* With a residual: residual += x, y = norm(residual). */
void tailrace_rms_norm(const float *x, float *residual, const float *weight, float *y,
                       int64_t num_rows, int64_t width, float eps, int64_t threads) {
    const norm_t n = {x, weight, residual, y, width, eps};
    parallel_for(threads, num_rows, row_grain(threads, num_rows, width), norm_rows, &n);
}

/* silu(g) * u = g / (1 + e^-g) * u. */
static INLINE vec gated(vec gate, vec up) {
    vec exponent = AT_W(min)(AT_W(splat)(127.0f), gate * -1.44269504f);
    return gate / (AT_W(exp2)(exponent) + 1.0f) * up;
}

typedef struct {
    const float *gate_up;
    float *y;
    int64_t width;
} silu_t;

static void silu_rows(const void *args, int64_t from, int64_t to) {
    const silu_t *s = args;
    const int64_t width = s->width;
    for (int64_t row = from; row < to; row++) {
        const float *gate = s->gate_up + row * 2 * width, *up = gate + width;
        float *out = s->y + row * width;
        int64_t i = 0;
        for (; i + W <= width; i += W)
            AT_W(store)(out + i, gated(AT_W(load)(gate + i), AT_W(load)(up + i)));
        if (i < width) {
            const int64_t left = width - i;
            store_tail(out + i, gated(load_tail(gate + i, left), load_tail(up + i, left)), left);
        }
    }
}

void tailrace_silu_mul(const float *gate_up, float *y, int64_t num_rows, int64_t width,
                       int64_t threads) {
    const silu_t s = {gate_up, y, width};
    parallel_for(threads, num_rows, row_grain(threads, num_rows, 2 * width), silu_rows, &s);
}

/* Turn each pair (d, d + D/2) of a head by the row's angles. */
static INLINE void rotate(const float *restrict x, const float *restrict cos,
                          const float *restrict sin, float *restrict y, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        float left = x[d], right = x[d + half];
        y[d] = left * cos[d] - right * sin[d];
        y[d + half] = right * cos[d] + left * sin[d];
    }
}

/* One row: [q heads | k heads | v heads] -> q out, k and v into their slot.
 *
 *   k_cache [block][head][d][offset]: a token's k is a column, one float every block_size
 *   v_cache [block][head][offset][d]: a token's v is a row
 */
typedef struct {
    const batch_t *batch;
    const float *qkv, *cos, *sin, *q_norm, *k_norm;
    float *k_cache, *v_cache, *q;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    float norm_eps;
} rope_t;

static void rope_row(const rope_t *r, const float *qkv, int64_t position, int64_t slot, float *q) {
    const int64_t dim = r->head_dim, half = dim / 2, bs = r->block_size;
    const int64_t block = slot / bs, offset = slot % bs;
    const float *cos = r->cos + position * half, *sin = r->sin + position * half;
    const float *k = qkv + r->num_heads * dim, *v = k + r->num_kv_heads * dim;
    float normed[MAX_HEAD_DIM], turned[MAX_HEAD_DIM];
    for (int64_t h = 0; h < r->num_heads; h++) {
        const float *head = qkv + h * dim;
        if (r->q_norm) {
            norm_row(head, r->q_norm, normed, dim, r->norm_eps);
            head = normed;
        }
        rotate(head, cos, sin, q + h * dim, half);
    }
    for (int64_t h = 0; h < r->num_kv_heads; h++) {
        const float *head = k + h * dim;
        if (r->k_norm) {
            norm_row(head, r->k_norm, normed, dim, r->norm_eps);
            head = normed;
        }
        rotate(head, cos, sin, turned, half);
        const int64_t base = (block * r->num_kv_heads + h) * dim * bs;
        for (int64_t d = 0; d < dim; d++) r->k_cache[base + d * bs + offset] = turned[d];
        memcpy(r->v_cache + base + offset * dim, v + h * dim, (size_t)dim * sizeof(float));
    }
}

static void rope_rows(const void *args, int64_t from, int64_t to) {
    const rope_t *r = args;
    const int64_t width = (r->num_heads + 2 * r->num_kv_heads) * r->head_dim;
    for (int64_t row = from; row < to; row++)
        rope_row(r, r->qkv + row * width, r->batch->positions[row], r->batch->slots[row],
                 r->q + row * r->num_heads * r->head_dim);
}

static int can_write(const batch_t *batch, int64_t num_slots, int64_t num_positions) {
    for (int64_t row = 0; row < batch->num_rows; row++) {
        if (batch->slots[row] < 0 || batch->slots[row] >= num_slots) return 0;
        if (batch->positions[row] < 0 || batch->positions[row] >= num_positions) return 0;
    }
    return 1;
}

int tailrace_rope_and_cache(const batch_t *batch, const float *qkv, const float *cos,
                            const float *sin, const float *q_norm, const float *k_norm,
                            float *k_cache, float *v_cache, float *q, int64_t num_heads,
                            int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                            int64_t num_blocks, int64_t num_positions, float norm_eps,
                            int64_t threads) {
    const rope_t r = {batch,        qkv,      cos,        sin,     q_norm,
                      k_norm,       k_cache,  v_cache,    q,       num_heads,
                      num_kv_heads, head_dim, block_size, norm_eps};
    const int64_t width = (num_heads + 2 * num_kv_heads) * head_dim;
    if (!can_write(batch, num_blocks * block_size, num_positions)) return OUT_OF_RANGE;
    parallel_for(threads, batch->num_rows, row_grain(threads, batch->num_rows, width), rope_rows,
                 &r);
    return DONE;
}

#undef W
