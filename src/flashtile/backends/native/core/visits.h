// Which query blocks of the backward pass visit which key blocks.
#pragma once
#include <vector>

#include "backward_schedule.h"
#include "spans.h"

// Without spans the band answers. With them, the row cuts of all query blocks are found once and stored, with the first
// and the last query block that visits each key block: the memory for a head is that of its blocks.
template <class R> class Visits {
 public:
  Visits(const ft_problem& p, int64_t block_keys)
      : p(p), block_keys(block_keys), spans(p.spans.data ? (int)p.span_count : 0), heads(p.spans.head ? p.q_heads : 1),
        query_blocks(block_count(total_queries(p), BLOCK_QUERIES<R>)),
        key_blocks(block_count(p.cu_k ? p.cu_k[p.sequences] : p.sequences * p.kv_len, block_keys)),
        rows(spans ? heads * query_blocks * spans : 0),
        columns(spans ? heads * key_blocks : 0, {INT32_MAX, 0}) {}

  // Find the cuts of a head of a sequence. Other heads may share its spans, so that this is to be called for
  // shared_heads() heads.
  int64_t shared_heads() const { return spans ? heads : 0; }
  void find(const Sequence& s, int64_t head) {
    constexpr int64_t Q = BLOCK_QUERIES<R>;
    Blocks* column = &columns[column_index(s, head, 0)];
    for (int64_t x = 0; x * Q < s.q_len; x++) {
      const RowCuts found = row_cuts(p, s, head, x * Q, std::min(x * Q + Q, s.q_len), block_keys);
      for (int r = 0; r < spans; r++) {
        const Cuts& c = found.span[r];
        rows[row_index(s, head, x) + r] = {(int32_t)c.begin, (int32_t)c.end};
        for (int64_t j = c.begin; j < c.end; j++)
          column[j] = {std::min(column[j].begin, (int32_t)x), (int32_t)x + 1};
      }
    }
  }

  // The key blocks that a query block visits. (Of the cuts, only begin and end are right.)
  RowCuts of_queries(const Sequence& s, int64_t head, int64_t block) const {
    const int64_t first = block * BLOCK_QUERIES<R>;
    if (!spans) return row_cuts(p, s, head, first, std::min(first + BLOCK_QUERIES<R>, s.q_len), block_keys);
    RowCuts found;
    const Blocks* row = &rows[row_index(s, head, block)];
    for (int r = 0; r < spans; r++) found.span[r] = {row[r].begin, row[r].begin, row[r].begin, row[r].end};
    found.count = spans;
    return found;
  }
  // f(query block) for those that visit a key block.
  template <class F> void for_each_query_block(const Sequence& s, int64_t head, int64_t block, F&& f) const {
    if (spans) {
      const Blocks& column = columns[column_index(s, head, block)];
      for (int64_t x = column.begin; x < column.end; x++)
        if (!of_queries(s, head, x).skips(block)) f(x);
    } else {
      // Those whose row cuts visit it: a column's own cuts differ where a band ends within a ragged block.
      const int64_t key = block * block_keys, blocks = ceil_div(s.q_len, BLOCK_QUERIES<R>);
      const int64_t from = clip(floor_div(key - s.band.offset - s.band.right, BLOCK_QUERIES<R>), 0, blocks);
      const int64_t past = key + block_keys - s.band.offset + s.band.left;
      const int64_t end = clip(ceil_div(past, BLOCK_QUERIES<R>), from, blocks);
      for (int64_t x = from; x < end; x++)
        if (!of_queries(s, head, x).skips(block)) f(x);
    }
  }

  // The number of a query block among those of all sequences, which lie side by side; a sequence may leave one unused.
  int64_t query_block(const Sequence& s, int64_t head, int64_t block) const {
    return head * query_blocks + first_query(p, s) / BLOCK_QUERIES<R> + s.index + block;
  }
  int64_t all_query_blocks() const { return p.q_heads * query_blocks; }

 private:
  struct Blocks {
    int32_t begin, end;
  };
  const ft_problem& p;
  const int64_t block_keys;
  const int spans;
  const int64_t heads, query_blocks, key_blocks;  // in a head
  std::vector<Blocks> rows, columns;              // [head][query block][span], [head][key block]

  int64_t block_count(int64_t n, int64_t size) const { return n / size + p.sequences + 1; }
  int64_t row_index(const Sequence& s, int64_t head, int64_t block) const {
    return query_block(s, head % heads, block) * spans;
  }
  int64_t column_index(const Sequence& s, int64_t head, int64_t block) const {
    const int64_t first = p.cu_k ? s.k_row : s.index * p.kv_len;
    return head % heads * key_blocks + first / block_keys + s.index + block;
  }
};
