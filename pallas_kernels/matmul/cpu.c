// Products of tokens with a matrix of bfloat16.
//
// Each thread takes runs of channels, the rows of the matrix. A row is read once: for up to eight
// tokens it is multiplied as it comes, for more it is first turned to float32 with a few others.
// Sums are kept in registers, a lane each, so that the compiler need not reorder any.

#include "native.h"

enum {
  RUN = 48,      // channels that a thread takes at a time
  AHEAD = 4096,  // bytes
  LINE = 32,     // bfloat16 in a line of the cache
  // For many tokens: channels that are turned at a time, entries of them that are, and the tile
  // whose sums are kept in registers, with a vector of each channel and one of a token.
  GROUP = 12,
  DEPTH = 768,
  TILE_TOKENS = LANES == 16 ? 6 : 4,
  TILE_CHANNELS = LANES == 16 ? 4 : 3,
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
enum { FEW_TOKENS = sizeof ROWS / sizeof *ROWS };

typedef struct {
  const float *x;
  const uint16_t *weights;
  float *out;
  int64_t num_tokens, width, num_channels;
} Product;

static void compute_few(const void *work, int64_t begin, int64_t end) {
  const Product *product = work;
  int64_t width = product->width;
  Row *row = ROWS[product->num_tokens - 1];
  for (int64_t channel = begin; channel < end; channel++)
    row(product->x, product->weights + channel * width, product->out + channel, width,
        product->num_channels);
}

static void widen(const uint16_t *from, float *to, int64_t length) {
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) {
    if (i % LINE == 0) __builtin_prefetch((const char *)(from + i) + AHEAD, 0, 3);
    store(to + i, load_bfloat16(from + i));
  }
  for (; i < length; i++) to[i] = float_of(from[i]);
}

// Adds, or stores at first, the products of a tile of tokens with a tile of channels over `depth`
// entries; of each tile some may be missing, and are then one of the others again.
static void multiply_tile(const float *const *x, const float *const *weights, int64_t depth,
                          float *out, int64_t stride, int64_t num_tokens, int64_t num_channels,
                          int is_first) {
  Floats sums[TILE_TOKENS][TILE_CHANNELS] = {0};
  int64_t i = 0;
  for (; i + LANES <= depth; i += LANES) {
    Floats rows[TILE_CHANNELS];
    for (int c = 0; c < TILE_CHANNELS; c++) {
      rows[c] = load(weights[c] + i);
      keep_in_register(rows[c]);
    }
    for (int t = 0; t < TILE_TOKENS; t++) {
      Floats token = load(x[t] + i);
      keep_in_register(token);
      for (int c = 0; c < TILE_CHANNELS; c++) sums[t][c] += token * rows[c];
    }
  }
  for (int t = 0; t < num_tokens; t++) {
    for (int c = 0; c < num_channels; c++) {
      float sum = sum_of(sums[t][c]);
      for (int64_t j = i; j < depth; j++) sum += x[t][j] * weights[c][j];
      out[t * stride + c] = is_first ? sum : out[t * stride + c] + sum;
    }
  }
}

// The weights of a group of channels are turned to float32 for all tokens; those of the next one
// are asked for meanwhile.
static void compute_many(const void *work, int64_t begin, int64_t end) {
  const Product *product = work;
  int64_t width = product->width, stride = product->num_channels;
  int64_t num_tiles = (product->num_tokens + TILE_TOKENS - 1) / TILE_TOKENS * (GROUP / TILE_CHANNELS);
  int64_t ahead = (GROUP * width / num_tiles + LINE - 1) / LINE * LINE;  // a tile
  float *panel = scratch_of(GROUP * DEPTH);
  for (int64_t first = begin; first < end; first += GROUP) {
    int64_t num_channels = end - first < GROUP ? end - first : GROUP;
    const uint16_t *next = product->weights + (first + GROUP) * width;
    const uint16_t *next_end = product->weights + end * width;
    for (int64_t at = 0; at < width; at += DEPTH) {
      int64_t depth = width - at < DEPTH ? width - at : DEPTH;
      for (int64_t channel = 0; channel < num_channels; channel++)
        widen(product->weights + (first + channel) * width + at, panel + channel * DEPTH, depth);
      for (int64_t token = 0; token < product->num_tokens; token += TILE_TOKENS) {
        int64_t num_left = product->num_tokens - token;
        const float *x[TILE_TOKENS], *rows[TILE_CHANNELS];
        for (int t = 0; t < TILE_TOKENS; t++)
          x[t] = product->x + (token + (t < num_left ? t : 0)) * width + at;
        for (int64_t channel = 0; channel < num_channels; channel += TILE_CHANNELS) {
          int64_t num_rows = num_channels - channel;
          for (int c = 0; c < TILE_CHANNELS; c++)
            rows[c] = panel + (channel + (c < num_rows ? c : 0)) * DEPTH;
          for (int64_t i = 0; i < ahead && next < next_end; i += LINE, next += LINE)
            __builtin_prefetch(next, 0, 2);
          multiply_tile(x, rows, depth, product->out + token * stride + first + channel, stride,
                        num_left < TILE_TOKENS ? num_left : TILE_TOKENS,
                        num_rows < TILE_CHANNELS ? num_rows : TILE_CHANNELS, at == 0);
        }
      }
    }
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
  if (num_tokens > 0)
    share(frame, num_tokens <= FEW_TOKENS ? compute_few : compute_many, &product, num_channels, RUN);
  return NULL;
}
