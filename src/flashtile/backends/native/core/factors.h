// Factors: what a product multiplies, which are numbers of type R or, for bfloat16, pairs of numbers.
// The two numbers of a Pair are neighbours along the axis of the sum. One instruction, where the processor has it,
// multiplies both and adds them to a float.
#pragma once
#include "prefetcher.h"
#include "scores.h"

template <class T> constexpr int64_t factors(int64_t n) { return (n + FACTOR_SIZE<T> - 1) / FACTOR_SIZE<T>; }

// Keys `from` to `to` of n, extended by those that share a factor with them. The added keys are hidden from every lane,
// so their weights are 0; past the last key the factor itself has a 0.
struct Range {
  int from, to;
};
template <class T> Range whole_factors(int from, int to, int n) {
  return {from - from % FACTOR_SIZE<T>, std::min(to + to % FACTOR_SIZE<T>, n)};
}

// ---- Rows as factors

// For sums over the rows: factors(n) x width in `buffer`, where width is d, or d rounded up to whole vectors with 0 in
// the columns past d. Rows that already have the type and the width are used in place.
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
// For sums along the rows: in place if the layout allows it, else in `buffer`, n x factors(d).
template <class R, class T>
Rows<T> factors_along_rows(const void* x, int64_t dtype, int64_t row, int n, int d, T* buffer) {
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
// Rows transposed into lanes, to[factors(d)][lane], and multiplied by `by`. For pairs `by` must be a power of two:
// other factors would round them. Lanes past the n rows repeat the last row.
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
// score_scale() in two steps: a factor for q in the lanes and one for the score afterwards. For pairs the first is a
// power of two, which rounds nothing and avoids overflow of the product.
template <class R> struct Scale {
  R before, after;
};
template <class R, class T> Scale<R> split_scale(const ft_problem& p) {
  const R scale = score_scale<R>(p);
  if (FACTOR_SIZE<T> == 1 || scale == 0 || !std::isfinite(scale)) return {scale, R(1)};
  const R power = std::ldexp(R(1), std::ilogb(scale));
  return {power, scale / power};
}
// acc = by K q for rows k .. k+M-1, each a sum of `length` factors. Forward and backward share it, so scores are equal.
// It is a turn of the prefetcher.
template <class R, int L, class T, int M, int N>
INLINE void score_tile(Vec<R> (&acc)[M][N], Rows<T> K, int k, const T* q, int length, R by, Prefetcher& prefetcher) {
  Prefetcher::Turn turn = prefetcher.turn((length + DOT_STEP - 1) / DOT_STEP);
  dot_tile<R>(acc, K.data + k * K.row, K.row, q, L, length, [&]() __attribute__((always_inline)) { turn.step(); });
  if constexpr (FACTOR_SIZE<T> > 1)
    UNROLL for (int i = 0; i < M; i++)
      UNROLL for (int j = 0; j < N; j++) acc[i][j] = opaque(acc[i][j] * splat(by));
}
// S[key][lane] = by K q for N of the vectors of L lanes
template <class R, class T, int N, int L>
NOINLINE void scores(Rows<T> K, int n, const T* q, int length, R by, R* S, Prefetcher& prefetcher) {
  for_tiles<piece_rows(N, L / W<R>)>(0, n, [=, &prefetcher](auto rows, int k) __attribute__((always_inline)) {
    Vec<R> acc[rows][N];
    score_tile<R, L>(acc, K, k, q, length, by, prefetcher);
    store_tile<R>(acc, S + k * L, L);
  });
}
// f(a piece, its vectors as a constant) for the pieces of a block of V vectors of lanes.
template <int V, class F> INLINE void dispatch_pieces(const Pieces& pieces, F&& f) {
  for (const Piece& x : pieces)
    dispatch_vectors<V>(x.vectors, [&](auto n) __attribute__((always_inline)) { f(x, n); });
}
// acc += A B over the keys of the pieces, without the products of vectors that do not see them. A has a number for each
// key, B a row of N vectors.
template <class R, class T, int M, int N, int FIRST = 0, int LAST = N>
INLINE void multiply_piece(Vec<R> (&acc)[M][N], const Piece& x, const T* A, ptrdiff_t ai, ptrdiff_t ak, const T* B) {
  if (FIRST + 1 < LAST && x.first > FIRST) {
    if constexpr (FIRST + 1 < LAST) multiply_piece<R, T, M, N, FIRST + 1, LAST>(acc, x, A, ai, ak, B);
  } else if (FIRST + 1 < LAST && x.first + x.vectors < LAST) {
    if constexpr (FIRST + 1 < LAST) multiply_piece<R, T, M, N, FIRST, LAST - 1>(acc, x, A, ai, ak, B);
  } else {
    const int64_t from = x.from / FACTOR_SIZE<T>, to = factors<T>(x.to);
    multiply_columns<R, FIRST, LAST>(acc, A + from * ak, ai, ak, B + from * N * W<R>, N * W<R>, (int)(to - from));
  }
}
// Numbers rounded as a factor rounds them.
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

// ---- Weights as factors: x[key][lane], n keys and L lanes

// For sums over the keys, stored over x.
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
// For sums over the first `used` lanes, in `buffer` if they must be rounded.
template <class R, class T> const T* factors_over_lanes(const R* x, int n, int L, int used, T* buffer) {
  if constexpr (FACTOR_SIZE<T> == 1) {
    return x;
  } else {
    bf16* to = (bf16*)buffer;
    for (int at = 0; at < n * L; at += W<R>) store_bf16(to + at, load(x + at));
    if (used % 2)
      for (int k = 0; k < n; k++) to[k * L + used] = {0};
    return buffer;
  }
}
// unless_hidden() of scores.h for factors.
template <class T> INLINE Vec<T> factor_unless_hidden(Vec<T> weight, Vec<T> x) {
  if constexpr (FACTOR_SIZE<T> == 1) {
    return unless_hidden<T>(weight, x);
  } else {
    return (Vec<T>)((halfwords)weight == halfwords{} + (uint16_t)0x8000 ? halfwords{} : (halfwords)x);
  }
}
// Set visible weights that would round to 0 to +0, since a -0 would look hidden. x is marked as in scores.h.
template <class R, class T> void flush_small(R* x, int n, int L) {
  if constexpr (FACTOR_SIZE<T> > 1)
    for (int at = 0; at < n * L; at += W<R>) {
      const Vec<R> v = load(x + at), small = is_hidden<R>(v) ? v : Vec<R>{};
      store(x + at, max(v, -v) < splat(R(0x1p-126)) ? small : v);
    }
}
