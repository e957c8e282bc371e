// What a product does with tokens before it, and with sums after it: operations on whole rows, whose
// results would else go through memory, and through XLA, once more.

#ifndef PALLAS_KERNELS_MATMUL_CPU_FUSED_H_
#define PALLAS_KERNELS_MATMUL_CPU_FUSED_H_

#include <math.h>

#include "native.h"

// Tokens as they come: x [M, D]; [M, 1, 2, D], gates and what they let through, if `is_gated`.
typedef struct {
  Reals x;
  Reals norm;  // [D], the weights of their RMS norm, of which eps is; NULL: none
  float eps;
  int is_gated;
  int64_t width;  // D
} Tokens;

// Sums as they go: out [M, F], after `residual` [M, F], if there is one, is added.
typedef struct {
  Reals out, residual;
  int64_t num_channels;  // F
} Results;

static inline int is_plain(const Tokens *of) { return !of->norm.data && !of->is_gated; }

static inline Floats sigmoid_of(Floats x) {
  Floats below = select_of(x > all_lanes(0), -x, x);
  Floats faded = select_of(below < all_lanes(-87), all_lanes(0), exp_of(below));
  return select_of(x > all_lanes(0), all_lanes(1), faded) / (faded + 1.0f);
}

static inline Floats rounded_as(Reals kind, Floats values) {
  return kind.is_bfloat16 ? round_to_bfloat16(values) : values;
}

// A vector of entries from number `at` on, or what there is of them and zeros.
static inline Floats load_some(Reals from, int64_t at, int64_t num_left) {
  if (num_left >= LANES) return load_reals(from, at);
  float values[LANES] = {0};
  for (int64_t i = 0; i < num_left; i++) values[i] = load_real(from, at + i);
  return load(values);
}

// One token as the product takes it, in whole vectors: zeros follow. Rounded as it would be in
// memory.
static void prepare_token(const Tokens *of, int64_t token, float *row) {
  int64_t width = of->width;
  if (of->is_gated) {
    int64_t gate = 2 * token * width;
    for (int64_t i = 0; i < width; i += LANES) {
      Floats gates = load_some(of->x, gate + i, width - i);
      Floats gated = gates * sigmoid_of(gates) * load_some(of->x, gate + width + i, width - i);
      store(row + i, rounded_as(of->x, gated));
    }
    return;
  }
  Floats sums[4] = {0};
  for (int64_t i = 0, part = 0; i < width; i += LANES, part = (part + 1) % 4) {
    Floats entries = load_some(of->x, token * width + i, width - i);
    store(row + i, entries);
    sums[part] += entries * entries;
  }
  if (!of->norm.data) return;
  float mean = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / width;
  Floats scale = all_lanes(1 / sqrtf(mean + of->eps));
  for (int64_t i = 0; i < width; i += LANES) {
    Floats normed = load(row + i) * scale * load_some(of->norm, i, width - i);
    store(row + i, rounded_as(of->x, normed));
  }
}

// Stores sums of one token, for channels from `channel` on, as results.
static void store_results(const Results *to, int64_t token, int64_t channel, int64_t count,
                          const float *sums) {
  int64_t at = token * to->num_channels + channel, i = 0;
  for (; i + LANES <= count; i += LANES) {
    Floats sum = load(sums + i);
    if (to->residual.data) sum += load_reals(to->residual, at + i);
    store_reals(to->out, at + i, sum);
  }
  for (; i < count; i++)
    store_real(to->out, at + i,
               sums[i] + (to->residual.data ? load_real(to->residual, at + i) : 0));
}

#endif  // PALLAS_KERNELS_MATMUL_CPU_FUSED_H_
