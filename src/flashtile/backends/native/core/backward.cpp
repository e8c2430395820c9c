// Backward. A task owns a block of keys, so dK and dV are its own, and walks the queries; its share of dQ is added when
// its turn comes, key block after key block, so that no sum depends on the threads. P is computed again from lse, S
// summed as the forward pass did. As there, blocks are [key][lane] with queries in the lanes. Five products a tile:
//   S = K Q^T    dV += P dO    dP = V dO^T    dK += dS Q    dQ^T += K^T dS
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "factors.h"
#include "kernels.h"
#include "lse.h"
#include "row_vectors.h"
#include "threads.h"

namespace {

constexpr int GROUPS = 2;                             // groups of lanes a query block
template <class R> constexpr int KEYS = 96;           // keys a tile
template <class R> constexpr int QUERIES = GROUPS * LANES<R>;  // queries a block

// ---- The products. L = N * W lanes; P and dS are [key][L], q and dout [factor][L].

// P = exp(S - lse) of S = by K q, where no lse is coarse. The difference first: its rounding is that of S, not of something larger.
template <class R, class T, int N>
NOINLINE void weights(Rows<T> K, int n, const T* q, int length, R by, const R* lse, R* P) {
  constexpr int L = N * W<R>;
  in_tiles<rows_for(N)>(0, n, [=](auto m, int k) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    score_tile<R>(acc, K, k, q, length, by);
    UNROLL for (int i = 0; i < M; i++) {
      UNROLL for (int j = 0; j < N; j++) acc[i][j] -= load(lse + j * W<R>);
      exp_each<R>(acc[i]);
    }
    store_tile<R>(acc, P + k * L, L);
  });
}
// P <- exp(P - top - log): both differences are exact, or near to it, where an lse of their sum would be coarse.
template <class R, int N> NOINLINE void probabilities(int n, const R* top, const R* log, R* P) {
  for (int k = 0; k < n; k++, P += N * W<R>) {
    Vec<R> x[N];
    UNROLL for (int j = 0; j < N; j++) x[j] = load(P + j * W<R>) - load(top + j * W<R>) - load(log + j * W<R>);
    exp_each<R>(x);
    UNROLL for (int j = 0; j < N; j++) store(P + j * W<R>, x[j]);
  }
}
// P <- dS = P * (Z * (V dout) - delta); Z, what dropout multiplies by, may be null
template <class R, class T, int N, bool DROPS>
NOINLINE void score_gradients(Rows<T> V, int n, const T* dout, int length, const R* delta, const R* Z, R* P) {
  constexpr int L = N * W<R>;
  in_tiles<rows_for(N)>(0, n, [=](auto m, int k) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    dot_tile<R>(acc, V.data + k * V.row, V.row, dout, L, length);
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) {
      const int at = (k + i) * L + j * W<R>;
      if constexpr (DROPS) acc[i][j] *= load(Z + at);
      store(P + at, load(P + at) * (acc[i][j] - load(delta + j * W<R>)));
    }
  });
}
// dq[column][lane] += K^T dS
template <class R, class T, int N> NOINLINE void add_to_queries(Rows<T> K, int length, const T* dS, R* dq, int dim) {
  constexpr int L = N * W<R>;
  in_tiles<rows_for(N)>(0, dim, [=](auto m, int d) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    zero_tile<R>(acc);
    tile<R>(acc, K.data + d, 1, K.row, dS, L, length);
    add_tile<R>(acc, dq + d * L, L);
  });
}
// The same, sum for sum, where K holds values that are not finite and dS is marked: hidden pairs are left out.
template <class R, class T>
NOINLINE void add_to_queries_but_hidden(Rows<T> K, int length, const T* dS, R* dq, int dim, int L) {
  for (int d = 0; d < dim; d++)
    for (int l = 0; l < L; l += W<R>) {
      Vec<R> acc = {};
      for (int k = 0; k < length; k++) {
        const Vec<T> w = load(dS + k * L + l);
        acc = add_product(acc, w, factor_unless_hidden<T>(w, all(K.data[k * K.row + d])));
      }
      store(dq + d * L + l, load(dq + d * L + l) + acc);
    }
}

