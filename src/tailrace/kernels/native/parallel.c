/* Loops over the threads that torch already has.
 *
 * torch loads GNU OpenMP (or a library that speaks its calls) for all to see, so calling it by its
 * own entry point needs no compiler support and no second pool whose idle threads would spin.
 */

void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags);

/* Does the loop's iterations from .. to - 1. */
typedef void (*body_t)(const void *args, int64_t from, int64_t to);

typedef struct {
    body_t body;
    const void *args;
    int64_t count, grain, next;
} loop_t;

static void take_turns(void *shared) {
    loop_t *loop = shared;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&loop->next, loop->grain, __ATOMIC_RELAXED);
        if (from >= loop->count) return;
        loop->body(loop->args, from, min64(from + loop->grain, loop->count));
    }
}

/* The team is always of `threads`, for a team of another size would have its threads remade. */
static void parallel_for(int64_t threads, int64_t count, int64_t grain, body_t body,
                         const void *args) {
    loop_t loop = {body, args, count, grain, 0};
    if (threads <= 1 || count <= grain)
        body(args, 0, count);
    else
        GOMP_parallel(take_turns, &loop, (unsigned)threads, 0);
}

/* Rows for a turn: a quarter of a thread's share, but never so few that handing out costs more
 * than doing. */
static int64_t row_grain(int64_t threads, int64_t num_rows, int64_t row_elements) {
    const int64_t share = num_rows / (4 * threads) + 1;
    return max64(share, 8192 / (row_elements + 1) + 1);
}
