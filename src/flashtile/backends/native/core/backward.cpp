// The backward pass: a task owns a block of keys and loops over the query blocks that see it.
// So dK and dV are the task's own; dQ is an ordered sum over key blocks (dq_sum.h). P is recomputed from lse, with S
// summed as in the forward pass. Blocks are [key][lane], with queries in the lanes as in forward.cpp. Each tile takes
// five products:
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

// A group of queries in the lanes, its arrays in the scratch memory, and the keys of a tile that it sees.
template <class R, class T> struct Group {
  Lanes<R> lanes;
  T *q, *dout, *rounded;
  R *dq, *P, *slope, *Z, *dropped;
  R *row_max, *log_sum, *delta;  // see row_statistics.h
  const T* weights;              // of the next sum over queries
  int from, to;                  // keys of the tile that some lane sees, counted from the first of the block
  Pieces pieces;                 // of these keys
  bool hidden;                   // some lane does not see all of them
  bool coarse;                   // some lane has a coarse lse
};

// Z <- the factor of dropout, dropped <- P * Z
template <class R> NOINLINE void apply_dropout(const Block<R>& b, const R* P, R* Z, R* dropped) {
  const Vec<R> up = splat((R)(1 / (1 - b.p.dropout)));
  for_each_kept<R>(b, [=](int64_t at, Mask<R> kept) {
    const Vec<R> z = kept ? up : Vec<R>{};
    store(Z + at, z);
    store(dropped + at, load(P + at) * z);
  });
}
// x <- x + 0, which turns -0 into +0
template <class R> NOINLINE void clear_negative_zeros(const Block<R>& b, R* x) {
  for (int at = 0; at < b.n * b.lanes.padded; at += W<R>) store(x + at, load(x + at) + Vec<R>{});
}
// x <- x * slope, except that hidden elements stay hidden and no others become so
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
        dim((int)p.dim), v_dim((int)p.v_dim), padded_dim(round_up(p.dim, W<R>)), padded_v_dim(round_up(p.v_dim, W<R>)),
        few_queries(decode_fits<R>(p)), schedule(p), visits(p, schedule.block_keys), statistics(p), dq_sum(p, visits) {
    layout();
  }
  int run();

 private:
  const ft_problem& p;
  const int64_t item, out_item, group;
  const int dim, v_dim;
  const int64_t padded_dim, padded_v_dim;  // rounded up to whole vectors
  const bool few_queries;                  // forward was decode, so S is summed as in decode
  const BackwardSchedule<R> schedule;
  Visits<R> visits;
  RowStatistics<R, T> statistics;
  DqSum<R> dq_sum;

  // Offsets in a thread's scratch memory
  struct Layout {
    size_t q, dout, dq, P, rounded, dk, dv, row_max, log_sum, delta, q_rows, dout_rows, K, K_over_rows, V, slope, Z;
    size_t dropped, end;
  } at;
  struct KeyBlock;
  struct QueryBlock;

  Block<R> block(const KeyBlock& keys, const Group<R, T>& g) const;
  Range seen_keys(const KeyBlock& keys, const Group<R, T>& g, int from, int to) const;  // of these of a block
  void layout();
  void key_block(int64_t s, int64_t kv_head, int64_t block, R* scratch);
  void query_block(KeyBlock& keys, int64_t head, int64_t block, R* scratch);
  void pack_queries(const char* q, int n, R* to) const;
  void load_queries(KeyBlock& keys, QueryBlock& queries, R* scratch);
  void compute_weights(const KeyBlock& keys, QueryBlock& queries, int k0, int k1);
  void compute_gradients(const KeyBlock& keys, QueryBlock& queries);
  void sum_over_queries(QueryBlock& queries, Rows<T> x, bool finite, R* C, int64_t row);
};

