// Attention to a paged cache of bfloat16 or float32.
//
// An item of work is a tile of one row's queries, with the query heads of one KV head: its lines.
// Keys are taken a block at a time, with a running softmax a line. Where there are few lines, as in
// decoding, a vector has dimensions of one line, and a key is read once for all of them. Where there
// are many, arrays of lines are turned, so that a vector has one dimension, or one score, of many
// lines, and nothing is ever summed up within a vector.

#include <math.h>

#include "native.h"

enum {
  BLOCK = 64,       // keys
  MAX_LINES = 48,   // of a tile, where one query has fewer
  FEW_LINES = 8,
  MAX_PARTS = 8,    // of few lines: vectors of sums at a time
  // Of many lines: sums that are kept in registers, vectors of lines by keys or by dimensions.
  TILE_PARTS = 3,
  TILE_KEYS = LANES == 16 ? 8 : 4,
};

typedef struct {
  const float *q, *sinks;
  const void *keys, *values;
  const int32_t *pages, *kv_lens, *q_lens, *starts;
  float *out;
  int64_t num_rows, num_heads, num_kv_heads, head_dim, page_size, pages_per_row;
  int64_t first_page, queries_per_tile, window;
  int is_bfloat16;
  float scale, soft_cap;
} Attention;

// e^x for x <= 0: 2^n by the exponent, and a polynomial of |f| <= ln 2 / 2; 2e-7 of the value.
static inline Floats exp_of(Floats x) {
  const Floats least = all_lanes(-87.0f);
  Ints is_less = x < least;
  x = (Floats)(((Ints)x & ~is_less) | ((Ints)least & is_less));
  Floats rounder = all_lanes(12582912.0f);  // 1.5 * 2^23: sums round to whole numbers
  Floats n = (x * 1.44269504f + rounder) - rounder;
  Floats f = x - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  Floats p = all_lanes(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * (Floats)exponent;
}

static int64_t tiles_of(const Attention *a, int64_t row) {
  return (a->q_lens[row] + a->queries_per_tile - 1) / a->queries_per_tile;
}

// Where token `at` of a row lies in the cache, in heads.
static inline int64_t place_of(const Attention *a, int64_t row, int64_t at, int64_t kv_head) {
  int64_t page = a->pages[row * a->pages_per_row + at / a->page_size];
  return ((a->first_page + page) * a->page_size + at % a->page_size) * a->num_kv_heads + kv_head;
}

static inline Floats load_cached(const Attention *a, const void *array, int64_t entry) {
  return a->is_bfloat16 ? load_bfloat16((const uint16_t *)array + entry)
                        : load((const float *)array + entry);
}

// scores[line][i] of `count` keys, each read once.
static void score_few(const Attention *a, const float *q, int64_t num_lines, const float *keys,
                      int64_t count, float *scores) {
  int64_t head_dim = a->head_dim;
  for (int64_t i = 0; i < count; i++) {
    Floats sums[FEW_LINES] = {0};
    for (int64_t d = 0; d < head_dim; d += LANES) {
      Floats key = load(keys + i * head_dim + d);
      for (int64_t line = 0; line < num_lines; line++)
        sums[line] += key * load(q + line * head_dim + d);
    }
    for (int64_t line = 0; line < num_lines; line++)
      scores[line * BLOCK + i] = sum_of(sums[line]);
  }
}

// sums[line] = sums[line] * faded[line] + weights[line] x values, of `count` keys.
static void add_values(const Attention *a, int64_t num_lines, const float *weights,
                       const float *faded, const float *values, int64_t count, float *sums) {
  int64_t head_dim = a->head_dim;
  for (int64_t line = 0; line < num_lines; line++) {
    for (int64_t d = 0; d < head_dim; d += MAX_PARTS * LANES) {
      int64_t num_parts = (head_dim - d) / LANES;
      float *at = sums + line * head_dim + d;
      if (num_parts >= MAX_PARTS) {
        Floats parts[MAX_PARTS];
        for (int part = 0; part < MAX_PARTS; part++)
          parts[part] = load(at + part * LANES) * faded[line];
        for (int64_t i = 0; i < count; i++) {
          Floats weight = all_lanes(weights[line * BLOCK + i]);
          for (int part = 0; part < MAX_PARTS; part++)
            parts[part] += weight * load(values + i * head_dim + d + part * LANES);
        }
        for (int part = 0; part < MAX_PARTS; part++) store(at + part * LANES, parts[part]);
      } else {
        for (int part = 0; part < num_parts; part++) {
          Floats sum = load(at + part * LANES) * faded[line];
          for (int64_t i = 0; i < count; i++)
            sum += weights[line * BLOCK + i] * load(values + i * head_dim + d + part * LANES);
          store(at + part * LANES, sum);
        }
      }
    }
  }
}

// Of few lines: q and sums [lines, H], scores [lines, BLOCK]. Of many: q, times the scale, and sums
// [H, lines], scores [BLOCK, lines], lines padded to a tile; newest: the last token that each sees.
typedef struct {
  float *q, *keys, *values, *scores, *sums, *peaks, *totals, *faded, *newest;
} Scratch;

static void load_block(const Attention *a, const Scratch *s, int64_t row, int64_t kv_head,
                       int64_t begin, int64_t count) {
  int64_t head_dim = a->head_dim;
  for (int64_t i = 0; i < count; i++) {
    int64_t entry = place_of(a, row, begin + i, kv_head) * head_dim;
    for (int64_t d = 0; d < head_dim; d += LANES) {
      store(s->keys + i * head_dim + d, load_cached(a, a->keys, entry + d));
      store(s->values + i * head_dim + d, load_cached(a, a->values, entry + d));
    }
  }
}

// One block of keys from `begin` on, of which the row has `count`, for the few lines of a tile; the
// query of line 0 is at `position`.
static void attend_few(const Attention *a, const Scratch *s, int64_t begin, int64_t count,
                       int64_t num_lines, int64_t group, int64_t position) {
  score_few(a, s->q, num_lines, s->keys, count, s->scores);
  for (int64_t line = 0; line < num_lines; line++) {
    float *scores = s->scores + line * BLOCK;
    int64_t newest = position + line / group;
    int64_t last = newest - begin + 1 < count ? newest - begin + 1 : count;  // keys from first on
    int64_t first = a->window && newest - a->window + 1 > begin ? newest - a->window + 1 - begin : 0;
    float peak = s->peaks[line];
    for (int64_t i = first; i < last; i++) {
      float score = scores[i] * a->scale;
      if (a->soft_cap != 0) score = a->soft_cap * tanhf(score / a->soft_cap);
      scores[i] = score;
      // A score that is no number is kept: the output shall not be one either.
      peak = score > peak || score != score ? score : peak;
    }
    s->faded[line] = 1;
    if (first >= last) {
      memset(scores, 0, sizeof(float) * BLOCK);
      continue;
    }
    s->faded[line] = s->peaks[line] == -INFINITY ? 0 : expf(s->peaks[line] - peak);
    s->peaks[line] = peak;
    for (int64_t i = 0; i < BLOCK; i += LANES)
      store(scores + i, exp_of(load(scores + i) - peak));
    for (int64_t i = 0; i < first; i++) scores[i] = 0;
    for (int64_t i = last; i < BLOCK; i++) scores[i] = 0;
    Floats total = {0};
    for (int64_t i = 0; i < BLOCK; i += LANES) total += load(scores + i);
    s->totals[line] = s->totals[line] * s->faded[line] + sum_of(total);
  }
  add_values(a, num_lines, s->scores, s->faded, s->values, count, s->sums);
}

static inline Floats select_of(Ints mask, Floats one, Floats other) {
  return (Floats)(((Ints)one & mask) | ((Ints)other & ~mask));
}

// scores[key][line] of `count` keys.
static void score_many(const Attention *a, const Scratch *s, int64_t count, int64_t num_lines) {
  int64_t head_dim = a->head_dim;
  for (int64_t key = 0; key < count; key += TILE_KEYS) {
    const float *keys[TILE_KEYS];
    for (int k = 0; k < TILE_KEYS; k++)
      keys[k] = s->keys + (key + k < count ? key + k : key) * head_dim;
    for (int64_t line = 0; line < num_lines; line += TILE_PARTS * LANES) {
      Floats sums[TILE_KEYS][TILE_PARTS] = {0};
      for (int64_t d = 0; d < head_dim; d++) {
        Floats lines[TILE_PARTS];
        for (int part = 0; part < TILE_PARTS; part++) {
          lines[part] = load(s->q + d * num_lines + line + part * LANES);
          keep_in_register(lines[part]);
        }
        for (int k = 0; k < TILE_KEYS; k++) {
          Floats entry = all_lanes(keys[k][d]);
          for (int part = 0; part < TILE_PARTS; part++) sums[k][part] += entry * lines[part];
        }
      }
      for (int k = 0; k < TILE_KEYS && key + k < count; k++)
        for (int part = 0; part < TILE_PARTS; part++)
          store(s->scores + (key + k) * num_lines + line + part * LANES, sums[k][part]);
    }
  }
}

// Scores of a vector of lines to weights, with what those make of peaks, totals and faded. At an
// edge, some lines do not see all keys.
static void weigh_many(const Attention *a, const Scratch *s, int64_t begin, int64_t count,
                       int64_t num_lines, int64_t line, int is_edge) {
  const Floats none = all_lanes(-INFINITY);
  Floats newest = load(s->newest + line), before = load(s->peaks + line), peak = before;
  Floats oldest = a->window ? newest - all_lanes(a->window - 1) : none;
  for (int64_t i = 0; i < count; i++) {
    float *at = s->scores + i * num_lines + line;
    Floats score = load(at), key = all_lanes(begin + i);
    if (a->soft_cap != 0)
      for (int lane = 0; lane < LANES; lane++)
        score[lane] = a->soft_cap * tanhf(score[lane] / a->soft_cap);
    if (is_edge) score = select_of((key <= newest) & (key >= oldest), score, none);
    store(at, score);
    // A score that is no number is kept: the output shall not be one either.
    peak = select_of((score > peak) | (score != score), score, peak);
  }
  Floats finite = select_of(peak == none, all_lanes(0), peak);  // where no key was seen so far
  Floats faded = exp_of(before - finite), total = load(s->totals + line) * faded;
  for (int64_t i = 0; i < count; i++) {
    float *at = s->scores + i * num_lines + line;
    Floats score = load(at), weight = exp_of(score - finite);
    if (is_edge) weight = select_of(score == none, all_lanes(0), weight);
    total += weight;
    store(at, weight);
  }
  store(s->peaks + line, peak);
  store(s->faded + line, faded);
  store(s->totals + line, total);
}

// sums[dimension][line] = sums * faded[line] + weights x values, of `count` keys.
static void add_many(const Attention *a, const Scratch *s, int64_t count, int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; line += TILE_PARTS * LANES) {
    for (int64_t d = 0; d < a->head_dim; d += TILE_KEYS) {
      Floats sums[TILE_KEYS][TILE_PARTS];
      for (int k = 0; k < TILE_KEYS; k++)
        for (int part = 0; part < TILE_PARTS; part++)
          sums[k][part] = load(s->sums + (d + k) * num_lines + line + part * LANES) *
                          load(s->faded + line + part * LANES);
      for (int64_t i = 0; i < count; i++) {
        Floats weights[TILE_PARTS];
        for (int part = 0; part < TILE_PARTS; part++) {
          weights[part] = load(s->scores + i * num_lines + line + part * LANES);
          keep_in_register(weights[part]);
        }
        for (int k = 0; k < TILE_KEYS; k++) {
          Floats value = all_lanes(s->values[i * a->head_dim + d + k]);
          for (int part = 0; part < TILE_PARTS; part++) sums[k][part] += value * weights[part];
        }
      }
      for (int k = 0; k < TILE_KEYS; k++)
        for (int part = 0; part < TILE_PARTS; part++)
          store(s->sums + (d + k) * num_lines + line + part * LANES, sums[k][part]);
    }
  }
}

