/* Kernels that multiply activations with quantized weights: the C interface of the Rust crate
 * quant-kernels-cpu. Written by cbindgen; `cargo test -p quant-kernels-c --test header` compares it.
 *
 * Every function with a qz1_status returns 0 when it is done. A structure begins with its size, which the caller
 * sets; null and misaligned pointers, lengths that are not the shape's, outputs that overlap another part of the call,
 * reserved fields that are not 0 and layouts that are none are refused, and a qz1_message says why. Matrices are
 * row-major; lengths count elements.
 *
 * No function keeps a pointer of the caller beyond the call, starts a thread, or has state beyond its handles; a
 * handle may be used by one thread at a time.
 *
 * Floats are rounded to nearest and subnormal numbers are numbers. Callers that change the rounding mode, or have the
 * processor take subnormals for 0 (FTZ and DAZ, as -ffast-math may at the start of a program), set that back before
 * a call, on the threads of a for_each too: weights whose scale is below 2^-126 would count as 0, and no status tells.
 *
 * Link with -lpthread -ldl -lm.
 */

#ifndef QUANT_KERNELS_H
#define QUANT_KERNELS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Weights are multiplied with integers of 8 bits, a scale for every row.
#define QZ1_EXPERT_ROWS_INT8 1

// Weights are multiplied with floats.
#define QZ1_EXPERT_ROWS_FLOAT 2

// `silu(gate) · up`
#define QZ1_GATE_SILU 1

// `gelu(gate) · up`, with a hyperbolic tangent.
#define QZ1_GATE_GELU_TANH 2

// `g · σ(alpha · g) · (u + 1)` with `g = min(gate, limit)` and `u` between `−limit` and `limit`.
#define QZ1_GATE_CLAMPED 3

// In a slot of a token: no expert.
#define QZ1_NO_EXPERT UINT32_MAX

// The fastest instructions of the processor, or those that the environment variable `QUANT_ISA` names.
#define QZ1_ISA_DETECT 0

// Portable code, the definition of every result.
#define QZ1_ISA_SCALAR 1

// AVX2, FMA and F16C.
#define QZ1_ISA_AVX2 2

// The same and AVX-VNNI.
#define QZ1_ISA_AVXVNNI 3

// AVX-512 F, BW, VL and VNNI.
#define QZ1_ISA_AVX512VNNI 4

// The same and BF16.
#define QZ1_ISA_AVX512BF16 5

// AArch64's Advanced SIMD.
#define QZ1_ISA_NEON 6

// The same and dotprod.
#define QZ1_ISA_NEONDOT 7

// The same and i8mm.
#define QZ1_ISA_NEONI8MM 8

// AVX-512 as `QZ1_ISA_AVX512BF16`, and AMX: tiles of 8-bit integers and of bf16, where the system permits them.
#define QZ1_ISA_AMX 9

// Weights of 2 to 8 bits, activations of 8.
#define QZ1_FEATURE_INT8 1

// The same weights, float activations.
#define QZ1_FEATURE_FLOAT 2

// Weights with two levels of scales.
#define QZ1_FEATURE_PROGRESSIVE 3

// Activations of f16 and bf16.
#define QZ1_FEATURE_HALF 4

// Quantization fused with RMSNorm and with SiLU.
#define QZ1_FEATURE_FUSED 5

// The Hadamard transform.
#define QZ1_FEATURE_HADAMARD 6

// Attention on a quantized cache.
#define QZ1_FEATURE_ATTENTION 7

// Kernels for NVIDIA GPUs, `quant_kernels_cuda.h`: where the library was built with them.
#define QZ1_FEATURE_CUDA 8

// The experts of a layer in one call.
#define QZ1_FEATURE_EXPERTS 9

// Quantized checkpoints on disk: where the library was built with them.
#define QZ1_FEATURE_CHECKPOINTS 10

// Codes of 4 bits, a scale and a zero a token and head.
#define QZ1_KV_4BIT 1

// The same of 8 bits.
#define QZ1_KV_8BIT 2

// Half floats.
#define QZ1_KV_F16 3

// Single precision.
#define QZ1_TYPE_F32 1

// IEEE half precision.
#define QZ1_TYPE_F16 2

// bfloat16.
#define QZ1_TYPE_BF16 3

// Scales stored as IEEE half precision.
#define QZ1_SCALES_F16 1

// Scales stored as bfloat16.
#define QZ1_SCALES_BF16 2

// Scales stored as single precision.
#define QZ1_SCALES_F32 3

// Two levels: integers of 8 bits a group below a float a row.
#define QZ1_SCALES_PROGRESSIVE 4

