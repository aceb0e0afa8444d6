/* Kernels for NVIDIA GPUs: the C interface of the Rust crate quant-kernels-cuda, in libraries that are built with the
 * feature `cuda`, for which qz1_has(QZ1_FEATURE_CUDA) is 1. Written by cbindgen; `cargo test -p quant-kernels-c --test
 * header` compares it. Not yet run on a device.
 *
 * What quant_kernels.h says of statuses, structures and messages holds here. Neither it nor this needs a header of
 * CUDA's: a stream is a CUstream or cudaStream_t, null for the context's own; an address is a CUdeviceptr or a pointer of
 * CUDA's. The driver and NVRTC are loaded when first asked for.
 *
 * Every family has two functions and two structures:
 *
 *     qz1_cuda_FAMILY_plan(kernels, shape, &plan, message)        compiles and loads what the shape takes
 *     qz1_cuda_plan_workspace(plan, &bytes, &tickets, message)    what the caller allocates
 *     qz1_cuda_FAMILY_launch(plan, arguments, stream, message)    puts it on the stream
 *
 * A plan takes a context that is current on the calling thread, as CUDA's runtime or a framework leaves it; the first of
 * its kind compiles, which takes a tenth of a second and may wait for the device, so plans are made ahead. A launch
 * allocates nothing on the device, waits for nothing, may be captured into a graph, and is refused for a region that is
 * null, misaligned or too short. What is in device memory nobody looks at; that regions overlap nobody sees. What goes
 * wrong on the device is an error of later calls of CUDA's.
 *
 * Matrices are row-major. Contexts outlive handles and plans.
 */

#ifndef QUANT_KERNELS_CUDA_H
#define QUANT_KERNELS_CUDA_H

#include "quant_kernels.h"

// Weights that are multiplied with f16 or bf16.
#define QZ1_CUDA_ORDER_FLOAT 1

// Weights that are multiplied with integers of 8 bits.
#define QZ1_CUDA_ORDER_INT8 2

// Integers of 8 bits with a scale per token, beside the `QZ1_TYPE_…` of floats.
#define QZ1_CUDA_TYPE_INT8 4

// Rows as they are.
#define QZ1_CUDA_ROWS_PLAIN 1

// Their RMSNorm: `x / √(mean x² + eps) · weight`.
#define QZ1_CUDA_ROWS_RMS_NORM 2

// The same of `residual + x`, which is rounded to its type and stored in the residual's place.
#define QZ1_CUDA_ROWS_RESIDUAL_RMS_NORM 3

// `silu(x) · up`.
#define QZ1_CUDA_ROWS_SILU_MUL 4

// Kernels that are compiled and loaded when a plan first takes them. Any number of threads may use it at once.
typedef struct qz1_cuda_kernels qz1_cuda_kernels;

// A launch of any family, settled but for addresses, and its kernels. It never changes: any number of threads may use it
// at once, and launches may repeat it. It belongs to the context in which it was made.
typedef struct qz1_cuda_plan qz1_cuda_plan;

// What plans depend on, of a device.
typedef struct qz1_cuda_device {
  // `sizeof(qz1_cuda_device)`
  uint32_t struct_size;
  // Compute capability, major.
  uint32_t capability_major;
  // Compute capability, minor.
  uint32_t capability_minor;
  // Multiprocessors.
  uint32_t multiprocessors;
  // Bytes of shared memory that one block may have, if it asks for them.
  uint32_t shared_of_block;
  // Bytes of shared memory that a multiprocessor has.
  uint32_t shared_of_multiprocessor;
} qz1_cuda_device;

// Where everything is in packed bytes: tiles of 16 output features and 128 input features, one order for all
// architectures. Made by `qz1_cuda_layout_of` or `qz1_cuda_layout_from`; its fields may be kept beside the bytes, and are
// checked against `id` whenever it is used.
typedef struct qz1_cuda_layout {
  // `sizeof(qz1_cuda_layout)`
  uint32_t struct_size;
  // `QZ1_CUDA_ORDER_…`
  uint32_t order;
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
  // `QZ1_CODES_…`; floating-point codes are of `QZ1_CUDA_ORDER_FLOAT`, with `middle` 0.
  uint32_t format;
  // Output features.
  uint64_t n;
  // Input features.
  uint64_t k;
  // Input features that share a scale: 32, 64, 128 or `k`; with floats and with two levels of scales any multiple of 128;
  // of floating-point codes also 16.
  uint64_t group_size;
  // Bytes of the matrix, a multiple of 256. On the device it begins at one.
  uint64_t bytes;
  // Names the order and all that it depends on.
  uint64_t id;
} qz1_cuda_layout;

