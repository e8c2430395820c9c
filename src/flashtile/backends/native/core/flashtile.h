// The C ABI of the CPU core: one struct describes a call, one function runs it forward, one backward.
//
// A tensor is [sequence, head, row, column] with strides in elements; they may be zero or negative. The columns of
// q, k, v, out, dout, dq, dk and dv are contiguous. "real" is float, or double if dtype is FT_F64. Sums, statistics and
// everything without a stated dtype are real.
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { FT_F32 = 0, FT_F64 = 1, FT_BF16 = 2, FT_F16 = 3 };
enum { FT_OK = 0, FT_BAD_ABI = 1, FT_NO_MEMORY = 2 };
enum { FT_ADD_DQ = 1, FT_ADD_DK = 2, FT_ADD_DV = 4, FT_ADD_DSINK = 8 };
enum { FT_MAX_DIM = 512 };  // of dim and v_dim
enum { FT_MAX_SPANS = 8 };

typedef struct {
  void* data;  // null if absent
  int64_t sequence, head, row, column;
} ft_tensor;

typedef struct {
  int64_t size;       // sizeof(ft_problem): caller and core must agree on this struct
  int64_t threads;    // at most this many, including the caller's
  int64_t dtype;      // of q, k, v
  int64_t out_dtype;  // of out and dout: dtype or real
  int64_t bias_dtype; // dtype or real
  int64_t sequences, q_heads, kv_heads;
  int64_t q_len, kv_len;  // of the longest sequence
  int64_t dim, v_dim;     // of q and k; of v and out
  int64_t left, right, offset;  // query i sees key j iff -left <= j - (i + offset) <= right
  int64_t align_end;      // nonzero: offset is (keys in use - queries) of each sequence instead
  double scale, softcap, dropout;
  uint64_t seed;
  const int64_t* cu_q;       // packed: sequence s has the rows cu_q[s] .. cu_q[s+1]-1 of q, out, lse, dout, dlse, dq
  const int64_t* cu_k;       // the same for k, v, dk, dv
  const int64_t* kv_lengths; // keys in use of each sequence: its first ones
  ft_tensor q, k, v, out;
  ft_tensor lse;             // real [sequence, head, row], natural logarithm; column unused. Forward: may be null
  ft_tensor bias;            // [sequence, head, query, key], counted within a sequence; any strides, 0 where broadcast
  ft_tensor mask;            // bytes, indexed as bias: nonzero where a query may attend
  ft_tensor alibi;           // real [sequence, head]: adds -slope * |i + offset - j|
  // int32 [sequence, head, query][span][2]; column unused. A query sees only keys that one of its spans holds, from the
  // first number up to the second. Spans rise, and none overlap.
  ft_tensor spans;
  int64_t span_count;        // of a query, at most FT_MAX_SPANS
  const void* sink;          // real [q_heads]: a logit that takes probability but adds no value
  // Backward only; out and lse are what forward returned, or those of attention to more keys than these.
  ft_tensor dout, dlse;      // dlse may be null
  ft_tensor dq, dk, dv;      // every element is written, or added to
  ft_tensor dbias;           // real, the shape and broadcast axes (stride 0) of bias; added to
  void* dsink;               // real [q_heads], written or added to
  int64_t grad_dtype;        // of dq, dk, dv: dtype or real
  int64_t add;               // FT_ADD_* of the gradients that are added to what is there
  // Where dropout counts from: query i is origin_query + i * query_step, key j is origin_key + j * key_step, and head h
  // of sequence s is origin_head + s * origin_heads + h.
  int64_t origin_query, query_step, origin_key, key_step, origin_head, origin_heads;
} ft_problem;

int ft_forward(const ft_problem*);
int ft_backward(const ft_problem*);
// Merge `count` results over disjoint keys. Arrays are out and lse of each result, then those of the merged one, which
// may be arrays of a result: data and dtypes are theirs, strides[array][axis] in elements. An out is [shape[0], ...,
// shape[axes]] with contiguous columns, and an lse lacks the last axis.
int ft_merge(int64_t threads, int64_t count, int64_t axes, const int64_t* shape, const uint64_t* data,
             const int64_t* dtypes, const int64_t* strides);
// Exported for tests, which compare them with the functions of band.py, spans.py and dropout.py.
void ft_cuts(int64_t left, int64_t right, int64_t offset, int64_t first, int64_t last, int64_t n_cols, int64_t block,
             int64_t cuts[4]);
// How the spans of rows first..last-1 cut their row of tiles: limits is [row][span][2], and cuts holds four per span.
void ft_span_cuts(int64_t left, int64_t right, int64_t offset, int64_t first, int64_t last, int64_t n_cols,
                  int64_t block, const int32_t* limits, int64_t span_count, int64_t* cuts);
void ft_keep(uint64_t seed, int64_t head, int64_t i, int64_t j, int64_t n, double dropout,
             uint8_t* keep);  // of keys j .. j+n-1
void ft_after_fork(void);  // call this in a process that was forked before it loaded the library; later forks need not
const char* ft_isa(void);  // "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "aarch64", "generic"
#ifdef __cplusplus
}
#endif
