/* Causal attention over paged keys and values.
 *
 * A task is one sequence, one kv head and up to MAX_TASK_ROWS rows, a row being one query head
 * of one token: the rows of a group share the head's keys and values. A task walks its keys in
 * tiles of TILE tokens, and in each tile takes its rows MAX_ROWS at a time:
 *
 *                tile 0     tile 1     tile 2         TILE tokens at absolute positions, so
 *     rows 0-5   [scores -> softmax -> values]  ...   that a row's sums have one order whatever
 *     rows 6-11  [     "        "        "   ]  ...   the chunk it came in
 *
 * The softmax is the running one: maximum m and sum l per row, both in units of log2; when a
 * tile raises m, what was summed before is rescaled by 2^(m_old - m).
 */

#define TILE 64
#define MAX_ROWS 6
#define MAX_TASK_ROWS 48
#define MIN_BLOCK 8

#define W WIDE
#include "attention_tile.c"
#undef W
#if NARROW != WIDE
#define W NARROW
#include "attention_tile.c"
#undef W
#endif

#define W WIDE

typedef struct {
    int32_t sequence, kv_head, first_token, num_tokens; /* tokens count from the chunk's first */
    int64_t cost;
} task_t;

typedef struct {
    const batch_t *batch;
    const float *q, *k_cache, *v_cache;
    float *out;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    float scale;
    task_t *tasks;
} attention_t;

/* What a task keeps per row. q is packed [d][row] in groups of MAX_ROWS rows. */
typedef struct {
    float q[MAX_TASK_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float out[MAX_TASK_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MAX_ROWS * TILE] __attribute__((aligned(64)));
    vec sum[MAX_TASK_ROWS];
    float max[MAX_TASK_ROWS];
} rows_t;

/* Where the tile's keys and values lie. */
typedef struct {
    const float *keys[TILE / NARROW], *values[TILE / MIN_BLOCK]; /* vectors of K, blocks of V */
    const float *value_lines[TILE / NARROW], *key_blocks[TILE / MIN_BLOCK]; /* to fetch ahead */
} tile_t;

/* Find the tile's blocks. Beyond the last written block its own address is repeated: those scores
 * are masked, and the table is not read where nothing was promised. */
static INLINE void find_tile(const attention_t *a, const int32_t *table, int64_t kv_head,
                             int64_t start, int64_t kv_len, int64_t key_width, tile_t *tile) {
    const int64_t bs = a->block_size, last = (kv_len - 1) / bs;
    const int64_t size = a->head_dim * bs;
    for (int64_t i = 0, n = 0; i < TILE / bs; i++) {
        const int64_t block = table[min64(start / bs + i, last)];
        const int64_t at = (block * a->num_kv_heads + kv_head) * size;
        tile->values[i] = a->v_cache + at;
        tile->key_blocks[i] = a->k_cache + at;
        for (int64_t offset = 0; offset < bs; offset += key_width, n++) {
            tile->keys[n] = a->k_cache + at + offset;
            tile->value_lines[n] = a->v_cache + at + offset;
        }
    }
}

/* Turn one row's scores into weights; `valid` tokens of the tile may be attended. Returns the
 * factor by which earlier sums shrink. */
static INLINE float weigh(float *scores, int64_t valid, float *max, vec *sum) {
    for (int64_t t = max64(valid, 0); t < TILE; t++) scores[t] = -INFINITY;
    vec highest = AT_W(load)(scores);
    for (int t = W; t < TILE; t += W) highest = AT_W(max)(highest, AT_W(load)(scores + t));
    const float old = *max, new = AT_W(lane_max)(highest);
    *max = new > old ? new : old;
    vec total = AT_W(splat)(0.0f);
    for (int t = 0; t < TILE; t += W) {
        vec weight = AT_W(exp2)(AT_W(load)(scores + t) - *max);
        AT_W(store)(scores + t, weight);
        total += weight;
    }
    const float shrink = new > old ? exp2f(old - new) : 1.0f;
    *sum = *sum * shrink + total;
    return shrink;
}

/* Rows of one head group: row i is token i / group, head i % group of the kv head. */
static INLINE int64_t row_offset(const attention_t *a, int64_t first_row, int64_t kv_head,
                                 int64_t i) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    return ((first_row + i / group) * a->num_heads + kv_head * group + i % group) * a->head_dim;
}

