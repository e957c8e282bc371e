// Products of tokens of bfloat16 with a matrix of bfloat16, or of int8 with a scale a row, by the
// unit for tiles. A token's result is the same whatever tokens are around it.
//
// Each thread takes blocks of channels, the rows of the matrix, straight from memory: a product's A.
// Tokens are its B, turned once for all. Next to int8 they are integers of 16 bits with a scale a
// token, in two planes of int8: x = (256 high + low) * scale. Sums of integers are exact.

#ifndef PALLAS_KERNELS_MATMUL_CPU_TILES_H_
#define PALLAS_KERNELS_MATMUL_CPU_TILES_H_

#include "cpu_fused.h"
#include "tiles.h"

#if HAS_TILES

enum {
  BLOCK = 2 * TILE,   // channels whose sums are kept in tiles, with two tiles of B
  PANEL_DEPTHS = 18,  // of a block of channels, tiles of depth that fit in the first cache
  LARGEST = 127 * 256 + 127,
};

typedef struct {
  const Tokens *tokens;
  const Results *results;
  const char *weights;
  const float *scales;  // of channels, where weights are int8; NULL: bfloat16
  float *x_scales;      // of tokens, then too
  char *turned;         // x for the unit: [tiles of B, tiles of depth, 16, 64]
  int64_t num_tokens, width, num_channels;
  int64_t row_bytes, num_depths;  // of weights
} TileProduct;

// Copies what there is of 16 rows of 64 bytes, and zeros in place of the rest.
static void copy_tile(const char *rows, int64_t row_bytes, int64_t num_rows, int64_t num_bytes,
                      char *copy) {
  memset(copy, 0, TILE_BYTES);
  for (int64_t row = 0; row < (num_rows < TILE ? num_rows : TILE); row++)
    memcpy(copy + row * TILE_ROW, rows + row * row_bytes,
           num_bytes < TILE_ROW ? num_bytes : TILE_ROW);
}

// The tokens of a tile of B as the product takes them, in `scratch_of(2, ...)` where they are not in
// memory like that.
static const bfloat16 *prepare_tile(const TileProduct *p, int64_t tile) {
  const Tokens *tokens = p->tokens;
  if (is_plain(tokens)) return (const bfloat16 *)tokens->x.data + tile * TILE * p->width;
  int64_t num_tokens = p->num_tokens - tile * TILE, row_len = (p->width + LANES) / LANES * LANES;
  float *row = scratch_of(2, row_len + (TILE * p->width + LANES) / 2 + 1);
  bfloat16 *prepared = (bfloat16 *)(row + row_len);
  for (int64_t t = 0; t < (num_tokens < TILE ? num_tokens : TILE); t++) {
    prepare_token(tokens, tile * TILE + t, row);
    // In order: what is stored past a row's end is the next one's.
    for (int64_t i = 0; i < p->width; i += LANES)
      store_bfloat16(prepared + t * p->width + i, load(row + i));
  }
  return prepared;
}

static void turn_tokens(const void *work, int64_t begin, int64_t end) {
  const TileProduct *p = work;
  for (int64_t tile = begin; tile < end; tile++) {
    const char *x = (const char *)prepare_tile(p, tile);
    char *turned = p->turned + tile * p->num_depths * TILE_BYTES;
    int64_t num_tokens = p->num_tokens - tile * TILE;
    for (int64_t k = 0; k < p->num_depths; k++, x += TILE_ROW, turned += TILE_BYTES) {
      int64_t num_bytes = p->row_bytes - k * TILE_ROW;
      if (num_tokens >= TILE && num_bytes >= TILE_ROW) {
        turn(x, p->row_bytes, turned, TILE_ROW, TILE);
      } else {
        char copy[TILE_BYTES];
        copy_tile(x, p->row_bytes, num_tokens, num_bytes, copy);
        turn(copy, TILE_ROW, turned, TILE_ROW, TILE);
      }
    }
  }
}

