// Factors: what a product multiplies. Numbers as they are; or, of bfloat16 and where the processor can, Pairs of them that
// follow each other along the axis of the sum: one instruction multiplies both, and adds them to a float.
#pragma once
#include "scores.h"

template <class T> constexpr int64_t factors(int64_t n) { return (n + PER<T> - 1) / PER<T>; }

// Of n keys those from `from` to `to`, and with each its partner: one that is in no sum has to be hidden by a mask, which
// its number may need, or to be past the last, where there is 0.
struct Pieces {
  int from, to;
};
template <class T> Pieces whole_factors(int from, int to, int n) {
  return {from - from % PER<T>, std::min(to + to % PER<T>, n)};
}

// ---- Rows as factors

// Of sums along the rows: where they lie if they can stay there, else in `room`, n x factors(d).
template <class R, class T> Rows<T> along_rows(const void* x, int64_t dtype, int64_t row, int n, int d, T* room) {
  if constexpr (PER<T> == 1) {
    return widen<R>(x, dtype, row, n, d, room);
  } else {
    if (((uintptr_t)x % sizeof(T) | row % 2 | d % 2) == 0) return {(const T*)x, row / 2};
    const int64_t wide = factors<T>(d);
    for (int i = 0; i < n; i++) {
      bf16* to = (bf16*)(room + i * wide);
      memcpy(to, (const bf16*)x + i * row, d * sizeof(bf16));
      if (d % 2) to[d] = {0};
    }
    return {room, wide};
  }
}
// Of sums over the rows: factors(n) x wide in `room`, wide being d, or up to whole vectors, with 0 in the columns past it.
// Numbers that are real, and as wide as that, stay where they lie.
template <class R, class T>
Rows<T> over_rows(const void* x, int64_t dtype, int64_t row, int n, int d, int64_t wide, T* room) {
  return with_type<R>(dtype, [=](auto t) -> Rows<T> {
    using E = decltype(t);
    if (std::is_same_v<E, T> && d == wide) return {(const T*)x, row};
    for (int i = 0; i < n; i += PER<T>) {
      const E *from = (const E*)x + i * row, *next = PER<T> == 2 && i + 1 < n ? from + row : nullptr;
      T* to = room + i / PER<T> * wide;
      const auto both = [=](auto get) {
        if constexpr (PER<T> == 1) return get(from);
        else return paired(get(from), next ? get(next) : Vec<R>{});
      };
      int c = 0;
      for (; c + W<R> <= d; c += W<R>) store(to + c, both([=](const E* p) { return load_as<R>(p + c); }));
      if (c == wide) continue;
      const Vec<T> rest = both([=](const E* p) {
        Vec<R> x = {};
        for (int k = c; k < d; k++) x[k - c] = as<R>(p[k]);
        return x;
      });
      memcpy(to + c, &rest, sizeof(T) * (wide - c));
    }
    return {room, wide};
  });
}
// Rows turned into lanes, to[factors(d)][lane]; numbers are multiplied by `by`, pairs cannot be without being rounded.
template <class R, class T>
void in_lanes(const void* x, int64_t dtype, int64_t row, int n, int lanes, int d, R by, T* to) {
  if constexpr (PER<T> == 1) {
    pack_lanes<R>(x, dtype, row, n, lanes, d, by, to);
  } else {
    with_type<R>(dtype, [=](auto t) {
      using E = decltype(t);
      for (int l0 = 0; l0 < lanes; l0 += W<R>) {
        const E* rows[W<R>];
        for (int l = 0; l < W<R>; l++) rows[l] = (const E*)x + (l0 + l < n ? l0 + l : n - 1) * row;
        Vec<R> first = {};
        each_column<R>(rows, 1, d, [&](int c, Vec<R> a) {
          if (c % 2 == 0 && c + 1 < d) first = a;
          else store(to + (int64_t)(c / 2) * lanes + l0, c % 2 ? paired(first, a) : paired(a, Vec<R>{}));
        });
      }
    });
  }
}
// What is left to multiply a score by, where in_lanes() was told score_scale().
template <class R, class T> R score_factor(const ft_problem& p) { return PER<T> == 1 ? R(1) : score_scale<R>(p); }

inline bool all_finite(Rows<Pair> x, int n, int d) {
  uint32_t found = 0;
  for (int i = 0; i < n; i++)
    for (int c = 0; c < d; c++) {
      const uint32_t bits = x.data[i * x.row + c];
      found |= ((bits & 0x7f80) == 0x7f80) | ((bits >> 16 & 0x7f80) == 0x7f80);
    }
  return !found;
}

// ---- Weights as factors: x[key][lane], of n keys and L lanes

// Of sums over the keys, in the place of x.
template <class R, class T> const T* over_keys(R* x, int n, int L) {
  if constexpr (PER<T> == 1) {
    return x;
  } else {
    T* to = (T*)x;
    for (int k = 0; k < n; k += 2)
      for (int l = 0; l < L; l += W<R>) {
        const R* from = x + k * L + l;
        store(to + k / 2 * L + l, paired(load(from), k + 1 < n ? load(from + L) : Vec<R>{}));
      }
    return to;
  }
}
// Of sums over the first `real` lanes, in `room` where they must be rounded.
template <class R, class T> const T* over_lanes(const R* x, int n, int L, int real, T* room) {
  if constexpr (PER<T> == 1) {
    return x;
  } else {
    bf16* to = (bf16*)room;
    for (int at = 0; at < n * L; at += W<R>) put_rounded(to + at, load(x + at));
    if (real % 2)
      for (int k = 0; k < n; k++) to[k * L + real] = {0};
    return room;
  }
}
// Where weights are marked as hidden: what such a weight is multiplied by, see scores.h.
template <class T> INLINE Vec<T> factor_unless_hidden(Vec<T> weight, Vec<T> x) {
  if constexpr (PER<T> == 1) {
    return unless_hidden<T>(weight, x);
  } else {
    return (Vec<T>)((halves)weight == halves{} + (uint16_t)0x8000 ? halves{} : (halves)x);
  }
}
// x where a visible weight may be -0, or would be once rounded: no longer. Such a number is one nobody would miss.
template <class R, class T> INLINE Vec<R> unmarked(Vec<R> x) {
  if constexpr (PER<T> == 1) return x + Vec<R>{};
  else return max(x, -x) < all(R(0x1p-126)) ? Vec<R>{} : x;
}