template <class R, class T> void Backward<R, T>::layout() {
  size_t end = 0;
  const auto take = [&](bool wanted, int64_t n) {
    const size_t place = end;
    if (wanted) end += (size_t)round_up(n, 64 / sizeof(R));
    return place;
  };
  constexpr int64_t Q = BLOCK_QUERIES<R>, block = TILE_KEYS<R> * Q;
  constexpr bool PAIRS = FACTOR_SIZE<T> > 1;
  at.q = take(true, few_queries ? W<R> * padded_dim : Q * factors<T>(dim));
  at.dout = take(true, Q * factors<T>(v_dim));
  at.dq = take(true, Q * dim);
  at.P = take(true, block);
  at.rounded = take(PAIRS, factors<T>(block));
  at.dk = take(true, schedule.block_keys * padded_dim);
  at.dv = take(true, schedule.block_keys * padded_v_dim);
  at.row_max = take(true, Q);
  at.log_sum = take(true, Q);
  at.delta = take(true, Q);
  at.q_rows = take(item < (int64_t)sizeof(R) || padded_dim != dim, factors<T>(Q) * padded_dim);
  at.dout_rows = take(PAIRS || out_item < (int64_t)sizeof(R) || padded_v_dim != v_dim, factors<T>(Q) * padded_v_dim);
  at.K = take(item < (int64_t)sizeof(R), schedule.block_keys * factors<T>(dim));
  at.K_over_rows = take(PAIRS, factors<T>(schedule.block_keys) * dim);
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
  Rows<T> K, V;         // as factors of sums along the rows
  Rows<T> K_over_rows;  // as factors of sums over the rows
  int k_finite = -1;    // not known yet
};

template <class R, class T> Block<R> Backward<R, T>::block(const KeyBlock& keys, const Group<R, T>& g) const {
  return {p, g.lanes, keys.first + g.from, g.to - g.from};
}

template <class R, class T>
Range Backward<R, T>::seen_keys(const KeyBlock& keys, const Group<R, T>& g, int from, int to) const {
  const int64_t first = g.lanes.seen.next(keys.first + from), end = g.lanes.seen.last(keys.first + to);
  return first < end ? whole_factors<T>((int)(first - keys.first), (int)(end - keys.first), keys.n) : Range{from, from};
}

template <class R, class T> void Backward<R, T>::key_block(int64_t index, int64_t kv_head, int64_t block, R* scratch) {
  const Sequence s(p, index);
  const int64_t first = block * schedule.block_keys, last = std::min(first + schedule.block_keys, key_slots(p, index));
  if (first >= last) return;
  const int n = (int)clip(s.kv_len - first, 0, last - first);
  const char *k = key_row(p.k, item, s, kv_head, first), *v = key_row(p.v, item, s, kv_head, first);
  const Rows<T> K = factors_along_rows<R, T>(k, p.dtype, p.k.row, n, dim, (T*)(scratch + at.K));
  const Rows<T> V = factors_along_rows<R, T>(v, p.dtype, p.v.row, n, v_dim, (T*)(scratch + at.V));
  Rows<T> K_over_rows = K;
  if constexpr (FACTOR_SIZE<T> > 1)
    K_over_rows = factors_over_rows<R, T>(k, p.dtype, p.k.row, n, dim, dim, (T*)(scratch + at.K_over_rows));
  KeyBlock keys{s, block, first, n, K, V, K_over_rows};
  const int64_t grad_item = item_size(p.grad_dtype);
  const bool add_dk = p.add & FT_ADD_DK, add_dv = p.add & FT_ADD_DV;
  R *dk = scratch + at.dk, *dv = scratch + at.dv;
  memset(dk, 0, sizeof(R) * n * padded_dim);
  memset(dv, 0, sizeof(R) * n * padded_v_dim);
  if (n > 0 && s.q_len > 0)
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
      visits.for_each_query_block(s, head, block, [&](int64_t x) { query_block(keys, head, x, scratch); });
  store_rows<R>(dk, padded_dim, n, dim, (R)p.scale, add_dk, key_row(p.dk, grad_item, s, kv_head, first), p.grad_dtype,
                p.dk.row);
  store_rows<R>(dv, padded_v_dim, n, v_dim, R(1), add_dv, key_row(p.dv, grad_item, s, kv_head, first), p.grad_dtype,
                p.dv.row);
  for (int64_t j = first + n; j < last; j++) {  // keys not in use
    if (!add_dk) memset(key_row(p.dk, grad_item, s, kv_head, j), 0, grad_item * dim);
    if (!add_dv) memset(key_row(p.dv, grad_item, s, kv_head, j), 0, grad_item * v_dim);
  }
}

