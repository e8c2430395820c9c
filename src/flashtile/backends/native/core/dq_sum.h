// dQ, a sum over key blocks that add to it in order, so that it does not depend on the number of threads.
#pragma once
#include <atomic>
#include <memory>
#include <thread>

#include "elements.h"
#include "sequence.h"
#include "threads.h"
#include "visits.h"

// x[lane][c] = base[lane][c] + by * from[c][lane] for the first n lanes. base may be null, or x itself; `add`: plus
// x[lane][c].
template <class R, class T>
NOINLINE void unpack_rows(const R* from, int lanes, int n, int d, R by, const R* base, int64_t base_row, bool add,
                          T* x, int64_t row) {
  for (int l0 = 0; l0 < n; l0 += W<R>) {
    const int here = n - l0 < W<R> ? n - l0 : W<R>;
    int c = 0;
    for (; c + W<R> <= d; c += W<R>) {
      Vec<R> a[W<R>];
      for (int i = 0; i < W<R>; i++) a[i] = load(from + (int64_t)(c + i) * lanes + l0) * splat(by);
      transpose<R>(a);
      for (int l = 0; l < here; l++) {
        if (base) a[l] += load(base + (l0 + l) * base_row + c);
        if (add) a[l] += load_as<R>(x + (l0 + l) * row + c);
        store_as<R>(x + (l0 + l) * row + c, a[l]);
      }
    }
    for (; c < d; c++)
      for (int l = l0; l < l0 + here; l++)
        store_element<R>(x + l * row + c, from[(int64_t)c * lanes + l] * by + (base ? base[l * base_row + c] : R(0)) +
                                              (add ? to_real<R>(x[l * row + c]) : R(0)));
  }
}
template <class R> class DqSum {
 public:
  DqSum(const ft_problem& p, const Visits<R>& visits)
      : p(p), visits(visits), dim((int)p.dim), queries(total_queries(p)),
        added(new std::atomic<int32_t>[visits.all_query_blocks()]()),
        sums(item_size(p.grad_dtype) < (int64_t)sizeof(R) ? new R[p.q_heads * queries * p.dim] : nullptr) {}

  // Set dq to 0, unless it is added to, for the query blocks in [from, to) that see no key: no key block adds to them.
  void clear_unseeing(const Sequence& s, int64_t head, int64_t from, int64_t to) const {
    if (p.add & FT_ADD_DQ) return;
    const int64_t item = item_size(p.grad_dtype);
    for (int64_t i = from; i < to; i += BLOCK_QUERIES<R>) {
      const int64_t end = std::min<int64_t>(i + BLOCK_QUERIES<R>, to);
      if (row_cuts(p, s, head, i, end, 1).tiles() == 0)
        for (int64_t r = i; r < end; r++) memset(query_row(p.dq, item, s, head, r), 0, item * dim);
    }
  }

  // Wait until the earlier key blocks that a query block visits have added, then run add(is_first, is_last).
  template <class F> void in_turn(const Sequence& s, int64_t head, int64_t query_block, int64_t key_block, F&& add) {
    const RowCuts blocks = visits.of_queries(s, head, query_block);
    std::atomic<int32_t>& turn = added[visits.query_block(s, head, query_block)];
    const int32_t mine = (int32_t)blocks.before(key_block);
    for (int spins = 0; turn.load(std::memory_order_acquire) != mine; spins++) {
      if (spins < 4096) pause_thread();
      else std::this_thread::yield();
    }
    add(mine == 0, mine == blocks.tiles() - 1);
    turn.store(mine + 1, std::memory_order_release);
  }

  // Add a key block's share, share[column][lane], to dq of queries first .. first+n-1.
  void add(const Sequence& s, int64_t head, int64_t first, int n, const R* share, int lanes, bool is_first,
           bool is_last) const {
    const bool to_dq = p.add & FT_ADD_DQ;
    dispatch_type<R>(p.grad_dtype, [&](auto t) {
      using E = decltype(t);
      E* to = (E*)query_row(p.dq, sizeof(E), s, head, first);
      if constexpr (std::is_same_v<E, R>) {
        const R* base = is_first && !to_dq ? nullptr : to;
        unpack_rows<R, R>(share, lanes, n, dim, (R)p.scale, base, p.dq.row, false, to, p.dq.row);
      } else {
        R* sum = sums.get() + (head * queries + first_query(p, s) + first) * dim;
        const R* base = is_first ? nullptr : sum;
        if (is_last) unpack_rows<R, E>(share, lanes, n, dim, (R)p.scale, base, dim, to_dq, to, p.dq.row);
        else unpack_rows<R, R>(share, lanes, n, dim, (R)p.scale, base, dim, false, sum, dim);
      }
    });
  }

 private:
  const ft_problem& p;
  const Visits<R>& visits;
  const int dim;
  const int64_t queries;                                // in a head
  const std::unique_ptr<std::atomic<int32_t>[]> added;  // to each query block: the number of key blocks
  const std::unique_ptr<R[]> sums;                      // [head][query][dim] in real, if dq itself has fewer bits
};