/* Copy q, scaled, as [d][row] for each group of rows that are computed together. */
static void pack_queries(const attention_t *a, int64_t first_row, int64_t kv_head,
                         int64_t num_rows, rows_t *rows) {
    const int64_t dim = a->head_dim;
    const float scale = a->scale * 1.44269504088896f; /* log2(e): the softmax is of base 2 */
    for (int64_t start = 0; start < num_rows; start += MAX_ROWS) {
        const int64_t count = min64(MAX_ROWS, num_rows - start);
        for (int64_t r = 0; r < count; r++) {
            const float *q = a->q + row_offset(a, first_row, kv_head, start + r);
            for (int64_t d = 0; d < dim; d++) rows->q[start * dim + d * count + r] = q[d] * scale;
        }
    }
}

/* One tile for rows start .. start + count. limit[r]: tokens of the tile that row may see. */
static void attend_tile(const attention_t *a, const tile_t *tile, const tile_t *next,
                        int64_t start, int64_t count, const int64_t *limit, rows_t *rows) {
    const int64_t dim = a->head_dim, bs = a->block_size;
    const float *q = rows->q + start * dim;
    float *out = rows->out + start * dim;
    float shrink[MAX_ROWS];
    if (bs >= WIDE)
        PASTE(score_tile, WIDE)((int)count, q, tile->keys, tile->value_lines, bs, dim,
                                rows->scores);
    else
        PASTE(score_tile, NARROW)((int)count, q, tile->keys, tile->value_lines, bs, dim,
                                  rows->scores);
    for (int64_t r = 0; r < count; r++)
        shrink[r] = weigh(rows->scores + r * TILE, limit[r], &rows->max[start + r],
                          &rows->sum[start + r]);
    const int64_t tokens = min64(TILE, limit[count - 1]); /* the last row sees most */
    int64_t column = PASTE(value_tile, WIDE)((int)count, rows->scores, shrink, tile->values,
                                             next->key_blocks, tokens, bs, dim, 0, out);
    if (column < dim)
        PASTE(value_tile, NARROW)((int)count, rows->scores, shrink, tile->values,
                                  next->key_blocks, tokens, bs, dim, column, out);
}

static void write_rows(const attention_t *a, int64_t first_row, int64_t kv_head, int64_t num_rows,
                       const rows_t *rows) {
    for (int64_t i = 0; i < num_rows; i++) {
        const float total = AT_W(lane_sum)(rows->sum[i]);
        const float *from = rows->out + i * a->head_dim;
        float *to = a->out + row_offset(a, first_row, kv_head, i);
        for (int64_t d = 0; d < a->head_dim; d++) to[d] = from[d] / total;
    }
}

static void run_task(const attention_t *a, const task_t *task) {
    const batch_t *batch = a->batch;
    rows_t rows;
    tile_t tiles[2]; /* this one, and the next, whose keys are fetched ahead */
    const int64_t s = task->sequence, group = a->num_heads / a->num_kv_heads;
    const int32_t *table = batch->block_tables + s * batch->max_blocks;
    const int64_t chunk_start = batch->query_starts[s];
    const int64_t kv_len = batch->kv_lens[s];
    const int64_t first_row = chunk_start + task->first_token;
    const int64_t num_rows = task->num_tokens * group;
    /* Tokens that the task's first row may see; each later token sees one more. */
    const int64_t first_limit =
        kv_len - (batch->query_starts[s + 1] - chunk_start) + task->first_token + 1;
    const int64_t end = first_limit + task->num_tokens - 1;
    const int64_t key_width = a->block_size >= WIDE ? WIDE : NARROW;

    pack_queries(a, first_row, task->kv_head, num_rows, &rows);
    memset(rows.out, 0, (size_t)(num_rows * a->head_dim) * sizeof(float));
    for (int64_t i = 0; i < num_rows; i++) {
        rows.max[i] = -INFINITY;
        rows.sum[i] = AT_W(splat)(0.0f);
    }
    find_tile(a, table, task->kv_head, 0, kv_len, key_width, &tiles[0]);
    for (int64_t at = 0, i = 0; at < end; at += TILE, i ^= 1) {
        find_tile(a, table, task->kv_head, at + TILE, kv_len, key_width, &tiles[i ^ 1]);
        for (int64_t start = 0; start < num_rows; start += MAX_ROWS) {
            const int64_t count = min64(MAX_ROWS, num_rows - start);
            int64_t limit[MAX_ROWS];
            for (int64_t r = 0; r < count; r++) limit[r] = first_limit + (start + r) / group - at;
            if (limit[count - 1] > 0)
                attend_tile(a, &tiles[i], &tiles[i ^ 1], start, count, limit, &rows);
        }
    }
    write_rows(a, first_row, task->kv_head, num_rows, &rows);
}

