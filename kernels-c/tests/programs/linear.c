/* A linear layer with 4-bit weights from C: pack, quantize, multiply on two threads, check the results, handle errors.
 *
 *   cc -std=c11 -I kernels-c/include kernels-c/tests/programs/linear.c libquant_kernels.a -lpthread -ldl -lm
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant_kernels.h"

enum { M = 5, N = 100, K = 256, GROUP = 64, THREADS = 2 };

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition, reason); \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static char reason[200] = "";
static const qz1_message message = {sizeof(qz1_message), 0, reason, sizeof reason};

/* The threads of this program; each of the two runs every second piece. */
struct half {
    size_t first, count;
    qz1_piece piece;
    void *work;
};

static void *run_half(void *at) {
    const struct half *half = at;
    for (size_t i = half->first; i < half->count; i += THREADS) {
        half->piece(half->work, i);
    }
    return NULL;
}

static void on_threads(void *ctx, size_t count, qz1_piece piece, void *work) {
    pthread_t threads[THREADS];
    struct half halves[THREADS];
    int started[THREADS];
    ++*(int *)ctx;
    for (size_t t = 0; t < THREADS; t++) {
        halves[t] = (struct half){t, count, piece, work};
        started[t] = pthread_create(&threads[t], NULL, run_half, &halves[t]) == 0;
        if (!started[t]) {
            run_half(&halves[t]);
        }
    }
    for (size_t t = 0; t < THREADS; t++) {
        if (started[t]) {
            pthread_join(threads[t], NULL);
        }
    }
}

/* An incorrect `for_each`, which calls no piece. */
static void on_nothing(void *ctx, size_t count, qz1_piece piece, void *work) {
    (void)ctx, (void)count, (void)piece, (void)work;
}

static float noise(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24);
}

static uint8_t codes[N * K], zeros[N * K / GROUP];
static float scales[N * K / GROUP], x[M * K], bias[N], out[M * N], again[M * N];

/* The layer by definition, on the original activations. */
static double expected(size_t m, size_t n, double *magnitude) {
    double sum = bias[n];
    *magnitude = 0;
    for (size_t k = 0; k < K; k++) {
        const size_t group = n * (K / GROUP) + k / GROUP;
        const double w = ((double)codes[n * K + k] - zeros[group]) * scales[group];
        sum += w * x[m * K + k];
        *magnitude += fabs(w);
    }
    return sum;
}

static void check_outputs(double step) {
    for (size_t m = 0; m < M; m++) {
        float largest = 0;
        for (size_t k = 0; k < K; k++) {
            largest = fmaxf(largest, fabsf(x[m * K + k]));
        }
        for (size_t n = 0; n < N; n++) {
            double magnitude;
            const double off = fabs(out[m * N + n] - expected(m, n, &magnitude));
            CHECK(off <= step * largest * magnitude + 1e-5);
        }
    }
}

