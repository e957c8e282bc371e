// Products of a few tokens with a matrix of bfloat16.
//
// Each thread takes runs of channels, the rows of the matrix; a row is read once for up to eight
// tokens. Sums are kept in registers, a lane each, so that the compiler need not reorder any.

#include "native.h"

enum {
  RUN = 48,      // channels that a thread takes at a time
  AHEAD = 4096,  // bytes
  LINE = 32,     // bfloat16 in a line of the cache
};

// Products of one row of `weights` with NUM_TOKENS rows of x, all `width` long, in steps of NUM_PARTS
// vectors. Memory is asked for what comes AHEAD bytes later: rows follow each other.
#define DEFINE_ROW(NUM_TOKENS, NUM_PARTS)                                                      \
  static void row_##NUM_TOKENS(const float *x, const uint16_t *weights, float *out,            \
                               int64_t width, int64_t stride) {                                \
    Floats sums[NUM_TOKENS][NUM_PARTS] = {0};                                                  \
    int64_t i = 0;                                                                             \
    for (; i + NUM_PARTS * LANES <= width; i += NUM_PARTS * LANES) {                           \
      for (int j = 0; j < NUM_PARTS * LANES; j += LINE)                                        \
        __builtin_prefetch((const char *)(weights + i + j) + AHEAD, 0, 3);                     \
      for (int part = 0; part < NUM_PARTS; part++) {                                           \
        Floats row = load_bfloat16(weights + i + part * LANES);                                \
        for (int t = 0; t < NUM_TOKENS; t++)                                                   \
          sums[t][part] += row * load(x + t * width + i + part * LANES);                       \
      }                                                                                        \
    }                                                                                          \
    for (int t = 0; t < NUM_TOKENS; t++) {                                                     \
      for (int part = 1; part < NUM_PARTS; part++) sums[t][0] += sums[t][part];                \
      float sum = sum_of(sums[t][0]);                                                          \
      for (int64_t j = i; j < width; j++) sum += float_of(weights[j]) * x[t * width + j];      \
      out[t * stride] = sum;                                                                   \
    }                                                                                          \
  }

DEFINE_ROW(1, 4)
DEFINE_ROW(2, 4)
DEFINE_ROW(3, 2)
DEFINE_ROW(4, 2)
DEFINE_ROW(5, 2)
DEFINE_ROW(6, 2)
DEFINE_ROW(7, 1)
DEFINE_ROW(8, 1)

typedef void Row(const float *, const uint16_t *, float *, int64_t, int64_t);
static Row *const ROWS[] = {row_1, row_2, row_3, row_4, row_5, row_6, row_7, row_8};
enum { MAX_TOKENS = sizeof ROWS / sizeof *ROWS };

typedef struct {
  const float *x;
  const uint16_t *weights;
  float *out;
  int64_t num_tokens, width, num_channels;
} Product;

static void compute(const void *work, int64_t begin, int64_t end) {
  const Product *product = work;
  int64_t width = product->width, stride = product->num_channels;
  for (int64_t token = 0; token < product->num_tokens; token += MAX_TOKENS) {
    int64_t left = product->num_tokens - token;
    Row *row = ROWS[(left < MAX_TOKENS ? left : MAX_TOKENS) - 1];
    for (int64_t channel = begin; channel < end; channel++)
      row(product->x + token * width, product->weights + channel * width,
          product->out + token * stride + channel, width, stride);
  }
}

// Arguments: x [M, D] float32, weights [L, F, D] bfloat16, (layer, number of live tokens) int32.
// Result: [M, F] float32, zeros past the live tokens.
XLA_FFI_Error *jaxserve_matmul(XLA_FFI_CallFrame *frame) {
  if (is_no_execution(frame)) return NULL;
  const XLA_FFI_Buffer *x = frame->args.args[0], *weights = frame->args.args[1];
  const XLA_FFI_Buffer *where = frame->args.args[2], *out = frame->rets.rets[0];
  int64_t max_tokens = x->dims[0], width = x->dims[1], num_channels = weights->dims[1];
  int64_t layer = ((const int32_t *)where->data)[0], num_tokens = ((const int32_t *)where->data)[1];
  num_tokens = num_tokens < 0 ? 0 : num_tokens > max_tokens ? max_tokens : num_tokens;
  layer = layer < 0 ? 0 : layer >= weights->dims[0] ? weights->dims[0] - 1 : layer;
  float *results = out->data;
  memset(results + num_tokens * num_channels, 0,
         sizeof(float) * (max_tokens - num_tokens) * num_channels);
  Product product = {
      x->data, (const uint16_t *)weights->data + layer * num_channels * width,
      results, num_tokens, width, num_channels,
  };
  if (num_tokens > 0) share(frame, compute, &product, num_channels, RUN);
  return NULL;
}
