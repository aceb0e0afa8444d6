/* A linear layer with 4-bit weights and 8-bit activations on an NVIDIA GPU, from C: pack, plan, quantize, multiply,
 * check the results, handle errors. Needs no CUDA headers: the few driver functions that are needed for a context and
 * memory are declared here and looked up with dlsym.
 *
 *   cargo build --release -p quant-kernels-c --features cuda
 *   cc -std=c11 -I kernels-c/include kernels-c/tests/programs/cuda_linear.c libquant_kernels.a -lpthread -ldl -lm
 *   ./a.out [DIRECTORY]     directory for compiled kernels
 *
 * Exits with 2, and says why, if there is no GPU or no compiler.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant_kernels_cuda.h"

enum { M = 5, N = 40, K = 2048, GROUP = 128 };

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition, reason); \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static char reason[1000] = "";
static const qz1_message message = {sizeof(qz1_message), 0, reason, sizeof reason};

/* The driver, as cuda.h declares it. */
static int (*cu_init)(unsigned);
static int (*cu_device_get)(int *, int);
static int (*cu_context_retain)(void **, int);
static int (*cu_context_set)(void *);
static int (*cu_synchronize)(void);
static int (*cu_allocate)(uint64_t *, size_t);
static int (*cu_free)(uint64_t);
static int (*cu_to_device)(uint64_t, const void *, size_t);
static int (*cu_to_host)(void *, uint64_t, size_t);

static void look_up(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    memcpy(function, &found, sizeof found);
}

static void open_driver(void) {
    void *library = dlopen("libcuda.so", RTLD_NOW);
    if (library == NULL) library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    look_up(library, "cuInit", &cu_init);
    look_up(library, "cuDeviceGet", &cu_device_get);
    look_up(library, "cuDevicePrimaryCtxRetain", &cu_context_retain);
    look_up(library, "cuCtxSetCurrent", &cu_context_set);
    look_up(library, "cuCtxSynchronize", &cu_synchronize);
    look_up(library, "cuMemAlloc_v2", &cu_allocate);
    look_up(library, "cuMemFree_v2", &cu_free);
    look_up(library, "cuMemcpyHtoD_v2", &cu_to_device);
    look_up(library, "cuMemcpyDtoH_v2", &cu_to_host);
    int device;
    void *context;
    CHECK(cu_init(0) == 0 && cu_device_get(&device, 0) == 0);
    CHECK(cu_context_retain(&context, device) == 0 && cu_context_set(context) == 0);
}

/* Device memory with these bytes, or with zeros; a workspace may need none. */
static qz1_cuda_region to_device(const void *from, size_t bytes) {
    qz1_cuda_region region = {0, bytes};
    if (bytes == 0) return region;
    void *zeros = calloc(1, bytes);
    CHECK(zeros != NULL && cu_allocate(&region.address, bytes) == 0);
    CHECK(cu_to_device(region.address, from == NULL ? zeros : from, bytes) == 0);
    free(zeros);
    return region;
}

static float noise(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24);
}

static uint8_t codes[N * K], zeros[N * K / GROUP];
static float scales[N * K / GROUP], x[M * K], bias[N], out[M * N], x_scales[M];
static int8_t x_codes[M * K];

/* The layer by definition, on the quantized activations. */
static double expected(size_t m, size_t n, double *magnitude) {
    double sum = 0;
    *magnitude = fabs((double)bias[n]);
    for (size_t k = 0; k < K; k++) {
        const size_t group = n * (K / GROUP) + k / GROUP;
        const double weight = ((double)codes[n * K + k] - zeros[group]) * scales[group];
        sum += weight * x_codes[m * K + k];
        *magnitude += fabs(weight * x_codes[m * K + k]) * x_scales[m];
    }
    return sum * x_scales[m] + bias[n];
}

