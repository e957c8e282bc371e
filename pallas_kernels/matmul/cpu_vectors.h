// Products of tokens of float32 with a matrix of bfloat16, or of int8 with a scale a row.
//
// Each thread takes runs of channels, the rows of the matrix. A row is read once: for up to eight
// tokens it is multiplied as it comes, for more it is first turned to float32 with a few others.
// Sums are kept in registers, a lane each, so that the compiler need not reorder any.

#ifndef PALLAS_KERNELS_MATMUL_CPU_VECTORS_H_
#define PALLAS_KERNELS_MATMUL_CPU_VECTORS_H_

#include "cpu_fused.h"

enum {
  RUN = 48,      // channels that a thread takes at a time
  AHEAD = 4096,  // bytes
  LINE = 64,     // bytes of the cache
  // For many tokens: channels that are turned at a time, entries of them that are, and the tile
  // whose sums are kept in registers, with a vector of each channel and one of a token.
  GROUP = 12,
  DEPTH = 768,
  TILE_TOKENS = LANES == 16 ? 6 : 4,
  TILE_CHANNELS = LANES == 16 ? 4 : 3,
};

typedef struct {
  const Tokens *tokens;
  const Results *results;
  float *x;  // the tokens as prepared
  const void *weights;
  const float *scales;  // of channels, where weights are int8; NULL: bfloat16
  float *out;           // sums: the results themselves, or in memory of their own
  int64_t num_tokens, width, num_channels;
} Product;

static void prepare_tokens(const void *work, int64_t begin, int64_t end) {
  const Product *p = work;
  float *row = scratch_of(0, p->width + LANES);
  for (int64_t token = begin; token < end; token++) {
    prepare_token(p->tokens, token, row);
    memcpy(p->x + token * p->width, row, sizeof(float) * p->width);
  }
}

// Makes results of the sums of some channels, where those are not results.
static void finish_channels(const Product *p, int64_t begin, int64_t end) {
  if (p->out == p->results->out.data) return;
  for (int64_t token = 0; token < p->num_tokens; token++)
    store_results(p->results, token, begin, end - begin, p->out + token * p->num_channels + begin);
}

// Products of one row of `weights` with NUM_TOKENS rows of x, all `width` long, in steps of NUM_PARTS
// vectors. Memory is asked for what comes AHEAD bytes later: rows follow each other.
#define DEFINE_ROW(NUM_TOKENS, NUM_PARTS, KIND)                                                 \
  static void row_##KIND##_##NUM_TOKENS(const float *x, const KIND *weights, float scale,       \
                                        float *out, int64_t width, int64_t stride) {            \
    Floats sums[NUM_TOKENS][NUM_PARTS] = {0};                                                   \
    int64_t i = 0;                                                                              \
    for (; i + NUM_PARTS * LANES <= width; i += NUM_PARTS * LANES) {                            \
      for (int j = 0; j < NUM_PARTS * LANES; j += LINE / (int)sizeof *weights)                  \
        __builtin_prefetch((const char *)(weights + i + j) + AHEAD, 0, 3);                      \
      for (int part = 0; part < NUM_PARTS; part++) {                                            \
        Floats row = load_##KIND(weights + i + part * LANES);                                   \
        for (int t = 0; t < NUM_TOKENS; t++)                                                    \
          sums[t][part] += row * load(x + t * width + i + part * LANES);                        \
      }                                                                                         \
    }                                                                                           \
    for (int t = 0; t < NUM_TOKENS; t++) {                                                      \
      for (int part = 1; part < NUM_PARTS; part++) sums[t][0] += sums[t][part];                 \
      float sum = sum_of(sums[t][0]);                                                           \
      for (int64_t j = i; j < width; j++) sum += float_of_##KIND(weights[j]) * x[t * width + j]; \
      out[t * stride] = sum * scale;                                                            \
    }                                                                                           \
  }

#define DEFINE_ROWS(KIND)                                                                       \
  DEFINE_ROW(1, 4, KIND)                                                                        \
  DEFINE_ROW(2, 4, KIND)                                                                        \
  DEFINE_ROW(3, 2, KIND)                                                                        \
  DEFINE_ROW(4, 2, KIND)                                                                        \
  DEFINE_ROW(5, 2, KIND)                                                                        \
  DEFINE_ROW(6, 2, KIND)                                                                        \
  DEFINE_ROW(7, 1, KIND)                                                                        \
  DEFINE_ROW(8, 1, KIND)                                                                        \
  typedef void Row_##KIND(const float *, const KIND *, float, float *, int64_t, int64_t);       \
  static Row_##KIND *const ROWS_##KIND[] = {                                                    \
      row_##KIND##_1, row_##KIND##_2, row_##KIND##_3, row_##KIND##_4,                           \
      row_##KIND##_5, row_##KIND##_6, row_##KIND##_7, row_##KIND##_8};