// Queries first .. first+n-1 of a head.
template <class R, class T> struct Backward<R, T>::QueryBlock {
  const int64_t head, first;
  const int n;
  int groups = 0;
  Group<R, T> group[MAX_GROUPS<R>];
  Rows<T> Q, dO;
  // A non-finite value can reach a sum that it does not belong to only if pairs are hidden; otherwise this is not
  // computed.
  bool q_finite = true, dout_finite = true;

  QueryBlock(int64_t head, int64_t first, int n) : head(head), first(first), n(n) {}
  Group<R, T>* begin() { return group; }
  Group<R, T>* end() { return group + groups; }
};

template <class R, class T>
void Backward<R, T>::query_block(KeyBlock& keys, int64_t head, int64_t block, R* scratch) {
  const int64_t first = block * BLOCK_QUERIES<R>, n = std::min<int64_t>(BLOCK_QUERIES<R>, keys.s.q_len - first);
  QueryBlock queries(head, first, (int)n);
  load_queries(keys, queries, scratch);
  const RowCuts seen = row_cuts(p, keys.s, head, first, first + n, 1);
  seen.for_each_part(keys.first, keys.first + keys.n, MIN_GAP, [&](int64_t begin, int64_t end) {
    const Range whole = whole_factors<T>((int)(begin - keys.first), (int)(end - keys.first), keys.n);
    for (int k = whole.from; k < whole.to; k += TILE_KEYS<R>) {
      compute_weights(keys, queries, k, std::min(k + TILE_KEYS<R>, whole.to));
      sum_over_queries(queries, queries.dO, queries.dout_finite, scratch + at.dv, padded_v_dim);
      compute_gradients(keys, queries);
      sum_over_queries(queries, queries.Q, queries.q_finite, scratch + at.dk, padded_dim);
    }
  });
  dq_sum.in_turn(keys.s, head, block, keys.index, [&](bool is_first, bool is_last) {
    for (const Group<R, T>& g : queries)
      dq_sum.add(keys.s, head, g.lanes.first, g.lanes.used, g.dq, g.lanes.padded, is_first, is_last);
  });
}

// Pack n rows of q for few_query_scores; the rows past them are 0.
template <class R, class T> void Backward<R, T>::pack_queries(const char* q, int n, R* to) const {
  std::fill_n(to, W<R> * padded_dim, R(0));
  dispatch_type<R>(p.dtype, [&](auto t) {
    for (int i = 0; i < n; i++)
      pack_row((const decltype(t)*)q + i * p.q.row, dim, score_scale<R>(p), to + i * padded_dim);
  });
}