int main(int argc, char **argv) {
    uint32_t state = 1;
    for (size_t i = 0; i < N * K; i++) codes[i] = (uint8_t)(16 * noise(&state));
    for (size_t i = 0; i < N * K / GROUP; i++) zeros[i] = (uint8_t)(16 * noise(&state));
    for (size_t i = 0; i < N * K / GROUP; i++) scales[i] = (float)(1 + (int)(7 * noise(&state))) / 256;
    for (size_t i = 0; i < M * K; i++) x[i] = 2 * noise(&state) - 1;
    for (size_t i = 0; i < N; i++) bias[i] = noise(&state);

    CHECK(qz1_has(QZ1_FEATURE_CUDA) == 1);
    if (qz1_cuda_require_device(&message) != QZ1_STATUS_OK || qz1_cuda_require_compiler(&message) != QZ1_STATUS_OK) {
        puts(reason);
        return 2;
    }

    /* Weights are packed once; `layout` may be stored with the bytes. */
    const qz1_weights weights = {
        .struct_size = sizeof weights, .bits = 4, .n = N, .k = K, .group_size = GROUP,
        .codes = codes, .codes_len = sizeof codes, .scales = scales, .scales_len = N * K / GROUP,
        .zeros = zeros, .zeros_len = sizeof zeros,
    };
    qz1_cuda_layout layout = {.struct_size = sizeof layout};
    CHECK(qz1_cuda_layout_of(&weights, QZ1_CUDA_ORDER_INT8, 0, &layout, &message) == QZ1_STATUS_OK);
    uint8_t *packed = malloc(layout.bytes);
    CHECK(packed != NULL);
    CHECK(qz1_cuda_pack(&weights, &layout, packed, layout.bytes, &message) == QZ1_STATUS_OK);

    /* Planning fails without a context. */
    qz1_cuda_kernels *kernels = NULL;
    CHECK(qz1_cuda_kernels_new(argc > 1 ? argv[1] : NULL, &kernels, &message) == QZ1_STATUS_OK);
    const qz1_cuda_linear_shape shape = {
        .struct_size = sizeof shape, .x_type = QZ1_CUDA_TYPE_INT8, .out_type = QZ1_TYPE_F32, .layout = &layout, .m = M,
    };
    qz1_cuda_plan *linear = NULL;
    CHECK(qz1_cuda_linear_plan(kernels, &shape, &linear, &message) == QZ1_STATUS_CUDA_CONTEXT && linear == NULL);
    printf("without a context: %s\n", reason);
    open_driver();

    /* Planning compiles and loads kernels, so it comes before any time-critical code. */
    CHECK(qz1_cuda_linear_plan(kernels, &shape, &linear, &message) == QZ1_STATUS_OK);
    const qz1_cuda_activation_shape rows = {
        .struct_size = sizeof rows, .rows = QZ1_CUDA_ROWS_PLAIN, .x_type = QZ1_TYPE_F32, .m = M, .k = K,
    };
    qz1_cuda_plan *quantize = NULL;
    CHECK(qz1_cuda_activation_plan(kernels, &rows, &quantize, &message) == QZ1_STATUS_OK);
    size_t bytes, tickets;
    CHECK(qz1_cuda_plan_workspace(linear, &bytes, &tickets, &message) == QZ1_STATUS_OK);
    printf("%zu bytes of workspace, and %zu bytes of tickets, which must be zero\n", bytes, tickets);

    /* The caller allocates all device memory. */
    const qz1_cuda_activation_arguments from = {
        .struct_size = sizeof from, .x = to_device(x, sizeof x),
        .codes = to_device(NULL, M * K), .scales = to_device(NULL, M * sizeof(float)),
    };
    const qz1_cuda_linear_arguments to = {
        .struct_size = sizeof to, .weight = to_device(packed, layout.bytes), .x = from.codes, .x_scales = from.scales,
        .bias = to_device(bias, sizeof bias), .out = to_device(NULL, sizeof out),
        .tickets = to_device(NULL, tickets), .workspace = to_device(NULL, bytes),
    };

    /* Launch both on the default stream. The second launch of the product reuses the tickets, which the first one reset. */
    void *stream = NULL;
    CHECK(qz1_cuda_activation_launch(quantize, &from, stream, &message) == QZ1_STATUS_OK);
    CHECK(qz1_cuda_linear_launch(linear, &to, stream, &message) == QZ1_STATUS_OK);
    CHECK(qz1_cuda_linear_launch(linear, &to, stream, &message) == QZ1_STATUS_OK);
    CHECK(cu_synchronize() == 0);

    CHECK(cu_to_host(x_codes, from.codes.address, sizeof x_codes) == 0);
    CHECK(cu_to_host(x_scales, from.scales.address, sizeof x_scales) == 0);
    CHECK(cu_to_host(out, to.out.address, sizeof out) == 0);
    for (size_t m = 0; m < M; m++) {
        for (size_t k = 0; k < K; k++) CHECK(fabsf(x_codes[m * K + k] * x_scales[m] - x[m * K + k]) <= 0.51f * x_scales[m]);
        for (size_t n = 0; n < N; n++) {
            double magnitude;
            const double off = fabs(out[m * N + n] - expected(m, n, &magnitude));
            CHECK(off <= 1e-5 * magnitude);
        }
    }

    /* Errors give a status and a message, and nothing is launched. */
    qz1_cuda_linear_arguments wrong = to;
    wrong.out.bytes--;
    CHECK(qz1_cuda_linear_launch(linear, &wrong, stream, &message) == QZ1_STATUS_LENGTH);
    printf("a short output: %s\n", reason);
    wrong = to;
    wrong.weight.address += 16;
    CHECK(qz1_cuda_linear_launch(linear, &wrong, stream, &message) == QZ1_STATUS_MISALIGNED);
    printf("misaligned weights: %s\n", reason);
    CHECK(qz1_cuda_linear_launch(quantize, &to, stream, &message) == QZ1_STATUS_MISMATCH);
    printf("a plan of a different family: %s\n", reason);
    CHECK(qz1_cuda_linear_launch(NULL, &to, stream, &message) == QZ1_STATUS_NULL);
    qz1_cuda_layout other = layout;
    other.group_size = 64;
    qz1_cuda_linear_shape of_other = shape;
    of_other.layout = &other;
    qz1_cuda_plan *none = linear;
    CHECK(qz1_cuda_linear_plan(kernels, &of_other, &none, &message) == QZ1_STATUS_LAYOUT_ID && none == NULL);
    printf("a different layout: %s\n", reason);

    const qz1_cuda_region all[] = {from.x, from.codes, from.scales, to.weight, to.bias, to.out, to.tickets,
                                   to.workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) CHECK(all[i].bytes == 0 || cu_free(all[i].address) == 0);
    qz1_cuda_plan_free(linear);
    qz1_cuda_plan_free(quantize);
    qz1_cuda_kernels_free(kernels);
    free(packed);
    puts("done");
    return 0;
}
