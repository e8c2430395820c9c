// Element types at run time: conversion to and from real, a scan for non-finite values, rows to lanes and back.
#pragma once
#include <type_traits>

#include "flashtile.h"
#include "vectors.h"

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline int64_t item_size(int64_t dtype) { return dtype == FT_F64 ? 8 : dtype == FT_F32 ? 4 : 2; }

// Call f with a value of the element type; only its type matters. With double, every element is a double.
template <class R, class F> INLINE auto dispatch_type(int64_t dtype, F&& f) {
  if constexpr (std::is_same_v<R, float>) {
    if (dtype == FT_BF16) return f(bf16{});
    if (dtype == FT_F16) return f(f16{});
  }
  (void)dtype;
  return f(R{});
}

// Bits of the element type to float and back. U and F are uint32_t and float, or vectors of them.
template <class F, class U> INLINE F bits_to_float(U bits, bf16) { return __builtin_bit_cast(F, bits << 16); }
template <class F, class U> INLINE F bits_to_float(U bits, f16) {
  const F magnitude = __builtin_bit_cast(F, (bits & 0x7fff) << 13) * 0x1p112f;  // right for subnormals too
  const U wide = __builtin_bit_cast(U, magnitude), inf_or_nan = wide | 0x7f800000;
  return __builtin_bit_cast(F, (magnitude >= 65536.f ? inf_or_nan : wide) | (bits & 0x8000) << 16);
}
template <class U, class F> INLINE U float_to_bits(F x, bf16) {
  const U bits = __builtin_bit_cast(U, x), even = bits + 0x7fff + (bits >> 16 & 1), nan = (bits & 0) + 0x7fc00000;
  return (x != x ? nan : even) >> 16;
}
template <class U, class F> INLINE U float_to_bits(F x, f16) {
  const U all_bits = __builtin_bit_cast(U, x), sign = all_bits & 0x80000000, bits = all_bits ^ sign;
  const U normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  const U subnormal = __builtin_bit_cast(U, __builtin_bit_cast(F, bits) + 0.5f) - (126u << 23);
  const U nan = (bits & 0) + 0x7e00, inf = (bits & 0) + 0x7c00;
  const U large = bits > 0x7f800000u ? nan : inf;
  return (bits >= (143u << 23) ? large : bits < (113u << 23) ? subnormal : normal) | sign >> 16;
}

typedef uint32_t bits32 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t bits16 __attribute__((vector_size(VECTOR_BYTES / 2)));

// One element, or W of them, as real. A byte becomes the lowest of its lane, so it can only be compared with 0.
template <class R, class T> INLINE R to_real(T x) {
  if constexpr (std::is_same_v<T, R>) return x;
  else if constexpr (std::is_same_v<T, uint8_t>) return __builtin_bit_cast(R, (MaskInt<R>)x);
  else return bits_to_float<float, uint32_t>(x.bits, T{});
}
template <class R, class T> INLINE Vec<R> load_as(const T* p) {
  if constexpr (std::is_same_v<T, R>) {
    return load(p);
  } else if constexpr (std::is_same_v<T, uint8_t>) {
    typedef uint8_t bytes __attribute__((vector_size(W<R>)));
    bytes b;
    memcpy(&b, p, sizeof b);
    return (Vec<R>)__builtin_convertvector(b, Mask<R>);
  } else {
    bits16 bits;
    memcpy(&bits, p, sizeof bits);
    return bits_to_float<Vec<float>>(__builtin_convertvector(bits, bits32), T{});
  }
}
template <class R, class T> INLINE void store_element(T* p, R x) {
  if constexpr (std::is_same_v<T, R>) *p = x;
  else p->bits = (uint16_t)float_to_bits<uint32_t>(x, T{});
}
template <class R, class T> INLINE void store_as(T* p, Vec<R> x) {
  if constexpr (std::is_same_v<T, R>) {
    store(p, x);
  } else {
    const bits16 bits = __builtin_convertvector(float_to_bits<bits32>(x, T{}), bits16);
    memcpy(p, &bits, sizeof bits);
  }
}