// One group's part in a sum over queries: weights [key][L], and the rows they weigh, whole vectors each; all factors.
template <class T> struct Part {
  const T* weights;
  int L, rows;
  Rows<T> x;
};
// C[key][column] += sum over the parts of weights * x
template <class R, class T, int N>
NOINLINE void add_to_columns(const Part<T>* parts, int count, int n, int column, R* C, int64_t row) {
  in_tiles<rows_for(N)>(0, n, [=](auto m, int k) __attribute__((always_inline)) {
    constexpr int M = m;
    Vec<R> acc[M][N];
    zero_tile<R>(acc);
    for (const Part<T>* a = parts; a < parts + count; a++)
      tile<R>(acc, a->weights + k * a->L, a->L, 1, a->x.data + column, a->x.row, a->rows);
    add_tile<R>(acc, C + k * row, row);
  });
}
template <class R, class T> void add_to_keys(const Part<T>* parts, int count, int n, R* C, int64_t row) {
  int d = 0;
  for (; d + 2 * W<R> <= row; d += 2 * W<R>) add_to_columns<R, T, 2>(parts, count, n, d, C + d, row);
  if (d < row) add_to_columns<R, T, 1>(parts, count, n, d, C + d, row);
}
template <class R, class T>
NOINLINE void add_to_keys_but_hidden(const Part<T>* parts, int count, int n, R* C, int64_t row) {
  for (int k = 0; k < n; k++)
    for (int64_t d = 0; d < row; d += W<R>) {
      Vec<R> acc = {};
      for (const Part<T>* a = parts; a < parts + count; a++)
        for (int l = 0; l < a->rows; l++) {
          const Vec<T> w = all(a->weights[k * a->L + l]);
          acc = add_product(acc, w, factor_unless_hidden<T>(w, load(a->x.data + l * a->x.row + d)));
        }
      store(C + k * row + d, load(C + k * row + d) + acc);
    }
}

// ---- Rows and lanes

// x[lane][c] = base[lane][c] + by * from[c][lane] for the first n lanes; base may be null, or x itself
template <class R, class T>
NOINLINE void give_rows(const R* from, int lanes, int n, int d, R by, const R* base, int64_t base_row, T* x,
                        int64_t row) {
  for (int l0 = 0; l0 < n; l0 += W<R>) {
    const int here = n - l0 < W<R> ? n - l0 : W<R>;
    int c = 0;
    for (; c + W<R> <= d; c += W<R>) {
      Vec<R> a[W<R>];
      for (int i = 0; i < W<R>; i++) a[i] = load(from + (int64_t)(c + i) * lanes + l0) * all(by);
      transpose<R>(a);
      for (int l = 0; l < here; l++) {
        if (base) a[l] += load(base + (l0 + l) * base_row + c);
        store_as<R>(x + (l0 + l) * row + c, a[l]);
      }
    }
    for (; c < d; c++)
      for (int l = l0; l < l0 + here; l++)
        put<R>(x + l * row + c, from[(int64_t)c * lanes + l] * by + (base ? base[l * base_row + c] : R(0)));
  }
}

// A group of queries in the lanes, with its places in the scratch, and the keys of a tile that it sees.
template <class R, class T> struct Group {
  Lanes<R> lanes;
  T *q, *dout, *rounded;
  R *dq, *P, *slope, *Z, *dropped, *top, *log, *delta;  // top is the lse, and log 0, where that is not coarse
  const T* weights;  // of the sum over queries that comes next
  int from, to;  // keys of the tile it sees any of, counted from the block's first
  bool hidden;   // not all of them, in every lane
  bool coarse;   // the lse of some lane was
};

// ---- Passes over a block that only backward has

// x[key][lane] is the gradient of the bias; sum it into its place, whatever axes are broadcast.
template <class R> NOINLINE void add_to_bias(const Block<R>& b, const ft_tensor& t, R* to, const R* x) {
  const int L = b.lanes.padded, real = b.lanes.real;
  if (t.column == 0) {  // one place for all keys
    R sums[LANES<R>] = {}, total = 0;
    for (int k = 0; k < b.n; k++)
      for (int l = 0; l < L; l += W<R>) store(sums + l, load(sums + l) + load(x + k * L + l));
    for (int l = 0; l < real; l++) {
      if (t.row) to[l * t.row] += sums[l];
      else total += sums[l];
    }
    if (!t.row) *to += total;
  } else if (t.row == 0) {  // one for all queries
    for (int k = 0; k < b.n; k++) {
      Vec<R> sum = {};
      for (int l = 0; l < L; l += W<R>) {
        const Vec<R> a = load(x + k * L + l);
        sum += lane_index<R>() < all_int<R>(real - l) ? a : Vec<R>{};
      }
      to[k * t.column] += sum_lanes<R>(sum);
    }
  } else {
    for (int l0 = 0; l0 < real; l0 += W<R>) {
      const int here = real - l0 < W<R> ? real - l0 : W<R>;
      int k = 0;
      if (t.column == 1)
        for (; k + W<R> <= b.n; k += W<R>) {
          Vec<R> a[W<R>];
          for (int i = 0; i < W<R>; i++) a[i] = load(x + (k + i) * L + l0);
          transpose<R>(a);
          for (int l = 0; l < here; l++) {
            R* at = to + (l0 + l) * t.row + k;
            store(at, load(at) + a[l]);
          }
        }
      for (; k < b.n; k++)
        for (int l = l0; l < l0 + here; l++) to[l * t.row + k * t.column] += x[k * L + l];
    }
  }
}
// Z <- what dropout multiplies a weight by, dropped <- P * Z
template <class R> NOINLINE void drop(const Block<R>& b, const R* P, R* Z, R* dropped) {
  const Vec<R> up = all((R)(1 / (1 - b.p.dropout)));
  each_kept<R>(b, [=](int64_t at, Mask<R> kept) {
    const Vec<R> z = kept ? up : Vec<R>{};
    store(Z + at, z);
    store(dropped + at, load(P + at) * z);
  });
}
// x + 0: no place is -0 then
template <class R> NOINLINE void clear_signs(const Block<R>& b, R* x) {
  for (int at = 0; at < b.n * b.lanes.padded; at += W<R>) store(x + at, load(x + at) + Vec<R>{});
}
// x * slope; hidden places stay so, and no others become so
template <class R> NOINLINE void multiply(const Block<R>& b, R* x, const R* slope) {
  for (int at = 0; at < b.n * b.lanes.padded; at += W<R>) {
    const Vec<R> v = load(x + at);
    store(x + at, is_hidden<R>(v) ? v : v * load(slope + at) + Vec<R>{});
  }
}

