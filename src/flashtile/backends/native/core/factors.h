// Factors: what a product multiplies. Numbers as they are; or, of bfloat16 and where the processor can, Pairs of them that
// follow each other along the axis of the sum: one instruction multiplies both, and adds them to a float.
#pragma once
#include "scores.h"

template <class T> constexpr int64_t factors(int64_t n) { return (n + FACTOR_SIZE<T> - 1) / FACTOR_SIZE<T>; }

// Keys from `from` to `to` of n, and those that share a factor with them. No one sees the latter: as the band hides them from
// every lane, their weights are 0, and where there are none, past the last, the factor has a 0 too.
struct Range {
  int from, to;
};
template <class T> Range whole_factors(int from, int to, int n) {
  return {from - from % FACTOR_SIZE<T>, std::min(to + to % FACTOR_SIZE<T>, n)};
}

// ---- Rows as factors

// Of sums over the rows: factors(n) x wide in `room`, wide being d, or up to whole vectors, with 0 in the columns past it.
// Numbers that are real, and as wide as that, stay where they lie.
template <class R, class T>
Rows<T> factors_over_rows(const void* x, int64_t dtype, int64_t row, int n, int d, int64_t width, T* buffer) {
  return dispatch_type<R>(dtype, [=](auto t) -> Rows<T> {
    using E = decltype(t);
    if (std::is_same_v<E, T> && d == width) return {(const T*)x, row};
    for (int i = 0; i < n; i += FACTOR_SIZE<T>) {
      const E *from = (const E*)x + i * row, *next = FACTOR_SIZE<T> == 2 && i + 1 < n ? from + row : nullptr;
      T* to = buffer + i / FACTOR_SIZE<T> * width;
      const auto both = [=](auto get) {
        if constexpr (FACTOR_SIZE<T> == 1) return get(from);
        else return make_pairs(get(from), next ? get(next) : Vec<R>{});
      };
      int c = 0;
      for (; c + W<R> <= d; c += W<R>) store(to + c, both([=](const E* p) { return load_as<R>(p + c); }));
      if (c == width) continue;
      const Vec<T> rest = both([=](const E* p) {
        Vec<R> x = {};
        for (int k = c; k < d; k++) x[k - c] = to_real<R>(p[k]);
        return x;
      });
      memcpy(to + c, &rest, sizeof(T) * (width - c));
    }
    return {buffer, width};
  });
}
// Of sums along the rows: where they lie if they can stay there, else in `room`, n x factors(d).
template <class R, class T> Rows<T> factors_along_rows(const void* x, int64_t dtype, int64_t row, int n, int d, T* buffer) {
  if constexpr (FACTOR_SIZE<T> == 1) {
    return factors_over_rows<R, T>(x, dtype, row, n, d, d, buffer);  // numbers are the same either way
  } else {
    if (((uintptr_t)x % sizeof(T) | row % 2 | d % 2) == 0) return {(const T*)x, row / 2};
    const int64_t width = factors<T>(d);
    for (int i = 0; i < n; i++) {
      bf16* to = (bf16*)(buffer + i * width);
      memcpy(to, (const bf16*)x + i * row, d * sizeof(bf16));
      if (d % 2) to[d] = {0};
    }
    return {buffer, width};
  }
}
// Rows turned into lanes, to[factors(d)][lane], and multiplied by `by`; that of pairs has to be a power of two, or they would
// be rounded. Lanes past the n rows repeat the last one.
template <class R, class T>
void pack_lanes(const void* x, int64_t dtype, int64_t row, int n, int lanes, int d, R by, T* to) {
  dispatch_type<R>(dtype, [=](auto t) {
    using E = decltype(t);
    for (int l0 = 0; l0 < lanes; l0 += W<R>) {
      const E* rows[W<R>];
      for (int l = 0; l < W<R>; l++) rows[l] = (const E*)x + (l0 + l < n ? l0 + l : n - 1) * row;
      Vec<R> first = {};  // of a pair
      for_each_column<R>(rows, 1, d, [&](int c, Vec<R> a) {
        T* at = to + (int64_t)(c / FACTOR_SIZE<T>) * lanes + l0;
        a *= splat(by);
        if constexpr (FACTOR_SIZE<T> == 1) store(at, a);
        else if (c % 2) store(at, make_pairs(first, a));
        else if (c + 1 < d) first = a;
        else store(at, make_pairs(a, Vec<R>{}));
      });
    }
  });
}
// score_scale(), in two: what q is multiplied by in the lanes, and the score afterwards. For pairs a power of two comes
// first: that rounds nothing, and what would overflow without it does not.
template <class R> struct Scale {
  R before, after;
};
template <class R, class T> Scale<R> split_scale(const ft_problem& p) {
  const R scale = score_scale<R>(p);
  if (FACTOR_SIZE<T> == 1 || scale == 0 || !std::isfinite(scale)) return {scale, R(1)};
  const R power = std::ldexp(R(1), std::ilogb(scale));
  return {power, scale / power};
}
// acc = by K q, of rows k .. k+M-1 and a sum of `length` factors. Both passes have their scores from here.
template <class R, class T, int M, int N>
INLINE void score_tile(Vec<R> (&acc)[M][N], Rows<T> K, int k, const T* q, int length, R by) {
  dot_tile<R>(acc, K.data + k * K.row, K.row, q, N * W<R>, length);
  if constexpr (FACTOR_SIZE<T> > 1)
    UNROLL for (int i = 0; i < M; i++)
      UNROLL for (int j = 0; j < N; j++) acc[i][j] = opaque(acc[i][j] * splat(by));
}
// S[key][lane] = by K q
template <class R, class T, int N> NOINLINE void scores(Rows<T> K, int n, const T* q, int length, R by, R* S) {
  for_tiles<tile_rows(N)>(0, n, [=](auto rows, int k) __attribute__((always_inline)) {
    Vec<R> acc[rows][N];
    score_tile<R>(acc, K, k, q, length, by);
    store_tile<R>(acc, S + k * N * W<R>, N * W<R>);
  });
}
// A number as a factor has it.
template <class R, class T> INLINE Vec<R> round_to_factor(Vec<R> x) {
  if constexpr (FACTOR_SIZE<T> == 1) return x;
  else return bits_to_float<Vec<R>>(float_to_bits<bits32>(x, bf16{}), bf16{});
}