// n rows of d real numbers.
template <class R> struct Rows {
  const R* data;
  int64_t row;
};
template <class R> Rows<R> skip_rows(Rows<R> x, int64_t i) { return {x.data + i * x.row, x.row}; }
// x[i][c] = by * from[i][c] for n real rows of d, `from_row` apart, rounded to the element type; `add`: plus x[i][c].
template <class R>
void store_rows(const R* from, int64_t from_row, int n, int d, R by, bool add, void* x, int64_t dtype, int64_t row) {
  dispatch_type<R>(dtype, [=](auto t) {
    using T = decltype(t);
    for (int i = 0; i < n; i++) {
      const R* f = from + i * from_row;
      T* to = (T*)x + i * row;
      int c = 0;
      for (; c + W<R> <= d; c += W<R>) {
        const Vec<R> a = load(f + c) * splat(by);
        store_as<R>(to + c, add ? a + load_as<R>(to + c) : a);
      }
      for (; c < d; c++) store_element<R>(to + c, f[c] * by + (add ? to_real<R>(to[c]) : R(0)));
    }
  });
}
// Whether all values are finite: 0 * x is 0 for those alone.
template <class R> NOINLINE bool all_finite(Rows<R> x, int n, int d) {
  Vec<R> sums[4] = {};  // not one: an addition would wait for the one before it
  R rest = 0;
  for (int i = 0; i < n; i++) {
    const R* p = x.data + i * x.row;
    int c = 0;
    for (; c + 4 * W<R> <= d; c += 4 * W<R>)
      UNROLL for (int k = 0; k < 4; k++) sums[k] += load(p + c + k * W<R>) * splat(R(0));
    for (; c + W<R> <= d; c += W<R>) sums[0] += load(p + c) * splat(R(0));
    for (; c < d; c++) rest += p[c] * R(0);
  }
  return sum_lanes<R>((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest == 0;
}

// f(c, a) for each column c: a holds x[lane][c] of W rows, given by the addresses of their first elements.
template <class R, class T, class F> INLINE void for_each_column(const T* const* x, int64_t column, int n, F&& f) {
  int c = 0;
  if (column == 1)
    for (; c + W<R> <= n; c += W<R>) {
      Vec<R> a[W<R>];
      for (int l = 0; l < W<R>; l++) a[l] = load_as<R>(x[l] + c);
      transpose<R>(a);
      for (int i = 0; i < W<R>; i++) f(c + i, a[i]);
    }
  for (; c < n; c++) {
    Vec<R> a;
    for (int l = 0; l < W<R>; l++) a[l] = to_real<R>(x[l][c * column]);
    f(c, a);
  }
}
// x[lane][c] = by[lane] * from[c][lane] for the first n lanes.
template <class R>
void unpack_lanes(const R* from, int n, int lanes, int d, const R* by, void* x, int64_t dtype, int64_t row) {
  dispatch_type<R>(dtype, [=](auto t) {
    using T = decltype(t);
    for (int l0 = 0; l0 < n; l0 += W<R>) {
      const Vec<R> scale = load(by + l0);
      const int here = n - l0 < W<R> ? n - l0 : W<R>;
      T* to = (T*)x + l0 * row;
      const auto scaled = [=](int c) { return load(from + (int64_t)c * lanes + l0) * scale; };
      int c = 0;
      for (; c + W<R> <= d; c += W<R>) {
        Vec<R> a[W<R>];
        for (int i = 0; i < W<R>; i++) a[i] = scaled(c + i);
        transpose<R>(a);
        for (int l = 0; l < here; l++) store_as<R>(to + l * row + c, a[l]);
      }
      for (; c < d; c++) {
        const Vec<R> a = scaled(c);
        for (int l = 0; l < here; l++) store_element<R>(to + l * row + c, a[l]);
      }
    }
  });
}
