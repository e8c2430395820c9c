// Per-row statistics of the backward pass: delta and the lse, and from both the gradient of the sink.
#pragma once
#include <atomic>
#include <memory>

#include "factors.h"
#include "kernels.h"
#include "lse.h"

// Arrays are [head][query], see sequence.h. A row's lse is row_max + log_sum. Where it is not coarse, row_max is the
// whole lse and log_sum is 0; where the row has no weights, row_max is infinite, so exp(S - lse) is 0.
template <class R, class T> struct RowStatistics {
  const ft_problem& p;
  const int64_t queries;  // in a head
  const std::unique_ptr<R[]> delta, row_max, log_sum;
  std::atomic<bool> any_coarse{false};

  explicit RowStatistics(const ft_problem& p)
      : p(p), queries(total_queries(p)), delta(new R[p.q_heads * queries]), row_max(new R[p.q_heads * queries]),
        log_sum(new R[p.q_heads * queries]) {}

  int64_t row(const Sequence& s, int64_t head, int64_t i) const { return head * queries + first_query(p, s) + i; }

  // delta and lse of queries [from, to).
  void prepare(const Sequence& s, int64_t head, int64_t from, int64_t to) {
    R *d = delta.get() + row(s, head, 0), *maximum = row_max.get() + row(s, head, 0);
    std::fill(log_sum.get() + row(s, head, from), log_sum.get() + row(s, head, to), R(0));
    const R* lse = (const R*)query_row(p.lse, sizeof(R), s, head, 0);
    const R* dlse = p.dlse.data ? (const R*)query_row(p.dlse, sizeof(R), s, head, 0) : nullptr;
    const int v_dim = (int)p.v_dim;
    dispatch_type<R>(p.out_dtype, [&](auto t) {
      using E = decltype(t);
      for (int64_t i = from; i < to; i++) {
        const E* out = (const E*)query_row(p.out, sizeof(E), s, head, i);
        const E* dout = (const E*)query_row(p.dout, sizeof(E), s, head, i);
        Vec<R> sum = {};
        R rest = 0;
        int c = 0;
        const auto rounded = [](Vec<R> x) { return round_to_factor<R, T>(x); };  // dO as the products take it
        for (; c + W<R> <= v_dim; c += W<R>) sum += load_as<R>(out + c) * rounded(load_as<R>(dout + c));
        for (; c < v_dim; c++) rest += to_real<R>(out[c]) * rounded(splat(to_real<R>(dout[c])))[0];
        rest += sum_lanes<R>(sum) - (dlse ? dlse[i * p.dlse.row] : R(0));
        maximum[i] = lse[i * p.lse.row];
        bool empty = maximum[i] == -(R)INFINITY;
        if (is_coarse(maximum[i])) {  // usually padding, whose output gets no gradient
          empty = !(dlse && dlse[i * p.dlse.row]) &&
                  std::all_of(dout, dout + v_dim, [](E x) { return to_real<R>(x) == 0; });
          if (!empty) any_coarse.store(true, std::memory_order_relaxed);
        }
        if (empty) d[i] = 0, maximum[i] = (R)INFINITY;
        else d[i] = rest;
      }
    });
  }

  // Recompute maximum and sum of the rows whose lse is coarse and of these keys alone, by a forward pass without values,
  // which has the same scores to the bit.
  int split_coarse() {
    if (!any_coarse) return FT_OK;
    ft_problem f = p;
    f.v_dim = 0;
    f.dropout = 0;
    f.lse = {log_sum.get(), p.cu_q ? 0 : p.q_len, queries, 1, 0};
    if (decode_fits<R>(p)) return decode<R>(f, row_max.get());
    return forward<R, T>(f, row_max.get());
  }

  // dsink = the sum over the rows of the sink's weight times -delta, since its value is 0.
  void sum_sink(int64_t head) const {
    const R sink = ((const R*)p.sink)[head];
    double sum = 0;
    for (int64_t index = 0; index < p.sequences; index++) {
      const Sequence s(p, index);
      for (int64_t i = row(s, head, 0); i < row(s, head, s.q_len); i++)
        if (row_max[i] != (R)INFINITY)
          sum -= exp((double)sink - (double)row_max[i] - (double)log_sum[i]) * (double)delta[i];
    }
    R& total = ((R*)p.dsink)[head];
    total = (R)sum + (p.add & FT_ADD_DSINK ? total : R(0));
  }
};