// ---- One call

// A share of the work: key blocks [b0, b1) of the key heads [h0, h1) of the sequences [s0, s1).
struct Share {
  int64_t s0, s1, h0, h1, b0, b1;
};

template <class R, class T> class Backward {
 public:
  explicit Backward(const ft_problem& p)
      : p(p), item(item_size(p.dtype)), out_item(item_size(p.out_dtype)), group(p.q_heads / p.kv_heads),
        dim((int)p.dim), v_dim((int)p.v_dim), wide(round_up(p.dim, W<R>)), v_wide(round_up(p.v_dim, W<R>)),
        rows(p.cu_q ? p.cu_q[p.sequences] : p.sequences * p.q_len), narrow_type(item < (int64_t)sizeof(R)),
        few(decode_fits<R>(p)) {
    share_out();
    layout();
  }
  int run();

 private:
  const ft_problem& p;
  const int64_t item, out_item, group;
  const int dim, v_dim;
  const int64_t wide, v_wide;  // of rows made of whole vectors
  const int64_t rows;          // queries of all sequences
  const bool narrow_type;      // dq is summed beside, in real
  const bool few;              // queries: forward was decode, and S is summed as there
  int64_t keys_each;           // keys a key block
  std::vector<Share> shares;   // in the order they are handed out
  std::unique_ptr<std::atomic<int32_t>[]> turns;  // for each query block: the key blocks that have been added
  std::unique_ptr<R[]> delta, tops, logs;         // [head][rows]; the latter as Group has them
  std::atomic<bool> any_coarse{false};
  std::unique_ptr<R[]> sums;                      // [head][rows][dim], where dq is narrow

  // Places in a thread's scratch
  struct Layout {
    size_t q, dout, dq, P, rounded, dk, dv, top, log, delta, q_rows, dout_rows, K, K_over, V, slope, Z, dropped, end;
  } at;
  struct KeyBlock;
  struct QueryBlock;

  Block<R> block(const KeyBlock& kb, const Group<R, T>& y) const;
  int64_t room(int64_t s) const { return p.cu_k ? p.cu_k[s + 1] - p.cu_k[s] : p.kv_len; }
  int64_t first_row(const Sequence& s) const { return p.cu_q ? s.q_row : s.index * p.q_len; }
  // Query blocks of all sequences side by side; a sequence may leave one unused.
  int64_t block_index(const Sequence& s, int64_t head, int64_t block) const {
    return head * blocks_in_head() + first_row(s) / QUERIES<R> + s.index + block;
  }
  int64_t blocks_in_head() const { return rows / QUERIES<R> + p.sequences + 1; }

  void share_out();
  void layout();
  void prepare(int64_t s, int64_t head, int64_t from, int64_t to);
  int find_sums();
  void sum_sink(int64_t head);
  void key_block(int64_t s, int64_t kv_head, int64_t block, R* scratch);
  void query_block(KeyBlock& kb, int64_t head, int64_t first, int n, R* scratch);
  void lay_out_queries(const char* q, int n, R* to) const;
  void set_up(KeyBlock& kb, QueryBlock& qb, R* scratch);
  void make_weights(const KeyBlock& kb, QueryBlock& qb, int k0, int k1);
  void make_gradients(const KeyBlock& kb, QueryBlock& qb);
  void sum_over_queries(QueryBlock& qb, Rows<T> x, bool finite, R* C, int64_t row);
  void give_queries(const KeyBlock& kb, QueryBlock& qb);
};

