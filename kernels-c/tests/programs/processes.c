/* Products on shared weights from several threads at once, and in a child process after fork().
 *
 *   cc -std=c11 -I kernels-c/include kernels-c/tests/programs/processes.c libquant_kernels.a -lpthread -ldl -lm
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "quant_kernels.h"

enum { M = 5, N = 100, K = 256, GROUP = 64, THREADS = 4, ROUNDS = 50 };

#define CHECK(condition)                                               \
    do {                                                               \
        if (!(condition)) {                                            \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);    \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static uint8_t codes[N * K];
static float scales[N * K / GROUP], x[M * K], expected[M * N];
static qz1_layout layout = {.struct_size = sizeof layout};
static uint8_t *packed;
static qz1_int8_rows *rows;

static void multiply(float *out) {
    CHECK(qz1_multiply(&layout, packed, layout.bytes, rows, NULL, 0, out, M * N, QZ1_ISA_DETECT, NULL, NULL) ==
          QZ1_STATUS_OK);
}

/* Quantizes rows with a handle of its own, and multiplies these and the shared ones. */
static void *work(void *unused) {
    float out[M * N];
    qz1_int8_rows *own = NULL;
    const qz1_values values = {sizeof values, QZ1_TYPE_F32, x, M * K};
    CHECK(qz1_int8_rows_new(QZ1_ISA_DETECT, &own, NULL) == QZ1_STATUS_OK);
    for (int round = 0; round < ROUNDS; round++) {
        memset(out, 0, sizeof out);
        multiply(out);
        CHECK(memcmp(out, expected, sizeof out) == 0);
        memset(out, 0, sizeof out);
        CHECK(qz1_int8_rows_quantize(own, &layout, &values, NULL, NULL, NULL) == QZ1_STATUS_OK);
        CHECK(qz1_multiply(&layout, packed, layout.bytes, own, NULL, 0, out, M * N, QZ1_ISA_DETECT, NULL, NULL) ==
              QZ1_STATUS_OK);
        CHECK(memcmp(out, expected, sizeof out) == 0);
    }
    qz1_int8_rows_free(own);
    return unused;
}

static void on_threads(void) {
    pthread_t threads[THREADS];
    for (int t = 0; t < THREADS; t++) CHECK(pthread_create(&threads[t], NULL, work, NULL) == 0);
    for (int t = 0; t < THREADS; t++) CHECK(pthread_join(threads[t], NULL) == 0);
}

int main(void) {
    for (size_t i = 0; i < N * K; i++) codes[i] = (uint8_t)(i * 7 % 16);
    for (size_t i = 0; i < N * K / GROUP; i++) scales[i] = 0.01f + 0.001f * (float)(i % 9);
    for (size_t i = 0; i < M * K; i++) x[i] = (float)(i * 31 % 97) / 48 - 1;
    const qz1_weights weights = {
        .struct_size = sizeof weights, .bits = 4, .n = N, .k = K, .group_size = GROUP,
        .codes = codes, .codes_len = sizeof codes, .scales = scales, .scales_len = N * K / GROUP,
    };
    CHECK(qz1_layout_of(&weights, 0, &layout, NULL) == QZ1_STATUS_OK);
    CHECK((packed = aligned_alloc(64, layout.bytes + 64 - layout.bytes % 64)) != NULL);
    CHECK(qz1_pack(&weights, &layout, 0, layout.panels, packed, layout.bytes, NULL, NULL) == QZ1_STATUS_OK);
    const qz1_values values = {sizeof values, QZ1_TYPE_F32, x, M * K};
    CHECK(qz1_int8_rows_new(QZ1_ISA_DETECT, &rows, NULL) == QZ1_STATUS_OK);
    CHECK(qz1_int8_rows_quantize(rows, &layout, &values, NULL, NULL, NULL) == QZ1_STATUS_OK);
    multiply(expected);
    on_threads();

    /* The child uses what its parent made, and threads of its own. */
    fflush(stdout);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        work(NULL);
        on_threads();
        qz1_int8_rows_free(rows);
        _exit(0);
    }
    work(NULL);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    work(NULL);

    /* A null handle may be freed any number of times. */
    qz1_int8_rows_free(rows);
    qz1_int8_rows_free(NULL);
    qz1_float_rows_free(NULL);
    qz1_kv_cache_free(NULL);
    qz1_hadamard_free(NULL);
    free(packed);
    puts("done");
    return 0;
}