// Load q and dout as lanes and as rows, and check whether they are finite.
template <class R, class T> void Backward<R, T>::load_queries(KeyBlock& keys, QueryBlock& queries, R* scratch) {
  const Sequence& s = keys.s;
  const int64_t first = statistics.row(s, queries.head, queries.first);
  const char* q = query_row(p.q, item, s, queries.head, queries.first);
  const char* dout = query_row(p.dout, out_item, s, queries.head, queries.first);
  bool hidden = false;
  for (int l0 = 0, used; l0 < queries.n; l0 += used) {
    used = group_size<R>(p, s, queries.head, queries.first + l0, std::min(queries.n - l0, LANES<R>), W<R>);
    Group<R, T>& g = queries.group[queries.groups++];
    g.lanes = Lanes<R>(p, s, queries.head, queries.first + l0, used);
    const int L = g.lanes.padded;
    g.q = (T*)(scratch + at.q) + l0 * factors<T>(dim);
    g.dout = (T*)(scratch + at.dout) + l0 * factors<T>(v_dim);
    g.rounded = (T*)(scratch + at.rounded) + factors<T>(TILE_KEYS<R> * l0);
    g.weights = g.rounded;
    g.dq = scratch + at.dq + l0 * dim;
    g.P = scratch + at.P + TILE_KEYS<R> * l0;
    g.slope = p.softcap > 0 ? scratch + at.slope + TILE_KEYS<R> * l0 : nullptr;
    g.Z = scratch + at.Z + TILE_KEYS<R> * l0;
    g.dropped = p.dropout > 0 ? scratch + at.dropped + TILE_KEYS<R> * l0 : g.P;
    g.row_max = scratch + at.row_max + l0;
    g.log_sum = scratch + at.log_sum + l0;
    g.delta = scratch + at.delta + l0;
    g.coarse = false;
    for (int l = 0; l < L; l++) {
      const int64_t i = first + l0 + std::min(l, used - 1);
      g.row_max[l] = l < used ? statistics.row_max[i] : (R)INFINITY;  // no weight in a lane without a query
      g.log_sum[l] = statistics.log_sum[i];
      g.delta[l] = statistics.delta[i];
      g.coarse |= statistics.log_sum[i] != 0;
    }
    memset(g.dq, 0, sizeof(R) * L * dim);
    const Range seen = seen_keys(keys, g, 0, keys.n);
    if (seen.from == seen.to) continue;
    if (few_queries) pack_queries(q, used, (R*)g.q);
    else pack_lanes<R, T>(q + item * l0 * p.q.row, p.dtype, p.q.row, used, L, dim, split_scale<R, T>(p).before, g.q);
    pack_lanes<R, T>(dout + out_item * l0 * p.dout.row, p.out_dtype, p.dout.row, used, L, v_dim, R(1), g.dout);
    hidden |= Block<R>{p, g.lanes, keys.first + seen.from, seen.to - seen.from}.partial();
  }
  queries.Q = factors_over_rows<R, T>(q, p.dtype, p.q.row, queries.n, dim, padded_dim, (T*)(scratch + at.q_rows));
  queries.dO = factors_over_rows<R, T>(dout, p.out_dtype, p.dout.row, queries.n, v_dim, padded_v_dim,
                                       (T*)(scratch + at.dout_rows));
  if (!hidden) return;
  const int length = (int)factors<T>(queries.n);
  if (keys.k_finite < 0) keys.k_finite = all_finite(keys.K, keys.n, (int)factors<T>(dim));
  queries.q_finite = all_finite(queries.Q, length, dim);
  queries.dout_finite = all_finite(queries.dO, length, v_dim);
}

// P before and after dropout, for keys k0 .. k1-1 of the block.
template <class R, class T>
void Backward<R, T>::compute_weights(const KeyBlock& keys, QueryBlock& queries, int k0, int k1) {
  const bool plain = !few_queries && !(p.softcap > 0) && !p.bias.data && !p.alibi.data;
  for (Group<R, T>& g : queries) {
    const Range seen = seen_keys(keys, g, k0, k1);
    g.from = seen.from, g.to = seen.to;
    const Block<R> b = block(keys, g);
    g.hidden = b.partial();
    g.pieces.count = 0;
    if (b.n == 0) continue;
    if (!few_queries) g.pieces = pieces_of(b);
    else g.pieces.add({0, b.n, 0, g.lanes.padded / W<R>});
    const Rows<T> K = skip_rows(keys.K, g.from);
    const int length = (int)factors<T>(dim);
    const R by = split_scale<R, T>(p).after;
    dispatch_vectors(g.lanes.padded / W<R>, [&](auto N) {
      const bool finished = plain && !g.coarse;
      if (!few_queries)
        dispatch_pieces<N>(g.pieces, [&](const Piece& x, auto n) __attribute__((always_inline)) {
          constexpr int L = N * W<R>;
          const int first = x.first * W<R>;
          const Rows<T> rows = skip_rows(K, x.from);
          R* P = g.P + x.from * L + first;
          if (finished)
            recompute_probabilities<R, T, n, L>(rows, x.to - x.from, g.q + first, length, by, g.row_max + first, P);
          else scores<R, T, n, L>(rows, x.to - x.from, g.q + first, length, by, P);
        });
      else if constexpr (FACTOR_SIZE<T> == 1)
        dispatch_rows<R>(queries.n, [&](auto n) { few_query_scores<R, R, n>(K.data, K.row, b.n, g.q, dim, g.P); });
      if (finished) return;
      adjust_scores(b, g.P, g.slope);
      probabilities_from_scores<R, N>(b.n, g.row_max, g.log_sum, g.P);
    });
    if (g.hidden) hide(b, g.P, HIDDEN<R>);
    if (p.dropout > 0) apply_dropout(b, g.P, g.Z, g.dropped);
    g.weights = factors_over_lanes<R, T>(g.dropped, b.n, g.lanes.padded, g.lanes.used, g.rounded);
  }
}