inline bool all_finite(Rows<Pair> x, int n, int d) {
  uint32_t found = 0;
  for (int i = 0; i < n; i++)
    for (int c = 0; c < d; c++) {
      const uint32_t bits = x.data[i * x.row + c];
      found |= ((bits & 0x7f80) == 0x7f80) | ((bits >> 16 & 0x7f80) == 0x7f80);
    }
  return !found;
}

// ---- Weights as factors: x[key][lane], of n keys and L lanes

// Of sums over the keys, in the place of x.
template <class R, class T> const T* factors_over_keys(R* x, int n, int L) {
  if constexpr (FACTOR_SIZE<T> == 1) {
    return x;
  } else {
    T* to = (T*)x;
    for (int k = 0; k < n; k += 2)
      for (int l = 0; l < L; l += W<R>) {
        const R* from = x + k * L + l;
        store(to + k / 2 * L + l, make_pairs(load(from), k + 1 < n ? load(from + L) : Vec<R>{}));
      }
    return to;
  }
}
// Of sums over the first `real` lanes, in `room` where they must be rounded.
template <class R, class T> const T* factors_over_lanes(const R* x, int n, int L, int real, T* buffer) {
  if constexpr (FACTOR_SIZE<T> == 1) {
    return x;
  } else {
    bf16* to = (bf16*)buffer;
    for (int at = 0; at < n * L; at += W<R>) store_bf16(to + at, load(x + at));
    if (real % 2)
      for (int k = 0; k < n; k++) to[k * L + real] = {0};
    return buffer;
  }
}
// Where weights are marked as hidden: what such a weight is multiplied by, see scores.h.
template <class T> INLINE Vec<T> factor_unless_hidden(Vec<T> weight, Vec<T> x) {
  if constexpr (FACTOR_SIZE<T> == 1) {
    return unless_hidden<T>(weight, x);
  } else {
    return (Vec<T>)((halfwords)weight == halfwords{} + (uint16_t)0x8000 ? halfwords{} : (halfwords)x);
  }
}
// Marked weights, of which those that are visible but round to 0 become it: a -0 would look hidden.
template <class R, class T> void flush_small(R* x, int n, int L) {
  if constexpr (FACTOR_SIZE<T> > 1)
    for (int at = 0; at < n * L; at += W<R>) {
      const Vec<R> v = load(x + at), small = is_hidden<R>(v) ? v : Vec<R>{};
      store(x + at, max(v, -v) < splat(R(0x1p-126)) ? small : v);
    }
}
