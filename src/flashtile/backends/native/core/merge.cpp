// Merging results over disjoint keys (eq. 8) in one pass: each row of each result is read once, and written once.
#include <algorithm>
#include <cmath>

#pragma GCC visibility push(default)
#include "flashtile.h"
#pragma GCC visibility pop
#include "elements.h"
#include "threads.h"

namespace {

constexpr int64_t TASK_BYTES = 1 << 17;  // of outputs; a smaller merge is faster on one thread
constexpr int CHUNK = 256;               // columns, whose sums stay in L1 until all results are added

template <class F> INLINE void dispatch_element(int64_t dtype, F&& f) {
  if (dtype == FT_F64) f(double{});
  else dispatch_type<float>(dtype, f);
}
template <class R, class T> INLINE R wide(T x) {
  if constexpr (std::is_same_v<T, double>) return (R)x;
  else return (R)to_real<float>(x);
}
template <class R, class T> INLINE void store_rounded(T* p, R x) {
  if constexpr (std::is_same_v<T, double>) *p = x;
  else store_element<float>(p, (float)x);
}

// sum += by * x, or = if it is the first one.
template <class R, class T> NOINLINE void add_scaled(R* __restrict sum, const T* __restrict x, R by, int n, bool first) {
  if (first)
    for (int c = 0; c < n; c++) sum[c] = by * wide<R>(x[c]);
  else
    for (int c = 0; c < n; c++) sum[c] += by * wide<R>(x[c]);
}
template <class R, class T> NOINLINE void store_all(T* __restrict to, const R* __restrict x, int n) {
  for (int c = 0; c < n; c++) store_rounded(to + c, x[c]);
}

// R: the type of sums, double if an array is, or if more than two results are added.
template <class R> struct Merge {
  int64_t count, axes;
  const int64_t* shape;  // the leading axes, then the width
  const uint64_t* data;  // out and lse of each result, then of the merged one
  const int64_t *dtypes, *strides;

  char* row(int64_t array, const int64_t* index) const {
    const int64_t* s = strides + array * axes;
    int64_t offset = 0;
    for (int64_t a = 0; a < axes; a++) offset += index[a] * s[a];
    return (char*)data[array] + offset * item_size(dtypes[array]);
  }
  // share[n] <- the weight of result n, -0 if it saw no key; the merged lse is stored.
  void weigh(const int64_t* index, R* share) const {
    R top = -(R)INFINITY, total = 0;
    for (int64_t n = 0; n < count; n++) {
      dispatch_element(dtypes[2 * n + 1], [&](auto t) { share[n] = wide<R>(*(decltype(t)*)row(2 * n + 1, index)); });
      if (!(share[n] <= top)) top = share[n];  // a NaN stays
    }
    const R base = top == -(R)INFINITY ? R(0) : top;
    for (int64_t n = 0; n < count; n++)
      total += share[n] = share[n] == -(R)INFINITY ? R(-0.0) : std::exp(share[n] - base);
    if (total != 0)  // dividing makes the weights sum to 1, however coarse an lse is
      for (int64_t n = 0; n < count; n++) share[n] /= total;
    dispatch_element(dtypes[2 * count + 1], [&](auto t) {
      store_rounded((decltype(t)*)row(2 * count + 1, index), base + std::log(total));
    });
  }
  void merge_row(const int64_t* index, R* share) const {
    weigh(index, share);
    R sum[CHUNK];
    for (int64_t from = 0; from < shape[axes]; from += CHUNK) {
      const int n = (int)std::min<int64_t>(CHUNK, shape[axes] - from);
      bool first = true;
      for (int64_t r = 0; r < count; r++) {
        if (share[r] == 0 && std::signbit(share[r])) continue;  // out may be anything
        dispatch_element(dtypes[2 * r], [&](auto t) {
          add_scaled(sum, (const decltype(t)*)row(2 * r, index) + from, share[r], n, first);
        });
        first = false;
      }
      if (first) std::fill_n(sum, n, R(0));
      dispatch_element(dtypes[2 * count], [&](auto t) {
        store_all((decltype(t)*)row(2 * count, index) + from, sum, n);
      });
    }
  }
  int run(int64_t threads) const {
    int64_t rows = 1, index_bytes = sizeof(int64_t) * std::max<int64_t>(axes, 1);
    for (int64_t a = 0; a < axes; a++) rows *= shape[a];
    if (rows == 0) return FT_OK;
    const int64_t each = std::max<int64_t>(1, TASK_BYTES / std::max<int64_t>(1, count * shape[axes] * sizeof(R)));
    const int64_t tasks = (rows + each - 1) / each;
    const Scratch scratch(std::min(threads, tasks), index_bytes + sizeof(R) * count);
    if (!scratch.ok()) return FT_NO_MEMORY;
    parallel_for(threads, tasks, [&](int64_t thread, int64_t task) {
      int64_t* index = scratch.piece<int64_t>(thread);
      R* share = (R*)((char*)index + index_bytes);
      for (int64_t a = axes, rest = task * each; a-- > 0; rest /= shape[a]) index[a] = rest % shape[a];
      for (int64_t i = task * each; i < std::min(rows, (task + 1) * each); i++) {
        merge_row(index, share);
        for (int64_t a = axes; a-- > 0 && ++index[a] == shape[a];) index[a] = 0;
      }
    });
    return FT_OK;
  }
};

}  // namespace

int ft_merge(int64_t threads, int64_t count, int64_t axes, const int64_t* shape, const uint64_t* data,
             const int64_t* dtypes, const int64_t* strides) {
  const bool is_wide = count > 2 || std::count(dtypes, dtypes + 2 * count + 2, FT_F64);
  return is_wide ? Merge<double>{count, axes, shape, data, dtypes, strides}.run(threads)
                 : Merge<float>{count, axes, shape, data, dtypes, strides}.run(threads);
}
