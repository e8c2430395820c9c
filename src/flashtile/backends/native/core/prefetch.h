// prefetch(): fetch a cache line that is read soon into L1 or L2, whichever is faster on this processor.
// RowsAhead: the rows that a loop over blocks needs next, prefetched a few at a time while it computes.
#pragma once
#include <stdint.h>

#include <algorithm>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

// A Zen 4 (AMD family 25) can have few L1 requests in flight, and waiting reads need them too: prefetching into L2
// makes a decode up to 1.5 times as fast there. A Zen 5 gets up to a third slower; others were not measured.
inline bool prefers_l2() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  return (a >> 8 & 15) + (a >> 20 & 255) == 25;  // the family
#else
  return false;
#endif
}
inline const bool INTO_L2 = prefers_l2();

inline __attribute__((always_inline)) void prefetch(const void* p) {
  if (INTO_L2) __builtin_prefetch(p, 0, 2);
  else __builtin_prefetch(p, 0, 3);
}

constexpr int CACHE_LINE = 64;  // bytes

class RowsAhead {
 public:
  void clear() { parts = next = lines = each = 0, line = end = nullptr; }
  // n rows of some bytes, `stride` bytes apart.
  void add(const void* first, int64_t stride, int64_t bytes, int64_t n) {
    if (n <= 0) return;
    if (stride == bytes) bytes *= n, n = 1;
    const int64_t row_lines = (bytes + CACHE_LINE - 1) / CACHE_LINE;
    part[parts++] = {(const char*)first, stride, row_lines, n};
    lines += row_lines * n;
  }
  // They are to be prefetched in so many turns.
  void spread(int64_t turns) { each = (lines + turns - 1) / std::max<int64_t>(turns, 1); }
  void turn() {
    if (lines > 0) fetch(std::min(each, lines));
  }
  void rest() { fetch(lines); }

 private:
  struct Part {
    const char* row;
    int64_t stride, row_lines, rows;
  } part[5];
  int64_t parts = 0, next = 0;        // the part that the next line is in
  const char *line = nullptr, *end = nullptr;  // and the rest of its row
  int64_t lines = 0, each = 0;  // that are left, and for each turn

  __attribute__((noinline)) void fetch(int64_t n) {
    for (lines -= n; n > 0;) {
      if (line == end) {
        Part& p = part[next];
        line = p.row, end = line + p.row_lines * CACHE_LINE;
        p.row += p.stride;
        if (--p.rows == 0) next++;
      }
      const char* const stop = line + std::min<int64_t>(n, (end - line) / CACHE_LINE) * CACHE_LINE;
      n -= (stop - line) / CACHE_LINE;
      const char* at = line;
      if (INTO_L2)
        for (; at < stop; at += CACHE_LINE) __builtin_prefetch(at, 0, 2);
      else
        for (; at < stop; at += CACHE_LINE) __builtin_prefetch(at, 0, 3);
      line = stop;
    }
  }
};
