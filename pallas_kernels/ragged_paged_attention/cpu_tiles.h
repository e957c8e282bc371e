// Attention by the CPU's unit for tiles: see `cpu.c`.

#ifndef PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_TILES_H_
#define PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_TILES_H_

#include "cpu_common.h"

enum { MAX_LINES_BY_TILES = 96 };  // of an item, where one query has fewer

#if HAS_TILES

// Queries as B's: [tiles of lines, tiles of H, 16, 16, 2].
static void turn_queries(const Attention *a, const Scratch *s, const Item *item) {
  char *to = (char *)s->q;
  for (int64_t first = 0; first < item->num_padded; first += TILE) {
    for (int64_t d = 0; d < a->head_dim; d += TILE_DEPTH, to += TILE_BYTES) {
      uint16_t rows[TILE][TILE_DEPTH] = {0};
      for (int64_t line = first; line < first + TILE && line < item->num_lines; line++)
        memcpy(rows[line - first], (const uint16_t *)a->q + head_of(a, item, line) + d,
               sizeof *rows);
      turn(rows, 64, to, 64, TILE);
    }
  }
}

// Values of `count` keys as A's, rows of 32 keys: [tiles of H, tiles of keys, 16, 32].
static void turn_values(const Attention *a, const Scratch *s, const Item *item,
                        int64_t begin, int64_t count) {
  for (int64_t key = 0; key < count; key += TILE_DEPTH) {
    const uint16_t *tiles[2], *values[TILE_DEPTH];
    for (int i = 0; i < 2; i++) {
      int64_t at = begin + key + (key + i * TILE < count ? i * TILE : 0);
      tiles[i] = (const uint16_t *)a->values + place_of(a, item->row, at, item->kv_head);
    }
    for (int i = 0; i < TILE_DEPTH; i++)
      values[i] = tiles[i / TILE] + i % TILE * a->num_kv_heads * a->head_dim;
    for (int64_t d = 0; d < a->head_dim; d += TILE) {
      Words pairs[TILE];
      for (int pair = 0; pair < TILE; pair++) {
        Words even = {0}, odd = {0};
        if (key + 2 * pair < count) even = (Words)load_bfloat16(values[2 * pair] + d);
        if (key + 2 * pair + 1 < count) odd = (Words)load_bfloat16(values[2 * pair + 1] + d);
        pairs[pair] = even >> 16 | odd;
      }
      int64_t tile = d / TILE * (BLOCK / TILE_DEPTH) + key / TILE_DEPTH;
      turn(pairs, 64, (char *)s->values + tile * TILE_BYTES, 64, TILE);
    }
  }
}

// Weights of a vector of lines as B's, rounded: [tiles of lines, tiles of keys, 16, 16, 2].
static void round_weights(const Scratch *s, int64_t count, int64_t num_lines, int64_t line) {
  char *to = (char *)s->weights + line / TILE * (BLOCK / TILE_DEPTH) * TILE_BYTES;
  for (int64_t key = 0; key < count; key += TILE_DEPTH) {
    for (int64_t i = key; i < key + TILE_DEPTH; i += 2, to += sizeof(Words)) {
      Words even = {0}, odd = {0};
      if (i < count) even = (Words)load(s->scores + i * num_lines + line) + 0x8000;
      if (i + 1 < count) odd = (Words)load(s->scores + (i + 1) * num_lines + line) + 0x8000;
      even = even >> 16 | (odd & 0xffff0000);
      memcpy(to, &even, sizeof even);
    }
  }
}

// scores[key][line] of `count` keys.
static void score_tiles(const Attention *a, const Scratch *s, const Item *item,
                        int64_t begin, int64_t count) {
  int64_t num_lines = item->num_padded;
  int64_t num_depths = a->head_dim / TILE_DEPTH;
  for (int64_t key = 0; key < count; key += 2 * TILE) {
    const uint16_t *keys[2];
    for (int i = 0; i < 2; i++) {
      int64_t at = begin + key + (key + i * TILE < count ? i * TILE : 0);
      keys[i] = (const uint16_t *)a->keys + place_of(a, item->row, at, item->kv_head);
    }
    for (int64_t line = 0; line < num_lines; line += 2 * TILE) {
      const char *q = (const char *)s->q + line / TILE * num_depths * TILE_BYTES;
      char *scores = (char *)(s->scores + key * num_lines + line);
      int64_t below = sizeof(float) * TILE * num_lines;
      char *const to[2][2] = {{scores, scores + below}, {scores + 64, scores + 64 + below}};
      Operands operands = {
          .a = {(const char *)keys[0], (const char *)keys[1]},
          .b = {q, q + num_depths * TILE_BYTES},
          .a_stride = sizeof(uint16_t) * a->num_kv_heads * a->head_dim,
          .a_step = 64,
          .b_step = TILE_BYTES,
      };
      int has_second = line + TILE < num_lines;
      zero_products();
      add_products(&operands, num_depths, has_second, 0, NULL, 0);
      store_products(to, sizeof(float) * num_lines, has_second);
    }
  }
}

