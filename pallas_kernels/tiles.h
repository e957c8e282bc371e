// The matrix unit of x86-64 CPUs (AMX): tiles of 16 rows of 64 bytes, whose products of bfloat16
// are summed up in float32, and those of int8 in int32. A tile of products is C += A B: A has 16 rows
// of 32 or 64 entries, B 16 rows with two or four entries, a word, of each of 16 columns.

#ifndef PALLAS_KERNELS_TILES_H_
#define PALLAS_KERNELS_TILES_H_

#include "native.h"

enum {
  TILE = 16,        // rows and columns of C
  TILE_DEPTH = 32,  // bfloat16 that A's rows and B's columns have
  TILE_ROW = 64,    // bytes
  TILE_BYTES = 1024,
};

#define NO_TILES "a program that multiplies tiles has a library that does not"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__linux__)
#define HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

// All tiles of this thread whole. Others that run on the thread have their own shapes, so that
// these are for one run of work only.
static inline void begin_tiles(void) {
  // Not on the stack: GCC takes the instruction to read 8 bytes, and leaves out what sets the rest.
  static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shapes = {.palette = 1, .bytes = {[0 ... 7] = 64}, .rows = {[0 ... 7] = TILE}};
  _tile_loadconfig(&shapes);
}

static inline void end_tiles(void) { _tile_release(); }

// GCC does not know that loads of tiles read memory: what was stored before must be there.
static inline void finish_stores(void) { __asm__ volatile("" ::: "memory"); }

// Where the operands of products lie: two tiles of A's rows, whose rows are a_stride bytes apart,
// and two of B's columns, whose rows follow each other. A step is a tile of depth. They are of
// bfloat16 or of int8.
typedef struct {
  const char *a[2], *b[2];
  int64_t a_stride, a_step, b_step;
  int is_int8;
} Operands;

// Sets to zeros what `add_products` adds to.
static inline void zero_products(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Sets them to what is in memory; see `store_products`.
static inline void load_products(char *const from[2][2], int64_t stride, int has_second) {
  finish_stores();
  _tile_loadd(0, from[0][0], stride);
  _tile_loadd(1, from[0][1], stride);
  if (!has_second) return;
  _tile_loadd(2, from[1][0], stride);
  _tile_loadd(3, from[1][1], stride);
}

// Adds products of A's two tiles with B's first to tiles 0 and 1, and with B's second to 2 and 3.
// B passes the first cache by if it is `streamed`, which then keeps A. Meanwhile memory is asked
// for `ahead` lines a step, from `next` on.
__attribute__((always_inline)) static inline void add_products(const Operands *of,
                                                               int64_t num_steps, int has_second,
                                                               int is_streamed, const char *next,
                                                               int64_t ahead) {
  finish_stores();
  for (int64_t k = 0; k < num_steps; k++) {
    for (int64_t line = 0; line < ahead; line++, next += 64) __builtin_prefetch(next, 0, 2);
    if (is_streamed)
      _tile_stream_loadd(6, of->b[0] + k * of->b_step, 64);
    else
      _tile_loadd(6, of->b[0] + k * of->b_step, 64);
    _tile_loadd(4, of->a[0] + k * of->a_step, of->a_stride);
    if (of->is_int8)
      _tile_dpbssd(0, 4, 6);
    else
      _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, of->a[1] + k * of->a_step, of->a_stride);
    if (of->is_int8)
      _tile_dpbssd(1, 5, 6);
    else
      _tile_dpbf16ps(1, 5, 6);
    if (has_second) {
      if (is_streamed)
        _tile_stream_loadd(7, of->b[1] + k * of->b_step, 64);
      else
        _tile_loadd(7, of->b[1] + k * of->b_step, 64);
      if (of->is_int8)
        _tile_dpbssd(2, 4, 7);
      else
        _tile_dpbf16ps(2, 4, 7);
      if (of->is_int8)
        _tile_dpbssd(3, 5, 7);
      else
        _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Stores the tiles that `add_products` adds to: `stride` bytes between rows.
static inline void store_products(char *const to[2][2], int64_t stride, int has_second) {
  _tile_stored(0, to[0][0], stride);
  _tile_stored(1, to[0][1], stride);
  if (!has_second) return;
  _tile_stored(2, to[1][0], stride);
  _tile_stored(3, to[1][1], stride);
}

// Turns 16 rows of 16 words, which lie `from_stride` and `to_stride` bytes apart; of those that
// come out only the first `num_rows` are stored.
static inline void turn(const void *from, int64_t from_stride, void *to, int64_t to_stride,
                        int num_rows) {
  __m512i a[TILE], b[TILE];
  for (int i = 0; i < TILE; i++)
    a[i] = _mm512_loadu_si512((const char *)from + i * from_stride);
  for (int i = 0; i < TILE; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < TILE; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 * i + j] has, of rows 4 i to 4 i + 3, columns j, j + 4, j + 8 and j + 12.
  for (int j = 0; j < 4; j++) {
    b[j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    b[4 + j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    b[8 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; j++) {
    a[j] = _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88);
    a[8 + j] = _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd);
    a[4 + j] = _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0x88);
    a[12 + j] = _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0xdd);
  }
  for (int i = 0; i < num_rows; i++) _mm512_storeu_si512((char *)to + i * to_stride, a[i]);
}

#else
#define HAS_TILES 0

static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

#endif

// Whether this process may use the unit, which it asks the system for.
static inline int may_use_tiles(void) {
#if HAS_TILES
  enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
  return 0;
#endif
}

#endif  // PALLAS_KERNELS_TILES_H_
