// The backward pass. A task owns a block of keys, so dK and dV are its own, and loops over the query blocks that see it. P
// is recomputed from lse, with S summed as the forward pass summed it. Blocks are [key][lane] with queries in the lanes, as
// in forward.cpp. Five products per tile:
//   S = K Q^T    dV += P dO    dP = V dO^T    dK += dS Q    dQ^T += K^T dS
#include "backward_products.h"
#include "backward_schedule.h"
#include "dbias.h"
#include "dq_sum.h"
#include "kernels.h"
#include "row_statistics.h"
#include "row_vectors.h"
#include "threads.h"

namespace {

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

template <class R, class T> class Backward {
 public:
  explicit Backward(const ft_problem& p)
      : p(p), item(item_size(p.dtype)), out_item(item_size(p.out_dtype)), group(p.q_heads / p.kv_heads),
        dim((int)p.dim), v_dim((int)p.v_dim), wide(round_up(p.dim, W<R>)), v_wide(round_up(p.v_dim, W<R>)),
        few(decode_fits<R>(p)), schedule(p), statistics(p), dq_sum(p) {
    layout();
  }
  int run();

 private:
  const ft_problem& p;
  const int64_t item, out_item, group;
  const int dim, v_dim;
  const int64_t wide, v_wide;  // of rows made of whole vectors
  const bool few;              // queries: forward was decode, and S is summed as there
  const BackwardSchedule<R> schedule;
  RowStatistics<R, T> statistics;
  DqSum<R> dq_sum;

  // Places in a thread's scratch
  struct Layout {
    size_t q, dout, dq, P, rounded, dk, dv, top, log, delta, q_rows, dout_rows, K, K_over, V, slope, Z, dropped, end;
  } at;
  struct KeyBlock;
  struct QueryBlock;

  Block<R> block(const KeyBlock& kb, const Group<R, T>& y) const;
  void layout();
  void key_block(int64_t s, int64_t kv_head, int64_t block, R* scratch);
  void query_block(KeyBlock& kb, int64_t head, int64_t first, int n, R* scratch);
  void lay_out_queries(const char* q, int n, R* to) const;
  void set_up(KeyBlock& kb, QueryBlock& qb, R* scratch);
  void make_weights(const KeyBlock& kb, QueryBlock& qb, int k0, int k1);
  void make_gradients(const KeyBlock& kb, QueryBlock& qb);
  void sum_over_queries(QueryBlock& qb, Rows<T> x, bool finite, R* C, int64_t row);
};

template <class R, class T> void Backward<R, T>::layout() {
  size_t end = 0;
  const auto take = [&](bool wanted, int64_t n) {
    const size_t place = end;
    if (wanted) end += (size_t)round_up(n, 64 / sizeof(R));
    return place;
  };
  constexpr int64_t Q = BLOCK_QUERIES<R>, block = TILE_KEYS<R> * Q;
  constexpr bool PAIRS = PER<T> > 1;
  at.q = take(true, few ? W<R> * wide : Q * factors<T>(dim));
  at.dout = take(true, Q * factors<T>(v_dim));
  at.dq = take(true, Q * dim);
  at.P = take(true, block);
  at.rounded = take(PAIRS, factors<T>(block));
  at.dk = take(true, schedule.block_keys * wide);
  at.dv = take(true, schedule.block_keys * v_wide);
  at.top = take(true, Q);
  at.log = take(true, Q);
  at.delta = take(true, Q);
  at.q_rows = take(item < (int64_t)sizeof(R) || wide != dim, factors<T>(Q) * wide);
  at.dout_rows = take(PAIRS || out_item < (int64_t)sizeof(R) || v_wide != v_dim, factors<T>(Q) * v_wide);
  at.K = take(item < (int64_t)sizeof(R), schedule.block_keys * factors<T>(dim));
  at.K_over = take(PAIRS, factors<T>(schedule.block_keys) * dim);
  at.V = take(item < (int64_t)sizeof(R), schedule.block_keys * factors<T>(v_dim));
  at.slope = take(p.softcap > 0, block);
  at.Z = take(p.dropout > 0, block);
  at.dropped = take(p.dropout > 0, block);
  at.end = end;
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
  const int64_t first = block * schedule.block_keys, last = std::min(first + schedule.block_keys, key_slots(p, index));
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
    const Cuts seen = cuts(by_key, first, first + n, s.q_len, BLOCK_QUERIES<R>);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      for (int64_t i = seen.begin * BLOCK_QUERIES<R>; i < std::min(seen.end * BLOCK_QUERIES<R>, s.q_len); i += BLOCK_QUERIES<R>)
        query_block(kb, head, i, (int)std::min<int64_t>(BLOCK_QUERIES<R>, s.q_len - i), scratch);
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
  Group<R, T> group[BLOCK_GROUPS];
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
  for (int k = whole.from; k < whole.to; k += TILE_KEYS<R>) {
    make_weights(kb, qb, k, std::min(k + TILE_KEYS<R>, whole.to));
    sum_over_queries(qb, qb.dO, qb.dout_finite, scratch + at.dv, v_wide);
    make_gradients(kb, qb);
    sum_over_queries(qb, qb.Q, qb.q_finite, scratch + at.dk, wide);
  }
  dq_sum.in_turn(kb.s, head, first, n, kb.index, schedule.block_keys, [&](bool is_first, bool is_last) {
    for (const Group<R, T>& y : qb)
      dq_sum.add(kb.s, head, y.lanes.first, y.lanes.real, y.dq, y.lanes.padded, is_first, is_last);
  });
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
  const int64_t first = statistics.row(s, qb.head, qb.first);
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
    y.rounded = (T*)(scratch + at.rounded) + factors<T>(TILE_KEYS<R> * l0);
    y.weights = y.rounded;
    y.dq = scratch + at.dq + l0 * dim;
    y.P = scratch + at.P + TILE_KEYS<R> * l0;
    y.slope = p.softcap > 0 ? scratch + at.slope + TILE_KEYS<R> * l0 : nullptr;
    y.Z = scratch + at.Z + TILE_KEYS<R> * l0;
    y.dropped = p.dropout > 0 ? scratch + at.dropped + TILE_KEYS<R> * l0 : y.P;
    y.top = scratch + at.top + l0;
    y.log = scratch + at.log + l0;
    y.delta = scratch + at.delta + l0;
    y.coarse = false;
    for (int l = 0; l < L; l++) {
      const int64_t i = first + l0 + std::min(l, real - 1);
      y.top[l] = l < real ? statistics.row_max[i] : (R)INFINITY;  // no weight in a lane without a query
      y.log[l] = statistics.log_sum[i];
      y.delta[l] = statistics.delta[i];
      y.coarse |= statistics.log_sum[i] != 0;
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
  Part<T> parts[BLOCK_GROUPS];
  bool together = true;  // the groups see the same keys
  for (int i = 0; i < qb.groups; i++) {
    parts[i] = {g[i].weights, g[i].lanes.padded / PER<T>, (int)factors<T>(g[i].lanes.real),
                rows_from(x, i * LANES<R> / PER<T>)};
    together &= g[i].from == g->from && g[i].to == g->to;
  }
  if (together) return add(parts, qb.groups, g->to - g->from, C + g->from * row, row);
  for (int i = 0; i < qb.groups; i++) add(parts + i, 1, g[i].to - g[i].from, C + g[i].from * row, row);
}

template <class R, class T> int Backward<R, T>::run() {
  const int64_t chunk = 8 * BLOCK_QUERIES<R>, chunks = ceil_div(p.q_len, chunk);
  parallel_for(p.threads, p.sequences * p.q_heads * chunks, [&](int64_t, int64_t task) {
    const int64_t from = task % chunks * chunk, head = task / chunks % p.q_heads;
    const Sequence s(p, task / chunks / p.q_heads);
    const int64_t to = std::min(from + chunk, s.q_len);
    if (from >= to) return;
    statistics.prepare(s, head, from, to);
    dq_sum.clear_unseeing(s, head, from, to);
  });
  if (const int status = statistics.split_coarse()) return status;
  if (p.dsink) parallel_for(p.threads, p.q_heads, [&](int64_t, int64_t head) { statistics.sum_sink(head); });
  const auto& tasks = schedule.tasks;
  Scratch scratch(std::min<int64_t>(p.threads, tasks.size()), sizeof(R) * at.end);
  if (!scratch.ok()) return FT_NO_MEMORY;
  parallel_for(p.threads, (int64_t)tasks.size(), [&](int64_t thread, int64_t task) {
    const BackwardTask& w = tasks[task];
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
