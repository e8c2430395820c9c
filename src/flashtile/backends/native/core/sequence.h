// One sequence of a call: its lengths, its band, and the addresses of its rows.
#pragma once
#include "band.h"
#include "flashtile.h"

struct Sequence {
  int64_t index;          // its number in bias, mask, alibi and dropout
  int64_t batch;          // its number in q, k, v, out, lse and their gradients: 0 where sequences are packed
  int64_t q_row, k_row;   // rows of its first query and key within a head
  int64_t q_len, kv_len;  // keys in use
  Band band;

  Sequence(const ft_problem& p, int64_t s) : index(s), batch(p.cu_q ? 0 : s) {
    q_row = p.cu_q ? p.cu_q[s] : 0;
    k_row = p.cu_k ? p.cu_k[s] : 0;
    q_len = p.cu_q ? p.cu_q[s + 1] - q_row : p.q_len;
    kv_len = p.kv_lengths ? p.kv_lengths[s] : p.cu_k ? p.cu_k[s + 1] - k_row : p.kv_len;
    band = {p.left, p.right, p.align_end ? kv_len - q_len : p.offset};
  }
};

// The address of a query row or a key row, in a tensor of `item` bytes per element.
inline char* query_row(const ft_tensor& t, int64_t item, const Sequence& s, int64_t head, int64_t i) {
  return (char*)t.data + item * (s.batch * t.sequence + head * t.head + (s.q_row + i) * t.row);
}
inline char* key_row(const ft_tensor& t, int64_t item, const Sequence& s, int64_t head, int64_t j) {
  return (char*)t.data + item * (s.batch * t.sequence + head * t.head + (s.k_row + j) * t.row);
}

// Arrays with a number per query are [head][query], with the queries of all sequences side by side: how many a head
// has, and where a sequence begins.
inline int64_t total_queries(const ft_problem& p) { return p.cu_q ? p.cu_q[p.sequences] : p.sequences * p.q_len; }
inline int64_t first_query(const ft_problem& p, const Sequence& s) { return p.cu_q ? s.q_row : s.index * p.q_len; }