// E4M3 below a float that they are divided by; of floating-point codes only.
#define QZ1_SCALES_E4M3 5

// Powers of two, E8M0; of floating-point codes only.
#define QZ1_SCALES_E8M0 6

// Codes are integers.
#define QZ1_CODES_INTEGER 0

// Codes are E4M3 (FP8) numbers, 8 bits.
#define QZ1_CODES_E4M3 1

// Codes are E2M1 (FP4) numbers, 4 bits.
#define QZ1_CODES_E2M1 2

// What became of a call. The numbers keep their meaning.
enum qz1_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  QZ1_STATUS_OK = 0,
  // Memory has another length than the shape says.
  QZ1_STATUS_LENGTH = 1,
  // A shape or sum beyond the numbers of this machine.
  QZ1_STATUS_TOO_LARGE = 2,
  // A scheme, type or value that no kernel takes.
  QZ1_STATUS_SCHEME = 3,
  // Two operands that do not belong together.
  QZ1_STATUS_MISMATCH = 4,
  // An invalid layout, or packed bytes of another one.
  QZ1_STATUS_LAYOUT_ID = 5,
  // The processor lacks the instructions that were asked for.
  QZ1_STATUS_ISA = 6,
  // A size for which there is no Hadamard matrix here.
  QZ1_STATUS_ORDER = 7,
  // The system gives no memory for what the library keeps.
  QZ1_STATUS_MEMORY = 8,
  // A pointer is null that must not be.
  QZ1_STATUS_NULL = 32,
  // A pointer is not aligned to its type.
  QZ1_STATUS_MISALIGNED = 33,
  // A structure has a size that no version of it has, fields that this library does not know, or a reserved field
  // that is not 0.
  QZ1_STATUS_STRUCT_SIZE = 34,
  // Memory that is written overlaps other memory of the call.
  QZ1_STATUS_OVERLAP = 35,
  // The caller's `for_each` did not call each number once.
  QZ1_STATUS_FOR_EACH = 36,
  // The library failed, which is its fault; what was to be written may be written in part.
  QZ1_STATUS_INTERNAL = 37,
  // A checkpoint cannot be opened or read, or has no such linear.
  QZ1_STATUS_CHECKPOINT = 38,
  // The CUDA driver, a device, or the run-time compiler is not there.
  QZ1_STATUS_CUDA_MISSING = 64,
  // No CUDA context is current on the calling thread.
  QZ1_STATUS_CUDA_CONTEXT = 65,
  // The device is older than all that kernels are made for.
  QZ1_STATUS_CUDA_DEVICE = 66,
  // The CUDA driver or the run-time compiler refused.
  QZ1_STATUS_CUDA_FAILED = 67,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum qz1_status qz1_status;
#else
typedef uint32_t qz1_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// An open checkpoint. It does not change; any number of threads may use it.
typedef struct qz1_checkpoint qz1_checkpoint;

// The plan of calls of a layer's experts, and their memory.
typedef struct qz1_experts qz1_experts;

// Float activations in the order of the kernels.
typedef struct qz1_float_rows qz1_float_rows;

// The orthonormal Hadamard transform of rows of one width.
typedef struct qz1_hadamard qz1_hadamard;

// Activations as integers of 8 bits.
typedef struct qz1_int8_rows qz1_int8_rows;

// The keys and values of one sequence in one layer, and a workspace.
typedef struct qz1_kv_cache qz1_kv_cache;

// The weight of a linear in memory, unpacked. It does not change.
typedef struct qz1_tensor qz1_tensor;

// Where a call says what is wrong. The text is written last of all, also where the status is 0: then it is empty. It
// stays as it was where the message itself is refused, or where the text overlaps other memory of the call.
typedef struct qz1_message {
  // `sizeof(qz1_message)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // Gets UTF-8 that ends with a zero byte, cut where it is longer.
  char *text;
  // Bytes at `text`.
  size_t capacity;
} qz1_message;

// A linear whose weight is quantized.
typedef struct qz1_linear {
  // `sizeof(qz1_linear)`
  uint32_t struct_size;
  // Bits of a code.
  uint32_t bits;
  // Output features.
  size_t n;
  // Input features.
  size_t k;
  // The module, such as "model.layers.0.mlp.down_proj". Belongs to the checkpoint.
  const char *name;
  // How it is quantized, such as "w4a16-g128-sym". Belongs to the checkpoint.
  const char *scheme;
} qz1_linear;

