// The entry points: everything that the library exports.
#pragma GCC visibility push(default)
#include "flashtile.h"
#pragma GCC visibility pop
#include "factors.h"
#include "kernels.h"
#include "threads.h"

namespace {

// f(R, T): the type of sums and the type that products multiply.
template <class F> int dispatch_types(const ft_problem& p, F&& f) {
#if FT_PAIRS
  // Decoding is bound by memory, so pairs would not help; the backward pass of few queries must sum scores as it does.
  if (p.dtype == FT_BF16 && !decode_fits<float>(p)) return f(float{}, Pair{});
#endif
  return p.dtype == FT_F64 ? f(double{}, double{}) : f(float{}, float{});
}
// No exception leaves the library. Only allocations throw, or requests for more than a std::vector can hold.
template <class F> int run(const ft_problem* p, F&& f) {
  if (p->size != sizeof(ft_problem)) return FT_BAD_ABI;
  try {
    return dispatch_types(*p, f);
  } catch (...) {
    return FT_NO_MEMORY;
  }
}

}  // namespace

int ft_forward(const ft_problem* p) {
  return run(p, [=](auto real, auto factor) {
    using R = decltype(real);
    // With few query rows per key head most lanes would be empty, so decode's vectors run along the head dim instead.
    return decode_fits<R>(*p) ? decode<R>(*p) : forward<R, decltype(factor)>(*p);
  });
}

int ft_backward(const ft_problem* p) {
  return run(p, [=](auto real, auto factor) { return backward<decltype(real), decltype(factor)>(*p); });
}

void ft_cuts(int64_t left, int64_t right, int64_t offset, int64_t first, int64_t last, int64_t n_cols, int64_t block,
             int64_t out[4]) {
  const Cuts c = cuts({left, right, offset}, first, last, n_cols, block);
  out[0] = c.begin, out[1] = c.full_begin, out[2] = c.full_end, out[3] = c.end;
}

void ft_span_cuts(int64_t left, int64_t right, int64_t offset, int64_t first, int64_t last, int64_t n_cols,
                  int64_t block, const int32_t* limits, int64_t span_count, int64_t* out) {
  const RowCuts found =
      span_cuts({left, right, offset}, first, last, n_cols, block, limits, 2 * span_count, (int)span_count);
  for (int r = 0; r < found.count; r++, out += 4) {
    const Cuts& c = found.span[r];
    out[0] = c.begin, out[1] = c.full_begin, out[2] = c.full_end, out[3] = c.end;
  }
}

void ft_keep(uint64_t seed, int64_t head, int64_t i, int64_t j, int64_t n, double dropout, uint8_t* keep) {
  ft_problem p = {};
  p.seed = seed, p.dropout = dropout, p.query_step = p.key_step = 1;
  Lanes<float> lanes;
  lanes.add(p, Sequence(p, 0), head, i);
  lanes.finish(p, Sequence(p, 0));
  for (int64_t from = 0; from < n; from += 1024) {
    const Block<float> block{p, lanes, j + from, (int)std::min<int64_t>(n - from, 1024)};
    for_each_kept(block, [=](int64_t at, Mask<float> kept) { keep[from + at / lanes.padded] = kept[0] != 0; });
  }
}

void ft_after_fork(void) { after_fork(); }

const char* ft_isa(void) { return FT_ISA; }
