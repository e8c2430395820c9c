// Forward. Queries sit in the lanes, so K and V are read as they lie, one scalar at a time, and nothing is packed but a
// small block of queries. S, P and O are kept transposed: S[key][lane], O[column][lane].
#include "kernels.h"

#include "factors.h"
#include "lse.h"
#include "threads.h"

namespace {

constexpr int BC = 192;         // keys a block: S stays in L1. Blocks begin at multiples of it, whatever the task
constexpr int MAX_GROUPS = 8;   // groups of lanes a task: they share a block of keys while it is in L2
constexpr int L2_SHARE = 96 << 10;  // bytes of it for their q and O
constexpr int MIN_SPLIT = 1024, ENOUGH_TASKS = 32;  // keys are split, these at least, where queries make fewer tasks

// O before it is divided by l, the running max and sum: o[v_dim][lanes], m[lanes], l[lanes].
template <class R> struct State {
  R *o, *m, *l;
  State(R* room, int v_dim) : o(room), m(room + v_dim * LANES<R>), l(m + LANES<R>) {}
  static size_t size(int v_dim) { return (size_t)(v_dim + 2) * LANES<R>; }
  // Nothing seen yet; a sink counts as one key of weight 1 and value 0.
  void clear(int v_dim, int lanes, R sink) {
    std::fill_n(o, v_dim * lanes, R(0));
    std::fill_n(m, lanes, sink);
    std::fill_n(l, lanes, sink == -INFINITY ? R(0) : R(1));
  }
};

// S <- P = exp(S - m), with m and l brought up to date; alpha[lanes] is what O must be scaled by. False: by 1.
template <class R, int N> NOINLINE bool softmax(R* S, int n, R* m, R* l, R* alpha) {
  Vec<R> top[N], base[N], sum[N], a[N];
  UNROLL for (int j = 0; j < N; j++) top[j] = load(m + j * W<R>);
  for (int k = 0; k < n; k++)
    UNROLL for (int j = 0; j < N; j++) top[j] = max(load(S + (k * N + j) * W<R>), top[j]);
  Mask<R> moved = {};
  UNROLL for (int j = 0; j < N; j++) {
    const Vec<R> old = load(m + j * W<R>);
    moved |= top[j] != old;
    base[j] = top[j] == all(R(-INFINITY)) ? Vec<R>{} : top[j];
    a[j] = old - base[j];
    store(m + j * W<R>, top[j]);
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
  return any<R>(moved);
}
// O = alpha O + V^T P; alpha null: 1. A block is summed by itself first: it keeps the error of long sums small.
template <class R, class T, int N>
NOINLINE void output(Rows<T> V, const T* P, int length, R* o, int v_dim, const R* alpha) {
  constexpr int L = N * W<R>;
  in_tiles<rows_for(N)>(0, v_dim, [=](auto rows, int d) __attribute__((always_inline)) {
    Vec<R> acc[rows][N];
    zero_tile<R>(acc);
    tile<R>(acc, V.data + d, 1, V.row, P, L, length);
    add_tile<R>(acc, o + d * L, L, alpha);
  });
}
// The same, to the bit, where V holds values that are not finite: P is marked, and hidden pairs are left out.
template <class R, class T>
NOINLINE void output_guarded(Rows<T> V, const T* P, int length, R* o, int v_dim, int L, const R* alpha) {
  for (int l = 0; l < L; l += W<R>)
    for (int d = 0; d < v_dim; d++) {
      Vec<R> acc[1][1] = {};
      for (int k = 0; k < length; k++) {
        const Vec<T> weight = load(P + k * L + l), value = all(V.data[k * V.row + d]);
        acc[0][0] = add_product(acc[0][0], weight, factor_unless_hidden<T>(weight, value));
      }
      add_tile<R>(acc, o + d * L + l, L, alpha ? alpha + l : nullptr);
    }
}
template <class R> NOINLINE void drop(const Block<R>& b, R* P) {
  each_kept(b, [=](int64_t at, Mask<R> kept) { store(P + at, kept ? load(P + at) : Vec<R>{}); });
}

// One block of keys and values for all the groups of a task; whether V is finite is asked once, and only if it matters.
template <class T> struct KeyBlock {
  Rows<T> K, V;  // those of V are factors of sums over keys
  int64_t j;
  int n, v_dim, finite = -1;
  bool values_finite() { return finite < 0 ? finite = all_finite(V, (int)factors<T>(n), v_dim) : finite; }
};
// One group of queries, q[factors(dim)][lanes], against one block of keys. Every option is a pass of its own over S.
template <class R, class T>
void step(const Block<R>& b, KeyBlock<T>& keys, const T* q, State<R> x, R* S, R shrink) {
  const int dim = (int)b.p.dim, v_dim = (int)b.p.v_dim, L = b.lanes.padded, length = (int)factors<T>(b.n);
  const int64_t skip = b.j - keys.j;
  const Rows<T> K = rows_from(keys.K, skip), V = rows_from(keys.V, skip / PER<T>);
  const bool partial = b.partial();
  with_vectors(L / W<R>, [&](auto vectors) {
    constexpr int N = vectors;
    R alpha[N * W<R>];
    scores<R, T, N>(K, b.n, q, (int)factors<T>(dim), scale_of<R, T>(b.p).after, S);
    adjust(b, S);
    if (partial) hide(b, S, R(-INFINITY));
    const R* scale = softmax<R, N>(S, b.n, x.m, x.l, alpha) ? alpha : nullptr;
    if (b.p.dropout > 0) drop(b, S);
    if (shrink != 1) multiply_all(S, b.n * L, shrink);
    const bool guarded = partial && !keys.values_finite();
    if (guarded) hide(b, S, HIDDEN<R>);
    const T* P = over_keys<R, T>(S, b.n, L);
    if (guarded) output_guarded(V, P, length, x.o, v_dim, L, scale);
    else output<R, T, N>(V, P, length, x.o, v_dim, scale);
  });
}
// x <- x and y together
template <class R> void merge(State<R> x, State<R> y, int v_dim, int L) {
  for (int l = 0; l < L; l += W<R>) {
    const Vec<R> top = max(load(y.m + l), load(x.m + l)), base = top == all(R(-INFINITY)) ? Vec<R>{} : top;
    Vec<R> by[2] = {load(x.m + l) - base, load(y.m + l) - base};
    exp_each<R>(by);
    store(x.m + l, top);
    store(x.l + l, load(x.l + l) * by[0] + load(y.l + l) * by[1]);
    for (int at = l; at < v_dim * L; at += L) store(x.o + at, load(x.o + at) * by[0] + load(y.o + at) * by[1]);
  }
}
// shrink: what weights were multiplied by on their way into o
template <class R>
void finish(const ft_problem& p, const Sequence& s, int64_t head, int64_t first, int n, State<R> x, int L, R shrink,
            R* tops) {
  R by[LANES<R>];  // where all weights are 0, o is what they make of V: 0, or NaN
  for (int l = 0; l < L; l++) by[l] = x.l[l] == 0 ? R(1) : 1 / (shrink * x.l[l] * (R)(1 - p.dropout));
  unpack_lanes<R>(x.o, n, L, (int)p.v_dim, by, query_row(p.out, item_size(p.out_dtype), s, head, first), p.out_dtype,
                  p.out.row);
  for (int l = 0; l < n; l++) put_lse(p, s, head, first + l, x.m[l], x.l[l], tops);
}

// Which queries and keys make a task. Groups and splits depend on the shape only, so the sums never depend on the
// threads; how many groups a task takes may.
template <class R> struct Plan {
  int64_t heads;             // of all sequences
  int64_t groups;            // of lanes, in the longest sequence
  int64_t splits, split;     // shares of the keys, and keys of a share
  int64_t together, blocks;  // groups a task, and what that makes of the queries of a head
  int64_t tasks;

  explicit Plan(const ft_problem& p) {
    heads = p.sequences * p.q_heads;
    groups = ceil_div(p.q_len, LANES<R>);
    const int64_t units = heads * groups;
    splits = units < 1 || units >= ENOUGH_TASKS ? 1 : clip(p.kv_len / MIN_SPLIT, 1, ceil_div(ENOUGH_TASKS, units));
    split = ceil_div(ceil_div(p.kv_len, splits), BC) * BC;
    const int64_t bytes = sizeof(R) * LANES<R> * (p.dim + p.v_dim);  // of q and O of a group
    together = splits > 1 ? 1 : clip(L2_SHARE / bytes, 1, MAX_GROUPS);
    while (together > 1 && heads * ceil_div(groups, together) < 4 * p.threads) together--;
    blocks = ceil_div(groups, together);
    tasks = heads * blocks * splits;
  }
};

template <class R, class T> class Forward {
 public:
  Forward(const ft_problem& p, R* tops)
      : p(p), tops(tops), plan(p), dim((int)p.dim), v_dim((int)p.v_dim), item(item_size(p.dtype)),
        scratch(std::min(p.threads, plan.tasks), sizeof(R) * (plan.together * (state_size() + q_size()) + room_size())),
        shares(plan.splits > 1 ? plan.tasks : 0, sizeof(R) * state_size()) {}

  int run() {
    if (!scratch.ok() || !shares.ok()) return FT_NO_MEMORY;
    parallel_for(p.threads, plan.tasks, [&](int64_t thread, int64_t task) { attend(thread, task, R(1)); });
    if (plan.splits > 1)
      parallel_for(p.threads, plan.tasks / plan.splits,
                   [&](int64_t thread, int64_t i) { join_shares(thread, i, R(1)); });
    return FT_OK;
  }

 private:
  // A block of the queries of a head, and a share of the keys. Tasks take a head at a time, and in it the last queries
  // first: with a causal band they see the most keys.
  struct Task {
    int64_t split, head, first, last;  // queries first..last-1
    Sequence s;
    Task(const ft_problem& p, const Plan<R>& plan, int64_t n)
        : split(n % plan.splits), head(n / plan.splits / plan.blocks % p.q_heads),
          first((plan.blocks - 1 - n / plan.splits % plan.blocks) * plan.together * LANES<R>),
          s(p, n / plan.splits / plan.blocks / p.q_heads) {
      last = std::min(first + plan.together * LANES<R>, s.q_len);
    }
  };

  void attend(int64_t thread, int64_t number, R shrink) {
    const Task t(p, plan, number);
    if (t.first >= t.last || (tops && !any_coarse(p, t.s, t.head, t.first, t.last, tops))) return;
    R *states = plan.splits > 1 ? shares.piece<R>(number) : scratch.piece<R>(thread) + room_size();
    R* S = scratch.piece<R>(thread);
    T *k_room = (T*)(S + BC * LANES<R>), *v_room = k_room + BC * factors<T>(dim);
    T* q = (T*)(S + room_size() + plan.together * state_size());
    const auto state = [=](int g) { return State<R>(states + g * state_size(), v_dim); };

    Lanes<R> lanes[MAX_GROUPS];
    const int groups = (int)ceil_div(t.last - t.first, LANES<R>);
    const R sink = p.sink && t.split == 0 ? ((const R*)p.sink)[t.head] : -(R)INFINITY;
    for (int g = 0; g < groups; g++) {
      const int64_t from = t.first + g * LANES<R>;
      lanes[g] = Lanes<R>(p, t.s, t.head, from, (int)std::min<int64_t>(t.last - from, LANES<R>));
      in_lanes<R, T>(query_row(p.q, item, t.s, t.head, from), p.dtype, p.q.row, lanes[g].real, lanes[g].padded, dim,
                     scale_of<R, T>(p).before, q + g * q_size());
      state(g).clear(v_dim, lanes[g].padded, sink);
    }

    const int64_t kv_head = t.head / (p.q_heads / p.kv_heads);
    const Cuts seen = cuts(t.s.band, t.first, t.last, t.s.kv_len, 1);
    const int64_t first = std::max(seen.begin, t.split * plan.split);
    const int64_t begin = first - first % PER<T>;  // which keys share a factor does not depend on the task
    const int64_t end = std::min(seen.end, (t.split + 1) * plan.split);
    for (int64_t j = begin; j < end; j = (j / BC + 1) * BC) {
      const int n = (int)(std::min(end, (j / BC + 1) * BC) - j);
      const char *k = key_row(p.k, item, t.s, kv_head, j), *v = key_row(p.v, item, t.s, kv_head, j);
      KeyBlock<T> keys{along_rows<R, T>(k, p.dtype, p.k.row, n, dim, k_room),
                       over_rows<R, T>(v, p.dtype, p.v.row, n, v_dim, v_dim, v_room), j, n, v_dim};
      for (int g = 0; g < groups; g++) {
        const int64_t from = std::max(j, lanes[g].seen.begin), to = std::min(j + n, lanes[g].seen.end);
        if (from >= to) continue;
        const Range whole = whole_factors<T>((int)(from - j), (int)(to - j), n);
        step<R, T>(Block<R>{p, lanes[g], j + whole.from, whole.to - whole.from}, keys, q + g * q_size(), state(g), S,
                   shrink);
      }
    }
    if (plan.splits > 1) return;
    for (int g = 0; g < groups; g++)
      if (shrink == 1 && !finite(state(g), lanes[g].padded)) return attend(thread, number, SHRINK<R>);
    for (int g = 0; g < groups; g++)
      finish(p, t.s, t.head, t.first + g * LANES<R>, lanes[g].real, state(g), lanes[g].padded, shrink, tops);
  }

  // Where keys are split a task has one group of lanes; its shares follow each other.
  void join_shares(int64_t thread, int64_t i, R shrink) {
    const Task t(p, plan, i * plan.splits);
    if (t.first >= t.last) return;
    const int n = (int)(t.last - t.first), L = (int)ceil_div(n, W<R>) * W<R>;
    const auto share = [&](int64_t split) { return State<R>(shares.piece<R>(i * plan.splits + split), v_dim); };
    for (int64_t split = 1; split < plan.splits; split++) merge(share(0), share(split), v_dim, L);
    if (shrink == 1 && !finite(share(0), L)) {
      for (int64_t split = 0; split < plan.splits; split++) attend(thread, i * plan.splits + split, SHRINK<R>);
      return join_shares(thread, i, SHRINK<R>);
    }
    finish(p, t.s, t.head, t.first, n, share(0), L, shrink, tops);
  }

  bool finite(State<R> x, int L) const { return all_finite(Rows<R>{x.o, L}, v_dim, L); }

  // In numbers: the state and the queries of a group; S, and a block of keys and values where they must be copied.
  size_t state_size() const { return State<R>::size(v_dim); }
  size_t q_size() const { return (size_t)factors<T>(dim) * LANES<R>; }
  size_t room_size() const {
    const bool copied = p.dtype == FT_BF16 || p.dtype == FT_F16;
    return (size_t)BC * LANES<R> + (copied ? BC * factors<T>(dim) + factors<T>(BC) * v_dim : 0);
  }

  const ft_problem& p;
  R* const tops;  // see kernels.h
  const Plan<R> plan;
  const int dim, v_dim;
  const int64_t item;
  const Scratch scratch, shares;
};

}  // namespace

template <class R, class T> int forward(const ft_problem& p, R* tops) { return Forward<R, T>(p, tops).run(); }

template int forward<float, float>(const ft_problem&, float*);
template int forward<double, double>(const ft_problem&, double*);
#if FT_PAIRS
template int forward<float, Pair>(const ft_problem&, float*);
#endif
