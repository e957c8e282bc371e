// Attention by vectors of float32: see `cpu.c`.

#ifndef PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_VECTORS_H_
#define PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_VECTORS_H_

#include "cpu_common.h"

enum {
  MAX_LINES = 48,  // of an item, where one query has fewer
  FEW_LINES = 8,
  MAX_PARTS = 8,  // of few lines: vectors of sums at a time
  // Of many lines: sums that are kept in registers, vectors of lines by keys or by dimensions.
  TILE_PARTS = 3,
  TILE_KEYS = LANES == 16 ? 8 : 4,
};

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

static void load_block(const Attention *a, const Scratch *s, int64_t row, int64_t kv_head,
                       int64_t begin, int64_t count) {
  int64_t head_dim = a->head_dim;
  for (int64_t i = 0; i < count; i++) {
    int64_t entry = place_of(a, row, begin + i, kv_head);
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

static void attend_by_vectors(const Attention *a, const Scratch *s, const Item *item) {
  int64_t head_dim = a->head_dim, num_padded = item->num_padded;
  int is_many = item->num_lines > FEW_LINES;
  // Where entry d of a line is: at line * by_line + d * by_entry.
  int64_t by_line = is_many ? 1 : head_dim, by_entry = is_many ? num_padded : 1;
  begin_item(a, s, item);
  memset(s->sums, 0, sizeof(float) * num_padded * head_dim);
  for (int64_t line = 0; line < num_padded; line++) {
    int64_t of = line < item->num_lines ? line : item->num_lines - 1;
    const float *q = (const float *)a->q + head_of(a, item, of);
    for (int64_t d = 0; d < head_dim; d++) s->q[line * by_line + d * by_entry] = q[d];
  }
  int64_t end = item->position + item->num_queries;
  for (int64_t begin = first_of(a, item); begin < end; begin += BLOCK) {
    int64_t count = end - begin < BLOCK ? end - begin : BLOCK;
    load_block(a, s, item->row, item->kv_head, begin, count);
    if (!is_many) {
      attend_few(a, s, begin, count, item->num_lines, item->group, item->position);
      continue;
    }
    score_many(a, s, count, num_padded);
    for (int64_t line = 0; line < num_padded; line += LANES)
      weigh(a, s, begin, count, num_padded, line, is_edge_of(a, item, begin, count));
    add_many(a, s, count, num_padded);
  }
  for (int64_t line = 0; line < item->num_lines; line++) {
    int64_t out = head_of(a, item, line);
    for (int64_t d = 0; d < head_dim; d += LANES) {
      Floats sums;
      for (int lane = 0; lane < LANES; lane++)
        sums[lane] = s->sums[line * by_line + (d + lane) * by_entry];
      store_reals(a->out, out + d, sums / s->totals[line]);
    }
  }
}

#endif  // PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_VECTORS_H_
