// The log-sum-exp of a row, and where one number has not the bits for it.
#pragma once
#include <cmath>

#include "sequence.h"

// The larger the maximum of a row, the fewer bits are left for the logarithm of its sum. From here on a backward pass does
// not make weights from the lse: it has forward find the two anew, apart.
template <class R> constexpr R COARSE = R(64);
template <class R> bool is_coarse(R lse) { return std::abs(lse) >= COARSE<R> && std::abs(lse) < R(INFINITY); }

// Of a row of maximum m and sum l. tops, if not null, lies as p.lse does and holds the lse of every row: then nothing is
// done but for coarse rows, whose maximum goes there, and the logarithm of their sum to p.lse.
template <class R> void store_lse(const ft_problem& p, const Sequence& s, int64_t head, int64_t i, R m, R l, R* row_max) {
  if (!p.lse.data) return;
  R* lse = (R*)query_row(p.lse, sizeof(R), s, head, i);
  R* maximum = row_max ? row_max + (lse - (R*)p.lse.data) : nullptr;
  if (!maximum) *lse = m + std::log(l);
  else if (is_coarse(*maximum)) *maximum = m, *lse = std::log(l);
}
// Whether any of the queries first .. last-1 is coarse.
template <class R>
bool any_coarse(const ft_problem& p, const Sequence& s, int64_t head, int64_t first, int64_t last, const R* row_max) {
  const R* maximum = row_max + ((R*)query_row(p.lse, sizeof(R), s, head, first) - (R*)p.lse.data);
  for (int64_t i = first; i < last; i++, maximum += p.lse.row)
    if (is_coarse(*maximum)) return true;
  return false;
}
