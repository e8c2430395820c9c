// The gradient of the bias.
#pragma once
#include "scores.h"

// Add x[key][lane], the gradient of the bias, to dbias: summed over the axes that are broadcast.
template <class R> NOINLINE void add_to_bias(const Block<R>& b, const ft_tensor& t, R* to, const R* x) {
  const int L = b.lanes.padded, used = b.lanes.used;
  if (t.column == 0) {  // all keys share an element
    R sums[LANES<R>] = {}, total = 0;
    for (int k = 0; k < b.n; k++)
      for (int l = 0; l < L; l += W<R>) store(sums + l, load(sums + l) + load(x + k * L + l));
    for (int l = 0; l < used; l++) {
      if (t.row) to[l * t.row] += sums[l];
      else total += sums[l];
    }
    if (!t.row) *to += total;
  } else if (t.row == 0) {  // all queries share an element
    for (int k = 0; k < b.n; k++) {
      Vec<R> sum = {};
      for (int l = 0; l < L; l += W<R>) {
        const Vec<R> a = load(x + k * L + l);
        sum += lane_index<R>() < splat_int<R>(used - l) ? a : Vec<R>{};
      }
      to[k * t.column] += sum_lanes<R>(sum);
    }
  } else {
    for (int l0 = 0; l0 < used; l0 += W<R>) {
      const int here = used - l0 < W<R> ? used - l0 : W<R>;
      int k = 0;
      if (t.column == 1)
        for (; k + W<R> <= b.n; k += W<R>) {
          Vec<R> a[W<R>];
          for (int i = 0; i < W<R>; i++) a[i] = load(x + (k + i) * L + l0);
          transpose<R>(a);
          for (int l = 0; l < here; l++) {
            R* at = to + (l0 + l) * t.row + k;
            store(at, load(at) + a[l]);
          }
        }
      for (; k < b.n; k++)
        for (int l = l0; l < l0 + here; l++) to[l * t.row + k * t.column] += x[k * L + l];
    }
  }
}
