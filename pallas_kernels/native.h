// What custom calls of XLA on CPUs have in common: vectors, bfloat16, and work that is shared among
// the threads of XLA's own pool.

#ifndef PALLAS_KERNELS_NATIVE_H_
#define PALLAS_KERNELS_NATIVE_H_

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#else
#define LANES 8
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Quarters __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t bfloat16;

enum { MAX_HELPERS = 31 };

static inline Floats load(const float *at) {
  Floats loaded;
  memcpy(&loaded, at, sizeof loaded);
  return loaded;
}

static inline void store(float *at, Floats stored) { memcpy(at, &stored, sizeof stored); }

// Without it compilers read what several products share from memory for each of them.
#ifdef __AVX__
#define keep_in_register(vector) __asm__("" : "+v"(vector))
#else
#define keep_in_register(vector)
#endif

static inline Floats all_lanes(float value) { return value - (Floats){0}; }

static inline Floats load_bfloat16(const bfloat16 *at) {
  Halves halves;
  memcpy(&halves, at, sizeof halves);
#ifdef __AVX512F__
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);  // GCC's takes two of 256
#else
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

static inline float float_of_bfloat16(bfloat16 half) {
  uint32_t word = (uint32_t)half << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

static inline Floats load_int8_t(const int8_t *at) {
  Bytes bytes;
  memcpy(&bytes, at, sizeof bytes);
#ifdef __AVX512F__
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));  // as above
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

static inline float float_of_int8_t(int8_t value) { return value; }

static inline float sum_of(Floats lanes) {
  Quarters parts[LANES / 4];
  memcpy(parts, &lanes, sizeof lanes);
  for (int part = 1; part < LANES / 4; part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

enum { NUM_SCRATCHES = 2 };

typedef struct {
  float *memory[NUM_SCRATCHES];
  int64_t capacity[NUM_SCRATCHES];
} Scratches;

static pthread_key_t scratch_key;  // of threads that have some

static void free_scratches(void *scratches) {
  for (int i = 0; i < NUM_SCRATCHES; i++) free(((Scratches *)scratches)->memory[i]);
}

__attribute__((constructor)) static void make_scratch_key(void) {
  if (pthread_key_create(&scratch_key, free_scratches) != 0) abort();
}

// Memory of this thread, in whole lines of the cache, which stays until it asks for more, or ends.
static inline float *scratch_of(int number, int64_t num_floats) {
  static _Thread_local Scratches mine;
  if (num_floats > mine.capacity[number]) {
    pthread_setspecific(scratch_key, &mine);
    free(mine.memory[number]);
    mine.capacity[number] = (num_floats + 15) / 16 * 16;
    mine.memory[number] = aligned_alloc(64, sizeof(float) * mine.capacity[number]);
    if (mine.memory[number] == NULL) abort();  // as XLA's own allocations do
  }
  return mine.memory[number];
}

// Computes items begin to end of `work`.
typedef void Run(const void *work, int64_t begin, int64_t end);

typedef struct {
  Run *run;
  const void *work;
  int64_t num_items, run_len, num_threads;
  _Atomic int64_t num_taken, num_done;  // items
  _Atomic int num_users;                // the last one frees this
} Shared;

// Takes runs, long ones at first: within a run, memory can be asked for ahead.
static void take_part(Shared *shared) {
  int64_t begin = atomic_load_explicit(&shared->num_taken, memory_order_relaxed), end;
  for (;;) {
    do {
      if (begin >= shared->num_items) return;
      int64_t share = (shared->num_items - begin) / (2 * shared->num_threads);
      int64_t num_runs = share / shared->run_len;
      end = begin + shared->run_len * (num_runs > 1 ? num_runs : 1);
      if (end > shared->num_items) end = shared->num_items;
    } while (!atomic_compare_exchange_weak_explicit(&shared->num_taken, &begin, end,
                                                    memory_order_relaxed, memory_order_relaxed));
    shared->run(shared->work, begin, end);
    atomic_fetch_add_explicit(&shared->num_done, end - begin, memory_order_release);
    begin = atomic_load_explicit(&shared->num_taken, memory_order_relaxed);
  }
}

static void leave(Shared *shared) {
  if (atomic_fetch_sub(&shared->num_users, 1) == 1) free(shared);
}

static void help(void *shared) {
  take_part(shared);
  leave(shared);
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline void forget(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args destroy = {sizeof destroy, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
}

static inline XLA_FFI_Error *error_of(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args create = {sizeof create, NULL, message, XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&create);
}

static int count_helpers(const XLA_FFI_CallFrame *frame, int64_t num_runs) {
  int64_t num_threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {sizeof count, NULL, frame->ctx, &num_threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&count);
  if (error != NULL) {
    forget(frame, error);
    return 0;
  }
  int64_t useful = (num_threads < num_runs ? num_threads : num_runs) - 1;
  return useful < 0 ? 0 : useful < MAX_HELPERS ? useful : MAX_HELPERS;
}

// Runs all items, at least `run_len` of them at a time, with what threads come to help meanwhile;
// `work` is read until this returns, by no one after.
static void share(const XLA_FFI_CallFrame *frame, Run *run, const void *work, int64_t num_items,
                  int64_t run_len) {
  int num_helpers = count_helpers(frame, (num_items + run_len - 1) / run_len);
  if (num_helpers == 0) {
    if (num_items > 0) run(work, 0, num_items);
    return;
  }
  Shared *shared = malloc(sizeof *shared);
  if (shared == NULL) abort();  // as XLA's own allocations do
  *shared = (Shared){.run = run, .work = work, .num_items = num_items, .run_len = run_len,
                     .num_threads = 1 + num_helpers};
  atomic_init(&shared->num_users, 1 + num_helpers);
  for (int i = 0; i < num_helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args schedule = {sizeof schedule, NULL, frame->ctx, help, shared};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&schedule);
    if (error == NULL) continue;
    forget(frame, error);  // this thread does it
    leave(shared);
  }
  take_part(shared);
  while (atomic_load_explicit(&shared->num_done, memory_order_acquire) < num_items)
    pause_briefly();
  leave(shared);
}

// Whether XLA only asks which version of its interface this is for, which is then answered, or has
// a stage that there is nothing to do for.
static inline int is_no_execution(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata =
        ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 1;
  }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

#endif  // PALLAS_KERNELS_NATIVE_H_