// Key blocks: dK, dV, K and V of one stay in L2; as many as keep some 32 threads busy. They depend on the shape only.
// Where several heads, sequences or key blocks add to the same place of dbias, one share holds them all.
template <class R, class T> void Backward<R, T>::share_out() {
  const ft_tensor& bias = p.dbias;
  const bool all_s = bias.data && bias.sequence == 0, all_h = bias.data && bias.head == 0;
  const bool all_b = bias.data && bias.column == 0;
  const int64_t kinds = (all_s ? 1 : p.sequences) * (all_h ? 1 : p.kv_heads), tile = KEYS<R>;
  const int64_t in_cache = 196608 / (int64_t)sizeof(R) / std::max(p.dim, p.v_dim) / tile * tile;
  keys_each = std::max(tile, std::min(in_cache, round_up(p.kv_len, tile)));
  while (keys_each > tile && kinds * ceil_div(p.kv_len, keys_each) < 32) keys_each -= tile;
  const int64_t count = std::max<int64_t>(1, ceil_div(p.kv_len, keys_each));
  keys_each = std::max<int64_t>(24, round_up(ceil_div(p.kv_len, count), 24));  // even blocks, whole register tiles

  // As many heads side by side as there are threads, so that turns are seldom waited for.
  struct Kind {
    int64_t s0, s1, h0, h1, blocks;
  };
  std::vector<Kind> side;
  const auto flush = [&] {
    int64_t longest = 0;
    for (const Kind& k : side) longest = std::max(longest, k.blocks);
    for (int64_t b = 0; b < (all_b ? std::min<int64_t>(longest, 1) : longest); b++)
      for (const Kind& k : side)
        if (b < k.blocks) shares.push_back({k.s0, k.s1, k.h0, k.h1, b, all_b ? k.blocks : b + 1});
    side.clear();
  };
  for (int64_t s = 0; s < (all_s ? std::min<int64_t>(p.sequences, 1) : p.sequences); s++)
    for (int64_t h = 0; h < (all_h ? 1 : p.kv_heads); h++) {
      int64_t longest = room(s);
      if (all_s)
        for (int64_t other = 0; other < p.sequences; other++) longest = std::max(longest, room(other));
      side.push_back({s, all_s ? p.sequences : s + 1, h, all_h ? p.kv_heads : h + 1, ceil_div(longest, keys_each)});
      if ((int64_t)side.size() >= p.threads) flush();
    }
  flush();
}

template <class R, class T> void Backward<R, T>::layout() {
  size_t end = 0;
  const auto take = [&](bool wanted, int64_t n) {
    const size_t place = end;
    if (wanted) end += (size_t)round_up(n, 64 / sizeof(R));
    return place;
  };
  constexpr int64_t Q = QUERIES<R>, block = KEYS<R> * Q;
  constexpr bool PAIRS = PER<T> > 1;
  at.q = take(true, few ? W<R> * wide : Q * factors<T>(dim));
  at.dout = take(true, Q * factors<T>(v_dim));
  at.dq = take(true, Q * dim);
  at.P = take(true, block);
  at.rounded = take(PAIRS, factors<T>(block));
  at.dk = take(true, keys_each * wide);
  at.dv = take(true, keys_each * v_wide);
  at.top = take(true, Q);
  at.log = take(true, Q);
  at.delta = take(true, Q);
  at.q_rows = take(narrow_type || wide != dim, factors<T>(Q) * wide);
  at.dout_rows = take(PAIRS || out_item < (int64_t)sizeof(R) || v_wide != v_dim, factors<T>(Q) * v_wide);
  at.K = take(narrow_type, keys_each * factors<T>(dim));
  at.K_over = take(PAIRS, factors<T>(keys_each) * dim);
  at.V = take(narrow_type, keys_each * factors<T>(v_dim));
  at.slope = take(p.softcap > 0, block);
  at.Z = take(p.dropout > 0, block);
  at.dropped = take(p.dropout > 0, block);
  at.end = end;
}