static int64_t pad_lines(int64_t num_lines) {
  int64_t tile = TILE_PARTS * LANES;
  return num_lines > FEW_LINES ? (num_lines + tile - 1) / tile * tile : num_lines;
}

static void attend_tile(const Attention *a, const Scratch *s, int64_t row, int64_t tile,
                        int64_t kv_head) {
  int64_t head_dim = a->head_dim, group = a->num_heads / a->num_kv_heads;
  int64_t first = tile * a->queries_per_tile, num_queries = a->q_lens[row] - first;
  if (num_queries > a->queries_per_tile) num_queries = a->queries_per_tile;
  int64_t num_lines = num_queries * group, num_padded = pad_lines(num_lines);
  int is_many = num_lines > FEW_LINES;
  // Where entry d of a line is: at line * by_line + d * by_entry.
  int64_t by_line = is_many ? 1 : head_dim, by_entry = is_many ? num_padded : 1;
  int64_t position = a->kv_lens[row] - a->q_lens[row] + first, end = position + num_queries;
  int64_t token = a->starts[row] + first;
  for (int64_t line = 0; line < num_padded; line++) {
    int64_t of = line < num_lines ? line : num_lines - 1;
    int64_t head = kv_head * group + of % group;
    const float *q = a->q + ((token + of / group) * a->num_heads + head) * head_dim;
    for (int64_t d = 0; d < head_dim; d++)
      s->q[line * by_line + d * by_entry] = is_many ? q[d] * a->scale : q[d];
    s->newest[line] = position + of / group;
    s->peaks[line] = a->sinks ? a->sinks[head] : -INFINITY;
    s->totals[line] = a->sinks ? 1 : 0;
  }
  memset(s->sums, 0, sizeof(float) * num_padded * head_dim);
  int64_t begin = a->window && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
  for (; begin < end; begin += BLOCK) {
    int64_t count = end - begin < BLOCK ? end - begin : BLOCK;
    load_block(a, s, row, kv_head, begin, count);
    if (!is_many) {
      attend_few(a, s, begin, count, num_lines, group, position);
      continue;
    }
    int is_edge = begin + count - 1 > position || (a->window && end - a->window > begin);
    score_many(a, s, count, num_padded);
    for (int64_t line = 0; line < num_padded; line += LANES)
      weigh_many(a, s, begin, count, num_padded, line, is_edge);
    add_many(a, s, count, num_padded);
  }
  for (int64_t line = 0; line < num_lines; line++) {
    int64_t head = kv_head * group + line % group;
    float *out = a->out + ((token + line / group) * a->num_heads + head) * head_dim;
    for (int64_t d = 0; d < head_dim; d++)
      out[d] = s->sums[line * by_line + d * by_entry] / s->totals[line];
  }
}

