// Products of tokens with a matrix of bfloat16.
//
// Each thread takes runs of channels, the rows of the matrix. Where the CPU has a unit for products
// of tiles, tokens of bfloat16 go through that. Otherwise a row is read once: for up to eight tokens
// it is multiplied as it comes, for more it is first turned to float32 with a few others. Sums are
// kept in registers, a lane each, so that the compiler need not reorder any.

#include "tiles.h"

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
  float *panel = scratch_of(0, GROUP * DEPTH);
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

#if HAS_TILES

enum {
  BLOCK = 2 * TILE,   // channels, and tokens, whose sums are kept in tiles
  PANEL_DEPTHS = 18,  // of a block of channels, tiles of D that fit in the first cache
};

typedef struct {
  const uint16_t *x, *weights;
  uint16_t *turned;  // x for the unit: [tiles of tokens, tiles of D, 16, 16, 2]
  char *out;
  int is_rounded;  // to bfloat16
  int64_t num_tokens, width, num_channels, num_depths;
} TileProduct;

// Copies what there is of 16 rows of 32 entries, and zeros in place of the rest.
static void copy_tile(const uint16_t *rows, int64_t width, int64_t num_rows, int64_t depth,
                      uint16_t *copy) {
  memset(copy, 0, sizeof *copy * TILE * TILE_DEPTH);
  for (int64_t row = 0; row < (num_rows < TILE ? num_rows : TILE); row++)
    memcpy(copy + row * TILE_DEPTH, rows + row * width,
           sizeof *copy * (depth < TILE_DEPTH ? depth : TILE_DEPTH));
}

static void turn_tokens(const void *work, int64_t begin, int64_t end) {
  const TileProduct *p = work;
  for (int64_t tile = begin; tile < end; tile++) {
    const uint16_t *x = p->x + tile * TILE * p->width;
    uint16_t *turned = p->turned + tile * p->num_depths * TILE * TILE_DEPTH;
    int64_t num_tokens = p->num_tokens - tile * TILE;
    for (int64_t k = 0; k < p->num_depths; k++, x += TILE_DEPTH, turned += TILE * TILE_DEPTH) {
      int64_t depth = p->width - k * TILE_DEPTH;
      if (num_tokens >= TILE && depth >= TILE_DEPTH) {
        turn(x, sizeof *x * p->width, turned, 64, TILE);
      } else {
        uint16_t copy[TILE * TILE_DEPTH];
        copy_tile(x, p->width, num_tokens, depth, copy);
        turn(copy, 64, turned, 64, TILE);
      }
    }
  }
}

// Stores sums [2, 16 channels, 16 tokens] as results, for a token whole lines of the cache.
static inline void store_sums(const TileProduct *p, float sums[2][TILE * TILE], int64_t channel,
                              int64_t token) {
  int64_t num_channels = p->num_channels - channel, num_tokens = p->num_tokens - token;
  if (num_channels > BLOCK) num_channels = BLOCK;
  if (num_tokens > TILE) num_tokens = TILE;
  int64_t entry_bytes = p->is_rounded ? 2 : 4;
  char *out = p->out + (token * p->num_channels + channel) * entry_bytes;
  __m512 lines[2][TILE];
  for (int i = 0; i < 2; i++) turn(sums[i], 64, lines[i], 64, TILE);
  for (int64_t t = 0; t < num_tokens; t++, out += p->num_channels * entry_bytes) {
    __m512 both[2] = {lines[0][t], lines[1][t]};
    __m512bh rounded = _mm512_cvtne2ps_pbh(both[1], both[0]);
    const void *from = p->is_rounded ? (const void *)&rounded : (const void *)both;
    if (num_channels < BLOCK)
      memcpy(out, from, entry_bytes * num_channels);
    else if (p->is_rounded)
      memcpy(out, &rounded, sizeof rounded);
    else
      memcpy(out, both, sizeof both);
  }
}

// Products of a block of channels with one or two tiles of tokens, of tiles of D from `begin` to
// `end`; what is in `sums` is added but where these are the first. The last make results.
__attribute__((always_inline)) static inline void multiply_block(
    const TileProduct *p, int64_t channel, int64_t token, int has_second, int64_t begin,
    int64_t end, float sums[2][2][TILE * TILE], const char *next, int64_t ahead) {
  const uint16_t *weights = p->weights + channel * p->width;
  const uint16_t *x = p->turned + token / TILE * p->num_depths * TILE * TILE_DEPTH;
  const int64_t second = p->num_depths * TILE * TILE_DEPTH;
  int64_t num_rows = p->num_channels - channel;
  int64_t num_whole = num_rows >= BLOCK ? p->width / TILE_DEPTH : 0;
  Operands operands = {
      .a = {(const char *)weights, (const char *)(weights + TILE * p->width)},
      .b = {(const char *)x, (const char *)(x + second)},
      .a_stride = sizeof *weights * p->width,
      .a_step = 64,
      .b_step = TILE_BYTES,
  };
  char *const at[2][2] = {{(char *)sums[0][0], (char *)sums[0][1]},
                          {(char *)sums[1][0], (char *)sums[1][1]}};
  if (begin == 0)
    zero_products();
  else
    load_products(at, 64, has_second);
  if (begin < num_whole) {
    Operands whole = operands;
    for (int i = 0; i < 2; i++) {
      whole.a[i] += begin * whole.a_step;
      whole.b[i] += begin * whole.b_step;
    }
    add_products(&whole, (end < num_whole ? end : num_whole) - begin, has_second, 1, next, ahead);
  }
  for (int64_t k = begin > num_whole ? begin : num_whole; k < end; k++) {
    uint16_t copy[2][TILE * TILE_DEPTH];
    for (int i = 0; i < 2; i++)
      copy_tile(weights + i * TILE * p->width + k * TILE_DEPTH, p->width, num_rows - i * TILE,
                p->width - k * TILE_DEPTH, copy[i]);
    Operands part = {.a = {(char *)copy[0], (char *)copy[1]},
                     .b = {operands.b[0] + k * TILE_BYTES, operands.b[1] + k * TILE_BYTES},
                     .a_stride = 64};
    add_products(&part, 1, has_second, 1, NULL, 0);
  }
  store_products(at, 64, has_second);
  if (end < p->num_depths) return;
  store_sums(p, sums[0], channel, token);
  if (has_second) store_sums(p, sums[1], channel, token + TILE);
}

