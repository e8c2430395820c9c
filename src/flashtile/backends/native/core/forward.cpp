// The forward pass, with queries in the lanes. S, P and O are transposed: S[key][lane], O[column][lane].
// K and V are read in place, one scalar at a time; only a small block of queries is packed.
#include "kernels.h"

#include "factors.h"
#include "lse.h"
#include "softmax_state.h"
#include "threads.h"

namespace {

constexpr int BLOCK_KEYS = 192;     // keys per block: S stays in L1. In every task blocks begin at multiples of it
constexpr int MAX_GROUPS = 8;       // groups of lanes per task: they share a block of keys while it is in L2
constexpr int L2_SHARE = 96 << 10;  // bytes of L2 for their q and O
constexpr int EXTRA_GROUPS = 2;     // of a task, where spans divide groups
// With fewer tasks than ENOUGH_TASKS the keys are split too, into MIN_SPLIT keys or more.
constexpr int MIN_SPLIT = 1024, ENOUGH_TASKS = 32;

// The state of a group: o[v_dim][lanes], m[lanes], l[lanes].
template <class R> struct State : SoftmaxState<R> {
  State(R* buffer, int v_dim) : SoftmaxState<R>(buffer, v_dim * LANES<R>, LANES<R>) {}
  // Nothing seen yet; a sink counts as one key of weight 1 and value 0.
  void clear(int v_dim, int lanes, R sink) {
    std::fill_n(this->o, v_dim * lanes, R(0));
    std::fill_n(this->m, lanes, sink);
    std::fill_n(this->l, lanes, sink == -INFINITY ? R(0) : R(1));
  }
};

// S <- P = exp(S - m), after updating m and l. O must be multiplied by alpha[lane]; false if alpha is 1.
template <class R, int N> NOINLINE bool softmax(R* S, int n, R* m, R* l, R* alpha) {
  Vec<R> maximum[N], base[N], sum[N], a[N];
  UNROLL for (int j = 0; j < N; j++) maximum[j] = load(m + j * W<R>);
  for (int k = 0; k < n; k++)
    UNROLL for (int j = 0; j < N; j++) maximum[j] = max(load(S + (k * N + j) * W<R>), maximum[j]);
  Mask<R> changed = {};
  UNROLL for (int j = 0; j < N; j++) {
    const Vec<R> old = load(m + j * W<R>);
    changed |= maximum[j] != old;
    base[j] = exp_base<R>(maximum[j]);
    a[j] = old - base[j];
    store(m + j * W<R>, maximum[j]);
  }
  exp_each<R>(a);
  UNROLL for (int j = 0; j < N; j++) {
    store(alpha + j * W<R>, a[j]);
    sum[j] = Vec<R>{};
  }
  for (int k = 0; k < n; k++, S += N * W<R>) {
    Vec<R> x[N];
    UNROLL for (int j = 0; j < N; j++) x[j] = load(S + j * W<R>) - base[j];
    exp_each<R>(x);
    UNROLL for (int j = 0; j < N; j++) {
      sum[j] += x[j];
      store(S + j * W<R>, x[j]);
    }
  }
  UNROLL for (int j = 0; j < N; j++) store(l + j * W<R>, load(l + j * W<R>) * a[j] + sum[j]);
  return any<R>(changed);
}
// O = alpha O + V^T P; a null alpha is 1. Each block is summed separately first, to keep the error of long sums small.
template <class R, class T, int N>
NOINLINE void output_of_pieces(Rows<T> V, const T* P, const Pieces& pieces, R* o, int v_dim, const R* alpha) {
  constexpr int L = N * W<R>;
  for_tiles<tile_rows(N)>(0, v_dim, [&](auto rows, int d) __attribute__((always_inline)) {
    Vec<R> acc[rows][N];
    zero_tile<R>(acc);
    for (const Piece& x : pieces) multiply_piece<R, T>(acc, x, V.data + d, 1, V.row, P);
    add_tile<R>(acc, o + d * L, L, alpha);
  });
}
// The same where all vectors see all keys.
template <class R, class T, int N>
NOINLINE void output(Rows<T> V, const T* P, int length, R* o, int v_dim, const R* alpha) {
  constexpr int L = N * W<R>;
  for_tiles<tile_rows(N)>(0, v_dim, [=](auto rows, int d) __attribute__((always_inline)) {
    Vec<R> acc[rows][N];
    zero_tile<R>(acc);
    multiply_tile<R>(acc, V.data + d, 1, V.row, P, L, length);
    add_tile<R>(acc, o + d * L, L, alpha);
  });
}
// The same to the bit, where V has non-finite values: hidden pairs are marked in P and left out.
template <class R, class T>
NOINLINE void output_guarded(Rows<T> V, const T* P, int length, R* o, int v_dim, int L, const R* alpha) {
  for (int l = 0; l < L; l += W<R>)
    for (int d = 0; d < v_dim; d++) {
      Vec<R> acc[1][1] = {};
      for (int k = 0; k < length; k++) {
        const Vec<T> weight = load(P + k * L + l), value = splat(V.data[k * V.row + d]);
        acc[0][0] = add_product(acc[0][0], weight, factor_unless_hidden<T>(weight, value));
      }
      add_tile<R>(acc, o + d * L + l, L, alpha ? alpha + l : nullptr);
    }
}
template <class R> NOINLINE void apply_dropout(const Block<R>& b, R* P) {
  for_each_kept(b, [=](int64_t at, Mask<R> kept) { store(P + at, kept ? load(P + at) : Vec<R>{}); });
}

// A block of keys and values for all groups of a task. Whether V is finite is computed once, and only if needed.
template <class T> struct KeyBlock {
  Rows<T> K, V;  // V as factors of sums over keys
  int64_t j;
  int n, v_dim, finite = -1;
  bool values_finite() { return finite < 0 ? finite = all_finite(V, (int)factors<T>(n), v_dim) : finite; }
};
// Process one group of queries, q[factors(dim)][lanes], and one block of keys. Every option is its own pass over S.
template <class R, class T>
void step(const Block<R>& b, KeyBlock<T>& keys, const T* q, State<R> x, R* S, R shrink, Prefetcher& prefetcher) {
  const int dim = (int)b.p.dim, v_dim = (int)b.p.v_dim, L = b.lanes.padded, length = (int)factors<T>(b.n);
  const int64_t skip = b.j - keys.j;
  const Rows<T> K = skip_rows(keys.K, skip), V = skip_rows(keys.V, skip / FACTOR_SIZE<T>);
  const bool partial = b.partial();
  dispatch_vectors(L / W<R>, [&](auto vectors) {
    constexpr int N = vectors;
    R alpha[N * W<R>];
    const Pieces pieces = pieces_of(b);
    dispatch_pieces<N>(pieces, [&](const Piece& x, auto n) __attribute__((always_inline)) {
      const int at = x.first * W<R>;
      scores<R, T, n, N * W<R>>(skip_rows(K, x.from), x.to - x.from, q + at, (int)factors<T>(dim),
                                split_scale<R, T>(b.p).after, S + x.from * L + at, prefetcher);
    });
    adjust_scores(b, S);
    if (partial) hide(b, S, R(-INFINITY));
    const R* scale = softmax<R, N>(S, b.n, x.m, x.l, alpha) ? alpha : nullptr;
    if (b.p.dropout > 0) apply_dropout(b, S);
    if (shrink != 1) scale_all(S, b.n * L, shrink);
    const bool guarded = partial && !keys.values_finite();
    if (guarded) hide(b, S, HIDDEN<R>);
    const T* P = factors_over_keys<R, T>(S, b.n, L);
    if (guarded) output_guarded(V, P, length, x.o, v_dim, L, scale);
    else if (pieces.count > 1) output_of_pieces<R, T, N>(V, P, pieces, x.o, v_dim, scale);
    else output<R, T, N>(V, P, length, x.o, v_dim, scale);
  });
}
// Merge y into x.
template <class R> void merge(State<R> x, State<R> y, int v_dim, int L) {
  for (int l = 0; l < L; l += W<R>) {
    Vec<R> scales[2];
    merge_statistics<R>(x.m + l, x.l + l, y.m + l, y.l + l, scales);
    for (int at = l; at < v_dim * L; at += L) store(x.o + at, load(x.o + at) * scales[0] + load(y.o + at) * scales[1]);
  }
}
// Write out and lse. The weights summed in o were multiplied by shrink.
template <class R>
void finish(const ft_problem& p, const Sequence& s, int64_t head, int64_t first, int n, State<R> x, int L, R shrink,
            R* row_max) {
  R scales[LANES<R>];
  for (int l = 0; l < L; l++) scales[l] = output_scale(p, x.l[l], shrink);
  unpack_lanes<R>(x.o, n, L, (int)p.v_dim, scales, query_row(p.out, item_size(p.out_dtype), s, head, first),
                  p.out_dtype, p.out.row);
  for (int l = 0; l < n; l++) store_lse(p, s, head, first + l, x.m[l], x.l[l], row_max);
}

// Which queries and keys make a task. Groups and splits depend on the shape only, so that sums do not depend on the
// number of threads; the number of groups per task may.
template <class R> struct Plan {
  int64_t heads;   // of all sequences
  int64_t groups;  // groups of lanes in the longest sequence
  int64_t splits, split_keys;       // splits of the keys, and keys per split
  int64_t groups_per_task, blocks;  // and the blocks of queries that a head is divided into
  int64_t groups_at_once;           // more than groups_per_task if spans may divide groups
  int64_t tasks;

  explicit Plan(const ft_problem& p) {
    heads = p.sequences * p.q_heads;
    groups = ceil_div(p.q_len, LANES<R>);
    const int64_t units = heads * groups;
    splits = units < 1 || units >= ENOUGH_TASKS ? 1 : clip(p.kv_len / MIN_SPLIT, 1, ceil_div(ENOUGH_TASKS, units));
    split_keys = ceil_div(ceil_div(p.kv_len, splits), BLOCK_KEYS) * BLOCK_KEYS;
    const int64_t bytes = sizeof(R) * LANES<R> * (p.dim + p.v_dim);  // q and O of a group
    groups_per_task = splits > 1 ? 1 : clip(L2_SHARE / bytes, 1, MAX_GROUPS);
    while (groups_per_task > 1 && heads * ceil_div(groups, groups_per_task) < 4 * p.threads) groups_per_task--;
    const bool divided = p.spans.data && splits == 1;
    groups_at_once = divided ? std::min<int64_t>(groups_per_task + EXTRA_GROUPS, MAX_GROUPS) : groups_per_task;
    blocks = ceil_div(groups, groups_per_task);
    tasks = heads * blocks * splits;
  }
};

template <class R, class T> class Forward {
 public:
  Forward(const ft_problem& p, R* row_max)
      : p(p), row_max(row_max), plan(p), dim((int)p.dim), v_dim((int)p.v_dim), item(item_size(p.dtype)),
        prefetches(from_memory(p)), scratch(std::min(p.threads, plan.tasks),
                sizeof(R) * (plan.groups_at_once * (state_size() + q_size()) + buffer_size())),
        split_states(plan.splits > 1 ? plan.tasks : 0, sizeof(R) * state_size()) {}

  int run() {
    if (!scratch.ok() || !split_states.ok()) return FT_NO_MEMORY;
    parallel_for(p.threads, plan.tasks, [&](int64_t thread, int64_t task) { attend(thread, task, R(1)); });
    if (plan.splits > 1)
      parallel_for(p.threads, plan.tasks / plan.splits,
                   [&](int64_t thread, int64_t i) { combine_splits(thread, i, R(1)); });
    return FT_OK;
  }

 private:
  // A block of the queries of a head, and a split of the keys. Tasks go head by head, and from the last queries of a
  // head to the first: with a causal band the last see the most keys.
  struct Task {
    int64_t split, head, first, last;  // queries first..last-1
    Sequence s;
    Task(const ft_problem& p, const Plan<R>& plan, int64_t n)
        : split(n % plan.splits), head(n / plan.splits / plan.blocks % p.q_heads),
          first((plan.blocks - 1 - n / plan.splits % plan.blocks) * plan.groups_per_task * LANES<R>),
          s(p, n / plan.splits / plan.blocks / p.q_heads) {
      last = std::min(first + plan.groups_per_task * LANES<R>, s.q_len);
    }
  };

  struct KeyRange {
    int64_t first, end;
  };
  static int64_t end_of_block(int64_t key) { return (key / BLOCK_KEYS + 1) * BLOCK_KEYS; }

  void attend(int64_t thread, int64_t number, R shrink) {
    Task t(p, plan, number);
    if (t.first >= t.last || (row_max && !any_coarse(p, t.s, t.head, t.first, t.last, row_max))) return;
    while (t.first < t.last) t.first = attend_groups(thread, number, t, shrink);
  }
  // As many groups of a task as fit; return the first query after them.
  int64_t attend_groups(int64_t thread, int64_t number, const Task& t, R shrink) {
    R *states = plan.splits > 1 ? split_states.piece<R>(number) : scratch.piece<R>(thread) + buffer_size();
    R* S = scratch.piece<R>(thread);
    T *k_buffer = (T*)(S + BLOCK_KEYS * LANES<R>), *v_buffer = k_buffer + BLOCK_KEYS * factors<T>(dim);
    T* q = (T*)(S + buffer_size() + plan.groups_at_once * state_size());
    const auto state = [=](int g) { return State<R>(states + g * state_size(), v_dim); };

    Lanes<R> lanes[MAX_GROUPS];
    int groups = 0;
    const R sink = p.sink && t.split == 0 ? ((const R*)p.sink)[t.head] : -(R)INFINITY;
    for (int64_t from = t.first; from < t.last && groups < plan.groups_at_once; from = lanes[groups++].last) {
      Lanes<R>& group = lanes[groups];
      const int most = (int)std::min<int64_t>(t.last - from, LANES<R>);
      group = Lanes<R>(p, t.s, t.head, from, plan.splits > 1 ? most : group_size<R>(p, t.s, t.head, from, most, 1));
      pack_lanes<R, T>(query_row(p.q, item, t.s, t.head, from), p.dtype, p.q.row, group.used, group.padded, dim,
                       split_scale<R, T>(p).before, q + groups * q_size());
      state(groups).clear(v_dim, group.padded, sink);
    }

    const int64_t kv_head = t.head / (p.q_heads / p.kv_heads), split_end = (t.split + 1) * plan.split_keys;
    // The keys of the block of key `from`, or of the next one, that some group sees.
    const auto next_block = [&](int64_t from) {
      KeyRange found = {INT64_MAX, 0};
      for (int g = 0; g < groups; g++) found.first = std::min(found.first, lanes[g].seen.next(from));
      if (found.first >= split_end) return KeyRange{split_end, split_end};
      for (int g = 0; g < groups; g++) found.end = std::max(found.end, lanes[g].seen.last(end_of_block(found.first)));
      return found;
    };
    Prefetcher prefetcher(prefetches);
    KeyRange next = next_block(t.split * plan.split_keys);
    while (next.first < split_end) {
      const int64_t first = next.first, end = next.end;
      next = next_block(end_of_block(first));
      prefetch_next(number, t, lanes[groups - 1].last, next, prefetcher);
      int64_t seen = 0;  // keys, by all groups
      for (int g = 0; g < groups; g++) seen += lanes[g].seen.before(end) - lanes[g].seen.before(first);
      prefetcher.spread(seen / tile_rows(NV));
      const int64_t j = first - first % FACTOR_SIZE<T>;  // the same keys share a factor in every task
      const int n = (int)(end - j);
      const char *k = key_row(p.k, item, t.s, kv_head, j), *v = key_row(p.v, item, t.s, kv_head, j);
      KeyBlock<T> keys{factors_along_rows<R, T>(k, p.dtype, p.k.row, n, dim, k_buffer),
                       factors_over_rows<R, T>(v, p.dtype, p.v.row, n, v_dim, v_dim, v_buffer), j, n, v_dim};
      for (int g = 0; g < groups; g++) {
        lanes[g].seen.for_each_part(j, end, MIN_GAP, [&](int64_t from, int64_t to) {
          const Range whole = whole_factors<T>((int)(from - j), (int)(to - j), n);
          step<R, T>(Block<R>{p, lanes[g], j + whole.from, whole.to - whole.from}, keys, q + g * q_size(), state(g), S,
                     shrink, prefetcher);
        });
      }
      prefetcher.rest();
    }
    const int64_t last = lanes[groups - 1].last;
    if (plan.splits > 1) return last;
    for (int g = 0; g < groups; g++)
      if (shrink == 1 && !finite(state(g), lanes[g].padded)) return attend_groups(thread, number, t, SHRINK<R>);
    for (int g = 0; g < groups; g++)
      finish(p, t.s, t.head, lanes[g].first, lanes[g].used, state(g), lanes[g].padded, shrink, row_max);
    return last;
  }

  // Prefetch what is needed after the current block of keys: the next block; or, if there is none, the rows of out
  // before query `last`, and what the next task of this thread begins with, if tasks take equally long.
  void prefetch_next(int64_t number, const Task& t, int64_t last, KeyRange next, Prefetcher& prefetcher) {
    const auto add_queries = [&](const ft_tensor& x, int64_t item, int64_t width, const Task& t, int64_t last) {
      prefetcher.add(query_row(x, item, t.s, t.head, t.first), item * x.row, item * width, last - t.first);
    };
    const auto add_keys = [&](const Task& t, KeyRange keys) {
      const int64_t kv_head = t.head / (p.q_heads / p.kv_heads), n = keys.end - keys.first;
      prefetcher.add(key_row(p.k, item, t.s, kv_head, keys.first), item * p.k.row, item * dim, n);
      prefetcher.add(key_row(p.v, item, t.s, kv_head, keys.first), item * p.v.row, item * v_dim, n);
    };
    prefetcher.clear();
    if (next.first < next.end) return add_keys(t, next);
    if (plan.splits == 1) add_queries(p.out, item_size(p.out_dtype), v_dim, t, last);
    Task x = t;
    if (last < t.last) x.first = last;  // groups of this task that did not fit
    else if (number + p.threads < plan.tasks) x = Task(p, plan, number + p.threads);
    else return;
    if (x.first >= x.last) return;
    add_queries(p.q, item, dim, x, x.last);
    const RowCuts seen = row_cuts(p, x.s, x.head, x.first, x.first + 1, 1);
    const int64_t first = seen.next(x.split * plan.split_keys);
    if (first < (x.split + 1) * plan.split_keys) add_keys(x, {first, seen.last(end_of_block(first))});
  }

  // Merge the splits of a group of lanes. Where keys are split, a task has one group, and its splits are consecutive.
  void combine_splits(int64_t thread, int64_t i, R shrink) {
    const Task t(p, plan, i * plan.splits);
    if (t.first >= t.last) return;
    const int n = (int)(t.last - t.first), L = (int)ceil_div(n, W<R>) * W<R>;
    const auto state_of = [&](int64_t split) {
      return State<R>(split_states.piece<R>(i * plan.splits + split), v_dim);
    };
    for (int64_t split = 1; split < plan.splits; split++) merge(state_of(0), state_of(split), v_dim, L);
    if (shrink == 1 && !finite(state_of(0), L)) {
      for (int64_t split = 0; split < plan.splits; split++) attend(thread, i * plan.splits + split, SHRINK<R>);
      return combine_splits(thread, i, SHRINK<R>);
    }
    finish(p, t.s, t.head, t.first, n, state_of(0), L, shrink, row_max);
  }

  bool finite(State<R> x, int L) const { return all_finite(Rows<R>{x.o, L}, v_dim, L); }

  // In numbers: the state of a group; its queries; S, and a block of keys and values where they must be copied.
  size_t state_size() const { return SoftmaxState<R>::size(v_dim * LANES<R>, LANES<R>); }
  size_t q_size() const { return (size_t)factors<T>(dim) * LANES<R>; }
  size_t buffer_size() const {
    const bool copied = p.dtype == FT_BF16 || p.dtype == FT_F16;
    return (size_t)BLOCK_KEYS * LANES<R> + (copied ? BLOCK_KEYS * factors<T>(dim) + factors<T>(BLOCK_KEYS) * v_dim : 0);
  }

  const ft_problem& p;
  R* const row_max;  // see store_lse()
  const Plan<R> plan;
  const int dim, v_dim;
  const int64_t item;
  const bool prefetches;
  const Scratch scratch, split_states;
};

}  // namespace

template <class R, class T> int forward(const ft_problem& p, R* row_max) { return Forward<R, T>(p, row_max).run(); }

template int forward<float, float>(const ft_problem&, float*);
template int forward<double, double>(const ft_problem&, double*);
#if FT_PAIRS
template int forward<float, Pair>(const ft_problem&, float*);
#endif
