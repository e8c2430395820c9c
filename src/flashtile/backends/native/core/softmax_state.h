// State of query rows in the forward kernels: running maximum, sum and unnormalized output.
#pragma once
#include "flashtile.h"
#include "vectors.h"

// o is the output before it is divided by l; m and l have a number per lane.
template <class R> struct SoftmaxState {
  R *o, *m, *l;
  SoftmaxState(R* buffer, int64_t outputs, int lanes) : o(buffer), m(buffer + outputs), l(m + lanes) {}
  static int64_t size(int64_t outputs, int lanes) { return outputs + 2 * lanes; }
};

// What is subtracted from scores before exp: the maximum, or 0 for a row that has seen no key.
template <class R> INLINE Vec<R> exp_base(Vec<R> maximum) {
  return maximum == splat(-(R)INFINITY) ? Vec<R>{} : maximum;
}

// Merge one vector of m and l of y into x; the outputs are then scales[0] * x.o + scales[1] * y.o.
template <class R> INLINE void merge_statistics(R* x_m, R* x_l, const R* y_m, const R* y_l, Vec<R> (&scales)[2]) {
  const Vec<R> maximum = max(load(y_m), load(x_m)), base = exp_base<R>(maximum);
  scales[0] = load(x_m) - base, scales[1] = load(y_m) - base;
  exp_each<R>(scales);
  store(x_m, maximum);
  store(x_l, load(x_l) * scales[0] + load(y_l) * scales[1]);
}

// Weights are at most 1, yet a sum of them times values near the largest number can overflow where their mean does not.
// Such rows are recomputed with weights multiplied by SHRINK.
template <class R> constexpr R SHRINK = R(0x1p-32);
template <class R> NOINLINE void scale_all(R* x, int n, R by) {
  for (int at = 0; at < n; at += W<R>) store(x + at, load(x + at) * splat(by));
}

// What o is multiplied by at the end. Where all weights are 0, o is what they make of V: 0, or NaN.
template <class R> R output_scale(const ft_problem& p, R l, R shrink) {
  return l == 0 ? R(1) : 1 / (shrink * l * (R)(1 - p.dropout));
}