// A quantized matrix `[n, k]` in logical order, row-major: `(code − zero) · scale`, the scale and zero those of the
// group of `group_size` neighbouring input features. Of floating-point codes `number · scale`; E4M3 codes are multiplied
// with float activations only.
typedef struct qz1_weights {
  // `sizeof(qz1_weights)`
  uint32_t struct_size;
  // Bits of a code, 2 to 8.
  uint32_t bits;
  // Output features.
  size_t n;
  // Input features.
  size_t k;
  // Input features that share a scale; divides `k`, and is `k` where a row has one scale.
  size_t group_size;
  // `[n, k]`, one code a byte.
  const uint8_t *codes;
  // Elements of `codes`.
  size_t codes_len;
  // `[n, k / group_size]`, or `[n]` where `group_scales` is not null; of floating-point codes `[1]` then, what
  // `group_scales` are divided by.
  const float *scales;
  // Elements of `scales`.
  size_t scales_len;
  // `[n, k / group_size]`, the lower level of two; null where there is one. Of floating-point codes E4M3, without a
  // sign: NVFP4.
  const uint8_t *group_scales;
  // Elements of `group_scales`.
  size_t group_scales_len;
  // `[n, k / group_size]`, or null: every zero is `2^(bits − 1)`.
  const uint8_t *zeros;
  // Elements of `zeros`.
  size_t zeros_len;
  // `QZ1_CODES_…`; without it codes are integers.
  uint32_t format;
  // 0
  uint32_t reserved;
} qz1_weights;

// One scale and zero for all tokens: `x ≈ scale · (a − zero)`.
typedef struct qz1_static_scale {
  // `sizeof(qz1_static_scale)`
  uint32_t struct_size;
  // Above zero and finite.
  float scale;
  // −128 to 127; other than 0 only with the sums of a layout.
  int32_t zero;
  // 0
  uint32_t reserved;
} qz1_static_scale;

// Where everything is in packed bytes. Made by `qz1_layout_of`; its fields may be kept beside the bytes, and are
// checked against `id` whenever it is used.
typedef struct qz1_layout {
  // `sizeof(qz1_layout)`
  uint32_t struct_size;
  // Bits that a code takes: 4 or 8.
  uint32_t code_bits;
  // `QZ1_SCALES_…`
  uint32_t scales;
  // 1 where every group has a zero of its own.
  uint32_t zeros;
  // The zero of every group where `zeros` is 0, else 0.
  uint32_t middle;
  // 1 with the sums that activations with a zero need.
  uint32_t sums;
  // Output features.
  uint64_t n;
  // Input features.
  uint64_t k;
  // Input features that share a scale.
  uint64_t group_size;
  // Panels of sixteen rows.
  uint64_t panels;
  // Bytes of a panel.
  uint64_t panel_bytes;
  // Bytes of the matrix. Kernels read fastest where they begin at a multiple of 64.
  uint64_t bytes;
  // Names the order and all that it depends on.
  uint64_t id;
  // `QZ1_CODES_…`
  uint32_t format;
  // 0
  uint32_t reserved;
} qz1_layout;

// One expert: packed weights of its gate and up `[inner, hidden]` and its down `[hidden, inner]`, whose bits, groups,
// scales and zeros are its own. Gate and up have the same groups.
typedef struct qz1_expert {
  // `sizeof(qz1_expert)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // That of the gate.
  const struct qz1_layout *gate_layout;
  // As `qz1_pack` writes them.
  const uint8_t *gate;
  // Bytes of `gate`.
  size_t gate_len;
  // `[inner]`, or null.
  const float *gate_bias;
  // Elements of `gate_bias`.
  size_t gate_bias_len;
  // That of the up.
  const struct qz1_layout *up_layout;
  // As `qz1_pack` writes them.
  const uint8_t *up;
  // Bytes of `up`.
  size_t up_len;
  // `[inner]`, or null.
  const float *up_bias;
  // Elements of `up_bias`.
  size_t up_bias_len;
  // That of the down.
  const struct qz1_layout *down_layout;
  // As `qz1_pack` writes them.
  const uint8_t *down;
  // Bytes of `down`.
  size_t down_len;
  // `[hidden]`, or null.
  const float *down_bias;
  // Elements of `down_bias`.
  size_t down_bias_len;
} qz1_expert;

// What calls of a layer's experts do.
typedef struct qz1_experts_config {
  // `sizeof(qz1_experts_config)`
  uint32_t struct_size;
  // `QZ1_ISA_…`
  uint32_t isa;
  // `QZ1_EXPERT_ROWS_…`
  uint32_t rows;
  // `QZ1_GATE_…`
  uint32_t gate;
  // Of a clamped gate.
  float alpha;
  // Of a clamped gate, not negative.
  float limit;
  // `QZ1_TYPE_…` of activations.
  uint32_t kind;
  // 0
  uint32_t reserved;
  // Tokens of a call, at most.
  size_t tokens;
  // Experts of a token, at most.
  size_t top_k;
} qz1_experts_config;

