/* Tailrace's CPU kernels: one translation unit, compiled on the machine that runs it.
 *
 * Rules
 * - All tensors are contiguous float32, all indices int32 or int64 as AttentionBatch says.
 * - The code is written in vectors of W floats (GCC vector extensions, also clang's): W is 16 with
 *   AVX512, 8 with AVX, else 4. `vector.c` and `attention_tile.c` are templates, included once for
 *   each W in use.
 * - A row's result depends on that row alone: every sum has one fixed order, whatever the batch,
 *   the chunk or the thread. So the compiler may contract a*b+c, but never reassociate.
 * - Slots that no token was written to may hold NaN. They are masked by replacing the score, and
 *   their V is never read.
 * - Threads are torch's: see parallel.c.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define AT_W(name) PASTE(name, W) /* vec -> vec16 */

#if defined(__AVX512F__) && defined(__AVX512VL__)
#define WIDE 16
#define NARROW 8 /* for blocks of 8 tokens, and for the last half vector of a head */
#define ISA "avx512"
#elif defined(__AVX__)
#define WIDE 8
#define NARROW 8
#define ISA "avx2"
#elif defined(__ARM_NEON)
#define WIDE 4
#define NARROW 4
#define ISA "neon"
#else
#define WIDE 4
#define NARROW 4
#define ISA "sse"
#endif

/* Ask for a line of memory, into the second-level cache: there are more buffers for it there than
 * before the first. */
#define FETCH(p) __builtin_prefetch(p, 0, 2)

/* Load once: else the compiler reads memory again for each product, and that is what binds it. */
#if defined(__AVX512F__)
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined(__x86_64__)
#define IN_REGISTER(vector) __asm__("" : "+x"(vector))
#elif defined(__ARM_NEON)
#define IN_REGISTER(vector) __asm__("" : "+w"(vector))
#else
#define IN_REGISTER(vector) (void)(vector)
#endif

#define MAX_HEAD_DIM 512

static INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

typedef float four_t __attribute__((vector_size(16)));

#define W WIDE
#include "vector.c"
#undef W
#if NARROW != WIDE
#define W NARROW
#include "vector.c"
#undef W
#endif

/* The step's shape; mirrors BatchStruct in library.py. */
typedef struct {
    const int32_t *query_starts; /* [B+1] */
    const int32_t *kv_lens;      /* [B] */
    const int32_t *block_tables; /* [B, max_blocks] */
    const int64_t *positions;    /* [T] */
    const int64_t *slots;        /* [T] */
    int64_t num_sequences, max_blocks, num_rows;
} batch_t;

/* What a kernel answers; heads.py turns it into an error. */
enum { DONE = 0, NO_MEMORY = 1, OUT_OF_RANGE = 2 };

#include "parallel.c"
#include "elementwise.c"
#include "attention.c"

const char *tailrace_isa(void) { return ISA; }