// What is needed of queries [from, to) before anything else: delta and the lse, and 0 for dq where no key is seen.
template <class R, class T> void Backward<R, T>::prepare(int64_t index, int64_t head, int64_t from, int64_t to) {
  const Sequence s(p, index);
  to = std::min(to, s.q_len);
  if (from >= to) return;
  const int64_t row = head * rows + first_row(s);
  R *d = delta.get() + row, *top = tops.get() + row;
  std::fill(logs.get() + row + from, logs.get() + row + to, R(0));
  const R* lse = (const R*)query_row(p.lse, sizeof(R), s, head, 0);
  const R* dlse = p.dlse.data ? (const R*)query_row(p.dlse, sizeof(R), s, head, 0) : nullptr;
  with_type<R>(p.out_dtype, [&](auto t) {
    using E = decltype(t);
    for (int64_t i = from; i < to; i++) {
      const E* out = (const E*)query_row(p.out, sizeof(E), s, head, i);
      const E* dout = (const E*)query_row(p.dout, sizeof(E), s, head, i);
      Vec<R> sum = {};
      R rest = 0;
      int c = 0;
      const auto given = [](Vec<R> x) { return as_factor<R, T>(x); };  // of dO what the products take
      for (; c + W<R> <= v_dim; c += W<R>) sum += load_as<R>(out + c) * given(load_as<R>(dout + c));
      for (; c < v_dim; c++) rest += as<R>(out[c]) * given(all(as<R>(dout[c])))[0];
      rest += sum_lanes<R>(sum) - (dlse ? dlse[i * p.dlse.row] : R(0));
      top[i] = lse[i * p.lse.row];
      bool empty = top[i] == -(R)INFINITY;
      if (is_coarse(top[i])) {  // most often of padding, which no gradient comes back to
        empty = !(dlse && dlse[i * p.dlse.row]) && std::all_of(dout, dout + v_dim, [](E x) { return as<R>(x) == 0; });
        if (!empty) any_coarse.store(true, std::memory_order_relaxed);
      }
      if (empty) d[i] = 0, top[i] = (R)INFINITY;  // and so its weights will be 0
      else d[i] = rest;
    }
  });
  for (int64_t i = from; i < to; i += QUERIES<R>) {
    const int64_t end = std::min<int64_t>(i + QUERIES<R>, to);
    const Cuts seen = cuts(s.band, i, end, s.kv_len, 1);
    if (seen.begin == seen.end)
      for (int64_t r = i; r < end; r++) memset(query_row(p.dq, item, s, head, r), 0, item * dim);
  }
}

// Maximum and sum of the rows whose lse is coarse, by a forward pass without values. Its scores have the bits of those here.
template <class R, class T> int Backward<R, T>::find_sums() {
  ft_problem f = p;
  f.v_dim = 0;
  f.dropout = 0;
  f.lse = {logs.get(), p.cu_q ? 0 : p.q_len, rows, 1, 0};
  if (few) return decode<R>(f, tops.get());
  return forward<R, T>(f, tops.get());
}

// dsink = sum over the rows of its weight times -delta, its value being 0
template <class R, class T> void Backward<R, T>::sum_sink(int64_t head) {
  const R sink = ((const R*)p.sink)[head];
  double sum = 0;
  for (int64_t index = 0; index < p.sequences; index++) {
    const Sequence s(p, index);
    const int64_t row = head * rows + first_row(s);
    for (int64_t i = row; i < row + s.q_len; i++)
      if (tops[i] != (R)INFINITY) sum -= exp((double)sink - (double)tops[i] - (double)logs[i]) * (double)delta[i];
  }
  ((R*)p.dsink)[head] = (R)sum;
}

template <class R, class T> struct Backward<R, T>::KeyBlock {
  const Sequence s;
  const int64_t index, first;  // which block, its first key
  const int n;                 // keys in use
  Rows<T> K, V;       // for sums along the rows
  Rows<T> K_over;     // and over them
  int k_finite = -1;  // not known yet
};

template <class R, class T> Block<R> Backward<R, T>::block(const KeyBlock& kb, const Group<R, T>& y) const {
  return {p, y.lanes, kb.first + y.from, y.to - y.from};
}

template <class R, class T> void Backward<R, T>::key_block(int64_t index, int64_t kv_head, int64_t block, R* scratch) {
  const Sequence s(p, index);
  const int64_t first = block * keys_each, last = std::min(first + keys_each, room(index));
  if (first >= last) return;
  const int n = (int)clip(s.kv_len - first, 0, last - first);
  const char *k = key_row(p.k, item, s, kv_head, first), *v = key_row(p.v, item, s, kv_head, first);
  const Rows<T> K = along_rows<R, T>(k, p.dtype, p.k.row, n, dim, (T*)(scratch + at.K));
  const Rows<T> V = along_rows<R, T>(v, p.dtype, p.v.row, n, v_dim, (T*)(scratch + at.V));
  Rows<T> K_over = K;
  if constexpr (PER<T> > 1) K_over = over_rows<R, T>(k, p.dtype, p.k.row, n, dim, dim, (T*)(scratch + at.K_over));
  KeyBlock kb{s, block, first, n, K, V, K_over};
  R *dk = scratch + at.dk, *dv = scratch + at.dv;
  memset(dk, 0, sizeof(R) * n * wide);
  memset(dv, 0, sizeof(R) * n * v_wide);
  if (n > 0 && s.q_len > 0) {
    const Band by_key{s.band.right, s.band.left, -s.band.offset};
    const Cuts seen = cuts(by_key, first, first + n, s.q_len, QUERIES<R>);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      for (int64_t i = seen.begin * QUERIES<R>; i < std::min(seen.end * QUERIES<R>, s.q_len); i += QUERIES<R>)
        query_block(kb, head, i, (int)std::min<int64_t>(QUERIES<R>, s.q_len - i), scratch);
  }
  narrow<R>(dk, wide, n, dim, (R)p.scale, key_row(p.dk, item, s, kv_head, first), p.dtype, p.dk.row);
  narrow<R>(dv, v_wide, n, v_dim, R(1), key_row(p.dv, item, s, kv_head, first), p.dtype, p.dv.row);
  for (int64_t j = first + n; j < last; j++) {  // keys not in use
    memset(key_row(p.dk, item, s, kv_head, j), 0, item * dim);
    memset(key_row(p.dv, item, s, kv_head, j), 0, item * v_dim);
  }
}