// Values of rows, row-major, which are read.
typedef struct qz1_values {
  // `sizeof(qz1_values)`
  uint32_t struct_size;
  // `QZ1_TYPE_…`
  uint32_t kind;
  // The values, aligned to their type.
  const void *data;
  // Values, not bytes.
  size_t len;
} qz1_values;

// Which experts each token goes to.
typedef struct qz1_routing {
  // `sizeof(qz1_routing)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // Slots of a token.
  size_t top_k;
  // Numbers of experts, or `QZ1_NO_EXPERT`, `[tokens, top_k]`.
  const uint32_t *experts;
  // Elements of `experts`.
  size_t experts_len;
  // What each expert's output is multiplied by, `[tokens, top_k]`.
  const float *weights;
  // Elements of `weights`.
  size_t weights_len;
} qz1_routing;

// A piece of work: `piece(work, i)` does number `i`.
typedef void (*qz1_piece)(void *work, size_t index);

// Threads of the caller.
typedef struct qz1_parallel {
  // `sizeof(qz1_parallel)`
  uint32_t struct_size;
  // How many pieces may run at once; at least 1.
  uint32_t threads;
  // The caller's, for `for_each`.
  void *ctx;
  // Calls `piece(work, i)` once for every `i` below `count`, in any order, on any threads at once, and returns
  // when all have returned. No call may come later, and nothing may be thrown or jumped through it. Pieces do not
  // fail and do not block.
  void (*for_each)(void *ctx, size_t count, qz1_piece piece, void *work);
} qz1_parallel;

// Pages of keys and values: each holds the same number of tokens of one key-value head. Made by
// `qz1_kv_layout_of`; its fields may be kept beside pages, and are checked against `id` whenever it is used.
typedef struct qz1_kv_layout {
  // `sizeof(qz1_kv_layout)`
  uint32_t struct_size;
  // `QZ1_KV_…`
  uint32_t kind;
  // Features of a head: a multiple of 16 up to 512.
  uint32_t head_dim;
  // Tokens of a page: 64.
  uint32_t page_tokens;
  // Bytes of a page, a multiple of 64. Kernels read fastest where pages begin at one.
  uint64_t page_bytes;
  // Names the order and all that it depends on.
  uint64_t id;
} qz1_kv_layout;

// The pages of one key-value head, and what is seen of them. Tokens are counted along the list, whatever pages it
// names: a selection of pages, or a window, is a list. In an array of lists all have the same `struct_size`.
typedef struct qz1_page_list {
  // `sizeof(qz1_page_list)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // Numbers of pages, in order; page `i` begins at `i · page_bytes`.
  const uint32_t *pages;
  // Elements of `pages`; those behind the last token are not looked at.
  size_t pages_len;
  // Tokens in them.
  size_t tokens;
  // Tokens at the beginning that no query sees.
  size_t first;
  // Tokens up to the last that the first query sees; each query sees one more than the one before it, and none
  // more than there are. `PTRDIFF_MAX`: all see all. Causal: `tokens − queries + 1`, which may be negative.
  ptrdiff_t seen;
} qz1_page_list;

// Heads of attention.
typedef struct qz1_heads {
  // `sizeof(qz1_heads)`
  uint32_t struct_size;
  // What scores are multiplied with, usually `1 / √head_dim`; finite.
  float scale;
  // A multiple of the key-value heads, up to 65536: query head `h` attends with head `h / (query / kv)`.
  size_t query;
  // Key-value heads.
  size_t kv;
} qz1_heads;

// RMSNorm: `y = x / √(mean x² + eps) · weight`.
typedef struct qz1_rms_norm {
  // `sizeof(qz1_rms_norm)`
  uint32_t struct_size;
  // Above zero and finite.
  float eps;
  // `[k]`
  const float *weight;
  // Elements of `weight`.
  size_t weight_len;
} qz1_rms_norm;

// Values of rows, row-major, to which activations are added.
typedef struct qz1_residual {
  // `sizeof(qz1_residual)`
  uint32_t struct_size;
  // `QZ1_TYPE_…`
  uint32_t kind;
  // The values, aligned to their type.
  void *data;
  // Values, not bytes.
  size_t len;
} qz1_residual;

