// What custom calls share: memory of a thread, and work that threads of XLA's own pool share.

#include "native.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "tiles.h"

enum {
  NUM_SCRATCHES = 3,
  MAX_HELPERS = 31,
  SPIN_NS = 20000,  // about what a run takes
};

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

float *scratch_of(int number, int64_t num_floats) {
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

// Runs that are left of those a thread begins with: it takes them from the first on, so that memory
// can be asked for ahead; others take the last ones.
typedef struct {
  _Alignas(64) _Atomic uint64_t ends;  // begin << 32 | end
} Range;

typedef struct {
  Run *run;
  const void *work;
  int64_t num_items, run_len, num_threads;
  _Atomic int64_t num_done;  // runs
  _Atomic int num_users;     // the last one frees this
  _Atomic int num_present;   // threads
  pthread_mutex_t mutex;
  pthread_cond_t is_done;
  Range ranges[];
} Shared;

// Takes half of what is left; returns how many runs, from *begin on.
static int64_t take(Range *range, int is_own, int64_t *begin) {
  uint64_t ends = atomic_load_explicit(&range->ends, memory_order_relaxed), left;
  int64_t count;
  do {
    uint64_t first = ends >> 32, end = ends & UINT32_MAX;
    if (first >= end) return 0;
    count = (end - first + 1) / 2;
    *begin = is_own ? first : end - count;
    left = is_own ? (first + count) << 32 | end : first << 32 | (end - count);
  } while (!atomic_compare_exchange_weak_explicit(&range->ends, &ends, left, memory_order_relaxed,
                                                  memory_order_relaxed));
  return count;
}

// Returns whether all is done by that.
static int take_part(Shared *shared) {
  int64_t mine = atomic_fetch_add_explicit(&shared->num_present, 1, memory_order_relaxed);
  int64_t num_runs = (shared->num_items + shared->run_len - 1) / shared->run_len;
  int is_last = 0;
  for (int64_t i = 0; i < shared->num_threads; i++) {
    Range *range = &shared->ranges[(mine + i) % shared->num_threads];
    int64_t begin, count;
    while ((count = take(range, i == 0, &begin)) > 0) {
      int64_t end = (begin + count) * shared->run_len;
      shared->run(shared->work, begin * shared->run_len,
                  end < shared->num_items ? end : shared->num_items);
      int64_t num_done = atomic_fetch_add_explicit(&shared->num_done, count, memory_order_acq_rel);
      is_last = num_done + count == num_runs;
    }
  }
  return is_last;
}

static void leave(Shared *shared) {
  if (atomic_fetch_sub(&shared->num_users, 1) > 1) return;
  pthread_mutex_destroy(&shared->mutex);
  pthread_cond_destroy(&shared->is_done);
  free(shared);
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void help(void *work) {
  Shared *shared = work;
  if (take_part(shared)) {
    pthread_mutex_lock(&shared->mutex);
    pthread_cond_signal(&shared->is_done);
    pthread_mutex_unlock(&shared->mutex);
  }
  leave(shared);
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int is_done(Shared *shared, int64_t num_runs) {
  return atomic_load_explicit(&shared->num_done, memory_order_acquire) == num_runs;
}

// For runs that others took. One of them may have lost its core to another process, and gets this
// thread's if that sleeps.
static void wait(Shared *shared, int64_t num_runs) {
  if (is_done(shared, num_runs)) return;
  for (int64_t end_ns = now_ns() + SPIN_NS; now_ns() < end_ns;) {
    for (int i = 0; i < 8; i++) {
      pause_briefly();
      if (is_done(shared, num_runs)) return;
    }
  }
  pthread_mutex_lock(&shared->mutex);
  while (!is_done(shared, num_runs)) pthread_cond_wait(&shared->is_done, &shared->mutex);
  pthread_mutex_unlock(&shared->mutex);
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

void share(const XLA_FFI_CallFrame *frame, Run *run, const void *work, int64_t num_items,
           int64_t run_len) {
  int64_t num_runs = (num_items + run_len - 1) / run_len;
  int num_helpers = count_helpers(frame, num_runs);
  if (num_helpers == 0) {
    if (num_items > 0) run(work, 0, num_items);
    return;
  }
  int num_threads = 1 + num_helpers;
  Shared *shared = aligned_alloc(64, sizeof *shared + num_threads * sizeof(Range));
  if (shared == NULL) abort();  // as XLA's own allocations do
  *shared = (Shared){.run = run, .work = work, .num_items = num_items, .run_len = run_len,
                     .num_threads = num_threads};
  for (int i = 0; i < num_threads; i++) {
    uint64_t begin = num_runs * i / num_threads, end = num_runs * (i + 1) / num_threads;
    atomic_init(&shared->ranges[i].ends, begin << 32 | end);
  }
  pthread_mutex_init(&shared->mutex, NULL);
  pthread_cond_init(&shared->is_done, NULL);
  atomic_init(&shared->num_users, 1 + num_helpers);
  for (int i = 0; i < num_helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args schedule = {sizeof schedule, NULL, frame->ctx, help, shared};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&schedule);
    if (error == NULL) continue;
    forget(frame, error);  // this thread does it
    leave(shared);
  }
  take_part(shared);
  wait(shared, num_runs);
  leave(shared);
}

int jaxserve_has_tiles(void) { return may_use_tiles(); }
