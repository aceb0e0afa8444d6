/* Reads a quantized checkpoint and multiplies each of its linear layers by the row 1, 1/2, 1/3, …
 *   cc -std=c11 -I kernels-c/include kernels-c/examples/checkpoint.c libquant_kernels.a -lpthread -ldl -lm */
#include <stdio.h>
#include <stdlib.h>
#include "quant_kernels.h"

static char reason[400];
static const qz1_message message = {sizeof message, 0, reason, sizeof reason};
#define TRY(call) if ((call) != QZ1_STATUS_OK) return fprintf(stderr, "%s\n", reason), 1
int main(int argc, char **argv) {
    qz1_checkpoint *checkpoint; qz1_float_rows *rows; size_t count;
    TRY(qz1_checkpoint_open(argc > 1 ? argv[1] : ".", &checkpoint, &message));
    TRY(qz1_float_rows_new(QZ1_ISA_DETECT, &rows, &message));
    TRY(qz1_checkpoint_count(checkpoint, &count, &message));
    for (size_t i = 0; i < count; i++) {
        qz1_linear linear = {.struct_size = sizeof linear};
        qz1_weights weights = {.struct_size = sizeof weights};
        qz1_layout layout = {.struct_size = sizeof layout};
        qz1_tensor *tensor; const float *bias; const uint32_t *order;
        TRY(qz1_checkpoint_linear(checkpoint, i, &linear, &message));
        TRY(qz1_checkpoint_read(checkpoint, i, &tensor, &message));
        TRY(qz1_tensor_input_order(tensor, &order, &message));
        TRY(qz1_tensor_weights(tensor, &weights, &message));
        TRY(qz1_tensor_bias(tensor, &bias, &message));
        TRY(qz1_layout_of(&weights, 0, &layout, &message));
        void *packed = aligned_alloc(64, layout.bytes);
        TRY(qz1_pack(&weights, &layout, 0, layout.panels, packed, layout.bytes, NULL, &message));
        float *x = malloc(linear.k * sizeof *x), *out = malloc(linear.n * sizeof *out);
        for (size_t k = 0; k < linear.k; k++) x[k] = 1.0f / (1 + (order ? order[k] : k));
        const qz1_values values = {sizeof values, QZ1_TYPE_F32, x, linear.k};
        TRY(qz1_float_rows_pack(rows, &layout, &values, NULL, &message));
        TRY(qz1_multiply_float(&layout, packed, layout.bytes, rows, bias, bias ? linear.n : 0, out, linear.n, NULL,
                               &message));
        printf("%s %s [%zu, %zu]: %.9g\n", linear.name, linear.scheme, linear.n, linear.k, out[0]);
        free(x), free(out), free(packed), qz1_tensor_free(tensor);
    }
    qz1_float_rows_free(rows), qz1_checkpoint_free(checkpoint);
}