// Where the parts of a packed matrix go.
typedef struct qz1_parts {
  // `sizeof(qz1_parts)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // `[n, k]`
  uint8_t *codes;
  // Elements of `codes`.
  size_t codes_len;
  // `[n, k / group_size]`; with two levels those of groups, integers or what E4M3 codes stand for.
  float *scales;
  // Elements of `scales`.
  size_t scales_len;
  // `[n, k / group_size]`, or null with `zeros_len` 0 where every group has the same.
  uint8_t *zeros;
  // Elements of `zeros`.
  size_t zeros_len;
  // `[n]` with two levels of scales, else null with `channels_len` 0. Of E4M3 scales all are what these are divided by.
  float *channels;
  // Elements of `channels`.
  size_t channels_len;
} qz1_parts;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens a checkpoint: a directory with `config.json` and safetensors files, in the formats AWQ, GPTQ,
// compressed-tensors, ModelOpt, QServe or FP8. Headers and shapes are checked, no weight is read. `path` ends with a
// zero byte. Freed by `qz1_checkpoint_free`. On an error `out` is set to null.
qz1_status qz1_checkpoint_open(const char *path,
                               struct qz1_checkpoint **out,
                               const struct qz1_message *message);

// Closes a checkpoint; null is allowed. Tensors that were read stay.
void qz1_checkpoint_free(struct qz1_checkpoint *checkpoint);

// How many quantized linears there are. They have the numbers below it, in the order of their names.
qz1_status qz1_checkpoint_count(const struct qz1_checkpoint *checkpoint,
                                size_t *out,
                                const struct qz1_message *message);

// The number of the quantized linear with this name, which ends with a zero byte.
qz1_status qz1_checkpoint_find(const struct qz1_checkpoint *checkpoint,
                               const char *name,
                               size_t *out,
                               const struct qz1_message *message);

// Describes a linear. Fills `out`, whose `struct_size` is set.
qz1_status qz1_checkpoint_linear(const struct qz1_checkpoint *checkpoint,
                                 size_t index,
                                 struct qz1_linear *out,
                                 const struct qz1_message *message);

// Reads the weight of a linear, and its bias. Takes a byte for each weight and 4 for each scale. Freed by
// `qz1_tensor_free`. On an error `out` is set to null.
qz1_status qz1_checkpoint_read(const struct qz1_checkpoint *checkpoint,
                               size_t index,
                               struct qz1_tensor **out,
                               const struct qz1_message *message);

// Frees a tensor; null is allowed.
void qz1_tensor_free(struct qz1_tensor *tensor);

// The weight as `qz1_layout_of` and `qz1_pack` take it. Fills `out`, whose `struct_size` is set; what it points to
// belongs to the tensor, and is not needed any more when the weight was packed.
qz1_status qz1_tensor_weights(const struct qz1_tensor *tensor,
                              struct qz1_weights *out,
                              const struct qz1_message *message);

// The bias `[n]`, or null if the linear has no bias. It belongs to the tensor.
qz1_status qz1_tensor_bias(const struct qz1_tensor *tensor,
                           const float **out,
                           const struct qz1_message *message);

// The scale of the linear's activations that the checkpoint was calibrated with, where they are integers with one scale
// for all tokens. `scale` is 0 for every other linear. A zero other than 0 needs a layout with sums.
qz1_status qz1_tensor_static_scale(const struct qz1_tensor *tensor,
                                   struct qz1_static_scale *out,
                                   const struct qz1_message *message);

// A handle for calls of these experts, with the memory that they take, whatever the routing; freed by
// `qz1_experts_free`. `workspace_bytes`, where it is not null, gets how much that is. On an error `out` is set to null.
// Nothing of the experts is kept: other weights of the same layouts may be passed to `qz1_experts_run`.
qz1_status qz1_experts_new(const struct qz1_expert *experts,
                           size_t count,
                           const struct qz1_experts_config *config,
                           size_t *workspace_bytes,
                           struct qz1_experts **out,
                           const struct qz1_message *message);

// Frees a handle; null is allowed.
void qz1_experts_free(struct qz1_experts *handle);

// `out[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`, in order of experts. `x` is `[tokens, hidden]`, `out` the
// same in single precision and overwritten; a token without experts gets zeros. Results are those of single products,
// to the bit, with any threads. Where `for_each` fails, `out` is written in part.
qz1_status qz1_experts_run(struct qz1_experts *handle,
                           const struct qz1_expert *experts,
                           size_t count,
                           const struct qz1_values *x,
                           const struct qz1_routing *routing,
                           float *out,
                           size_t out_len,
                           const struct qz1_parallel *parallel,
                           const struct qz1_message *message);

// The version of this interface: major above 16 bits of minor. Within a major, functions and fields are only added.
uint32_t qz1_abi_version(void);

// The version of the library, such as "0.1.0".
const char *qz1_version(void);

