// What is done to a step's tokens before any is attended to: queries and keys are rotated by their
// positions, keys and values written to the cache.

#ifndef PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_NEW_TOKENS_H_
#define PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_NEW_TOKENS_H_

#include "cpu_common.h"

// One head of `from`, from entry `at` on, with each pair (i, i + H / 2) rotated by its angle, rounded
// as it would be in memory.
static void rotate_head(const Attention *a, int64_t token, int64_t at, float *head) {
  int64_t head_dim = a->head_dim, half = head_dim / 2;
  for (int64_t d = 0; d < head_dim; d += LANES) store(head + d, load_reals(a->qkv, at + d));
  if (a->cos == NULL) return;
  const float *cos = a->cos + token * half, *sin = a->sin + token * half;
  for (int64_t i = 0; i < half; i++) {
    float first = head[i], second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[i] + first * sin[i];
  }
  if (!a->qkv.is_bfloat16) return;
  for (int64_t d = 0; d < head_dim; d += LANES)
    store(head + d, round_to_bfloat16(load(head + d)));
}

static void store_head(Reals to, int64_t at, const float *head, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += LANES) store_reals(to, at + d, load(head + d));
}

// Tokens begin to end of those that rows have, which follow each other from 0 on.
static void take_tokens(const void *work, int64_t begin, int64_t end) {
  const Attention *a = work;
  int64_t head_dim = a->head_dim, group = a->num_heads / a->num_kv_heads;
  Reals q = {(void *)a->q, a->by_tiles};
  Reals keys = {a->keys, a->is_bfloat16}, values = {a->values, a->is_bfloat16};
  float *head = scratch_of(0, head_dim);
  int64_t row = 0;
  for (int64_t token = begin; token < end; token++) {
    while (token >= a->starts[row] + a->q_lens[row]) row++;
    int64_t position = a->kv_lens[row] - a->q_lens[row] + token - a->starts[row];
    for (int64_t kv_head = 0; kv_head < a->num_kv_heads; kv_head++) {
      int64_t at = (token * a->num_kv_heads + kv_head) * (group + 2) * head_dim;
      int64_t to = (token * a->num_heads + kv_head * group) * head_dim;
      for (int64_t i = 0; i < group; i++, at += head_dim, to += head_dim) {
        rotate_head(a, token, at, head);
        store_head(q, to, head, head_dim);
      }
      if (position < 0) continue;  // kv_lens is cut to what the row's pages hold, q_lens is not
      int64_t place = place_of(a, row, position, kv_head);
      rotate_head(a, token, at, head);
      store_head(keys, place, head, head_dim);
      at += head_dim;
      for (int64_t d = 0; d < head_dim; d += LANES)
        store_reals(values, place + d, load_reals(a->qkv, at + d));
    }
  }
}

#endif  // PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_CPU_NEW_TOKENS_H_
