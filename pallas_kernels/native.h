// What custom calls of XLA on CPUs have in common: vectors, bfloat16, and work that is shared among
// the threads of XLA's own pool.

#ifndef PALLAS_KERNELS_NATIVE_H_
#define PALLAS_KERNELS_NATIVE_H_

#include <stdint.h>
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

static inline Floats select_of(Ints mask, Floats one, Floats other) {
  return (Floats)(((Ints)one & mask) | ((Ints)other & ~mask));
}

// The larger of each lane; `other` where one is no number.
static inline Floats max_of(Floats one, Floats other) {
#if defined(__AVX512F__)
  return _mm512_max_ps(one, other);
#else
  return select_of(one > other, one, other);
#endif
}

// e^x for x <= 0: 2^n by the exponent, and a polynomial of |f| <= ln 2 / 2; 2e-7 of the value.
static inline Floats exp_of(Floats x) {
  x = max_of(all_lanes(-87.0f), x);
  Floats rounder = all_lanes(12582912.0f);  // 1.5 * 2^23: sums round to whole numbers
  Floats n = (x * 1.44269504f + rounder) - rounder;
  Floats f = x - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  Floats p = all_lanes(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * (Floats)exponent;
}

// Rounds to bfloat16, ties to even; what is no number stays none.
static inline Halves bfloat16s_of(Floats x) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh(x);
#else
  Words bits = (Words)x;
  Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  Words kept = (Words)select_of(x == x, (Floats)rounded, (Floats)(bits | 0x400000)) >> 16;
#ifdef __AVX512F__
  return (Halves)_mm512_cvtepi32_epi16((__m512i)kept);
#else
  return __builtin_convertvector(kept, Halves);
#endif
#endif
}

static inline void store_bfloat16(bfloat16 *at, Floats values) {
  Halves halves = bfloat16s_of(values);
  memcpy(at, &halves, sizeof halves);
}

static inline Floats round_to_bfloat16(Floats x) {
  bfloat16 halves[LANES];
  store_bfloat16(halves, x);
  return load_bfloat16(halves);
}

static inline bfloat16 bfloat16_of(float value) {
  bfloat16 halves[LANES];
  store_bfloat16(halves, all_lanes(value));
  return halves[0];
}

// Arrays of bfloat16 or of float32.
typedef struct {
  void *data;
  int is_bfloat16;
} Reals;

static inline Floats load_reals(Reals from, int64_t at) {
  return from.is_bfloat16 ? load_bfloat16((const bfloat16 *)from.data + at)
                          : load((const float *)from.data + at);
}

static inline float load_real(Reals from, int64_t at) {
  return from.is_bfloat16 ? float_of_bfloat16(((const bfloat16 *)from.data)[at])
                          : ((const float *)from.data)[at];
}

static inline void store_reals(Reals to, int64_t at, Floats values) {
  if (to.is_bfloat16)
    store_bfloat16((bfloat16 *)to.data + at, values);
  else
    store((float *)to.data + at, values);
}

static inline void store_real(Reals to, int64_t at, float value) {
  if (to.is_bfloat16)
    ((bfloat16 *)to.data)[at] = bfloat16_of(value);
  else
    ((float *)to.data)[at] = value;
}

static inline float sum_of(Floats lanes) {
  Quarters parts[LANES / 4];
  memcpy(parts, &lanes, sizeof lanes);
  for (int part = 1; part < LANES / 4; part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// Memory of this thread, in whole lines of the cache, which stays until it asks for more, or ends.
// There are three, by `number`: 0 is for a run of work; 1 for what a call needs until all its runs
// are done, and 2 for whichever of the two needs another.
float *scratch_of(int number, int64_t num_floats);

// Computes items begin to end of `work`.
typedef void Run(const void *work, int64_t begin, int64_t end);

// Runs all items, at least `run_len` of them at a time, with what threads come to help meanwhile;
// `work` is read until this returns, by no one after.
void share(const XLA_FFI_CallFrame *frame, Run *run, const void *work, int64_t num_items,
           int64_t run_len);

static inline Reals reals_of(const XLA_FFI_Buffer *buffer) {
  return (Reals){buffer->data, buffer->dtype == XLA_FFI_DataType_BF16};
}

static inline void forget(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args destroy = {sizeof destroy, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
}

static inline XLA_FFI_Error *error_of(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args create = {sizeof create, NULL, message, XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&create);
}

#define OTHER_VERSION "a program was compiled for another version of this library"

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
