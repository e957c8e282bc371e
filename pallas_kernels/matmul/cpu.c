// Products of tokens with a matrix of bfloat16, or of int8 with a scale a channel.
//
// Where the CPU has a unit for products of tiles, tokens of bfloat16 go through that, all others
// through vectors of float32.

#include "cpu_tiles.h"
#include "cpu_vectors.h"

enum { RUN = 48 };  // channels that a thread takes at a time

// Arguments: x [M, D] float32, or bfloat16 where the CPU has tiles, weights [L, F, D] bfloat16,
// (layer, number of live tokens) int32; or weights int8, and scales [L, F] float32 last. Result:
// [M, F] float32, or bfloat16 as x is, zeros past the live tokens.
XLA_FFI_Error *jaxserve_matmul(XLA_FFI_CallFrame *frame) {
  if (is_no_execution(frame)) return NULL;
  const XLA_FFI_Buffer *x = frame->args.args[0], *weights = frame->args.args[1];
  const XLA_FFI_Buffer *where = frame->args.args[2], *out = frame->rets.rets[0];
  const XLA_FFI_Buffer *scales = frame->args.size > 3 ? frame->args.args[3] : NULL;
  int64_t max_tokens = x->dims[0], width = x->dims[1], num_channels = weights->dims[1];
  int64_t layer = ((const int32_t *)where->data)[0], num_tokens = ((const int32_t *)where->data)[1];
  num_tokens = num_tokens < 0 ? 0 : num_tokens > max_tokens ? max_tokens : num_tokens;
  layer = layer < 0 ? 0 : layer >= weights->dims[0] ? weights->dims[0] - 1 : layer;
  int is_rounded = out->dtype == XLA_FFI_DataType_BF16;
  int64_t token_bytes = num_channels * (is_rounded ? 2 : 4);
  memset((char *)out->data + num_tokens * token_bytes, 0, (max_tokens - num_tokens) * token_bytes);
  if (num_tokens == 0) return NULL;
  int64_t entry_bytes = scales ? sizeof(int8_t) : sizeof(bfloat16);
  const char *matrix = (const char *)weights->data + layer * num_channels * width * entry_bytes;
  const float *of_channels = scales ? (const float *)scales->data + layer * num_channels : NULL;
#if HAS_TILES
  if (x->dtype == XLA_FFI_DataType_BF16) {
    TileProduct product = {
        .x = x->data, .weights = matrix, .scales = of_channels, .out = out->data,
        .is_rounded = is_rounded,
        .num_tokens = num_tokens, .width = width, .num_channels = num_channels,
    };
    multiply_tiles(frame, product);
    return NULL;
  }
#endif
  if (x->dtype != XLA_FFI_DataType_F32 || is_rounded) return error_of(frame, NO_TILES);
  Product product = {x->data, matrix, of_channels, out->data, num_tokens, width, num_channels};
  share(frame, num_tokens <= FEW_TOKENS ? compute_few : compute_many, &product, num_channels, RUN);
  return NULL;
}
