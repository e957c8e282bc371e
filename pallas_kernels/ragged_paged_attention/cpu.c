// Attention to a paged cache of bfloat16 or float32.
//
// An item of work is some of one row's queries, with the query heads of one KV head: its lines. Keys
// are taken a block at a time, with a running softmax a line. Where there are few lines, as in
// decoding, a vector has dimensions of one line, and a key is read once for all of them. Where there
// are many, arrays of lines are turned, so that a vector has one dimension, or one score, of many
// lines, and nothing is ever summed up within a vector. Products are by the CPU's unit for tiles
// where it has one and queries and cache are of bfloat16; then lines are always many.

#include "cpu_new_tokens.h"
#include "cpu_tiles.h"
#include "cpu_vectors.h"

static int64_t items_of(const Attention *a, int64_t row) {
  return (a->q_lens[row] + a->queries_per_item - 1) / a->queries_per_item * a->num_kv_heads;
}

static int64_t pad_lines(const Attention *a, int64_t num_lines) {
  if (!a->by_tiles && num_lines <= FEW_LINES) return num_lines;
  int64_t whole = a->by_tiles ? TILE : TILE_PARTS * LANES;
  return (num_lines + whole - 1) / whole * whole;
}

// A row, and its first item.
typedef struct {
  int64_t row, first_item;
} Place;

// Items go by row, then by query, then by KV head. `place` is of some item before, or of the first.
static Item item_at(const Attention *a, int64_t number, Place *place) {
  while (number >= place->first_item + items_of(a, place->row))
    place->first_item += items_of(a, place->row++);
  int64_t of_row = number - place->first_item;
  int64_t first = of_row / a->num_kv_heads * a->queries_per_item;
  int64_t num_left = a->q_lens[place->row] - first;
  Item item = {
      .row = place->row,
      .kv_head = of_row % a->num_kv_heads,
      .token = a->starts[place->row] + first,
      .position = a->kv_lens[place->row] - num_left,
      .num_queries = num_left < a->queries_per_item ? num_left : a->queries_per_item,
      .group = a->num_heads / a->num_kv_heads,
  };
  item.num_lines = item.num_queries * item.group;
  item.num_padded = pad_lines(a, item.num_lines);
  return item;
}

static void attend(const void *work, int64_t begin, int64_t end) {
  const Attention *a = work;
  int64_t num_lines = pad_lines(a, a->queries_per_item * (a->num_heads / a->num_kv_heads));
  int64_t head_dim = a->head_dim;
  int64_t sizes[] = {num_lines * head_dim, BLOCK * head_dim,  BLOCK * head_dim,
                     num_lines * BLOCK,    num_lines * BLOCK, num_lines * head_dim,
                     num_lines,            num_lines,         num_lines,
                     num_lines};
  enum { NUM_ARRAYS = sizeof sizes / sizeof *sizes };
  int64_t total = 0;
  for (int i = 0; i < NUM_ARRAYS; i++) total += (sizes[i] + LANES - 1) / LANES * LANES;
  float *memory = scratch_of(0, total), *arrays[NUM_ARRAYS];
  for (int i = 0, at = 0; i < NUM_ARRAYS; at += (sizes[i] + LANES - 1) / LANES * LANES, i++)
    arrays[i] = memory + at;
  Scratch s = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
               arrays[5], arrays[6], arrays[7], arrays[8], arrays[9]};
  if (a->by_tiles) begin_tiles();
  Place place = {0, 0};
  Item next = item_at(a, begin, &place);
  for (int64_t i = begin; i < end; i++) {
    Item item = next;
    int is_last = i + 1 == end;
    if (!is_last) next = item_at(a, i + 1, &place);
    if (a->by_tiles)
      attend_by_tiles(a, &s, &item, is_last ? NULL : &next);
    else
      attend_by_vectors(a, &s, &item);
  }
  if (a->by_tiles) end_tiles();
}