// What is packed.
typedef struct qz1_cuda_pack_shape {
  // `sizeof(qz1_cuda_pack_shape)`
  uint32_t struct_size;
  // Bits of a code, 2 to 8: those of the layout, or fewer that are stored in as many.
  uint32_t bits;
  // What is made.
  const struct qz1_cuda_layout *layout;
} qz1_cuda_pack_shape;

// Bytes on a device that are the caller's: where they begin, as `CUdeviceptr` or a pointer of CUDA's, and how many
// belong to this argument. `{0, 0}` means that it is absent. The one structure that does not begin with its size: it does not grow.
typedef struct qz1_cuda_region {
  // The address.
  uint64_t address;
  // Bytes from there on.
  uint64_t bytes;
} qz1_cuda_region;

// Where weights are on the device, as `qz1_weights` has them; addresses are aligned to what stands there.
typedef struct qz1_cuda_pack_arguments {
  // `sizeof(qz1_cuda_pack_arguments)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // u8 `[n, k]`, one code a byte.
  struct qz1_cuda_region codes;
  // f32 `[n, k / group_size]`, rounded to the type of the layout; with two levels u8, those of groups, and of E4M3
  // scales their codes.
  struct qz1_cuda_region scales;
  // f32 `[n]` with two levels of scales; of E4M3 scales `[1]`, what they are divided by; else none.
  struct qz1_cuda_region channels;
  // u8 `[n, k / group_size]` where the layout has zeros, else none.
  struct qz1_cuda_region zeros;
  // A u32 that is 0 before and, when the launch is done, 1 where `qz1_cuda_pack` would have refused a code, zero or
  // scale.
  struct qz1_cuda_region fault;
  // `layout.bytes` bytes at a multiple of 256. Bytes between its sections stay what they were.
  struct qz1_cuda_region out;
} qz1_cuda_pack_arguments;

// `out = x · Wᵀ + bias` of `m` tokens.
typedef struct qz1_cuda_linear_shape {
  // `sizeof(qz1_cuda_linear_shape)`
  uint32_t struct_size;
  // Of activations: `QZ1_TYPE_F16` or `QZ1_TYPE_BF16` with weights of `QZ1_CUDA_ORDER_FLOAT`, `QZ1_CUDA_TYPE_INT8` with
  // those of `QZ1_CUDA_ORDER_INT8`.
  uint32_t x_type;
  // Of results: a `QZ1_TYPE_…`.
  uint32_t out_type;
  // 0
  uint32_t reserved;
  // That of the weights.
  const struct qz1_cuda_layout *layout;
  // Tokens. 0 launches nothing.
  size_t m;
} qz1_cuda_linear_shape;

// Where things are on the device.
typedef struct qz1_cuda_linear_arguments {
  // `sizeof(qz1_cuda_linear_arguments)`
  uint32_t struct_size;
  // The zero of activations of 8 bits, −128 to 127, the same for all tokens; other than 0 only with the sums of a layout.
  int32_t x_zero;
  // The packed matrix: `layout.bytes` bytes at a multiple of 256.
  struct qz1_cuda_region weight;
  // `[m, k]` at a multiple of 16.
  struct qz1_cuda_region x;
  // f32 `[m]`: the scales of activations of 8 bits, else none.
  struct qz1_cuda_region x_scales;
  // f32 `[n]`, or none.
  struct qz1_cuda_region bias;
  // `[m, n]`, aligned to its type.
  struct qz1_cuda_region out;
  // The bytes of tickets that `qz1_cuda_plan_workspace` says, or more, at a multiple of 256: 0 before the first launch.
  struct qz1_cuda_region tickets;
  // The bytes that it says, or more, at a multiple of 256.
  struct qz1_cuda_region workspace;
  // Elements between rows of activations, whose bytes are a multiple of 16; 0: `k` rounded up to that.
  size_t x_stride;
  // Elements between rows of results; 0: `n`.
  size_t out_stride;
} qz1_cuda_linear_arguments;

