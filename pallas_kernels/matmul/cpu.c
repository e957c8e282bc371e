// Products of tokens with a matrix of bfloat16, or of int8 with a scale a channel.
//
// Where the CPU has a unit for products of tiles, tokens of bfloat16 go through that, all others
// through vectors of float32.

#include "cpu_tiles.h"
#include "cpu_vectors.h"

enum { X, WEIGHTS, SCALES, LAYER, NUM_TOKENS, NORM, EPS, RESIDUAL, BY_TILES, NUM_ARGUMENTS };

static inline int is_empty(const XLA_FFI_Buffer *buffer) {
  int64_t size = 1;
  for (int64_t axis = 0; axis < buffer->rank; axis++) size *= buffer->dims[axis];
  return size == 0;
}

// Row `layer` of an array of rows, or none of an array of none.
static Reals row_of(const XLA_FFI_Buffer *array, int64_t layer) {
  if (is_empty(array)) return (Reals){NULL, 0};
  Reals rows = reals_of(array);
  int64_t at = layer * array->dims[1] * (rows.is_bfloat16 ? sizeof(bfloat16) : sizeof(float));
  return (Reals){(char *)rows.data + at, rows.is_bfloat16};
}

// Arguments, by number: x [M, D], or [M, 1, 2, D], gates and what they let through; weights [L, F, D]
// bfloat16, or int8 with scales [L, F] float32, else [0]; layer and number of live tokens, int32; the
// weights [L, D] of a norm of x, or [0], and its epsilon, float32; what is added to the product
// [M, F], or [0]; int32 1 if the unit for tiles shall multiply. Result: [M, F], zeros past the live
// tokens. Reals are bfloat16 or float32; tiles take x of bfloat16.
XLA_FFI_Error *jaxserve_matmul(XLA_FFI_CallFrame *frame) {
  if (is_no_execution(frame)) return NULL;
  if (frame->args.size != NUM_ARGUMENTS) return error_of(frame, OTHER_VERSION);
  const XLA_FFI_Buffer **in = (const XLA_FFI_Buffer **)frame->args.args;
  const XLA_FFI_Buffer *x = in[X], *weights = in[WEIGHTS], *out = frame->rets.rets[0];
  int64_t max_tokens = x->dims[0], width = x->dims[x->rank - 1], num_channels = weights->dims[1];
  int64_t layer = *(const int32_t *)in[LAYER]->data;
  int64_t num_tokens = *(const int32_t *)in[NUM_TOKENS]->data;
  num_tokens = num_tokens < 0 ? 0 : num_tokens > max_tokens ? max_tokens : num_tokens;
  layer = layer < 0 ? 0 : layer >= weights->dims[0] ? weights->dims[0] - 1 : layer;
  Tokens tokens = {.x = reals_of(x), .norm = row_of(in[NORM], layer),
                   .eps = *(const float *)in[EPS]->data, .is_gated = x->rank == 4, .width = width};
  Results results = {.out = reals_of(out), .num_channels = num_channels};
  if (!is_empty(in[RESIDUAL])) results.residual = reals_of(in[RESIDUAL]);
  int64_t token_bytes = num_channels * (results.out.is_bfloat16 ? sizeof(bfloat16) : sizeof(float));
  memset((char *)out->data + num_tokens * token_bytes, 0, (max_tokens - num_tokens) * token_bytes);
  if (num_tokens == 0) return NULL;
  int is_int8 = !is_empty(in[SCALES]);
  int64_t entry_bytes = is_int8 ? sizeof(int8_t) : sizeof(bfloat16);
  const char *matrix = (const char *)weights->data + layer * num_channels * width * entry_bytes;
  const float *scales = is_int8 ? (const float *)in[SCALES]->data + layer * num_channels : NULL;
  if (*(const int32_t *)in[BY_TILES]->data) {
#if HAS_TILES
    TileProduct product = {.tokens = &tokens, .results = &results, .weights = matrix,
                           .scales = scales, .num_tokens = num_tokens, .width = width,
                           .num_channels = num_channels};
    multiply_tiles(frame, product);
    return NULL;
#else
    return error_of(frame, NO_TILES);
#endif
  }
  Product product = {.tokens = &tokens, .results = &results, .weights = matrix, .scales = scales,
                     .num_tokens = num_tokens, .width = width, .num_channels = num_channels};
  multiply_vectors(frame, product);
  return NULL;
}