enum {
  QKV, COS, SIN, KEYS, VALUES, PAGES, KV_LENS, Q_LENS, STARTS, SINKS, LAYER, WHOLE, REAL,
  NUM_ARGUMENTS,
};

// Arguments, by number: qkv [T, K, G + 2, H]; cosines and sines [T, H / 2] float32 of the angles that
// queries and keys are rotated by, or [0, 0]; keys, values [L, P, S, K, H]; pages [R, B], kv_lens,
// q_lens and starts [R] int32, as in `rows.Rows`; sinks [N] float32, or none: [0]; layer int32;
// (1 if the unit for tiles shall multiply, window or 0) int32; (scale, soft cap or 0) float32.
// Results: [T, N, H] of qkv's type, zeros for padding; keys, values, where they are. Reals are
// bfloat16 or float32; tiles take bfloat16.
XLA_FFI_Error *jaxserve_ragged_paged_attention(XLA_FFI_CallFrame *frame) {
  if (is_no_execution(frame)) return NULL;
  if (frame->args.size != NUM_ARGUMENTS) return error_of(frame, OTHER_VERSION);
  const XLA_FFI_Buffer **in = (const XLA_FFI_Buffer **)frame->args.args;
  const XLA_FFI_Buffer **rets = (const XLA_FFI_Buffer **)frame->rets.rets;
  const int64_t *packed = in[QKV]->dims, *cache = in[KEYS]->dims, *tables = in[PAGES]->dims;
  const int32_t *whole = in[WHOLE]->data;
  const float *real = in[REAL]->data;
  int64_t num_layers = cache[0], layer = *(const int32_t *)in[LAYER]->data;
  layer = layer < 0 ? 0 : layer >= num_layers ? num_layers - 1 : layer;
  int64_t group = packed[2] - 2, num_heads = packed[1] * group, head_dim = packed[3];
  Attention a = {
      .qkv = reals_of(in[QKV]),
      .cos = in[COS]->dims[0] ? in[COS]->data : NULL,
      .sin = in[SIN]->data,
      .sinks = in[SINKS]->dims[0] ? in[SINKS]->data : NULL,
      .keys = rets[1]->data,  // the arguments' memory, too
      .values = rets[2]->data,
      .pages = in[PAGES]->data,
      .kv_lens = in[KV_LENS]->data,
      .q_lens = in[Q_LENS]->data,
      .starts = in[STARTS]->data,
      .out = reals_of(rets[0]),
      .num_rows = tables[0],
      .num_heads = num_heads,
      .num_kv_heads = cache[3],
      .head_dim = head_dim,
      .page_size = cache[2],
      .pages_per_row = tables[1],
      .first_page = layer * cache[1],
      .window = whole[1],
      .by_tiles = whole[0],
      .is_bfloat16 = in[KEYS]->dtype == XLA_FFI_DataType_BF16,
      .scale = real[0],
      .soft_cap = real[1],
  };
  if (a.by_tiles && !HAS_TILES) return error_of(frame, NO_TILES);
  if (in[KEYS]->data != a.keys || in[VALUES]->data != a.values)
    return error_of(frame, "the cache was copied");
  int64_t max_lines = a.by_tiles ? MAX_LINES_BY_TILES : MAX_LINES;
  a.queries_per_item = group < max_lines ? max_lines / group : 1;
  int64_t num_items = 0, num_tokens = 0;
  for (int64_t row = 0; row < a.num_rows; row++) {
    num_items += items_of(&a, row);
    num_tokens += a.q_lens[row];
  }
  if (num_tokens > packed[0]) return error_of(frame, "rows have more tokens than there are");
  int64_t token_len = num_heads * head_dim, entry_bytes = a.out.is_bfloat16 ? 2 : 4;
  memset((char *)a.out.data + num_tokens * token_len * entry_bytes, 0,
         (packed[0] - num_tokens) * token_len * entry_bytes);
  a.q = scratch_of(1, num_tokens * token_len);
  share(frame, take_tokens, &a, num_tokens, 32);
  share(frame, attend, &a, num_items, 1);
  return NULL;
}