DEFINE_ROWS(bfloat16)
DEFINE_ROWS(int8_t)
enum { FEW_TOKENS = sizeof ROWS_int8_t / sizeof *ROWS_int8_t };

static void compute_few(const void *work, int64_t begin, int64_t end) {
  const Product *p = work;
  for (int64_t channel = begin; channel < end; channel++) {
    float *out = p->out + channel;
    int64_t at = channel * p->width;
    if (p->scales)
      ROWS_int8_t[p->num_tokens - 1](p->x, (const int8_t *)p->weights + at, p->scales[channel],
                                     out, p->width, p->num_channels);
    else
      ROWS_bfloat16[p->num_tokens - 1](p->x, (const bfloat16 *)p->weights + at, 1, out, p->width,
                                       p->num_channels);
  }
  finish_channels(p, begin, end);
}

// Turns entries of a row, from number `at` on, to float32.
static void widen(const Product *p, int64_t channel, int64_t at, float *to, int64_t length) {
  int64_t first = channel * p->width + at, i = 0;
  const int8_t *bytes = (const int8_t *)p->weights + first;
  const bfloat16 *halves = (const bfloat16 *)p->weights + first;
  if (p->scales) {
    float scale = p->scales[channel];
    for (; i + LANES <= length; i += LANES) {
      if (i % LINE == 0) __builtin_prefetch(bytes + i + AHEAD, 0, 3);
      store(to + i, load_int8_t(bytes + i) * scale);
    }
    for (; i < length; i++) to[i] = float_of_int8_t(bytes[i]) * scale;
  } else {
    for (; i + LANES <= length; i += LANES) {
      if (i % (LINE / 2) == 0) __builtin_prefetch((const char *)(halves + i) + AHEAD, 0, 3);
      store(to + i, load_bfloat16(halves + i));
    }
    for (; i < length; i++) to[i] = float_of_bfloat16(halves[i]);
  }
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
  const Product *p = work;
  int64_t width = p->width, stride = p->num_channels;
  int64_t row_bytes = width * (p->scales ? sizeof(int8_t) : sizeof(bfloat16));
  int64_t num_tiles = (p->num_tokens + TILE_TOKENS - 1) / TILE_TOKENS * (GROUP / TILE_CHANNELS);
  int64_t ahead = (GROUP * row_bytes / num_tiles + LINE - 1) / LINE * LINE;  // a tile
  float *panel = scratch_of(0, GROUP * DEPTH);
  for (int64_t first = begin; first < end; first += GROUP) {
    int64_t num_channels = end - first < GROUP ? end - first : GROUP;
    const char *next = (const char *)p->weights + (first + GROUP) * row_bytes;
    const char *next_end = (const char *)p->weights + end * row_bytes;
    for (int64_t at = 0; at < width; at += DEPTH) {
      int64_t depth = width - at < DEPTH ? width - at : DEPTH;
      for (int64_t channel = 0; channel < num_channels; channel++)
        widen(p, first + channel, at, panel + channel * DEPTH, depth);
      for (int64_t token = 0; token < p->num_tokens; token += TILE_TOKENS) {
        int64_t num_left = p->num_tokens - token;
        const float *x[TILE_TOKENS], *rows[TILE_CHANNELS];
        for (int t = 0; t < TILE_TOKENS; t++)
          x[t] = p->x + (token + (t < num_left ? t : 0)) * width + at;
        for (int64_t channel = 0; channel < num_channels; channel += TILE_CHANNELS) {
          int64_t num_rows = num_channels - channel;
          for (int c = 0; c < TILE_CHANNELS; c++)
            rows[c] = panel + (channel + (c < num_rows ? c : 0)) * DEPTH;
          for (int64_t i = 0; i < ahead && next < next_end; i += LINE, next += LINE)
            __builtin_prefetch(next, 0, 2);
          multiply_tile(x, rows, depth, p->out + token * stride + first + channel, stride,
                        num_left < TILE_TOKENS ? num_left : TILE_TOKENS,
                        num_rows < TILE_CHANNELS ? num_rows : TILE_CHANNELS, at == 0);
        }
      }
    }
  }
  finish_channels(p, begin, end);
}

static void multiply_vectors(const XLA_FFI_CallFrame *frame, Product p) {
  const Tokens *tokens = p.tokens;
  p.x = tokens->x.data;
  if (!is_plain(tokens) || tokens->x.is_bfloat16) {
    p.x = scratch_of(1, p.num_tokens * p.width);
    share(frame, prepare_tokens, &p, p.num_tokens, 16);
  }
  p.out = p.results->out.data;
  if (p.results->residual.data || p.results->out.is_bfloat16)
    p.out = scratch_of(2, p.num_tokens * p.num_channels);
  share(frame, p.num_tokens <= FEW_TOKENS ? compute_few : compute_many, &p, p.num_channels, RUN);
}

#endif  // PALLAS_KERNELS_MATMUL_CPU_VECTORS_H_
