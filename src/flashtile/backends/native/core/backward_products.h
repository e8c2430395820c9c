// The products of the backward pass. P and dS are [key][L], q and dout [factor][L], of which some take N vectors only.
#pragma once
#include "factors.h"

// P = exp(S - lse) with S = by K q, where no lse is coarse. Subtracting first keeps the rounding to that of S.
template <class R, class T, int N, int L>
NOINLINE void recompute_probabilities(Rows<T> K, int n, const T* q, int length, R by, const R* lse, R* P,
                                      Prefetcher& prefetcher) {
  for_tiles<piece_rows(N, L / W<R>)>(0, n, [=, &prefetcher](auto m, int k) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    score_tile<R, L>(acc, K, k, q, length, by, prefetcher);
    UNROLL for (int i = 0; i < M; i++) {
      UNROLL for (int j = 0; j < N; j++) acc[i][j] -= load(lse + j * W<R>);
      exp_each<R>(acc[i]);
    }
    store_tile<R>(acc, P + k * L, L);
  });
}
// P <- exp(P - row_max - log_sum). Both differences are exact or nearly so, even where the lse, their sum, is coarse.
template <class R, int N> NOINLINE void probabilities_from_scores(int n, const R* row_max, const R* log_sum, R* P) {
  for (int k = 0; k < n; k++, P += N * W<R>) {
    Vec<R> x[N];
    UNROLL for (int j = 0; j < N; j++) x[j] = load(P + j * W<R>) - load(row_max + j * W<R>) - load(log_sum + j * W<R>);
    exp_each<R>(x);
    UNROLL for (int j = 0; j < N; j++) store(P + j * W<R>, x[j]);
  }
}
// P <- dS = P * (Z * (V dout) - delta), with the factors Z of dropout
template <class R, class T, int N, int L, bool DROPS>
NOINLINE void score_gradients(Rows<T> V, int n, const T* dout, int length, const R* delta, const R* Z, R* P) {
  for_tiles<piece_rows(N, L / W<R>)>(0, n, [=](auto m, int k) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    dot_tile<R>(acc, V.data + k * V.row, V.row, dout, L, length, [] {});
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) {
      const int at = (k + i) * L + j * W<R>;
      if constexpr (DROPS) acc[i][j] *= load(Z + at);
      store(P + at, load(P + at) * (acc[i][j] - load(delta + j * W<R>)));
    }
  });
}
// dq[column][lane] += K^T dS
template <class R, class T, int N>
NOINLINE void add_dq_of_pieces(Rows<T> K, const Pieces& pieces, const T* dS, R* dq, int dim) {
  constexpr int L = N * W<R>;
  for_tiles<tile_rows(N)>(0, dim, [&](auto m, int d) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    zero_tile<R>(acc);
    for (const Piece& x : pieces) multiply_piece<R, T>(acc, x, K.data + d, 1, K.row, dS);
    add_tile<R>(acc, dq + d * L, L);
  });
}
// The same where all vectors see all keys.
template <class R, class T, int N> NOINLINE void add_dq(Rows<T> K, int length, const T* dS, R* dq, int dim) {
  constexpr int L = N * W<R>;
  for_tiles<tile_rows(N)>(0, dim, [=](auto m, int d) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    zero_tile<R>(acc);
    multiply_tile<R>(acc, K.data + d, 1, K.row, dS, L, length);
    add_tile<R>(acc, dq + d * L, L);
  });
}
// The same to the bit, where K has non-finite values: hidden pairs are marked in dS and left out.
template <class R, class T>
NOINLINE void add_dq_guarded(Rows<T> K, int length, const T* dS, R* dq, int dim, int L) {
  for (int d = 0; d < dim; d++)
    for (int l = 0; l < L; l += W<R>) {
      Vec<R> acc = {};
      for (int k = 0; k < length; k++) {
        const Vec<T> w = load(dS + k * L + l);
        acc = add_product(acc, w, factor_unless_hidden<T>(w, splat(K.data[k * K.row + d])));
      }
      store(dq + d * L + l, load(dq + d * L + l) + acc);
    }
}

// One group's part in a sum over queries: weights[key][L] and the rows they multiply, padded to whole vectors; all
// factors. Pieces tell which of the rows see a key.
template <class T> struct WeightedRows {
  const T* weights;
  int L, rows;
  Rows<T> x;
  const Pieces* pieces;

  // The rows that see any of n keys are within these.
  Range seeing(int key, int n) const {
    constexpr int each = W<float> * (int)sizeof(float) / (int)sizeof(T) / FACTOR_SIZE<T>;  // rows of a vector
    if (pieces->count == 1) return {0, rows};
    int first = rows, last = 0;
    for (const Piece& x : *pieces)
      if (x.from < key + n && key < x.to) {
        first = std::min(first, x.first * each);
        last = std::max(last, (x.first + x.vectors) * each);
      }
    return {first, std::min(last, rows)};
  }
};
// C[key][column] += sum over the parts of weights * x
template <class R, class T, int N>
NOINLINE void add_weighted_columns(const WeightedRows<T>* parts, int count, int n, int column, R* C, int64_t row) {
  for_tiles<tile_rows(N)>(0, n, [=](auto m, int k) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    zero_tile<R>(acc);
    for (const WeightedRows<T>* a = parts; a < parts + count; a++) {
      const Range rows = a->seeing(k, M);
      multiply_tile<R>(acc, a->weights + k * a->L + rows.from, a->L, 1, a->x.data + rows.from * a->x.row + column,
                       a->x.row, rows.to - rows.from);
    }
    add_tile<R>(acc, C + k * row, row);
  });
}
template <class R, class T> void add_weighted_rows(const WeightedRows<T>* parts, int count, int n, R* C, int64_t row) {
  int d = 0;
  for (; d + 2 * W<R> <= row; d += 2 * W<R>) add_weighted_columns<R, T, 2>(parts, count, n, d, C + d, row);
  if (d < row) add_weighted_columns<R, T, 1>(parts, count, n, d, C + d, row);
}
template <class R, class T>
NOINLINE void add_weighted_rows_guarded(const WeightedRows<T>* parts, int count, int n, R* C, int64_t row) {
  for (int k = 0; k < n; k++)
    for (int64_t d = 0; d < row; d += W<R>) {
      Vec<R> acc = {};
      for (const WeightedRows<T>* a = parts; a < parts + count; a++)
        for (int l = 0; l < a->rows; l++) {
          const Vec<T> w = splat(a->weights[k * a->L + l]);
          acc = add_product(acc, w, factor_unless_hidden<T>(w, load(a->x.data + l * a->x.row + d)));
        }
      store(C + k * row + d, load(C + k * row + d) + acc);
    }
}