static void run_tasks(const void *args, int64_t from, int64_t to) {
    const attention_t *a = args;
    for (int64_t i = from; i < to; i++) run_task(a, &a->tasks[i]);
}

static int compare_cost(const void *left, const void *right) {
    const int64_t a = ((const task_t *)left)->cost, b = ((const task_t *)right)->cost;
    return (a < b) - (a > b); /* the dearest first, so that no thread is left with it at the end */
}

static int64_t tokens_per_task(const attention_t *a) {
    return max64(1, MAX_TASK_ROWS / (a->num_heads / a->num_kv_heads));
}

static int64_t count_tasks(const attention_t *a) {
    const batch_t *batch = a->batch;
    const int64_t step = tokens_per_task(a);
    int64_t count = 0;
    for (int64_t s = 0; s < batch->num_sequences; s++)
        count += (batch->query_starts[s + 1] - batch->query_starts[s] + step - 1) / step;
    return count * a->num_kv_heads;
}

static void list_tasks(const attention_t *a) {
    const batch_t *batch = a->batch;
    task_t *task = a->tasks;
    const int64_t step = tokens_per_task(a);
    for (int64_t s = 0; s < batch->num_sequences; s++) {
        const int64_t chunk = batch->query_starts[s + 1] - batch->query_starts[s];
        for (int64_t first = 0; first < chunk; first += step) {
            const int64_t count = min64(step, chunk - first);
            const int64_t cost = count * (batch->kv_lens[s] - chunk + first + count);
            for (int64_t h = 0; h < a->num_kv_heads; h++)
                *task++ = (task_t){(int32_t)s, (int32_t)h, (int32_t)first, (int32_t)count, cost};
        }
    }
}

/* Says whether every sequence's rows and blocks exist. */
static int can_read(const batch_t *batch, int64_t block_size, int64_t num_blocks) {
    for (int64_t s = 0; s < batch->num_sequences; s++) {
        const int64_t chunk = batch->query_starts[s + 1] - batch->query_starts[s];
        const int64_t kv_len = batch->kv_lens[s];
        const int64_t used = (kv_len + block_size - 1) / block_size;
        if (chunk < 0 || kv_len < chunk || used > batch->max_blocks) return 0;
        for (int64_t i = 0; i < used; i++) {
            const int64_t block = batch->block_tables[s * batch->max_blocks + i];
            if (block < 0 || block >= num_blocks) return 0;
        }
    }
    return batch->query_starts[0] == 0 &&
           batch->query_starts[batch->num_sequences] == batch->num_rows;
}

/* The limits of the head shape (head_dim a multiple of 8 up to MAX_HEAD_DIM, blocks of 8, 16 or 32,
 * groups up to MAX_TASK_ROWS) are the caller's to check: see heads.py. */
int tailrace_paged_attention(const batch_t *batch, const float *q, const float *k_cache,
                             const float *v_cache, float *out, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                             int64_t num_blocks, float scale, int64_t threads) {
    attention_t a = {batch,        q,        k_cache,    v_cache, out, num_heads,
                     num_kv_heads, head_dim, block_size, scale,   NULL};
    if (!can_read(batch, block_size, num_blocks)) return OUT_OF_RANGE;
    const int64_t num_tasks = count_tasks(&a);
    a.tasks = malloc((size_t)(num_tasks + 1) * sizeof(task_t));
    if (!a.tasks) return NO_MEMORY;
    list_tasks(&a);
    qsort(a.tasks, (size_t)num_tasks, sizeof(task_t), compare_cost);
    parallel_for(threads, num_tasks, 1, run_tasks, &a);
    free(a.tasks);
    return DONE;
}

#undef W
