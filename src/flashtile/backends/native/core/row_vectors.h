// Rows of d numbers as vectors, and the scores of few queries, which are sums along such rows.
// Forward and backward share them: backward recomputes forward's weights only if the scores are equal to the bit.
#pragma once
#include <algorithm>

#include "elements.h"
#include "prefetch.h"

// The last d % W numbers are in the upper lanes of one more vector, whose lower lanes are 0.
template <class R> constexpr int64_t vectors_of(int64_t d) { return (d + W<R> - 1) / W<R>; }
template <class R, class T> INLINE Vec<R> load_tail(const T* row, int d) {
  const int n = d % W<R>;
  if (d > W<R>) {
    const Vec<R> x = load_as<R>(row + d - W<R>);
    return lane_index<R>() >= splat_int<R>(W<R> - n) ? x : Vec<R>{};
  }
  Vec<R> x = {};
  for (int i = 0; i < n; i++) x[W<R> - n + i] = to_real<R>(row[i]);
  return x;
}
// The index of column c in such a row.
template <class R> INLINE int column_index(int c, int d) { return c < d / W<R> * W<R> ? c : c + (W<R> - d % W<R>); }

// Write a row of q in this layout, multiplied by `by`, into `to`, which is zeroed.
template <class R, class T> void pack_row(const T* from, int d, R by, R* to) {
  for (int c = 0; c < d; c++) to[column_index<R>(c, d)] = to_real<R>(from[c]) * by;
}

// Sum over the lanes of each of N vectors, N a power of two: lane i of the result has the sum of a[i % N].
template <int H, int N, class V, int... I> INLINE V reduce_lanes(V* a, std::integer_sequence<int, I...> lanes) {
  constexpr int n = sizeof...(I);
  if constexpr (H == n) {
    return a[0];
  } else if constexpr (N > 1) {
    for (int i = 0; i < N / 2; i++) {
      const V x = a[2 * i], y = a[2 * i + 1];
      a[i] = __builtin_shufflevector(x, y, ((I & H) ? n + I - H : I)...) +
             __builtin_shufflevector(x, y, ((I & H) ? n + I : I + H)...);
    }
    return reduce_lanes<2 * H, N / 2>(a, lanes);
  } else {
    a[0] += __builtin_shufflevector(a[0], a[0], (I ^ H)...);
    return reduce_lanes<2 * H, 1>(a, lanes);
  }
}

// S[key][row] = K q^T for ROWS rows of q, a power of two up to W. A key has KEY_STRIDE numbers in S. If these are ROWS,
// numbers after the last key are arbitrary up to a whole vector; if they are W, those past ROWS keep their values. The
// keys of a vector of results are read one after the other for one row, and four at a time for several rows, to share
// the loads of q. Keys are prefetched `ahead` keys early, unless that is 0: the hardware prefetcher is too late.
template <class R, class T, int ROWS, int KEY_STRIDE = W<R>>
NOINLINE void few_query_scores(const T* K, int64_t stride, int n, const R* q, int dim, R* S, int64_t ahead = 0) {
  constexpr int KEYS_PER_VECTOR = W<R> / ROWS, KEYS_AT_ONCE = ROWS == 1 ? 1 : KEYS_PER_VECTOR < 4 ? KEYS_PER_VECTOR : 4;
  const int whole = dim / W<R>, q_row = (int)vectors_of<R>(dim) * W<R>;
  for (int k0 = 0; k0 < n; k0 += KEYS_PER_VECTOR) {
    Vec<R> acc[W<R>];
    UNROLL for (int k = 0; k < KEYS_PER_VECTOR; k += KEYS_AT_ONCE) {
      Vec<R>* a = acc + k * ROWS;
      const T* rows[KEYS_AT_ONCE];
      UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) rows[i] = K + std::min(k0 + k + i, n - 1) * stride;
      UNROLL for (int i = 0; i < KEYS_AT_ONCE * ROWS; i++) a[i] = Vec<R>{};
      const auto add = [&](int d, auto get) __attribute__((always_inline)) {
        Vec<R> y[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) y[r] = load(q + r * q_row + d * W<R>);
        UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) {
          const Vec<R> x = get(rows[i]);
          UNROLL for (int r = 0; r < ROWS; r++) a[i * ROWS + r] = add_product(a[i * ROWS + r], x, y[r]);
        }
      };
      for (int d = 0; d < whole; d++)
        add(d, [=](const T* row) {
          if (ahead) prefetch(row + ahead * stride + d * W<R>);
          return load_as<R>(row + d * W<R>);
        });
      if (dim % W<R>) add(whole, [=](const T* row) { return load_tail<R>(row, dim); });
    }
    const Vec<R> sums = reduce_lanes<1, W<R>>(acc, std::make_integer_sequence<int, W<R>>{});
    if constexpr (KEY_STRIDE == ROWS) {
      store(S + k0 * ROWS, sums);
    } else {
      R spread[W<R>];
      store(spread, sums);
      UNROLL for (int k = 0; k < KEYS_PER_VECTOR; k++)
        if (k0 + k < n) memcpy(S + (k0 + k) * W<R>, spread + k * ROWS, sizeof(R) * ROWS);
    }
  }
}
// f(n rounded up to a power of two, as a constant)
template <class R, int ROWS = W<R>, class F> INLINE void dispatch_rows(int n, F&& f) {
  if constexpr (ROWS > 1)
    if (n <= ROWS / 2) return dispatch_rows<R, ROWS / 2>(n, f);
  f(std::integral_constant<int, ROWS>{});
}