// dS, stored over P, and its sums over keys, added to dbias and dq.
template <class R, class T> void Backward<R, T>::compute_gradients(const KeyBlock& keys, QueryBlock& queries) {
  for (Group<R, T>& g : queries) {
    const Block<R> b = block(keys, g);
    if (b.n == 0) continue;
    const Rows<T> K = skip_rows(keys.K_over_rows, g.from / FACTOR_SIZE<T>), V = skip_rows(keys.V, g.from);
    const int length = (int)factors<T>(v_dim), L = g.lanes.padded;
    dispatch_vectors(L / W<R>, [&](auto N) {
      dispatch_pieces<N>(g.pieces, [&](const Piece& x, auto n) __attribute__((always_inline)) {
        constexpr int L = N * W<R>;
        const int first = x.first * W<R>, at = x.from * L + first;
        const Rows<T> rows = skip_rows(V, x.from);
        const T* dout = g.dout + first;
        const R* delta = g.delta + first;
        if (p.dropout > 0)
          score_gradients<R, T, n, L, true>(rows, x.to - x.from, dout, length, delta, g.Z + at, g.P + at);
        else score_gradients<R, T, n, L, false>(rows, x.to - x.from, dout, length, delta, nullptr, g.P + at);
      });
    });
    const bool guard_k = g.hidden && !keys.k_finite;
    const bool guarded = guard_k || !queries.q_finite;
    if (guarded) clear_negative_zeros(b, g.P);
    if (g.hidden) hide(b, g.P, HIDDEN<R>);
    if (p.dbias.data) {
      const ft_tensor& t = p.dbias;
      R* to = (R*)t.data + keys.s.index * t.sequence + queries.head * t.head + g.lanes.first * t.row + b.j * t.column;
      add_to_bias(b, t, to, g.P);
    }
    if (g.slope) multiply(b, g.P, g.slope);
    if (guarded) flush_small<R, T>(g.P, b.n, L);
    g.weights = factors_over_lanes<R, T>(g.P, b.n, L, g.lanes.used, g.rounded);
    const T* dS = factors_over_keys<R, T>(g.P, b.n, L);
    const int key_factors = (int)factors<T>(b.n);
    dispatch_vectors(L / W<R>, [&](auto N) {
      if (guard_k) add_dq_guarded(K, key_factors, dS, g.dq, dim, L);
      else if (g.pieces.count > 1) add_dq_of_pieces<R, T, N>(K, g.pieces, dS, g.dq, dim);
      else add_dq<R, T, N>(K, key_factors, dS, g.dq, dim);
    });
  }
}

// C[key][column] += weights * x over the groups; if x is not finite, hidden pairs are left out one by one.
template <class R, class T>
void Backward<R, T>::sum_over_queries(QueryBlock& queries, Rows<T> x, bool finite, R* C, int64_t row) {
  const Group<R, T>* g = queries.group;
  const auto add = finite ? add_weighted_rows<R, T> : add_weighted_rows_guarded<R, T>;
  WeightedRows<T> parts[MAX_GROUPS<R>];
  bool together = true;  // the groups see the same keys
  for (int i = 0; i < queries.groups; i++) {
    parts[i] = {g[i].weights, g[i].lanes.padded / FACTOR_SIZE<T>, (int)factors<T>(g[i].lanes.used),
                skip_rows(x, (g[i].lanes.first - queries.first) / FACTOR_SIZE<T>), &g[i].pieces};
    together &= g[i].from == g->from && g[i].to == g->to;
  }
  if (together) return add(parts, queries.groups, g->to - g->from, C + g->from * row, row);
  for (int i = 0; i < queries.groups; i++) add(parts + i, 1, g[i].to - g[i].from, C + g[i].from * row, row);
}

template <class R, class T> int Backward<R, T>::run() {
  parallel_for(p.threads, p.sequences * visits.shared_heads(), [&](int64_t, int64_t task) {
    visits.find(Sequence(p, task % p.sequences), task / p.sequences);
  });
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
  const auto& tasks = schedule.tasks;
  Scratch scratch(std::min<int64_t>(p.threads, tasks.size()), sizeof(R) * at.end);
  if (!scratch.ok()) return FT_NO_MEMORY;
  if (p.dsink) parallel_for(p.threads, p.q_heads, [&](int64_t, int64_t head) { statistics.sum_sink(head); });
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