// Sixteen entries of a token, or what there is of them and zeros.
static inline __m512 load_entries(const bfloat16 *x, int64_t num_left) {
  __mmask16 is_there = num_left < TILE ? (1u << num_left) - 1 : 0xffff;
  __m256i halves = _mm256_maskz_loadu_epi16(is_there, x);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// A token as integers, in whole tiles of depth; returns its scale, which is NaN if an entry is not
// finite.
static float quantize_token(const bfloat16 *x, int64_t width, int64_t num_entries, int8_t *high,
                            int8_t *low) {
  __m512i peaks = _mm512_setzero_si512();  // without signs, floats are in the order of their bits
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  for (int64_t i = 0; i < width; i += TILE) {
    __m512i bits = _mm512_castps_si512(load_entries(x + i, width - i));
    peaks = _mm512_max_epi32(peaks, _mm512_and_si512(bits, no_sign));
  }
  int32_t peak_bits = _mm512_reduce_max_epi32(peaks);
  float peak;
  memcpy(&peak, &peak_bits, sizeof peak);
  int is_finite = peak_bits < 0x7f800000;
  float inverse = is_finite && peak > 1e-34f ? LARGEST / peak : 0;  // of less, it might overflow
  const __m512i half = _mm512_set1_epi32(128);
  for (int64_t i = 0; i < num_entries; i += TILE) {
    __m512 scaled = _mm512_mul_ps(load_entries(x + i, i < width ? width - i : 0),
                                  _mm512_set1_ps(inverse));
    __m512i whole = _mm512_cvtps_epi32(scaled);
    __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, half), 8);
    __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
    _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(lower));
  }
  return is_finite ? peak / LARGEST : peak - peak;
}

static void quantize_tokens(const void *work, int64_t begin, int64_t end) {
  const TileProduct *p = work;
  int64_t row = p->num_depths * TILE_ROW;
  int8_t *planes = (int8_t *)scratch_of(0, 2 * TILE * row / sizeof(float));
  for (int64_t tile = begin; tile < end; tile++) {
    const bfloat16 *x = prepare_tile(p, tile);
    int64_t num_tokens = p->num_tokens - tile * TILE;
    if (num_tokens < TILE) memset(planes, 0, 2 * TILE * row);
    for (int64_t t = 0; t < (num_tokens < TILE ? num_tokens : TILE); t++) {
      int64_t token = tile * TILE + t;
      p->x_scales[token] = quantize_token(x + t * p->width, p->width, row, planes + t * row,
                                          planes + (TILE + t) * row);
    }
    char *turned = p->turned + 2 * tile * p->num_depths * TILE_BYTES;
    for (int64_t plane = 0; plane < 2; plane++)
      for (int64_t k = 0; k < p->num_depths; k++, turned += TILE_BYTES)
        turn(planes + plane * TILE * row + k * TILE_ROW, row, turned, TILE_ROW, TILE);
  }
}

// Stores sums [2, 16 channels, 16 tokens] as results, for a token whole lines of the cache.
static inline void store_sums(const TileProduct *p, float sums[2][TILE * TILE], int64_t channel,
                              int64_t token) {
  int64_t num_channels = p->num_channels - channel, num_tokens = p->num_tokens - token;
  if (num_channels > BLOCK) num_channels = BLOCK;
  if (num_tokens > TILE) num_tokens = TILE;
  float lines[2][TILE * TILE];
  for (int i = 0; i < 2; i++) turn(sums[i], 64, lines[i], 64, TILE);
  for (int64_t t = 0; t < num_tokens; t++) {
    float both[BLOCK];
    for (int i = 0; i < 2; i++) memcpy(both + i * TILE, lines[i] + t * TILE, 64);
    store_results(p->results, token + t, channel, num_channels, both);
  }
}

// Puts sums of the high plane [2, 16 channels, 16 tokens] and of the low one together, in the first.
static inline void join_planes(const TileProduct *p, float sums[2][2][TILE * TILE],
                               int64_t channel, int64_t token) {
  int64_t num_tokens = p->num_tokens - token;
  __m512 x_scales = _mm512_maskz_loadu_ps(num_tokens < TILE ? (1u << num_tokens) - 1 : 0xffff,
                                          p->x_scales + token);
  for (int64_t row = 0; row < BLOCK && channel + row < p->num_channels; row++) {
    float *high = sums[0][0] + row * TILE;
    __m512 joined = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(high)),
                                    _mm512_set1_ps(256),
                                    _mm512_cvtepi32_ps(_mm512_loadu_si512(sums[1][0] + row * TILE)));
    __m512 scales = _mm512_mul_ps(x_scales, _mm512_set1_ps(p->scales[channel + row]));
    _mm512_storeu_ps(high, _mm512_mul_ps(joined, scales));
  }
}