// 1 where a `QZ1_FEATURE_…` is there, else 0.
uint32_t qz1_has(uint32_t feature);

// 1 where the processor has a `QZ1_ISA_…`, else 0.
uint32_t qz1_isa_available(uint32_t isa);

// The instructions that `QZ1_ISA_DETECT` means here.
uint32_t qz1_isa_detect(void);

// The name of a `QZ1_ISA_…`, or null if there is no such name.
const char *qz1_isa_name(uint32_t isa);

// A handle for rows of width `n`; freed by `qz1_hadamard_free`. On an error `out` is set to null.
qz1_status qz1_hadamard_new(size_t n, struct qz1_hadamard **out, const struct qz1_message *message);

// Frees a handle; null is allowed.
void qz1_hadamard_free(struct qz1_hadamard *by);

// An entry of the matrix, 1 or −1; 0 where there is no such row or column, or the handle is null.
int32_t qz1_hadamard_sign(const struct qz1_hadamard *by, size_t row, size_t column);

// Transforms rows `[m, n]` in place, `m` the length over the width. A handle may be used by any number of threads.
qz1_status qz1_hadamard_transform(const struct qz1_hadamard *by,
                                  float *x,
                                  size_t len,
                                  uint32_t isa,
                                  const struct qz1_parallel *parallel,
                                  const struct qz1_message *message);

// The layout of pages of a `QZ1_KV_…` for heads of `head_dim` features. Fills `out`, whose `struct_size` is set.
qz1_status qz1_kv_layout_of(uint32_t kind,
                            size_t head_dim,
                            struct qz1_kv_layout *out,
                            const struct qz1_message *message);

// Quantizes one token of one head into `slot` of a page, below 64: `key` and `value` are `[head_dim]`, the key after
// rotary embedding. Other slots are left alone, and nothing is written where a value is refused: beyond ±65504.
qz1_status qz1_kv_write(const struct qz1_kv_layout *layout,
                        uint8_t *page,
                        size_t page_len,
                        size_t slot,
                        const float *key,
                        size_t key_len,
                        const float *value,
                        size_t value_len,
                        const struct qz1_message *message);

// Reads one token of one head back as floats, `[head_dim]` each.
qz1_status qz1_kv_read(const struct qz1_kv_layout *layout,
                       const uint8_t *page,
                       size_t page_len,
                       size_t slot,
                       float *key,
                       size_t key_len,
                       float *value,
                       size_t value_len,
                       const struct qz1_message *message);

// Quantizes `m` tokens and appends them behind the `tokens` of each list, one list a key-value head: `keys` and `values`
// are `[m, lists_len, head_dim]`, `pages` whole pages. Lists name pages for the new tokens too, none of these twice;
// the caller counts the tokens up afterwards.
qz1_status qz1_kv_append(const struct qz1_kv_layout *layout,
                         uint8_t *pages,
                         size_t pages_len,
                         const struct qz1_page_list *lists,
                         size_t lists_len,
                         const float *keys,
                         size_t keys_len,
                         const float *values,
                         size_t values_len,
                         const struct qz1_parallel *parallel,
                         const struct qz1_message *message);

// Writes to `words` how many words of 32 bits `qz1_attend` needs for so many queries on lists of at most so many tokens.
qz1_status qz1_attend_workspace(const struct qz1_kv_layout *layout,
                                const struct qz1_heads *heads,
                                size_t queries,
                                size_t tokens,
                                size_t *words,
                                const struct qz1_message *message);

// Attention of queries `q` `[m, heads.query, head_dim]` on a list for every key-value head: `out` is as `q`, `lse`
// `[m, heads.query]` the logarithm of the sum of `exp(score)`, with which `qz1_attend_merge` joins parts of a sequence.
//
// A query that sees nothing gets zeros and minus infinity; a head whose query is not finite gets NaN in both. `isa`
// is a `QZ1_ISA_…`: all give the same bits, with any threads, but for the outputs of `QZ1_ISA_AVX512BF16`. The workspace
// is the caller's, holds nothing that stays, and must not be that of another call that runs at once.
qz1_status qz1_attend(const struct qz1_kv_layout *layout,
                      const uint8_t *pages,
                      size_t pages_len,
                      const struct qz1_heads *heads,
                      const struct qz1_page_list *lists,
                      size_t lists_len,
                      const float *q,
                      size_t q_len,
                      float *out,
                      size_t out_len,
                      float *lse,
                      size_t lse_len,
                      uint32_t *workspace,
                      size_t workspace_len,
                      uint32_t isa,
                      const struct qz1_parallel *parallel,
                      const struct qz1_message *message);

