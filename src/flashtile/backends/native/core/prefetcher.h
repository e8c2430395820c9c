// Prefetcher: rows that are needed soon are prefetched a few lines at a time, between the steps of products.
// All at once would hold up the loads of the products; a loop over rows that come from memory would wait for each.
#pragma once
#include <stdint.h>

#include <algorithm>

#include "elements.h"
#include "prefetch.h"
#include "sequence.h"

constexpr int64_t CALL_IN_CACHE = 2 << 20;  // bytes of a call's q, k and v that probably are in a cache

class Prefetcher {
 public:
  explicit Prefetcher(bool wanted) : wanted_(wanted) {}

  // Forget the rows that are left.
  void clear() { parts_ = next_ = lines_ = each_ = 0, line_ = end_ = nullptr; }
  // n rows of some bytes, `stride` bytes apart.
  void add(const char* first, int64_t stride, int64_t bytes, int64_t n) {
    if (!wanted_ || n <= 0 || bytes <= 0) return;
    if (stride == bytes) bytes *= n, n = 1;
    const int64_t row_lines = (bytes + CACHE_LINE - 1) / CACHE_LINE;
    part_[parts_++] = {first, stride, row_lines, n};
    lines_ += row_lines * n;
  }
  // The rows come in this many turns.
  void spread(int64_t turns) {
    turns = std::max<int64_t>(turns, 1);
    each_ = std::min<int64_t>((lines_ + turns - 1) / turns, MOST);
  }
  // The lines of a turn, prefetched in some steps.
  struct Turn {
    const char *const *line, *const *end;
    int each;
    void step() {
      for (int i = 0; i < each && line < end; i++) prefetch(*line++);
    }
  };
  Turn turn(int steps) {
    const int n = (int)std::min(each_, lines_);
    if (n > 0) take(n);
    return {list_, list_ + n, (n + steps - 1) / steps};
  }
  // What no turn has taken.
  void rest() {
    while (lines_ > 0) {
      const int n = (int)std::min<int64_t>(lines_, MOST);
      take(n);
      for (int i = 0; i < n; i++) prefetch(list_[i]);
    }
  }

 private:
  static constexpr int MOST = 64, MAX_PARTS = 8;
  struct Part {
    const char* row;
    int64_t stride, row_lines, rows;
  };
  const bool wanted_;
  Part part_[MAX_PARTS];
  int64_t parts_ = 0, next_ = 0;                // the part that the next row is in
  const char *line_ = nullptr, *end_ = nullptr;  // what is left of the row before it
  int64_t lines_ = 0, each_ = 0;                // that are left, and in a turn
  const char* list_[MOST];                      // the lines of a turn

  __attribute__((noinline)) void take(int n) {
    lines_ -= n;
    for (const char** to = list_; n > 0;) {
      if (line_ == end_) {
        Part& part = part_[next_];
        line_ = part.row, end_ = line_ + part.row_lines * CACHE_LINE;
        part.row += part.stride;
        if (--part.rows == 0) next_++;
      }
      for (; n > 0 && line_ < end_; n--, line_ += CACHE_LINE) *to++ = line_;
    }
  }
};

// Whether the rows of a call are probably not in a cache.
inline bool from_memory(const ft_problem& p) {
  const int64_t keys = p.cu_k ? p.cu_k[p.sequences] : p.sequences * p.kv_len;
  const int64_t numbers = total_queries(p) * p.q_heads * p.dim + keys * p.kv_heads * (p.dim + p.v_dim);
  return numbers * item_size(p.dtype) > CALL_IN_CACHE;
}