// `m` rows of `k` floats to codes, a scale per row, and sums of codes.
typedef struct qz1_cuda_activation_shape {
  // `sizeof(qz1_cuda_activation_shape)`
  uint32_t struct_size;
  // `QZ1_CUDA_ROWS_…`
  uint32_t rows;
  // Of rows, `QZ1_TYPE_…`: `x`, `up` and `residual`.
  uint32_t x_type;
  // Of the weight of a norm, `QZ1_TYPE_…`; 0: that of rows.
  uint32_t weight_type;
  // 1: the scale and zero of the launch's arguments are those of all rows. 0: each row has a scale of its own, and no
  // zero.
  uint32_t fixed;
  // 0: float rows and weights begin at multiples of 16 bytes. 1: at any element, which is read slower.
  uint32_t unaligned;
  // Rows: tokens. 0 launches nothing.
  size_t m;
  // Values of a row, up to 360,448.
  size_t k;
  // Features whose codes are added up, a multiple of 32, the last group the rest; 0: no sums of groups.
  size_t group;
  // Elements between rows of `x`; 0: `k`.
  size_t x_stride;
  // Elements between rows of `up`; 0: `k`.
  size_t up_stride;
  // Elements between rows of the residual; 0: `k`.
  size_t residual_stride;
  // Bytes between rows of codes, a multiple of 16; 0: `k` rounded up to that.
  size_t code_stride;
} qz1_cuda_activation_shape;

// Where things are on the device, and numbers. What the shape does not ask for is left absent.
typedef struct qz1_cuda_activation_arguments {
  // `sizeof(qz1_cuda_activation_arguments)`
  uint32_t struct_size;
  // Of a norm: above zero and finite.
  float eps;
  // With `fixed`: above zero, and so is its inverse. `x ≈ scale · (code − zero)`.
  float scale;
  // With `fixed`: −128 to 127.
  int32_t zero;
  // `[m, k]`: rows, or the gate.
  struct qz1_cuda_region x;
  // `[m, k]`, of `silu(x) · up`.
  struct qz1_cuda_region up;
  // `[m, k]`, read and written.
  struct qz1_cuda_region residual;
  // `[k]`, of a norm.
  struct qz1_cuda_region weight;
  // i8 `[m, k]` at a multiple of 16. Bytes between rows stay what they were.
  struct qz1_cuda_region codes;
  // f32 `[m]`
  struct qz1_cuda_region scales;
  // i32 `[m]`: sums of a row's codes; or none.
  struct qz1_cuda_region row_sums;
  // i32 `[m, ⌈k / group⌉]`, where there are groups.
  struct qz1_cuda_region group_sums;
} qz1_cuda_activation_arguments;

// Pages of keys and values of one key-value head on the device. Made by `qz1_cuda_kv_layout_of`; its fields may be kept
// beside pages, and are checked against `id` whenever it is used.
typedef struct qz1_cuda_kv_layout {
  // `sizeof(qz1_cuda_kv_layout)`
  uint32_t struct_size;
  // `QZ1_KV_…`
  uint32_t kind;
  // Features of a head: a multiple of 16 up to 256; multiples of 32 waste nothing.
  uint32_t head_dim;
  // Tokens of a page: 16, 32, 64, … 1024.
  uint32_t page_tokens;
  // Bytes of a page of one head, a multiple of 128.
  uint64_t page_bytes;
  // Names the order and what it depends on, but for the tokens of a page.
  uint64_t id;
} qz1_cuda_kv_layout;

// Tokens of any sequences, quantized and stored.
typedef struct qz1_cuda_append_shape {
  // `sizeof(qz1_cuda_append_shape)`
  uint32_t struct_size;
  // Of keys and values: a `QZ1_TYPE_…`.
  uint32_t x_type;
  // That of the pages.
  const struct qz1_cuda_kv_layout *layout;
  // Key-value heads, up to 65535.
  size_t kv_heads;
  // Tokens. 0 launches nothing.
  size_t tokens;
} qz1_cuda_append_shape;