// sums[dimension][line] += weights x values, of `count` keys; there are no sums before the first.
static void add_tiles(const Attention *a, const Scratch *s, int64_t count, int64_t num_lines,
                      int is_first) {
  const int64_t whole = BLOCK / TILE_DEPTH * TILE_BYTES;
  for (int64_t d = 0; d < a->head_dim; d += 2 * TILE) {
    for (int64_t line = 0; line < num_lines; line += 2 * TILE) {
      const char *values = (const char *)s->values + d / TILE * whole;
      const char *weights = (const char *)s->weights + line / TILE * whole;
      char *sums = (char *)(s->sums + d * num_lines + line);
      int64_t below = sizeof(float) * TILE * num_lines;
      char *const at[2][2] = {{sums, sums + below}, {sums + 64, sums + 64 + below}};
      Operands operands = {
          .a = {values, values + whole},
          .b = {weights, weights + whole},
          .a_stride = 64,
          .a_step = TILE_BYTES,
          .b_step = TILE_BYTES,
      };
      int has_second = line + TILE < num_lines;
      if (is_first)
        zero_products();
      else
        load_products(at, sizeof(float) * num_lines, has_second);
      add_products(&operands, (count + TILE_DEPTH - 1) / TILE_DEPTH, has_second, 0, NULL, 0);
      store_products(at, sizeof(float) * num_lines, has_second);
    }
  }
}

// The first key that is taken. Tiles of keys are each of one page, and blocks are the same whatever
// other queries an item has, so that each query is summed up in the same order.
static inline int64_t begin_of(const Attention *a, const Item *item) {
  return first_of(a, item) / BLOCK * BLOCK;
}

// Asks for the keys and values of a block from `begin` on, of what there are.
static void fetch_block(const Attention *a, const Item *item, int64_t begin) {
  int64_t end = item->position + item->num_queries;
  for (int64_t at = begin; at < end && at < begin + BLOCK; at += TILE) {
    int64_t entry = place_of(a, item->row, at, item->kv_head);
    for (int64_t i = 0; i < TILE && at + i < end; i++, entry += a->num_kv_heads * a->head_dim) {
      for (int64_t d = 0; d < a->head_dim; d += TILE_DEPTH) {
        __builtin_prefetch((const uint16_t *)a->keys + entry + d, 0, 2);
        __builtin_prefetch((const uint16_t *)a->values + entry + d, 0, 2);
      }
    }
  }
}

// What a vector of lines had so far, by what the new keys make of it.
static void fade_sums(const Attention *a, const Scratch *s, int64_t num_lines, int64_t line) {
  Floats faded = load(s->faded + line);
  Ints is_same = faded == all_lanes(1);
  int has_changed = 0;
  for (int lane = 0; lane < LANES; lane++) has_changed |= !is_same[lane];
  for (int64_t d = 0; d < a->head_dim && has_changed; d++) {
    float *sum = s->sums + d * num_lines + line;
    store(sum, load(sum) * faded);
  }
}

static void store_outputs(const Attention *a, const Scratch *s, const Item *item) {
  for (int64_t first = 0; first < item->num_lines; first += TILE) {
    for (int64_t d = 0; d < a->head_dim; d += TILE) {
      Floats lines[TILE];
      int64_t num_lines = item->num_lines - first < TILE ? item->num_lines - first : TILE;
      turn(s->sums + d * item->num_padded + first, sizeof(float) * item->num_padded, lines, 64,
           num_lines);
      for (int64_t line = 0; line < num_lines; line++)
        store_reals(a->out, head_of(a, item, first + line) + d,
                    lines[line] / s->totals[first + line]);
    }
  }
}

// Meanwhile memory is asked for the next item's first block.
static void attend_by_tiles(const Attention *a, const Scratch *s, const Item *item,
                            const Item *next) {
  int64_t num_lines = item->num_padded, end = item->position + item->num_queries;
  int64_t first = begin_of(a, item);
  begin_item(a, s, item);
  turn_queries(a, s, item);
  for (int64_t begin = first; begin < end; begin += BLOCK) {
    int64_t count = end - begin < BLOCK ? end - begin : BLOCK;
    score_tiles(a, s, item, begin, count);
    if (begin + BLOCK < end)
      fetch_block(a, item, begin + BLOCK);
    else if (next != NULL)
      fetch_block(a, next, begin_of(a, next));
    turn_values(a, s, item, begin, count);
    int is_edge = is_edge_of(a, item, begin, count);
    for (int64_t line = 0; line < num_lines; line += LANES) {
      weigh(a, s, begin, count, num_lines, line, is_edge);
      round_weights(s, count, num_lines, line);
      if (begin > first) fade_sums(a, s, num_lines, line);
    }
    add_tiles(a, s, count, num_lines, begin == first);
  }
  store_outputs(a, s, item);
}

#else

static void attend_by_tiles(const Attention *a, const Scratch *s, const Item *item,
                            const Item *next) {}

#endif

#endif  // PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_TILES_H_
