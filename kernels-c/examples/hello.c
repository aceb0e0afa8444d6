/* The shortest program: packs a 4-bit matrix and multiplies one row by it.
 *   cc -std=c11 -I kernels-c/include kernels-c/examples/hello.c libquant_kernels.a -lpthread -ldl -lm */
#include <stdio.h>
#include <stdlib.h>
#include "quant_kernels.h"
#define TRY(call) if ((call) != QZ1_STATUS_OK) return 1
enum { N = 32, K = 64 };

int main(void) {
    static uint8_t codes[N * K]; /* one code per byte, 0 to 15; the zero point is 8 */
    static float scales[N], x[K], y[N];
    for (int i = 0; i < N * K; i++) codes[i] = (uint8_t)(i % 16);
    for (int i = 0; i < N; i++) scales[i] = 0.5f;
    for (int i = 0; i < K; i++) x[i] = 1.0f;
    qz1_weights weights = {.struct_size = sizeof weights, .bits = 4, .n = N, .k = K, .group_size = K,
                           .codes = codes, .codes_len = N * K, .scales = scales, .scales_len = N};
    qz1_layout layout = {.struct_size = sizeof layout};
    TRY(qz1_layout_of(&weights, 0, &layout, NULL));
    uint8_t *packed = aligned_alloc(64, (layout.bytes + 63) / 64 * 64);
    TRY(qz1_pack(&weights, &layout, 0, layout.panels, packed, layout.bytes, NULL, NULL));
    qz1_float_rows *rows;
    qz1_values values = {sizeof values, QZ1_TYPE_F32, x, K};
    TRY(qz1_float_rows_new(QZ1_ISA_DETECT, &rows, NULL));
    TRY(qz1_float_rows_pack(rows, &layout, &values, NULL, NULL));
    TRY(qz1_multiply_float(&layout, packed, layout.bytes, rows, NULL, 0, y, N, NULL, NULL));
    printf("y[0] = %g\ndone\n", y[0]);
    qz1_float_rows_free(rows), free(packed);
    return 0;
}