// Where things are on the device, at multiples of 16.
typedef struct qz1_cuda_append_arguments {
  // `sizeof(qz1_cuda_append_arguments)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // `[tokens, kv_heads, head_dim]`, after rotary embedding.
  struct qz1_cuda_region keys;
  // As keys.
  struct qz1_cuda_region values;
  // u32 `[tokens]`: the row of the table that a token belongs to.
  struct qz1_cuda_region sequence;
  // u32 `[tokens]`: where in its sequence a token is stored; `UINT32_MAX` is skipped.
  struct qz1_cuda_region position;
  // u32 `[sequences, table_stride]`: numbers of pages in order. Which rows `sequence` names nobody looks at.
  struct qz1_cuda_region table;
  // Pages, all heads: from the first head of page 0 on. Tokens whose page is not wholly within are skipped.
  struct qz1_cuda_region pages;
  // A u32, aligned to its type, that grows by the rows which hold a value beyond ±65504 or NaN, stored as if limited; or
  // none.
  struct qz1_cuda_region refused;
  // Elements between tokens of `keys`, whose bytes are a multiple of 16; 0: `kv_heads · head_dim`.
  size_t key_stride;
  // The same of `values`.
  size_t value_stride;
  // Entries between rows of the table.
  size_t table_stride;
  // Bytes between pages of one head, a multiple of 16; 0: `kv_heads · page_bytes`.
  size_t page_stride;
  // Bytes between heads of one page, a multiple of 16; 0: `page_bytes`.
  size_t head_stride;
} qz1_cuda_append_arguments;

// Attention of the last queries of each sequence. The plan holds for any number of tokens up to `max_tokens`, so it can
// be kept, or captured in a graph, while sequences grow.
typedef struct qz1_cuda_decode_shape {
  // `sizeof(qz1_cuda_decode_shape)`
  uint32_t struct_size;
  // Of queries: `QZ1_TYPE_F16` or `QZ1_TYPE_BF16`.
  uint32_t query_type;
  // Of outputs: a `QZ1_TYPE_…`.
  uint32_t out_type;
  // 0
  uint32_t reserved;
  // That of the pages.
  const struct qz1_cuda_kv_layout *layout;
  // A multiple of the key-value heads, up to 65535: query head `h` attends with head `h / (query_heads / kv_heads)`.
  size_t query_heads;
  // Key-value heads.
  size_t kv_heads;
  // Sequences, up to 65535. 0 launches nothing.
  size_t sequences;
  // Queries of each sequence: its last tokens', in order, of which each sees none that comes after it. 1 decodes.
  size_t queries;
  // At least the tokens of the longest list; decides about the workspace, and changes no result.
  size_t max_tokens;
} qz1_cuda_decode_shape;

// Where things are on the device, at multiples of 16 but where said. In a table and in counts an entry of `sequence` and
// `kv_head` is at the sum of each times its stride: 0 where all share one.
typedef struct qz1_cuda_decode_arguments {
  // `sizeof(qz1_cuda_decode_arguments)`
  uint32_t struct_size;
  // What scores are multiplied with, usually `1 / √head_dim`; finite.
  float scale;
  // `[sequences, queries, query_heads, head_dim]`
  struct qz1_cuda_region query;
  // Pages, all heads: from the first head of page 0 on. That numbers of pages are within nobody looks at.
  struct qz1_cuda_region pages;
  // u32 numbers of pages, in order: those of a list follow each other.
  struct qz1_cuda_region table;
  // u32: tokens of each list, up to `max_tokens`.
  struct qz1_cuda_region tokens;
  // u32: tokens at the beginning of each list that are not seen; or none.
  struct qz1_cuda_region first;
  // `[sequences, queries, query_heads, head_dim]`, aligned to its type.
  struct qz1_cuda_region out;
  // f32 `[sequences, queries, query_heads]`, aligned to its type: natural logarithms of the sums of exponentials, minus
  // infinity of a query that sees nothing; or none.
  struct qz1_cuda_region lse;
  // The bytes of tickets that `qz1_cuda_plan_workspace` says, or more, at a multiple of 256: 0 before the first launch.
  struct qz1_cuda_region tickets;
  // The bytes that it says, or more, at a multiple of 256.
  struct qz1_cuda_region workspace;
  // Elements between queries, a multiple of 4; 0: `query_heads · head_dim`.
  size_t query_stride;
  // Bytes between pages of one head, a multiple of 16; 0: `kv_heads · page_bytes`.
  size_t page_stride;
  // Bytes between heads of one page, a multiple of 16; 0: `page_bytes`.
  size_t head_stride;
  // Entries of the table between sequences.
  size_t table_stride;
  // Entries of the table between key-value heads: usually 0.
  size_t table_head_stride;
  // Entries of `tokens` and `first` between sequences: usually 1.
  size_t count_stride;
  // Entries of `tokens` and `first` between key-value heads: usually 0.
  size_t count_head_stride;
} qz1_cuda_decode_arguments;