static void attend(const void *work, int64_t begin, int64_t end) {
  const Attention *a = work;
  int64_t num_lines = pad_lines(a->queries_per_tile * (a->num_heads / a->num_kv_heads));
  int64_t head_dim = a->head_dim;
  int64_t sizes[] = {num_lines * head_dim, BLOCK * head_dim,     BLOCK * head_dim,
                     num_lines * BLOCK,    num_lines * head_dim, num_lines,
                     num_lines,            num_lines,            num_lines};
  enum { NUM_ARRAYS = sizeof sizes / sizeof *sizes };
  int64_t total = 0;
  for (int i = 0; i < NUM_ARRAYS; i++) total += (sizes[i] + LANES - 1) / LANES * LANES;
  float *memory = scratch_of(total), *arrays[NUM_ARRAYS];
  for (int i = 0, at = 0; i < NUM_ARRAYS; at += (sizes[i] + LANES - 1) / LANES * LANES, i++)
    arrays[i] = memory + at;
  Scratch s = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
               arrays[5], arrays[6], arrays[7], arrays[8]};
  // Items go by row, then by tile, then by KV head.
  int64_t row = 0, row_begin = 0;
  for (int64_t item = begin; item < end; item++) {
    while (item >= row_begin + tiles_of(a, row) * a->num_kv_heads)
      row_begin += tiles_of(a, row++) * a->num_kv_heads;
    int64_t tile = (item - row_begin) / a->num_kv_heads;
    attend_tile(a, &s, row, tile, (item - row_begin) % a->num_kv_heads);
  }
}

