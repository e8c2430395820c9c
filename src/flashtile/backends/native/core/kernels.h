// The kernels that abi.cpp chooses from, for R = float and double.
// Each returns FT_OK or FT_NO_MEMORY, or throws std::bad_alloc.
#pragma once
#include "flashtile.h"

// T: what products multiply, R or Pair (factors.h). row_max: see store_lse() in lse.h.
template <class R, class T> int forward(const ft_problem& p, R* row_max = nullptr);  // queries in the lanes
template <class R> bool decode_fits(const ft_problem& p);
template <class R> int decode(const ft_problem& p, R* row_max = nullptr);  // few queries: vectors along the head dim
template <class R, class T> int backward(const ft_problem& p);