// Results on parts of sequences, to be joined by their logarithms.
typedef struct qz1_cuda_merge_shape {
  // `sizeof(qz1_cuda_merge_shape)`
  uint32_t struct_size;
  // Of joined rows: a `QZ1_TYPE_…`; parts are f32.
  uint32_t out_type;
  // Parts, in order.
  size_t parts;
  // Rows of each: sequences times queries times query heads. 0 launches nothing.
  size_t rows;
  // Features of a row.
  size_t head_dim;
} qz1_cuda_merge_shape;

// Where things are on the device, aligned to their types.
typedef struct qz1_cuda_merge_arguments {
  // `sizeof(qz1_cuda_merge_arguments)`
  uint32_t struct_size;
  // 0
  uint32_t reserved;
  // f32 `[parts, rows, head_dim]`
  struct qz1_cuda_region sums;
  // f32 `[parts, rows]`: logarithms as attention gives them, minus infinity of a part that saw nothing.
  struct qz1_cuda_region logs;
  // `[rows, head_dim]`
  struct qz1_cuda_region out;
  // f32 `[rows]`, or none.
  struct qz1_cuda_region lse;
} qz1_cuda_merge_arguments;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// 0 where there is a driver that shows a device, else `QZ1_STATUS_CUDA_MISSING`, or `QZ1_STATUS_CUDA_FAILED` where the
// driver cannot start; the message says what to install. Needs no context.
qz1_status qz1_cuda_require_device(const qz1_message *message);

// 0 where NVRTC, which compiles kernels, can be loaded: from the loader's path, or where the environment variable
// `QUANT_NVRTC` says. Else `QZ1_STATUS_CUDA_MISSING`: plans can be made only of kernels whose images lie in a directory.
qz1_status qz1_cuda_require_compiler(const qz1_message *message);

// The device whose context is current on the calling thread. Fills `out`, whose `struct_size` is set.
qz1_status qz1_cuda_current_device(struct qz1_cuda_device *out, const qz1_message *message);

// A handle for kernels, without any yet; needs no driver. `images` names a directory where compiled kernels are kept,
// closed by a zero byte, UTF-8 where paths are not bytes: empty for none, null for that of the environment variable
// `QUANT_CUDA_CACHE`, or else `quant/cuda` among the user's caches. The driver runs what lies there: it must belong to who
// runs the program. Freed by `qz1_cuda_kernels_free`; On an error `out` is set to null.
qz1_status qz1_cuda_kernels_new(const char *images,
                                struct qz1_cuda_kernels **out,
                                const qz1_message *message);

// Frees a handle; null is allowed. Plans stay. A kernel is unloaded when the handle and all plans that have it are freed, so
// what was launched must be done when the last of them is.
void qz1_cuda_kernels_free(struct qz1_cuda_kernels *kernels);

// Bytes of device memory that a launch works in, each at a multiple of 256; both may be 0. A workspace may hold anything.
// Tickets are 0 before a launch, which leaves them 0. Launches of any plans, one after the other, share both, if there
// are as many bytes as the largest asks for; launches that may run at the same time need their own.
qz1_status qz1_cuda_plan_workspace(const struct qz1_cuda_plan *plan,
                                   size_t *bytes,
                                   size_t *tickets,
                                   const qz1_message *message);

// Frees a plan; null is allowed. What was launched goes on while the kernels' handle is there.
void qz1_cuda_plan_free(struct qz1_cuda_plan *plan);

// The layout of weights that are multiplied with what `order`, a `QZ1_CUDA_ORDER_…`, says; with `sums` not 0 it holds
// what activations of 8 bits with a zero need. Scales are stored in the narrowest type that holds all of them. Fills `out`,
// whose `struct_size` is set.
qz1_status qz1_cuda_layout_of(const qz1_weights *weights,
                              uint32_t order,
                              uint32_t sums,
                              struct qz1_cuda_layout *out,
                              const qz1_message *message);

