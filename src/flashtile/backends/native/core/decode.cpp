// The forward pass for few queries, as in decoding. It is bound by memory.
// So each row of K and V is read once, in order, for all queries and heads that share it, and the vectors of both
// products run along the head dim. Scores are [key][lane], one vector of lanes for all rows, so forward's passes over
// scores apply. Keys are split, depending on the shape only, to give every thread work; the thread that finishes the
// last split of a set of rows merges them.
#include <atomic>
#include <memory>
#include <new>

#include "kernels.h"
#include "lse.h"
#include "row_vectors.h"
#include "scores.h"
#include "softmax_state.h"
#include "threads.h"

namespace {

constexpr int BLOCK_KEYS = 64;             // keys per block
constexpr int MIN_SPLIT = 512;             // keys per split, at least
constexpr int ENOUGH_SPLITS = 32;          // over all sets of rows
constexpr int PREFETCH_BYTES = 8 << 10;    // how far ahead rows are prefetched if they come from memory
constexpr int64_t CACHED_BYTES = 4 << 20;  // keys and values of up to this size stay in a cache

// ---- The product with V, for ROWS rows

// o[row][vectors first .. first+N-1] = alpha * o + P V; a null alpha is 1. P has KEY_STRIDE numbers per key; the first
// ROWS are used.
template <class R, class T, int ROWS, int KEY_STRIDE, int N, bool TAIL>
NOINLINE void output_columns(const T* V, int64_t stride, int n, const R* P, int v_dim, int first, R* o,
                             const R* alpha, int64_t ahead) {
  const int o_row = (int)vectors_of<R>(v_dim) * W<R>;
  Vec<R> acc[ROWS][N];
  o += first * W<R>;
  zero_tile<R>(acc);
  for (int k = 0; k < n; k++, V += stride, P += KEY_STRIDE) {
    Vec<R> x[N];
    UNROLL for (int j = 0; j < N; j++) {
      if constexpr (TAIL) x[j] = load_tail<R>(V, v_dim);
      else x[j] = load_as<R>(V + (first + j) * W<R>);
    }
    if (first == 0 && ahead)  // all columns: the next calls read the others
      for (int c = 0; c < v_dim; c += CACHE_LINE / (int)sizeof(T)) prefetch(V + ahead * stride + c);
    UNROLL for (int r = 0; r < ROWS; r++) {
      const Vec<R> weight = splat(P[r]);
      UNROLL for (int j = 0; j < N; j++) acc[r][j] = add_product(acc[r][j], weight, x[j]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int j = 0; j < N; j++) {
    R* to = o + r * o_row + j * W<R>;
    store(to, alpha ? add_product(acc[r][j], load(to), splat(alpha[r])) : load(to) + acc[r][j]);
  }
}
template <class R, class T, int ROWS, int KEY_STRIDE>
void output(const T* V, int64_t stride, int n, const R* P, int v_dim, R* o, const R* alpha, int64_t ahead) {
  constexpr int ROOM = (REGISTERS == 32 ? 24 : 12) / ROWS, MOST = ROOM >= 8 ? 8 : ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1;
  for_tiles<MOST>(0, v_dim / W<R>, [=](auto vectors, int first) {
    output_columns<R, T, ROWS, KEY_STRIDE, vectors, false>(V, stride, n, P, v_dim, first, o, alpha, ahead);
  });
  if (v_dim % W<R>)
    output_columns<R, T, ROWS, KEY_STRIDE, 1, true>(V, stride, n, P, v_dim, v_dim / W<R>, o, alpha, ahead);
}
// The same to the bit, where V has non-finite values: hidden pairs are marked in P and left out.
template <class R, class T, int KEY_STRIDE>
void output_guarded(const T* V, int64_t stride, int n, const R* P, int rows, int v_dim, R* o, const R* alpha) {
  for (int r = 0; r < rows; r++, o += vectors_of<R>(v_dim) * W<R>)
    for (int c = 0; c < v_dim; c++) {
      Vec<R> sum = {};
      R* to = o + column_index<R>(c, v_dim);
      for (int k = 0; k < n; k++) {
        const Vec<R> weight = splat(P[k * KEY_STRIDE + r]);
        sum = add_product(sum, weight, unless_hidden<R>(weight, splat(to_real<R>(V[k * stride + c]))));
      }
      *to = alpha ? add_product(sum, splat(*to), splat(alpha[r]))[0] : *to + sum[0];
    }
}
template <class R, class T> NOINLINE bool rows_finite(const T* x, int64_t stride, int n, int d) {
  Vec<R> sum = {};
  for (int k = 0; k < n; k++, x += stride) {
    for (int c = 0; c + W<R> <= d; c += W<R>) sum += load_as<R>(x + c) * splat(R(0));
    if (d % W<R>) sum += load_tail<R>(x, d) * splat(R(0));
  }
  return sum_lanes<R>(sum) == 0;
}

// Reduce x with op over the lanes that belong to the same of KEY_STRIDE rows; every lane has its row's result.
template <int KEY_STRIDE, int H = KEY_STRIDE, class V, class F, int... I>
INLINE V reduce_rows(V x, F op, std::integer_sequence<int, I...> lanes) {
  if constexpr (H >= (int)sizeof...(I)) return x;
  else return reduce_rows<KEY_STRIDE, 2 * H>(op(x, __builtin_shufflevector(x, x, (I ^ H)...)), op, lanes);
}
// Repeat the first KEY_STRIDE lanes of x.
template <int KEY_STRIDE, class V, int... I> INLINE V repeat_rows(V x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (I % KEY_STRIDE)...);
}

// S <- P = exp(S - m), after updating m and l. o must be multiplied by alpha[row]; false if alpha is 1.
// S is [key][KEY_STRIDE rows], padded to a whole vector.
template <class R, int KEY_STRIDE> NOINLINE bool softmax(R* S, int n, R* m, R* l, R* alpha) {
  constexpr auto lanes = std::make_integer_sequence<int, W<R>>{};
  const Vec<R> none = splat(-(R)INFINITY), old = repeat_rows<KEY_STRIDE>(load(m), lanes);
  const int whole = n * KEY_STRIDE / W<R>, rest = n * KEY_STRIDE % W<R>, vectors = whole + (rest > 0);
  if (rest) {
    R* last = S + whole * W<R>;
    store(last, lane_index<R>() < splat_int<R>(rest) ? load(last) : none);
  }
  Vec<R> maximum = old, x[1], sum[2] = {};
  for (int k = 0; k < vectors; k++) maximum = max(load(S + k * W<R>), maximum);
  maximum = reduce_rows<KEY_STRIDE>(maximum, [](Vec<R> a, Vec<R> b) { return max(a, b); }, lanes);
  const Vec<R> base = exp_base<R>(maximum);
  for (int k = 0; k < vectors; k++, S += W<R>) {
    x[0] = load(S) - base;
    exp_each<R>(x);
    sum[k & 1] += x[0];
    store(S, x[0]);
  }
  sum[0] = reduce_rows<KEY_STRIDE>(sum[0] + sum[1], [](Vec<R> a, Vec<R> b) { return a + b; }, lanes);
  x[0] = old - base;
  exp_each<R>(x);
  store(alpha, x[0]);
  store(m, maximum);
  store(l, repeat_rows<KEY_STRIDE>(load(l), lanes) * x[0] + sum[0]);
  return any<R>(maximum != old);
}

// x[key][KEY_STRIDE rows] <- value where the row may not see the key: by hide() if each key has a vector, else one by
// one.
template <class R, int KEY_STRIDE> NOINLINE void hide_rows(const Block<R>& b, R* x, R value) {
  if constexpr (KEY_STRIDE == W<R>) return hide(b, x, value);
  const Lanes<R>& l = b.lanes;
  for (int r = 0; r < l.used; r++) {
    int end = 0;  // of the span before
    for (int span = 0; span < l.seen.count; span++) {
      const int begin = (int)clip(l.span_begin(r, span) - b.j, end, b.n);
      for (int k = end; k < begin; k++) x[k * KEY_STRIDE + r] = value;
      end = (int)clip(l.span_end(r, span) - b.j, begin, b.n);
    }
    for (int k = end; k < b.n; k++) x[k * KEY_STRIDE + r] = value;
    if (!b.p.mask.data) continue;
    const uint8_t* mask = l.mask[r] + b.j * b.p.mask.column;
    for (int k = 0; k < b.n; k++)
      if (!mask[k * b.p.mask.column]) x[k * KEY_STRIDE + r] = value;
  }
}

template <class R> struct Decode {
  using State = SoftmaxState<R>;  // of a set of rows and a split of the keys: o[row][v_dim as vectors]

  // The query heads of a key head are divided into sets; a set's heads and queries, its rows, fit into a vector.
  const ft_problem& p;
  R* const row_max;  // see store_lse()
  const int dim, v_dim;
  const int64_t group, heads_per_set, sets;  // query heads per key head and per set; sets per key head
  const int rows;                            // per set, rounded up to a power of two
  const int64_t o_row;
  const bool from_memory;  // keys and values are not in a cache
  const bool has_passes;   // over scores before softmax, or over weights after it
  int64_t splits;          // of the keys

  State state(R* buffer) const { return State(buffer, rows * o_row, W<R>); }
  static int power_of_two(int64_t n) {
    int x = 1;
    while (x < n) x *= 2;
    return x;
  }
  Decode(const ft_problem& p, R* row_max)
      : p(p), row_max(row_max), dim((int)p.dim), v_dim((int)p.v_dim), group(p.q_heads / p.kv_heads),
        heads_per_set(clip(W<R> / std::max<int64_t>(p.q_len, 1), 1, group)), sets(ceil_div(group, heads_per_set)),
        rows(power_of_two(std::max<int64_t>(heads_per_set * p.q_len, 1))), o_row(vectors_of<R>(p.v_dim) * W<R>),
        from_memory(p.sequences * p.kv_heads * p.kv_len * (p.dim + p.v_dim) * item_size(p.dtype) > CACHED_BYTES),
        has_passes(p.softcap > 0 || p.dropout > 0 || p.bias.data || p.alibi.data) {
    const int64_t units = std::max<int64_t>(1, p.sequences * p.kv_heads * sets);
    const int64_t seen = clip(p.left + p.right + p.q_len, 0, p.kv_len);
    splits = units >= ENOUGH_SPLITS ? 1 : clip(seen / MIN_SPLIT, 1, ceil_div(ENOUGH_SPLITS, units));
  }

  // How many keys ahead rows are prefetched.
  template <class T> int64_t ahead(int d) const { return from_memory && d ? PREFETCH_BYTES / (d * (int)sizeof(T)) : 0; }

  // A block of keys, with scores[key][KEY_STRIDE rows]: W per key if there are passes, which need a lane for each row;
  // else ROWS per key, so that no lane is empty. With one row per key head most would be.
  template <class T, int ROWS, int KEY_STRIDE>
  INLINE void process_block(const Block<R>& b, const T* K, const T* V, const R* q, State x, R* S, R shrink) const {
    alignas(64) R alpha[W<R>];
    const bool partial = b.partial();
    few_query_scores<R, T, ROWS, KEY_STRIDE>(K, p.k.row, b.n, q, dim, S, ahead<T>(dim));
    if constexpr (KEY_STRIDE == W<R>) adjust_scores(b, S);
    if (partial) hide_rows<R, KEY_STRIDE>(b, S, -(R)INFINITY);
    const R* scale = softmax<R, KEY_STRIDE>(S, b.n, x.m, x.l, alpha) ? alpha : nullptr;
    const auto drop = [&](int64_t at, Mask<R> kept) { store(S + at, kept ? load(S + at) : Vec<R>{}); };
    if (KEY_STRIDE == W<R> && p.dropout > 0) for_each_kept<R>(b, drop);
    if (shrink != 1) scale_all(S, round_up(b.n * KEY_STRIDE, W<R>), shrink);
    if (!partial || rows_finite<R>(V, p.v.row, b.n, v_dim)) {
      output<R, T, ROWS, KEY_STRIDE>(V, p.v.row, b.n, S, v_dim, x.o, scale, ahead<T>(v_dim));
    } else {
      hide_rows<R, KEY_STRIDE>(b, S, HIDDEN<R>);
      output_guarded<R, T, KEY_STRIDE>(V, p.v.row, b.n, S, ROWS, v_dim, x.o, scale);
    }
  }
  // Keys [begin, end) of a sequence and key head. Inlined into attend_split(): 3% faster where K and V come from
  // memory.
  template <class T, int ROWS>
  INLINE void attend(const Sequence& s, const Lanes<R>& lanes, int64_t kv_head, int64_t begin, int64_t end, const R* q,
                     State x, R shrink) const {
    alignas(64) R S[BLOCK_KEYS * W<R>] = {};
    for (int64_t j = begin; j < end; j += BLOCK_KEYS) {
      const Block<R> b{p, lanes, j, (int)std::min<int64_t>(BLOCK_KEYS, end - j)};
      const T* K = (const T*)key_row(p.k, sizeof(T), s, kv_head, j);
      const T* V = (const T*)key_row(p.v, sizeof(T), s, kv_head, j);
      if (has_passes) process_block<T, ROWS, W<R>>(b, K, V, q, x, S, shrink);
      else process_block<T, ROWS, ROWS>(b, K, V, q, x, S, shrink);
    }
  }

  // The heads and queries of a set, one per lane.
  Lanes<R> lanes_of(const Sequence& s, int64_t kv_head, int64_t set) const {
    Lanes<R> lanes;
    const int64_t first = set * heads_per_set, last = std::min(first + heads_per_set, group);
    for (int64_t h = first; h < last; h++)
      for (int64_t i = 0; i < s.q_len; i++) lanes.add(p, s, kv_head * group + h, i);
    lanes.finish(p, s);
    return lanes;
  }
  int64_t head_of(const Sequence& s, int64_t kv_head, int64_t set, int lane) const {
    return kv_head * group + set * heads_per_set + lane / s.q_len;
  }

  void attend_split(const Sequence& s, int64_t kv_head, int64_t set, int64_t index, State x, R shrink) const {
    const Lanes<R> lanes = lanes_of(s, kv_head, set);
    std::fill_n(x.o, rows * o_row, R(0));
    for (int r = 0; r < W<R>; r++) {
      const bool sink = p.sink && index == 0 && r < lanes.used;  // one key of weight 1 and value 0
      x.m[r] = sink ? ((const R*)p.sink)[head_of(s, kv_head, set, r)] : -(R)INFINITY;
      x.l[r] = x.m[r] == -(R)INFINITY ? R(0) : R(1);
    }
    const int64_t total = lanes.seen.tiles(), each = round_up(ceil_div(total, splits), BLOCK_KEYS);
    if (index * each >= total) return;
    dispatch_type<R>(p.dtype, [&](auto t) {
      using T = decltype(t);
      dispatch_rows<R>(rows, [&](auto n) {
        constexpr int64_t MOST = vectors_of<R>(FT_MAX_DIM) * W<R>;
        const int q_row = (int)vectors_of<R>(dim) * W<R>;
        alignas(64) R q[n * MOST];
        std::fill_n(q, n * q_row, R(0));
        for (int r = 0; r < lanes.used; r++) {
          const T* from = (const T*)query_row(p.q, sizeof(T), s, head_of(s, kv_head, set, r), r % s.q_len);
          pack_row(from, dim, score_scale<R>(p), q + r * q_row);
        }
        int64_t before = 0;  // keys of the spans before
        for (int r = 0; r < lanes.seen.count; r++) {
          const Cuts& span = lanes.seen.span[r];
          const int64_t start = span.begin - before, begin = std::max(start + index * each, span.begin);
          const int64_t end = std::min(start + (index + 1) * each, span.end);
          attend<T, n>(s, lanes, kv_head, begin, end, q, x, shrink);
          before += span.end - span.begin;
        }
      });
    });
  }

  // Merge all splits of a set into the first, and write out and lse.
  void finish(const Sequence& s, int64_t kv_head, int64_t set, R* buffer, int64_t size, R shrink) const {
    const State x = state(buffer);
    const int64_t heads = std::min(heads_per_set, group - set * heads_per_set);
    const int n = (int)(heads * s.q_len);
    for (int64_t i = 1; i < splits; i++) {
      const State y = state(buffer + i * size);
      Vec<R> scales[2];
      merge_statistics<R>(x.m, x.l, y.m, y.l, scales);
      for (int r = 0; r < n; r++)
        for (int64_t c = r * o_row; c < (r + 1) * o_row; c += W<R>)
          store(x.o + c, load(x.o + c) * splat(scales[0][r]) + load(y.o + c) * splat(scales[1][r]));
    }
    if (shrink == 1 && !all_finite(Rows<R>{x.o, o_row}, n, (int)o_row)) {
      for (int64_t i = 0; i < splits; i++)
        attend_split(s, kv_head, set, i, state(buffer + i * size), SHRINK<R>);
      return finish(s, kv_head, set, buffer, size, SHRINK<R>);
    }
    dispatch_type<R>(p.out_dtype, [&](auto t) {
      using T = decltype(t);
      for (int r = 0; r < n; r++) {
        const int64_t head = head_of(s, kv_head, set, r), i = r % s.q_len;
        const R scale = output_scale(p, x.l[r], shrink), *from = x.o + r * o_row;
        T* to = (T*)query_row(p.out, sizeof(T), s, head, i);
        for (int c = 0; c < v_dim; c++) store_element<R>(to + c, from[column_index<R>(c, v_dim)] * scale);
        store_lse(p, s, head, i, x.m[r], x.l[r], row_max);
      }
    });
  }

  // If keys are not split, a task finishes its rows at once, in its thread's memory.
  int run() const {
    const int64_t units = p.sequences * p.kv_heads * sets, size = State::size(rows * o_row, W<R>);
    if (units == 0) return FT_OK;
    const bool split = splits > 1;
    const Scratch states(split ? units : std::min(p.threads, units), sizeof(R) * splits * size);
    const std::unique_ptr<std::atomic<int64_t>[]> done(new (std::nothrow) std::atomic<int64_t>[split ? units : 0]());
    if (!states.ok() || !done) return FT_NO_MEMORY;
    parallel_for(p.threads, units * splits, [&](int64_t thread, int64_t task) {
      const int64_t unit = task / splits, set = unit % sets, kv_head = unit / sets % p.kv_heads;
      const Sequence s(p, unit / sets / p.kv_heads);
      if (s.q_len == 0 || (row_max && !any_coarse(s, kv_head, set))) return;
      R* buffer = states.piece<R>(split ? unit : thread);
      attend_split(s, kv_head, set, task % splits, state(buffer + task % splits * size), R(1));
      if (!split || done[unit].fetch_add(1, std::memory_order_acq_rel) == splits - 1)
        finish(s, kv_head, set, buffer, size, R(1));
    });
    return FT_OK;
  }
  bool any_coarse(const Sequence& s, int64_t kv_head, int64_t set) const {
    const int64_t heads = std::min(heads_per_set, group - set * heads_per_set), first = head_of(s, kv_head, set, 0);
    for (int64_t head = first; head < first + heads; head++)
      if (::any_coarse(p, s, head, 0, s.q_len, row_max)) return true;
    return false;
  }
};

}  // namespace

template <class R> bool decode_fits(const ft_problem& p) {
  return p.q_len <= W<R> / 4 || p.q_heads / p.kv_heads * p.q_len <= W<R>;
}
template <class R> int decode(const ft_problem& p, R* row_max) { return Decode<R>(p, row_max).run(); }

template bool decode_fits<float>(const ft_problem&);
template bool decode_fits<double>(const ft_problem&);
template int decode<float>(const ft_problem&, float*);
template int decode<double>(const ft_problem&, double*);
