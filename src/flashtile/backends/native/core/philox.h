// Philox4x32-10: random bits that depend on seed, head, query and key only. Equal to dropout.py bit for bit.
#pragma once
#include <math.h>

#include "vectors.h"

// 32-bit words, each in the low half of a 64-bit lane; the high halves are ignored.
typedef uint64_t words __attribute__((vector_size(VECTOR_BYTES)));

INLINE words multiply_low(words a, uint32_t by) {  // the 64-bit product of the low halves
#if defined(__AVX512F__)
  return (words)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(by));
#elif defined(__AVX2__)
  return (words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(by));
#else
  return (a & 0xffffffffu) * (uint64_t)by;
#endif
}

INLINE void philox(uint64_t seed, words (&c)[4]) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    const words a = multiply_low(c[0], 0xD2511F53), b = multiply_low(c[2], 0xCD9E8D57);
    c[0] = (b >> 32) ^ c[1] ^ (uint64_t)k0;
    c[1] = b;
    c[2] = (a >> 32) ^ c[3] ^ (uint64_t)k1;
    c[3] = a;
  }
}

// A weight is kept iff its 32 random bits are at least this; halves round to even, as in Python.
inline uint32_t keep_threshold(double dropout) {
  const double t = nearbyint(dropout * 4294967296.);
  return t > 4294967295. ? 0xffffffffu : (uint32_t)t;
}

// kept[r]: which lanes keep their weight for key 4 * quad + r. `query` and `head` hold 32-bit numbers in lanes of R's
// width: two per 64-bit lane for float, one for double.
template <class R>
INLINE void keep_four(uint64_t seed, uint32_t threshold, uint32_t quad, Mask<R> query, Mask<R> head,
                      Mask<R> (&kept)[4]) {
  words even[4] = {(uint64_t)quad - words{}, (words)query, (words)head, words{}};
  if constexpr (sizeof(R) == 4) {
    words odd[4] = {even[0], even[1] >> 32, even[2] >> 32, words{}};
    philox(seed, even);
    philox(seed, odd);
    typedef uint32_t bits __attribute__((vector_size(VECTOR_BYTES)));
    UNROLL for (int r = 0; r < 4; r++) {
      const bits word = (bits)((even[r] & 0xffffffffu) | odd[r] << 32);
      kept[r] = word >= threshold - bits{};
    }
  } else {
    philox(seed, even);
    UNROLL for (int r = 0; r < 4; r++) kept[r] = (even[r] & 0xffffffffu) >= (uint64_t)threshold - words{};
  }
}