static void compute_tiles(const void *work, int64_t begin, int64_t end) {
  const TileProduct *p = work;
  int64_t num_blocks = (p->num_tokens + BLOCK - 1) / BLOCK;
  int64_t ahead = (BLOCK + num_blocks - 1) / num_blocks;
  typedef float Sums[2][2][TILE * TILE];
  Sums *sums = (Sums *)scratch_of(0, num_blocks * (sizeof *sums / sizeof(float)));
  begin_tiles();
  for (int64_t channel = begin; channel < end; channel += BLOCK) {
    const char *next = (const char *)(p->weights + (channel + BLOCK) * p->width);
    for (int64_t k = 0; k < p->num_depths; k += PANEL_DEPTHS) {
      int64_t last = k + PANEL_DEPTHS < p->num_depths ? k + PANEL_DEPTHS : p->num_depths;
      for (int64_t block = 0; block < num_blocks; block++) {
        int64_t token = block * BLOCK;
        if (p->num_tokens - token > TILE)
          multiply_block(p, channel, token, 1, k, last, sums[block], next, ahead);
        else
          multiply_block(p, channel, token, 0, k, last, sums[block], next, ahead);
        next += ahead * (last - k) * 64;
      }
    }
  }
  end_tiles();
}

static void multiply_tiles(const XLA_FFI_CallFrame *frame, TileProduct p) {
  int64_t num_tiles = (p.num_tokens + TILE - 1) / TILE;
  p.num_depths = (p.width + TILE_DEPTH - 1) / TILE_DEPTH;
  p.turned = (uint16_t *)scratch_of(1, num_tiles * p.num_depths * TILE * TILE);
  share(frame, turn_tokens, &p, num_tiles, 8);  // fewer take less time than a thread to come
  share(frame, compute_tiles, &p, p.num_channels, BLOCK);
}

#endif

// Arguments: x [M, D] float32, or bfloat16 where the CPU has tiles, weights [L, F, D] bfloat16,
// (layer, number of live tokens) int32. Result: [M, F] float32, or bfloat16 as x is, zeros past the
// live tokens.
XLA_FFI_Error *jaxserve_matmul(XLA_FFI_CallFrame *frame) {
  if (is_no_execution(frame)) return NULL;
  const XLA_FFI_Buffer *x = frame->args.args[0], *weights = frame->args.args[1];
  const XLA_FFI_Buffer *where = frame->args.args[2], *out = frame->rets.rets[0];
  int64_t max_tokens = x->dims[0], width = x->dims[1], num_channels = weights->dims[1];
  int64_t layer = ((const int32_t *)where->data)[0], num_tokens = ((const int32_t *)where->data)[1];
  num_tokens = num_tokens < 0 ? 0 : num_tokens > max_tokens ? max_tokens : num_tokens;
  layer = layer < 0 ? 0 : layer >= weights->dims[0] ? weights->dims[0] - 1 : layer;
  int is_rounded = out->dtype == XLA_FFI_DataType_BF16;
  int64_t token_bytes = num_channels * (is_rounded ? 2 : 4);
  memset((char *)out->data + num_tokens * token_bytes, 0, (max_tokens - num_tokens) * token_bytes);
  if (num_tokens == 0) return NULL;
  const uint16_t *matrix = (const uint16_t *)weights->data + layer * num_channels * width;
#if HAS_TILES
  if (x->dtype == XLA_FFI_DataType_BF16) {
    TileProduct product = {
        .x = x->data, .weights = matrix, .out = out->data, .is_rounded = is_rounded,
        .num_tokens = num_tokens, .width = width, .num_channels = num_channels,
    };
    multiply_tiles(frame, product);
    return NULL;
  }
#endif
  if (x->dtype != XLA_FFI_DataType_F32 || is_rounded) return error_of(frame, NO_TILES);
  Product product = {x->data, matrix, out->data, num_tokens, width, num_channels};
  share(frame, num_tokens <= FEW_TOKENS ? compute_few : compute_many, &product, num_channels, RUN);
  return NULL;
}