// Arguments: q [T, N, H] float32; keys, values [L, P, S, K, H]; pages [R, B], kv_lens, q_lens and
// starts [R] int32, as in `rows.Rows`; sinks [N] float32, or none: [0]; (layer, window or 0) int32;
// (scale, soft cap or 0) float32. Result: [T, N, H] float32, zeros for padding.
XLA_FFI_Error *jaxserve_ragged_paged_attention(XLA_FFI_CallFrame *frame) {
  if (is_no_execution(frame)) return NULL;
  const XLA_FFI_Buffer **in = (const XLA_FFI_Buffer **)frame->args.args;
  const XLA_FFI_Buffer *out = frame->rets.rets[0];
  const int64_t *q = in[0]->dims, *cache = in[1]->dims, *tables = in[3]->dims;
  const int32_t *whole = in[8]->data;
  const float *real = in[9]->data;
  int64_t group = q[1] / cache[3];
  Attention a = {
      .q = in[0]->data,
      .sinks = in[7]->dims[0] ? in[7]->data : NULL,
      .keys = in[1]->data,
      .values = in[2]->data,
      .pages = in[3]->data,
      .kv_lens = in[4]->data,
      .q_lens = in[5]->data,
      .starts = in[6]->data,
      .out = out->data,
      .num_rows = tables[0],
      .num_heads = q[1],
      .num_kv_heads = cache[3],
      .head_dim = q[2],
      .page_size = cache[2],
      .pages_per_row = tables[1],
      .first_page = whole[0] * cache[1],
      .queries_per_tile = group < MAX_LINES ? MAX_LINES / group : 1,
      .window = whole[1],
      .is_bfloat16 = in[1]->dtype == XLA_FFI_DataType_BF16,
      .scale = real[0],
      .soft_cap = real[1],
  };
  memset(a.out, 0, sizeof(float) * q[0] * q[1] * q[2]);
  int64_t num_items = 0;
  for (int64_t row = 0; row < a.num_rows; row++) num_items += tiles_of(&a, row) * a.num_kv_heads;
  share(frame, attend, &a, num_items, 1);
  return NULL;
}
