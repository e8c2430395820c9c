// The log-sum-exp of a row, and when one number is too coarse to hold it.
#pragma once
#include <cmath>
#include <limits>

#include "sequence.h"

// The larger a row's maximum, the fewer bits of the lse are left for the logarithm of its sum. From this lse on, the
// backward pass does not compute weights from it, but has forward recompute the two numbers separately.
template <class R> constexpr R COARSE = R(64);
template <class R> bool is_coarse(R lse) { return std::abs(lse) >= COARSE<R> && std::abs(lse) < R(INFINITY); }

// Whether an lse is that of a row of maximum m and sum l, as far as its own precision tells: the backward pass of a block
// of keys may be given the lse of a row of more keys. numerics/softmax.py has the same number.
template <class R> bool is_own(R lse, R m, R l) {
  return std::abs(m + std::log(l) - lse) <= 4 * std::numeric_limits<R>::epsilon() * std::abs(lse);
}

// Store the lse of a row of maximum m and sum l. If row_max is not null, it has the layout of p.lse and holds the lse
// of every row: then only coarse rows with this lse are stored, their maximum in row_max and the logarithm of their sum
// in p.lse.
template <class R>
void store_lse(const ft_problem& p, const Sequence& s, int64_t head, int64_t i, R m, R l, R* row_max) {
  if (!p.lse.data) return;
  R* lse = (R*)query_row(p.lse, sizeof(R), s, head, i);
  R* maximum = row_max ? row_max + (lse - (R*)p.lse.data) : nullptr;
  if (!maximum) *lse = m + std::log(l);
  else if (is_coarse(*maximum) && is_own(*maximum, m, l)) *maximum = m, *lse = std::log(l);
}
// Whether any of the queries first .. last-1 has a coarse lse.
template <class R>
bool any_coarse(const ft_problem& p, const Sequence& s, int64_t head, int64_t first, int64_t last, const R* row_max) {
  const R* maximum = row_max + ((R*)query_row(p.lse, sizeof(R), s, head, first) - (R*)p.lse.data);
  for (int64_t i = first; i < last; i++, maximum += p.lse.row)
    if (is_coarse(*maximum)) return true;
  return false;
}