// n queries of a head, from `first` on.
template <class R, class T> struct Backward<R, T>::QueryBlock {
  const int64_t head, first;
  const int n, groups;
  Group<R, T> group[GROUPS];
  Rows<T> Q, dO;
  // Only where pairs are hidden can a value that is not finite reach a sum it has no part in: elsewhere nobody looks.
  bool q_finite = true, dout_finite = true;

  QueryBlock(int64_t head, int64_t first, int n)
      : head(head), first(first), n(n), groups((n + LANES<R> - 1) / LANES<R>) {}
  Group<R, T>* begin() { return group; }
  Group<R, T>* end() { return group + groups; }
};

template <class R, class T> void Backward<R, T>::query_block(KeyBlock& kb, int64_t head, int64_t first, int n, R* scratch) {
  QueryBlock qb(head, first, n);
  set_up(kb, qb, scratch);
  const Cuts seen = cuts(kb.s.band, first, first + n, kb.s.kv_len, 1);
  const int begin = (int)clip(seen.begin - kb.first, 0, kb.n), end = (int)clip(seen.end - kb.first, begin, kb.n);
  const Range whole = whole_factors<T>(begin, end, kb.n);
  for (int k = whole.from; k < whole.to; k += KEYS<R>) {
    make_weights(kb, qb, k, std::min(k + KEYS<R>, whole.to));
    sum_over_queries(qb, qb.dO, qb.dout_finite, scratch + at.dv, v_wide);
    make_gradients(kb, qb);
    sum_over_queries(qb, qb.Q, qb.q_finite, scratch + at.dk, wide);
  }
  give_queries(kb, qb);
}

// n rows of q for scores_of_few; those past them are 0.
template <class R, class T> void Backward<R, T>::lay_out_queries(const char* q, int n, R* to) const {
  std::fill_n(to, W<R> * wide, R(0));
  with_type<R>(p.dtype, [&](auto t) {
    for (int i = 0; i < n; i++) lay_out_row((const decltype(t)*)q + i * p.q.row, dim, score_scale<R>(p), to + i * wide);
  });
}

// The groups with their queries in the lanes, the rows as they lie, and whether these are finite.
template <class R, class T> void Backward<R, T>::set_up(KeyBlock& kb, QueryBlock& qb, R* scratch) {
  const Sequence& s = kb.s;
  const int64_t first = qb.head * rows + first_row(s) + qb.first;
  const char* q = query_row(p.q, item, s, qb.head, qb.first);
  const char* dout = query_row(p.dout, out_item, s, qb.head, qb.first);
  bool hidden = false;
  for (int x = 0; x < qb.groups; x++) {
    const int l0 = x * LANES<R>, real = std::min(qb.n - l0, LANES<R>);
    Group<R, T>& y = qb.group[x];
    y.lanes = Lanes<R>(p, s, qb.head, qb.first + l0, real);
    const int L = y.lanes.padded;
    y.q = (T*)(scratch + at.q) + l0 * factors<T>(dim);
    y.dout = (T*)(scratch + at.dout) + l0 * factors<T>(v_dim);
    y.rounded = (T*)(scratch + at.rounded) + factors<T>(KEYS<R> * l0);
    y.weights = y.rounded;
    y.dq = scratch + at.dq + l0 * dim;
    y.P = scratch + at.P + KEYS<R> * l0;
    y.slope = p.softcap > 0 ? scratch + at.slope + KEYS<R> * l0 : nullptr;
    y.Z = scratch + at.Z + KEYS<R> * l0;
    y.dropped = p.dropout > 0 ? scratch + at.dropped + KEYS<R> * l0 : y.P;
    y.top = scratch + at.top + l0;
    y.log = scratch + at.log + l0;
    y.delta = scratch + at.delta + l0;
    y.coarse = false;
    for (int l = 0; l < L; l++) {
      const int64_t i = first + l0 + std::min(l, real - 1);
      y.top[l] = l < real ? tops[i] : (R)INFINITY;  // no weight in a lane without a query
      y.log[l] = logs[i];
      y.delta[l] = delta[i];
      y.coarse |= logs[i] != 0;
    }
    if (few) lay_out_queries(q, real, (R*)y.q);
    else in_lanes<R, T>(q + item * l0 * p.q.row, p.dtype, p.q.row, real, L, dim, scale_of<R, T>(p).before, y.q);
    in_lanes<R, T>(dout + out_item * l0 * p.dout.row, p.out_dtype, p.dout.row, real, L, v_dim, R(1), y.dout);
    memset(y.dq, 0, sizeof(R) * L * dim);
    hidden |= Block<R>{p, y.lanes, kb.first, kb.n}.partial();
  }
  qb.Q = over_rows<R, T>(q, p.dtype, p.q.row, qb.n, dim, wide, (T*)(scratch + at.q_rows));
  qb.dO = over_rows<R, T>(dout, p.out_dtype, p.dout.row, qb.n, v_dim, v_wide, (T*)(scratch + at.dout_rows));
  if (!hidden) return;
  const int length = (int)factors<T>(qb.n);
  if (kb.k_finite < 0) kb.k_finite = all_finite(kb.K, kb.n, (int)factors<T>(dim));
  qb.q_finite = all_finite(qb.Q, length, dim);
  qb.dout_finite = all_finite(qb.dO, length, v_dim);
}