// Joins what queries found in other tokens to what they found so far: `out` and `other` are `[rows, head_dim]`, `lse` and
// `other_lse` `[rows]`, as `qz1_attend` gives them.
qz1_status qz1_attend_merge(size_t head_dim,
                            float *out,
                            size_t out_len,
                            float *lse,
                            size_t lse_len,
                            const float *other,
                            size_t other_len,
                            const float *other_lse,
                            size_t other_lse_len,
                            const struct qz1_message *message);

// A cache for at most `max_tokens`, whose memory grows with its tokens; freed by `qz1_kv_cache_free`. On an error
// `out` is set to null.
qz1_status qz1_kv_cache_new(const struct qz1_kv_layout *layout,
                            const struct qz1_heads *heads,
                            size_t max_tokens,
                            struct qz1_kv_cache **out,
                            const struct qz1_message *message);

// Frees a handle; null is allowed.
void qz1_kv_cache_free(struct qz1_kv_cache *cache);

// Tokens that it holds; 0 of null.
size_t qz1_kv_cache_tokens(const struct qz1_kv_cache *cache);

// Bytes of its pages; 0 of null.
size_t qz1_kv_cache_bytes(const struct qz1_kv_cache *cache);

// Quantizes and appends `m` tokens: `keys`, after rotary embedding, and `values` are `[m, heads.kv, head_dim]`. It holds
// the tokens from before where the status is not 0.
qz1_status qz1_kv_cache_append(struct qz1_kv_cache *cache,
                               const float *keys,
                               size_t keys_len,
                               const float *values,
                               size_t values_len,
                               const struct qz1_parallel *parallel,
                               const struct qz1_message *message);

// The last token's queries, by the instructions that `QZ1_ISA_DETECT` means: `q` and `out` are `[heads.query, head_dim]`,
// `lse` `[heads.query]`. All tokens are seen; of none there are zeros and minus infinity.
qz1_status qz1_kv_cache_decode(struct qz1_kv_cache *cache,
                               const float *q,
                               size_t q_len,
                               float *out,
                               size_t out_len,
                               float *lse,
                               size_t lse_len,
                               const struct qz1_parallel *parallel,
                               const struct qz1_message *message);

// The queries of the last `m` tokens, which were appended before: `q` and `out` are `[m, heads.query, head_dim]`, `lse`
// `[m, heads.query]`. No query sees a token after its own.
qz1_status qz1_kv_cache_prefill(struct qz1_kv_cache *cache,
                                const float *q,
                                size_t q_len,
                                float *out,
                                size_t out_len,
                                float *lse,
                                size_t lse_len,
                                const struct qz1_parallel *parallel,
                                const struct qz1_message *message);

// Forgets all but the first `tokens`, which it holds; memory stays for the next.
qz1_status qz1_kv_cache_truncate(struct qz1_kv_cache *cache,
                                 size_t tokens,
                                 const struct qz1_message *message);

// Forgets all tokens; memory stays for the next.
qz1_status qz1_kv_cache_clear(struct qz1_kv_cache *cache, const struct qz1_message *message);

// `out = x · Wᵀ + bias` on integers: `out` is `[m, n]`, `bias` `[n]` or null. `isa` is a `QZ1_ISA_…`; all give
// the same bits, with any threads.
qz1_status qz1_multiply(const struct qz1_layout *layout,
                        const uint8_t *packed,
                        size_t packed_len,
                        const struct qz1_int8_rows *x,
                        const float *bias,
                        size_t bias_len,
                        float *out,
                        size_t out_len,
                        uint32_t isa,
                        const struct qz1_parallel *parallel,
                        const struct qz1_message *message);

// The same on floats, by the instructions that the handle was made for.
qz1_status qz1_multiply_float(const struct qz1_layout *layout,
                              const uint8_t *packed,
                              size_t packed_len,
                              const struct qz1_float_rows *x,
                              const float *bias,
                              size_t bias_len,
                              float *out,
                              size_t out_len,
                              const struct qz1_parallel *parallel,
                              const struct qz1_message *message);

// A handle for quantized rows, made by the instructions `isa`; freed by `qz1_int8_rows_free`. On an
// error `out` is set to null.
qz1_status qz1_int8_rows_new(uint32_t isa, struct qz1_int8_rows **out, const struct qz1_message *message);

// Frees a handle; null is allowed.
void qz1_int8_rows_free(struct qz1_int8_rows *rows);

// Quantizes rows `[m, k]`, `m` the length over the layout's `k`: per token, or where `by` is not null by one scale.
qz1_status qz1_int8_rows_quantize(struct qz1_int8_rows *rows,
                                  const struct qz1_layout *layout,
                                  const struct qz1_values *x,
                                  const struct qz1_static_scale *by,
                                  const struct qz1_parallel *parallel,
                                  const struct qz1_message *message);

