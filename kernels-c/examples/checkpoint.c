/* Multiplies a linear layer of a quantized checkpoint by the row 1, 1/2, 1/3, …
 *   cc -std=c11 -I kernels-c/include kernels-c/examples/checkpoint.c libquant_kernels.a -lpthread -ldl -lm */
#include <stdio.h>
#include <stdlib.h>
#include "quant_kernels.h"
static char reason[400];
static const qz1_message message = {sizeof message, 0, reason, sizeof reason};
#define TRY(call) if (call) return fprintf(stderr, "%s\n", reason), 1 /* QZ1_STATUS_OK is 0 */
int main(int argc, char **argv) {
    qz1_checkpoint *checkpoint; qz1_tensor *tensor; qz1_float_rows *rows;
    qz1_weights w = {.struct_size = sizeof w};
    qz1_layout layout = {.struct_size = sizeof layout};
    size_t index; const uint32_t *order; const float *bias; /* column k multiplies input order[k] */
    if (argc != 3) return fprintf(stderr, "usage: checkpoint DIRECTORY LINEAR\n"), 2;
    TRY(qz1_checkpoint_open(argv[1], &checkpoint, &message));
    TRY(qz1_checkpoint_find(checkpoint, argv[2], &index, &message));
    TRY(qz1_checkpoint_read(checkpoint, index, &tensor, &message) || qz1_tensor_input_order(tensor, &order, &message));
    TRY(qz1_tensor_weights(tensor, &w, &message) || qz1_tensor_bias(tensor, &bias, &message));
    TRY(qz1_layout_of(&w, 0, &layout, &message) || qz1_float_rows_new(QZ1_ISA_DETECT, &rows, &message));
    uint8_t *packed = aligned_alloc(64, layout.bytes);
    float *x = calloc(w.k, sizeof *x), *y = calloc(w.n, sizeof *y);
    if (!packed || !x || !y) return fprintf(stderr, "out of memory\n"), 1;
    TRY(qz1_pack(&w, &layout, 0, layout.panels, packed, layout.bytes, NULL, &message));
    for (size_t k = 0; k < w.k; k++) x[k] = 1.0f / (1 + (order ? order[k] : k));
    const qz1_values values = {sizeof values, QZ1_TYPE_F32, x, w.k};
    TRY(qz1_float_rows_pack(rows, &layout, &values, NULL, &message));
    TRY(qz1_multiply_float(&layout, packed, layout.bytes, rows, bias, bias ? w.n : 0, y, w.n, NULL, &message));
    printf("%s [%zu, %zu]: %.9g\n", argv[2], w.n, w.k, y[0]);
    free(packed), free(x), free(y), qz1_tensor_free(tensor), qz1_float_rows_free(rows), qz1_checkpoint_free(checkpoint);
}