// P, and what dropout leaves of it, for the keys k0 .. k1-1 of the block.
template <class R, class T> void Backward<R, T>::make_weights(const KeyBlock& kb, QueryBlock& qb, int k0, int k1) {
  const bool plain = !few && !(p.softcap > 0) && !p.bias.data && !p.alibi.data;
  for (Group<R, T>& y : qb) {
    y.from = (int)clip(y.lanes.seen.begin - kb.first, k0, k1);
    y.to = (int)clip(y.lanes.seen.end - kb.first, y.from, k1);
    if (y.from < y.to) {
      const Range whole = whole_factors<T>(y.from, y.to, kb.n);
      y.from = whole.from, y.to = whole.to;
    }
    const Block<R> b = block(kb, y);
    y.hidden = b.partial();
    if (b.n == 0) continue;
    const Rows<T> K = rows_from(kb.K, y.from);
    const int length = (int)factors<T>(dim);
    const R by = scale_of<R, T>(p).after;
    with_vectors(y.lanes.padded / W<R>, [&](auto N) {
      if (plain && !y.coarse) return weights<R, T, N>(K, b.n, y.q, length, by, y.top, y.P);
      if (!few) scores<R, T, N>(K, b.n, y.q, length, by, y.P);
      else if constexpr (PER<T> == 1)
        with_rows<R>(qb.n, [&](auto n) { scores_of_few<R, R, n>(K.data, K.row, b.n, y.q, dim, y.P); });
      adjust(b, y.P, y.slope);
      probabilities<R, N>(b.n, y.top, y.log, y.P);
    });
    if (y.hidden) hide(b, y.P, HIDDEN<R>);
    if (p.dropout > 0) drop(b, y.P, y.Z, y.dropped);
    y.weights = over_lanes<R, T>(y.dropped, b.n, y.lanes.padded, y.lanes.real, y.rounded);
  }
}

// dS, in the place of P; its sums over keys into dbias and dq.
template <class R, class T> void Backward<R, T>::make_gradients(const KeyBlock& kb, QueryBlock& qb) {
  for (Group<R, T>& y : qb) {
    const Block<R> b = block(kb, y);
    if (b.n == 0) continue;
    const Rows<T> K = rows_from(kb.K_over, y.from / PER<T>), V = rows_from(kb.V, y.from);
    const int length = (int)factors<T>(v_dim), L = y.lanes.padded;
    with_vectors(L / W<R>, [&](auto N) {
      if (p.dropout > 0) score_gradients<R, T, N, true>(V, b.n, y.dout, length, y.delta, y.Z, y.P);
      else score_gradients<R, T, N, false>(V, b.n, y.dout, length, y.delta, nullptr, y.P);
    });
    const bool k_spoils = y.hidden && !kb.k_finite;
    const bool guarded = k_spoils || !qb.q_finite;
    if (guarded) clear_signs(b, y.P);
    if (y.hidden) hide(b, y.P, HIDDEN<R>);
    if (p.dbias.data) {
      const ft_tensor& t = p.dbias;
      R* to = (R*)t.data + kb.s.index * t.sequence + qb.head * t.head + y.lanes.first * t.row + b.j * t.column;
      add_to_bias(b, t, to, y.P);
    }
    if (y.slope) multiply(b, y.P, y.slope);
    if (guarded) clear_small<R, T>(y.P, b.n, L);
    y.weights = over_lanes<R, T>(y.P, b.n, L, y.lanes.real, y.rounded);
    const T* dS = over_keys<R, T>(y.P, b.n, L);
    const int keys = (int)factors<T>(b.n);
    with_vectors(L / W<R>, [&](auto N) {
      if (k_spoils) add_to_queries_but_hidden(K, keys, dS, y.dq, dim, L);
      else add_to_queries<R, T, N>(K, keys, dS, y.dq, dim);
    });
  }
}