// Quantizes the RMSNorm of rows. Where `residual` is not null, its rows `[m, k]`, of the same type, get `x` added
// first, and the sum is normed.
qz1_status qz1_int8_rows_quantize_rms_norm(struct qz1_int8_rows *rows,
                                           const struct qz1_layout *layout,
                                           const struct qz1_values *x,
                                           const struct qz1_rms_norm *norm,
                                           const struct qz1_residual *residual,
                                           const struct qz1_static_scale *by,
                                           const struct qz1_parallel *parallel,
                                           const struct qz1_message *message);

// Quantizes `silu(gate) · up`. Where `up` is null, `gate` holds both: rows `[m, 2k]`, each a row of the gate and then
// one of the other.
qz1_status qz1_int8_rows_quantize_silu_mul(struct qz1_int8_rows *rows,
                                           const struct qz1_layout *layout,
                                           const struct qz1_values *gate,
                                           const struct qz1_values *up,
                                           const struct qz1_static_scale *by,
                                           const struct qz1_parallel *parallel,
                                           const struct qz1_message *message);

// A handle for float rows, packed for the instructions `isa`; freed by `qz1_float_rows_free`. On an
// error `out` is set to null.
qz1_status qz1_float_rows_new(uint32_t isa, struct qz1_float_rows **out, const struct qz1_message *message);

// Frees a handle; null is allowed.
void qz1_float_rows_free(struct qz1_float_rows *rows);

// Packs rows `[m, k]` of floats.
qz1_status qz1_float_rows_pack(struct qz1_float_rows *rows,
                               const struct qz1_layout *layout,
                               const struct qz1_values *x,
                               const struct qz1_parallel *parallel,
                               const struct qz1_message *message);

// Packs the RMSNorm of rows, as `qz1_int8_rows_quantize_rms_norm` quantizes it.
qz1_status qz1_float_rows_pack_rms_norm(struct qz1_float_rows *rows,
                                        const struct qz1_layout *layout,
                                        const struct qz1_values *x,
                                        const struct qz1_rms_norm *norm,
                                        const struct qz1_residual *residual,
                                        const struct qz1_parallel *parallel,
                                        const struct qz1_message *message);

// Packs `silu(gate) · up`, as `qz1_int8_rows_quantize_silu_mul` quantizes it.
qz1_status qz1_float_rows_pack_silu_mul(struct qz1_float_rows *rows,
                                        const struct qz1_layout *layout,
                                        const struct qz1_values *gate,
                                        const struct qz1_values *up,
                                        const struct qz1_parallel *parallel,
                                        const struct qz1_message *message);

// The layout of weights; with `sums` not 0 it holds what activations with a zero need. Fills `out`, whose
// `struct_size` is set.
qz1_status qz1_layout_of(const struct qz1_weights *weights,
                         uint32_t sums,
                         struct qz1_layout *out,
                         const struct qz1_message *message);

// Packs `panels` panels of weights from `first_panel` on into `out`, which has `panels · panel_bytes` bytes: all
// are 0 and `layout.panels`. `parallel` is null or the caller's threads.
qz1_status qz1_pack(const struct qz1_weights *weights,
                    const struct qz1_layout *layout,
                    size_t first_panel,
                    size_t panels,
                    uint8_t *out,
                    size_t out_len,
                    const struct qz1_parallel *parallel,
                    const struct qz1_message *message);

// Whether packed bytes that come from elsewhere, such as a file, are what `qz1_pack` writes: codes and scales are numbers
// of their formats. It reads all of them, once. Kernels take other bytes too, and count a code of NaN as 480, a scale of
// NaN as 480 or infinity.
qz1_status qz1_check(const struct qz1_layout *layout,
                     const uint8_t *packed,
                     size_t packed_len,
                     const struct qz1_message *message);

// Writes the parts of packed weights, each of the length that `qz1_parts` says.
qz1_status qz1_unpack(const struct qz1_layout *layout,
                      const uint8_t *packed,
                      size_t packed_len,
                      const struct qz1_parts *parts,
                      const struct qz1_message *message);

// Writes `rows` rows of packed weights from `first_row` on as floats, `[rows, k]`.
qz1_status qz1_dequantize_rows(const struct qz1_layout *layout,
                               const uint8_t *packed,
                               size_t packed_len,
                               size_t first_row,
                               size_t rows,
                               float *out,
                               size_t out_len,
                               const struct qz1_message *message);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QUANT_KERNELS_H */
