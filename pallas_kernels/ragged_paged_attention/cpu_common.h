// What attention on a CPU has in common, whatever multiplies: see `cpu.c`.

#ifndef PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_COMMON_H_
#define PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_COMMON_H_

#include <math.h>

#include "tiles.h"

enum { BLOCK = 64 };  // keys

typedef struct {
  const float *sinks, *cos, *sin;  // cos: NULL where nothing is rotated
  const void *q;                   // [T, N, H], rotated: bfloat16 if `by_tiles`, else float32
  void *keys, *values;
  const int32_t *pages, *kv_lens, *q_lens, *starts;
  Reals qkv, out;  // qkv: [T, K, G + 2, H], of each KV head its queries, its key and its value
  int64_t num_rows, num_heads, num_kv_heads, head_dim, page_size, pages_per_row;
  int64_t first_page, queries_per_item, window;
  int is_bfloat16, by_tiles;
  float scale, soft_cap;
} Attention;

// Some queries of one row, the first of them token `token` of the step at `position` of the row,
// with the query heads of one KV head. A line is one query of one head: line i is of query i / group.
typedef struct {
  int64_t row, kv_head, token, position, num_queries, group;
  int64_t num_lines, num_padded;  // to whole tiles
} Item;

// Of few lines by vectors: q and sums [lines, H], scores [lines, BLOCK]. Otherwise sums [H, lines],
// scores [BLOCK, lines], lines padded, q the same way or as the unit for tiles wants it.
// newest: the last token that each line sees.
typedef struct {
  float *q, *keys, *values, *scores, *weights, *sums, *peaks, *totals, *faded, *newest;
} Scratch;

// Where token `at` of a row lies in the cache, in entries.
static inline int64_t place_of(const Attention *a, int64_t row, int64_t at, int64_t kv_head) {
  int64_t page = a->pages[row * a->pages_per_row + at / a->page_size];
  int64_t token = (a->first_page + page) * a->page_size + at % a->page_size;
  return (token * a->num_kv_heads + kv_head) * a->head_dim;
}

// Where the queries of a line begin, and where its outputs go.
static inline int64_t head_of(const Attention *a, const Item *item, int64_t line) {
  int64_t token = item->token + line / item->group;
  int64_t head = item->kv_head * item->group + line % item->group;
  return (token * a->num_heads + head) * a->head_dim;
}

// The first token that any line sees.
static inline int64_t first_of(const Attention *a, const Item *item) {
  int64_t first = item->position - a->window + 1;
  return a->window && first > 0 ? first : 0;
}

// No key is seen so far.
static void begin_item(const Attention *a, const Scratch *s, const Item *item) {
  for (int64_t line = 0; line < item->num_padded; line++) {
    int64_t of = line < item->num_lines ? line : item->num_lines - 1;
    s->newest[line] = item->position + of / item->group;
    s->peaks[line] =
        a->sinks ? a->sinks[item->kv_head * item->group + of % item->group] : -INFINITY;
    s->totals[line] = a->sinks ? 1 : 0;
  }
}

enum { CHAINS = 4 };  // of sums and maxima, that do not wait for each other

// Scores of a vector of lines to weights, with what those make of peaks, totals and faded. At an
// edge, some lines do not see all keys. A score that is no number makes a weight, and a total, that
// are none either.
__attribute__((always_inline)) static inline void weigh_lines(const Attention *a, const Scratch *s,
                                                              int64_t begin, int64_t count,
                                                              int64_t num_lines, int64_t line,
                                                              int is_edge) {
  const Floats none = all_lanes(-INFINITY);
  Floats newest = load(s->newest + line), before = load(s->peaks + line);
  Floats oldest = a->window ? newest - all_lanes(a->window - 1) : none;
  Floats peaks[CHAINS] = {before, before, before, before}, totals[CHAINS] = {0};
  float *scores = s->scores + line, scale = a->soft_cap != 0 ? 1 : a->scale;
  for (int64_t i = 0; i < count && a->soft_cap != 0; i++)
    for (int lane = 0; lane < LANES; lane++) {
      float *score = scores + i * num_lines + lane;
      *score = a->soft_cap * tanhf(*score * a->scale / a->soft_cap);
    }
  for (int64_t first = 0; first < count; first += CHAINS) {
    for (int c = 0; c < CHAINS && first + c < count; c++) {
      float *at = scores + (first + c) * num_lines;
      Floats score = load(at) * scale, key = all_lanes(begin + first + c);
      if (is_edge) score = select_of((key <= newest) & (key >= oldest), score, none);
      store(at, score);
      peaks[c] = max_of(score, peaks[c]);
    }
  }
  Floats peak = max_of(max_of(peaks[0], peaks[1]), max_of(peaks[2], peaks[3]));
  Floats finite = select_of(peak == none, all_lanes(0), peak);  // where no key was seen so far
  Floats faded = exp_of(before - finite);
  for (int64_t first = 0; first < count; first += CHAINS) {
    for (int c = 0; c < CHAINS && first + c < count; c++) {
      float *at = scores + (first + c) * num_lines;
      Floats score = load(at), weight = exp_of(score - finite);
      if (is_edge) weight = select_of(score == none, all_lanes(0), weight);
      totals[c] += weight;
      store(at, weight);
    }
  }
  Floats total = load(s->totals + line) * faded;
  for (int c = 0; c < CHAINS; c++) total += totals[c];
  store(s->peaks + line, peak);
  store(s->faded + line, faded);
  store(s->totals + line, total);
}

static void weigh(const Attention *a, const Scratch *s, int64_t begin, int64_t count,
                  int64_t num_lines, int64_t line, int is_edge) {
  if (is_edge)
    weigh_lines(a, s, begin, count, num_lines, line, 1);
  else
    weigh_lines(a, s, begin, count, num_lines, line, 0);
}

// Whether some line of an item does not see all of a block of keys.
static inline int is_edge_of(const Attention *a, const Item *item, int64_t begin, int64_t count) {
  int64_t end = item->position + item->num_queries;
  return begin + count - 1 > item->position || (a->window && end - a->window > begin);
}

#endif  // PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_COMMON_H_