// C[key][column] += weights * x over the groups; where x is not finite, hidden pairs are left out one by one.
template <class R, class T>
void Backward<R, T>::sum_over_queries(QueryBlock& qb, Rows<T> x, bool finite, R* C, int64_t row) {
  const Group<R, T>* g = qb.group;
  const auto add = finite ? add_to_keys<R, T> : add_to_keys_but_hidden<R, T>;
  Part<T> parts[GROUPS];
  bool together = true;  // the groups see the same keys
  for (int i = 0; i < qb.groups; i++) {
    parts[i] = {g[i].weights, g[i].lanes.padded / PER<T>, (int)factors<T>(g[i].lanes.real),
                rows_from(x, i * LANES<R> / PER<T>)};
    together &= g[i].from == g->from && g[i].to == g->to;
  }
  if (together) return add(parts, qb.groups, g->to - g->from, C + g->from * row, row);
  for (int i = 0; i < qb.groups; i++) add(parts + i, 1, g[i].to - g[i].from, C + g[i].from * row, row);
}

// Adds a key block's share of dq to what the key blocks before it have given.
template <class R, class T> void Backward<R, T>::give_queries(const KeyBlock& kb, QueryBlock& qb) {
  const Sequence& s = kb.s;
  const int64_t head = qb.head, first = qb.first;
  const Cuts blocks = cuts(s.band, first, first + qb.n, s.kv_len, keys_each);  // that have a share in these queries
  const bool is_first = kb.index == blocks.begin, is_last = kb.index == blocks.end - 1;
  std::atomic<int32_t>& turn = turns[block_index(s, head, first / QUERIES<R>)];
  const int32_t mine = (int32_t)(kb.index - blocks.begin);
  for (int spins = 0; turn.load(std::memory_order_acquire) != mine; spins++) {
    if (spins < 4096) pause_thread();
    else std::this_thread::yield();
  }
  with_type<R>(p.dtype, [&](auto t) {
    using E = decltype(t);
    for (const Group<R, T>& y : qb) {
      const int L = y.lanes.padded, n = y.lanes.real;
      const int64_t i = y.lanes.first;
      E* to = (E*)query_row(p.dq, sizeof(E), s, head, i);
      if constexpr (std::is_same_v<E, R>) {
        give_rows<R, R>(y.dq, L, n, dim, (R)p.scale, is_first ? nullptr : to, p.dq.row, to, p.dq.row);
      } else {
        R* sum = sums.get() + (head * rows + first_row(s) + i) * dim;
        const R* base = is_first ? nullptr : sum;
        if (is_last) give_rows<R, E>(y.dq, L, n, dim, (R)p.scale, base, dim, to, p.dq.row);
        else give_rows<R, R>(y.dq, L, n, dim, (R)p.scale, base, dim, sum, dim);
      }
    }
  });
  turn.store(mine + 1, std::memory_order_release);
}

template <class R, class T> int Backward<R, T>::run() {
  for (auto* x : {&delta, &tops, &logs}) x->reset(new R[p.q_heads * rows]);
  turns.reset(new std::atomic<int32_t>[p.q_heads * blocks_in_head()]());
  if (narrow_type) sums.reset(new R[p.q_heads * rows * dim]);

  const int64_t chunk = 8 * QUERIES<R>, chunks = ceil_div(p.q_len, chunk);
  parallel_for(p.threads, p.sequences * p.q_heads * chunks, [&](int64_t, int64_t task) {
    const int64_t c = task % chunks, head = task / chunks % p.q_heads, s = task / chunks / p.q_heads;
    prepare(s, head, c * chunk, (c + 1) * chunk);
  });
  if (any_coarse)
    if (const int status = find_sums()) return status;
  if (p.dsink) parallel_for(p.threads, p.q_heads, [&](int64_t, int64_t head) { sum_sink(head); });
  Scratch scratch(std::min<int64_t>(p.threads, shares.size()), sizeof(R) * at.end);
  if (!scratch.ok()) return FT_NO_MEMORY;
  parallel_for(p.threads, (int64_t)shares.size(), [&](int64_t thread, int64_t task) {
    const Share& w = shares[task];
    for (int64_t b = w.b0; b < w.b1; b++)
      for (int64_t s = w.s0; s < w.s1; s++)
        for (int64_t h = w.h0; h < w.h1; h++) key_block(s, h, b, scratch.piece<R>(thread));
  });
  return FT_OK;
}

}  // namespace

template <class R, class T> int backward(const ft_problem& p) { return Backward<R, T>(p).run(); }

template int backward<float, float>(const ft_problem&);
template int backward<double, double>(const ft_problem&);
#if FT_PAIRS
template int backward<float, Pair>(const ft_problem&);
#endif
