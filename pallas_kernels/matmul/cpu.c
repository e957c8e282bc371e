// Products of a few tokens with a matrix of bfloat16, as a custom call of XLA on CPUs.
//
// Each thread takes runs of channels, the rows of the matrix; a row is read once for up to eight
// tokens. Sums are kept in registers, a lane each, so that the compiler need not reorder any.

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

enum {
  RUN = 48,      // channels that a thread takes at a time
  MAX_HELPERS = 31,
  AHEAD = 4096,  // bytes
  LINE = 32,     // bfloat16 in a line of the cache
};

static inline Floats load(const float *at) {
  Floats loaded;
  memcpy(&loaded, at, sizeof loaded);
  return loaded;
}

static inline Floats load_bfloat16(const uint16_t *at) {
  Halves halves;
  memcpy(&halves, at, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

static inline float float_of(uint16_t half) {
  uint32_t word = (uint32_t)half << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

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
      float sum = 0;                                                                           \
      for (int part = 1; part < NUM_PARTS; part++) sums[t][0] += sums[t][part];                \
      for (int lane = 0; lane < LANES; lane++) sum += sums[t][0][lane];                        \
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
enum { MAX_TOKENS = sizeof ROWS / sizeof *ROWS };

// One product, shared by the thread that is asked for it and those that may come to help.
typedef struct {
  const float *x;
  const uint16_t *weights;
  float *out;
  int64_t num_tokens, width, num_channels;
  _Atomic int64_t num_taken, num_done;  // channels
  _Atomic int num_users;                // the last one frees this
} Product;

static void compute(const Product *product, int64_t begin, int64_t end) {
  int64_t width = product->width, stride = product->num_channels;
  for (int64_t token = 0; token < product->num_tokens; token += MAX_TOKENS) {
    int64_t left = product->num_tokens - token;
    Row *row = ROWS[(left < MAX_TOKENS ? left : MAX_TOKENS) - 1];
    for (int64_t channel = begin; channel < end; channel++)
      row(product->x + token * width, product->weights + channel * width,
          product->out + token * stride + channel, width, stride);
  }
}

static void work(Product *product) {
  for (;;) {
    int64_t begin = atomic_fetch_add_explicit(&product->num_taken, RUN, memory_order_relaxed);
    if (begin >= product->num_channels) return;
    int64_t end = begin + RUN < product->num_channels ? begin + RUN : product->num_channels;
    compute(product, begin, end);
    atomic_fetch_add_explicit(&product->num_done, end - begin, memory_order_release);
  }
}

static void leave(Product *product) {
  if (atomic_fetch_sub(&product->num_users, 1) == 1) free(product);
}

static void help(void *product) {
  work(product);
  leave(product);
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void forget(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args destroy = {sizeof destroy, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
}

static int count_helpers(const XLA_FFI_CallFrame *frame, int64_t num_channels) {
  int64_t num_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {sizeof count, NULL, frame->ctx, &num_threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&count);
  if (error != NULL) {
    forget(frame, error);
    return 0;
  }
  int64_t num_runs = (num_channels + RUN - 1) / RUN;
  int64_t useful = num_threads < num_runs ? num_threads - 1 : num_runs - 1;
  return useful < MAX_HELPERS ? useful : MAX_HELPERS;
}

// Arguments: x [M, D] float32, weights [L, F, D] bfloat16, (layer, number of live tokens) int32.
// Result: [M, F] float32, zeros past the live tokens.
XLA_FFI_Error *jaxserve_matmul(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata =
        ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const XLA_FFI_Buffer *x = frame->args.args[0], *weights = frame->args.args[1];
  const XLA_FFI_Buffer *where = frame->args.args[2], *out = frame->rets.rets[0];
  int64_t max_tokens = x->dims[0], width = x->dims[1], num_channels = weights->dims[1];
  int64_t layer = ((const int32_t *)where->data)[0], num_tokens = ((const int32_t *)where->data)[1];
  num_tokens = num_tokens < 0 ? 0 : num_tokens > max_tokens ? max_tokens : num_tokens;
  layer = layer < 0 ? 0 : layer >= weights->dims[0] ? weights->dims[0] - 1 : layer;
  float *results = out->data;
  memset(results + num_tokens * num_channels, 0,
         sizeof(float) * (max_tokens - num_tokens) * num_channels);

  Product *product = malloc(sizeof *product);
  if (product == NULL) abort();  // as XLA's own allocations do
  product->x = x->data;
  product->weights = (const uint16_t *)weights->data + layer * num_channels * width;
  product->out = results;
  product->num_tokens = num_tokens;
  product->width = width;
  product->num_channels = num_channels;
  atomic_init(&product->num_taken, 0);
  atomic_init(&product->num_done, 0);
  int num_helpers = count_helpers(frame, num_channels);
  atomic_init(&product->num_users, 1 + num_helpers);
  for (int i = 0; i < num_helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args schedule = {
        sizeof schedule, NULL, frame->ctx, help, product};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&schedule);
    if (error == NULL) continue;
    forget(frame, error);  // this thread does it
    leave(product);
  }
  work(product);
  while (atomic_load_explicit(&product->num_done, memory_order_acquire) < num_channels)
    pause_briefly();
  leave(product);
  return NULL;
}