// The same without weights at hand: `bytes` and `id` of the other fields, for weights that are packed on the device, or
// to know their size. Fills `out`, whose `struct_size` is set; `parts` is another structure.
qz1_status qz1_cuda_layout_from(const struct qz1_cuda_layout *parts,
                                struct qz1_cuda_layout *out,
                                const qz1_message *message);

// Packs weights on the CPU into `out`, which has `layout.bytes` bytes, to be copied to the device or kept. Bytes
// between sections are 0, the others those that `qz1_cuda_pack_launch` writes.
qz1_status qz1_cuda_pack(const qz1_weights *weights,
                         const struct qz1_cuda_layout *layout,
                         uint8_t *out,
                         size_t out_len,
                         const qz1_message *message);

// Plans a packing on the device.
qz1_status qz1_cuda_pack_plan(const struct qz1_cuda_kernels *kernels,
                              const struct qz1_cuda_pack_shape *shape,
                              struct qz1_cuda_plan **out,
                              const qz1_message *message);

// Packs weights on the device.
qz1_status qz1_cuda_pack_launch(const struct qz1_cuda_plan *plan,
                                const struct qz1_cuda_pack_arguments *arguments,
                                void *stream,
                                const qz1_message *message);

// Plans a product for the device whose context is current. Which kernel it takes depends on the weights, and by few steps
// on `m`: plans for 1, 16, 32, 64, 128 and the most tokens, made ahead, load what other numbers take, or nearly so. A row
// of results does not depend on `m`, to the bit.
qz1_status qz1_cuda_linear_plan(const struct qz1_cuda_kernels *kernels,
                                const struct qz1_cuda_linear_shape *shape,
                                struct qz1_cuda_plan **out,
                                const qz1_message *message);

// Multiplies.
qz1_status qz1_cuda_linear_launch(const struct qz1_cuda_plan *plan,
                                  const struct qz1_cuda_linear_arguments *arguments,
                                  void *stream,
                                  const qz1_message *message);

// Plans a quantization.
qz1_status qz1_cuda_activation_plan(const struct qz1_cuda_kernels *kernels,
                                    const struct qz1_cuda_activation_shape *shape,
                                    struct qz1_cuda_plan **out,
                                    const qz1_message *message);

// Quantizes.
qz1_status qz1_cuda_activation_launch(const struct qz1_cuda_plan *plan,
                                      const struct qz1_cuda_activation_arguments *arguments,
                                      void *stream,
                                      const qz1_message *message);

// The layout of pages of a `QZ1_KV_…` for heads of `head_dim` features. Fills `out`, whose `struct_size` is set.
qz1_status qz1_cuda_kv_layout_of(uint32_t kind,
                                 size_t head_dim,
                                 size_t page_tokens,
                                 struct qz1_cuda_kv_layout *out,
                                 const qz1_message *message);

// Plans an append.
qz1_status qz1_cuda_append_plan(const struct qz1_cuda_kernels *kernels,
                                const struct qz1_cuda_append_shape *shape,
                                struct qz1_cuda_plan **out,
                                const qz1_message *message);

// Quantizes keys and values of tokens and stores them.
qz1_status qz1_cuda_append_launch(const struct qz1_cuda_plan *plan,
                                  const struct qz1_cuda_append_arguments *arguments,
                                  void *stream,
                                  const qz1_message *message);

// Plans attention. Which kernel it takes depends on the pages and types, and on whether more than eight queries and heads
// share a key-value head.
qz1_status qz1_cuda_decode_plan(const struct qz1_cuda_kernels *kernels,
                                const struct qz1_cuda_decode_shape *shape,
                                struct qz1_cuda_plan **out,
                                const qz1_message *message);

// Attends.
qz1_status qz1_cuda_decode_launch(const struct qz1_cuda_plan *plan,
                                  const struct qz1_cuda_decode_arguments *arguments,
                                  void *stream,
                                  const qz1_message *message);

// Plans a merge.
qz1_status qz1_cuda_merge_plan(const struct qz1_cuda_kernels *kernels,
                               const struct qz1_cuda_merge_shape *shape,
                               struct qz1_cuda_plan **out,
                               const qz1_message *message);

// Joins what the same queries found in different tokens.
qz1_status qz1_cuda_merge_launch(const struct qz1_cuda_plan *plan,
                                 const struct qz1_cuda_merge_arguments *arguments,
                                 void *stream,
                                 const qz1_message *message);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QUANT_KERNELS_CUDA_H */
