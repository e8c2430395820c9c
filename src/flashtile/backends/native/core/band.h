// The band of keys that a query may see, and how it cuts a row of tiles. A test compares it with band.py.
#pragma once
#include <stdint.h>

#include <algorithm>

struct Band {
  int64_t left, right, offset;  // query i sees key j iff -left <= j - (i + offset) <= right
  int64_t begin(int64_t i) const { return i + offset - left; }
  int64_t end(int64_t i) const { return i + offset + right + 1; }
};

// Tiles of one row: [begin, full_begin) partial, [full_begin, full_end) full, [full_end, end) partial.
struct Cuts {
  int64_t begin, full_begin, full_end, end;
};

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
inline int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
inline int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }
inline int64_t clip(int64_t x, int64_t low, int64_t high) { return std::min(std::max(x, low), high); }

// How the band cuts the row of tiles of rows first..last-1; a ragged last tile is partial.
inline Cuts cuts(const Band& band, int64_t first, int64_t last, int64_t n_cols, int64_t block) {
  if (band.left + band.right < 0) return {0, 0, 0, 0};  // an empty band: no row sees a key
  const int64_t n = ceil_div(n_cols, block);
  // Some row sees begin(first)..end(last - 1); all rows see begin(last - 1)..end(first).
  const int64_t begin = clip(floor_div(band.begin(first), block), 0, n);
  const int64_t end = clip(ceil_div(std::min(band.end(last - 1), n_cols), block), begin, n);
  const int64_t full_begin = clip(ceil_div(band.begin(last - 1), block), begin, end);
  const int64_t full_end = clip(floor_div(std::min(band.end(first), n_cols), block), full_begin, end);
  return {begin, full_begin, full_end, end};
}