int main(void) {
    uint32_t state = 1;
    for (size_t i = 0; i < N * K; i++) codes[i] = (uint8_t)(16 * noise(&state));
    for (size_t i = 0; i < N * K / GROUP; i++) zeros[i] = (uint8_t)(16 * noise(&state));
    for (size_t i = 0; i < N * K / GROUP; i++) scales[i] = 0.01f + 0.02f * noise(&state);
    for (size_t i = 0; i < M * K; i++) x[i] = 2 * noise(&state) - 1;
    for (size_t i = 0; i < N; i++) bias[i] = noise(&state);

    CHECK(qz1_abi_version() >> 16 == 1);
    CHECK(qz1_has(QZ1_FEATURE_INT8) == 1 && qz1_has(12345) == 0);
    printf("version %s on %s\n", qz1_version(), qz1_isa_name(qz1_isa_detect()));

    /* Describe the weights, compute their layout, and pack them into the caller's memory. */
    qz1_weights weights = {
        .struct_size = sizeof weights, .bits = 4, .n = N, .k = K, .group_size = GROUP,
        .codes = codes, .codes_len = sizeof codes, .scales = scales, .scales_len = N * K / GROUP,
        .zeros = zeros, .zeros_len = sizeof zeros,
    };
    qz1_layout layout = {.struct_size = sizeof layout};
    CHECK(qz1_layout_of(&weights, 0, &layout, &message) == QZ1_STATUS_OK);
    uint8_t *packed = aligned_alloc(64, layout.bytes);
    CHECK(packed != NULL);
    int calls = 0;
    const qz1_parallel threads = {sizeof threads, THREADS, &calls, on_threads};
    CHECK(qz1_pack(&weights, &layout, 0, layout.panels, packed, layout.bytes, &threads, &message) == QZ1_STATUS_OK);

    /* Quantize activations once for all layers that read them. */
    qz1_int8_rows *rows = NULL;
    CHECK(qz1_int8_rows_new(QZ1_ISA_DETECT, &rows, &message) == QZ1_STATUS_OK);
    const qz1_values values = {sizeof values, QZ1_TYPE_F32, x, M * K};
    CHECK(qz1_int8_rows_quantize(rows, &layout, &values, NULL, &threads, &message) == QZ1_STATUS_OK);

    /* Two threads with the fastest instructions match one thread with portable code bit for bit. */
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, bias, N, out, M * N, QZ1_ISA_DETECT, &threads, &message) ==
          QZ1_STATUS_OK);
    CHECK(calls >= 3);
    check_outputs(0.5 / 127);
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, bias, N, again, M * N, QZ1_ISA_SCALAR, NULL, &message) ==
          QZ1_STATUS_OK);
    CHECK(memcmp(out, again, sizeof out) == 0);

    /* Float activations. */
    qz1_float_rows *floats = NULL;
    CHECK(qz1_float_rows_new(QZ1_ISA_DETECT, &floats, &message) == QZ1_STATUS_OK);
    CHECK(qz1_float_rows_pack(floats, &layout, &values, NULL, &message) == QZ1_STATUS_OK);
    CHECK(qz1_multiply_float(&layout, packed, layout.bytes, floats, bias, N, out, M * N, &threads, &message) ==
          QZ1_STATUS_OK);
    check_outputs(1e-4);

    /* Errors give a status and a message. */
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, bias, N, out, M * N - 1, 0, NULL, &message) ==
          QZ1_STATUS_LENGTH);
    printf("a short buffer: %s\n", reason);
    CHECK(qz1_multiply(&layout, packed, layout.bytes, NULL, bias, N, out, M * N, 0, NULL, &message) == QZ1_STATUS_NULL);
    printf("a null handle: %s\n", reason);
    CHECK(qz1_multiply(&layout, packed, layout.bytes - 1, rows, bias, N, out, M * N, 0, NULL, &message) ==
          QZ1_STATUS_LENGTH);
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, bias, N, (float *)(void *)((char *)out + 1), M * N - 1, 0,
                       NULL, &message) == QZ1_STATUS_MISALIGNED);
    printf("a misaligned output: %s\n", reason);
    qz1_layout other = layout;
    other.group_size = 32;
    CHECK(qz1_multiply(&other, packed, layout.bytes, rows, bias, N, out, M * N, 0, NULL, &message) ==
          QZ1_STATUS_LAYOUT_ID);
    printf("a different layout: %s\n", reason);
    other = layout;
    other.struct_size = 8;
    CHECK(qz1_multiply(&other, packed, layout.bytes, rows, bias, N, out, M * N, 0, NULL, NULL) ==
          QZ1_STATUS_STRUCT_SIZE);
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, out, N, out, M * N, 0, NULL, &message) ==
          QZ1_STATUS_OVERLAP);
    const qz1_parallel broken = {sizeof broken, THREADS, NULL, on_nothing};
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, bias, N, out, M * N, 0, &broken, &message) ==
          QZ1_STATUS_FOR_EACH);
    printf("a for_each that calls nothing: %s\n", reason);

    qz1_int8_rows_free(rows);
    qz1_float_rows_free(floats);
    free(packed);
    puts("done");
    return 0;
}
