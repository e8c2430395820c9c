// The spans of keys that queries may see, and how they cut a row of tiles. A test compares them with spans.py.
#pragma once
#include "sequence.h"

// Where the keys begin and end that some rows see by one of their spans.
struct Reach {
  int64_t first_begin = INT64_MAX, last_begin = 0, first_end = INT64_MAX, last_end = 0;
  bool every = true;  // row sees some key

  // A row whose band holds keys begin..end-1, and whose span has these limits.
  void add(int64_t begin, int64_t end, const int32_t* limits) {
    begin = std::max<int64_t>(begin, limits[0]), end = std::min<int64_t>(end, limits[1]);
    if (begin >= end) {
      every = false;
      return;
    }
    first_begin = std::min(first_begin, begin), last_begin = std::max(last_begin, begin);
    first_end = std::min(first_end, end), last_end = std::max(last_end, end);
  }
  // The tiles of these keys that are not before tile `from`.
  Cuts cuts(int64_t block, int64_t from) const {
    if (last_end == 0) return {from, from, from, from};
    const int64_t begin = std::max(first_begin / block, from), end = std::max(ceil_div(last_end, block), begin);
    const int64_t full_begin = clip(ceil_div(last_begin, block), begin, end);
    return {begin, full_begin, every ? clip(first_end / block, full_begin, end) : full_begin, end};
  }
};

// A row of tiles: the cuts of each span, in order. No two have a tile in common. Without spans, those of the band.
struct RowCuts {
  int count = 0;
  Cuts span[FT_MAX_SPANS];

  // The cuts of spans with these reaches. A span that some rows lack may lie before one that they have: cuts begin
  // where a later span does, if that is earlier, so that each begins behind the one before it.
  static RowCuts of(Reach* reach, int count, int64_t block) {
    RowCuts found;
    for (int r = count - 2; r >= 0; r--)
      reach[r].first_begin = std::min(reach[r].first_begin, reach[r + 1].first_begin);
    for (int64_t end = 0; found.count < count; end = found.span[found.count++].end)
      found.span[found.count] = reach[found.count].cuts(block, end);
    return found;
  }
  // The first tile from j on that is not skipped; INT64_MAX if there is none.
  int64_t next(int64_t j) const {
    for (int r = 0; r < count; r++)
      if (std::max(span[r].begin, j) < span[r].end) return std::max(span[r].begin, j);
    return INT64_MAX;
  }
  // One past the last tile before `end` that is not skipped; 0 if there is none.
  int64_t last(int64_t end) const {
    for (int r = count - 1; r >= 0; r--)
      if (span[r].begin < std::min(span[r].end, end)) return std::min(span[r].end, end);
    return 0;
  }
  // f(begin, end) for the parts of tiles [from, to) that are not skipped. Parts less than `gap` tiles apart are one.
  template <class F> void for_each_part(int64_t from, int64_t to, int64_t gap, F&& f) const {
    int64_t begin = 0, end = 0;
    for (int r = 0; r < count; r++) {
      const int64_t b = std::max(span[r].begin, from), e = std::min(span[r].end, to);
      if (b >= e) continue;
      if (end == 0 || b - end >= gap) {
        if (end) f(begin, end);
        begin = b;
      }
      end = e;
    }
    if (end) f(begin, end);
  }
  // Tiles before tile j that are not skipped.
  int64_t before(int64_t j) const {
    int64_t sum = 0;
    for (int r = 0; r < count; r++) sum += clip(j, span[r].begin, span[r].end) - span[r].begin;
    return sum;
  }
  int64_t tiles() const { return before(INT64_MAX); }
  bool skips(int64_t j) const { return next(j) != j; }
  // Whether tiles [j, end) are full.
  bool full(int64_t j, int64_t end) const {
    for (int r = 0; r < count; r++)
      if (j >= span[r].full_begin && end <= span[r].full_end) return true;
    return false;
  }
};

// The limits of a query's spans; null if the call has none.
inline const int32_t* span_limits(const ft_problem& p, const Sequence& s, int64_t head, int64_t i) {
  const ft_tensor& t = p.spans;
  return t.data ? (const int32_t*)t.data + (s.index * t.sequence + head * t.head + i * t.row) : nullptr;
}

// The cuts of the row of tiles of queries first..last-1, whose limits are `stride` apart.
inline RowCuts span_cuts(const Band& band, int64_t first, int64_t last, int64_t n_cols, int64_t block,
                         const int32_t* limits, int64_t stride, int count) {
  Reach reach[FT_MAX_SPANS];
  for (int64_t i = first; i < last; i++, limits += stride) {
    const int64_t begin = std::max<int64_t>(band.begin(i), 0), end = std::min(band.end(i), n_cols);
    for (int r = 0; r < count; r++) reach[r].add(begin, end, limits + 2 * r);
  }
  return RowCuts::of(reach, count, block);
}
inline RowCuts row_cuts(const ft_problem& p, const Sequence& s, int64_t head, int64_t first, int64_t last,
                        int64_t block) {
  if (!p.spans.data) return {1, {cuts(s.band, first, last, s.kv_len, block)}};
  return span_cuts(s.band, first, last, s.kv_len, block, span_limits(p, s, head, first), p.spans.row,
                   (int)p.span_count);
}