// Products of a block of channels with one or two tiles of B, of tiles of depth from `begin` to
// `end`; what is in `sums` is added but where these are the first. The last make results.
__attribute__((always_inline)) static inline void multiply_block(
    const TileProduct *p, int64_t channel, int64_t tile, int has_second, int is_int8, int64_t begin,
    int64_t end, float sums[2][2][TILE * TILE], const char *next, int64_t ahead) {
  const char *weights = p->weights + channel * p->row_bytes;
  const char *x = p->turned + tile * p->num_depths * TILE_BYTES;
  int64_t num_rows = p->num_channels - channel;
  int64_t num_whole = num_rows >= BLOCK ? p->row_bytes / TILE_ROW : 0;
  Operands operands = {
      .a = {weights, weights + TILE * p->row_bytes},
      .b = {x, x + p->num_depths * TILE_BYTES},
      .a_stride = p->row_bytes,
      .a_step = TILE_ROW,
      .b_step = TILE_BYTES,
      .is_int8 = is_int8,
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
    char copy[2][TILE_BYTES];
    for (int i = 0; i < 2; i++)
      copy_tile(operands.a[i] + k * TILE_ROW, p->row_bytes, num_rows - i * TILE,
                p->row_bytes - k * TILE_ROW, copy[i]);
    Operands part = {.a = {copy[0], copy[1]},
                     .b = {operands.b[0] + k * TILE_BYTES, operands.b[1] + k * TILE_BYTES},
                     .a_stride = TILE_ROW,
                     .is_int8 = is_int8};
    add_products(&part, 1, has_second, 1, NULL, 0);
  }
  store_products(at, 64, has_second);
  if (end < p->num_depths) return;
  int64_t token = is_int8 ? tile / 2 * TILE : tile * TILE;
  if (is_int8) join_planes(p, sums, channel, token);
  store_sums(p, sums[0], channel, token);
  if (has_second && !is_int8) store_sums(p, sums[1], channel, token + TILE);
}

static int64_t num_tiles_of(const TileProduct *p) {
  return (p->num_tokens + TILE - 1) / TILE * (p->scales ? 2 : 1);
}

static void compute_tiles(const void *work, int64_t begin, int64_t end) {
  const TileProduct *p = work;
  int64_t num_tiles = num_tiles_of(p), num_blocks = (num_tiles + 1) / 2;
  int64_t ahead = (BLOCK + num_blocks - 1) / num_blocks;
  typedef float Sums[2][2][TILE * TILE];
  Sums *sums = (Sums *)scratch_of(0, num_blocks * (sizeof *sums / sizeof(float)));
  begin_tiles();
  for (int64_t channel = begin; channel < end; channel += BLOCK) {
    const char *next = p->weights + (channel + BLOCK) * p->row_bytes;
    for (int64_t k = 0; k < p->num_depths; k += PANEL_DEPTHS) {
      int64_t last = k + PANEL_DEPTHS < p->num_depths ? k + PANEL_DEPTHS : p->num_depths;
      for (int64_t block = 0; block < num_blocks; block++) {
        int64_t tile = 2 * block;
        if (p->scales)
          multiply_block(p, channel, tile, 1, 1, k, last, sums[block], next, ahead);
        else if (tile + 1 < num_tiles)
          multiply_block(p, channel, tile, 1, 0, k, last, sums[block], next, ahead);
        else
          multiply_block(p, channel, tile, 0, 0, k, last, sums[block], next, ahead);
        next += ahead * (last - k) * TILE_ROW;
      }
    }
  }
  end_tiles();
}

static void multiply_tiles(const XLA_FFI_CallFrame *frame, TileProduct p) {
  p.row_bytes = p.width * (p.scales ? sizeof(int8_t) : sizeof(bfloat16));
  p.num_depths = (p.row_bytes + TILE_ROW - 1) / TILE_ROW;
  int64_t num_tiles = num_tiles_of(&p), turned_len = num_tiles * p.num_depths * TILE_BYTES / 4;
  float *memory = scratch_of(1, turned_len + p.num_tokens);
  p.turned = (char *)memory;
  p.x_scales = memory + turned_len;
  // Fewer tiles than 8 take less time than a thread to come.
  share(frame, p.scales ? quantize_tokens : turn_tokens, &p, (p.num_tokens + TILE - 1) / TILE, 8);
  share(frame, compute_tiles, &p, p.num_channels, BLOCK);
}

#endif
#endif  // PALLAS_KERNELS_MATMUL_CPU_TILES_H_
