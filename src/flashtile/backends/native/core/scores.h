// The passes over a block of scores, one per option: softcap, bias, ALiBi, mask, band and dropout.
// S is [key][lane], n keys of L lanes, and stays in L1. A pass changes S, or P in its place; options act nowhere else.
#pragma once
#include "elements.h"
#include "philox.h"
#include "spans.h"

// What q is multiplied by before the product with k: S is then the scaled score, divided by the softcap if there is
// one.
template <class R> R score_scale(const ft_problem& p) { return (R)(p.softcap > 0 ? p.scale / p.softcap : p.scale); }

constexpr int MIN_GAP = 16;  // keys between two spans that are worth a step of their own
// What a group costs, in vectors of lanes, and a step, in keys: to decide whether two groups cost less than one.
constexpr float GROUP_COST = 0.5f;
constexpr int STEP_COST = 16;

// The queries in the lanes of a group, all of one sequence; each lane has its own query and head. Lanes past the last
// used one, up to a whole vector, repeat it.
template <class R> class Lanes {
 public:
  int used = 0, padded = 0;     // lanes in use, and rounded up to a multiple of W
  int64_t first = 0, last = 0;  // the queries are within first..last-1
  RowCuts seen;                 // in tiles of one key: no lane sees skipped ones, all see full ones but for the mask
  int64_t begin[LANES<R>], end[LANES<R>];  // keys within each lane's band, from its first span to its last
  const int32_t* spans[LANES<R>];          // the limits of each lane's spans, if there are any
  struct {
    int64_t begin, end;
  } near[FT_MAX_SPANS];  // the keys that some lane sees by each of several spans are within these
  int64_t position[LANES<R>];              // the key that ALiBi measures distance from
  R slope[LANES<R>];                       // ALiBi slope
  const char* bias[LANES<R>];              // address of key 0
  const uint8_t* mask[LANES<R>];
  MaskInt<R> query[LANES<R>], head[LANES<R>];  // counters of dropout

  // n consecutive queries of one head
  Lanes(const ft_problem& p, const Sequence& s, int64_t head, int64_t first_query, int n) {
    for (int l = 0; l < n; l++) add(p, s, head, first_query + l);
    finish(p, s);
  }
  // Or lane by lane: add() each, then finish().
  Lanes() = default;
  void add(const ft_problem& p, const Sequence& s, int64_t h, int64_t i) {
    const int l = used++;
    first = l ? std::min(first, i) : i;
    last = l ? std::max(last, i + 1) : i + 1;
    begin[l] = s.band.begin(i);
    end[l] = s.band.end(i);
    spans[l] = span_limits(p, s, h, i);
    position[l] = i + s.band.offset;
    query[l] = (MaskInt<R>)(uint32_t)(p.origin_query + i * p.query_step);
    head[l] = (MaskInt<R>)(uint32_t)(p.origin_head + s.index * p.origin_heads + h);
    const ft_tensor &b = p.bias, &m = p.mask, &a = p.alibi;
    bias[l] = nullptr, mask[l] = nullptr, slope[l] = 0;
    if (b.data)
      bias[l] = (const char*)b.data + item_size(p.bias_dtype) * (s.index * b.sequence + h * b.head + i * b.row);
    if (m.data) mask[l] = (const uint8_t*)m.data + (s.index * m.sequence + h * m.head + i * m.row);
    if (a.data) slope[l] = ((const R*)a.data)[s.index * a.sequence + h * a.head];
  }
  void finish(const ft_problem& p, const Sequence& s) {
    if (p.spans.data) cut_by_spans(s, (int)p.span_count);
    else seen = {1, {cuts(s.band, first, last, s.kv_len, 1)}};
    for (padded = used; padded % W<R>; padded++) {
      const int l = padded;
      begin[l] = begin[l - 1], end[l] = end[l - 1], position[l] = position[l - 1], slope[l] = slope[l - 1];
      spans[l] = spans[l - 1];
      query[l] = query[l - 1], head[l] = head[l - 1], bias[l] = bias[l - 1], mask[l] = mask[l - 1];
    }
  }
  // The keys that a lane may see by span r; by the band if there are no spans.
  int64_t span_begin(int l, int r) const {
    return seen.count > 1 ? std::max<int64_t>(begin[l], spans[l][2 * r]) : begin[l];
  }
  int64_t span_end(int l, int r) const {
    return seen.count > 1 ? std::min<int64_t>(end[l], spans[l][2 * r + 1]) : end[l];
  }
  // Whether some lane sees keys from begin to end-1 by span r of several.
  bool is_near(int r, int64_t begin, int64_t end) const { return near[r].begin < end && near[r].end > begin; }

 private:
  NOINLINE void cut_by_spans(const Sequence& s, int count) {
    Reach reach[FT_MAX_SPANS];
    for (int r = 0; r < count; r++) {
      for (int l = 0; l < used; l++)
        reach[r].add(std::max<int64_t>(begin[l], 0), std::min(end[l], s.kv_len), spans[l] + 2 * r);
      near[r] = {reach[r].first_begin, reach[r].last_end};
    }
    seen = RowCuts::of(reach, count, 1);
    for (int l = 0; l < used; l++) {
      begin[l] = std::max<int64_t>(begin[l], spans[l][0]);
      end[l] = std::min<int64_t>(end[l], spans[l][2 * count - 1]);
    }
  }
};

// How many of the queries first .. first+most-1 make a group: all, unless spans change so much between two of them that
// two groups cost less. A group ends at a multiple of `step` queries.
template <class R>
NOINLINE int group_size(const ft_problem& p, const Sequence& s, int64_t head, int64_t first, int most, int step) {
  if (!p.spans.data || p.spans.row == 0) return most;
  const auto cost = [&](int from, int to) {  // in keys for each vector of lanes
    const int64_t keys = row_cuts(p, s, head, first + from, first + to, 1).tiles() + STEP_COST;
    return (ceil_div(to - from, W<R>) + GROUP_COST) * keys;
  };
  float together = 0;
  int before = 0;  // the last place that was tried
  for (int i = 1; i < most; i++) {
    const int32_t *b = span_limits(p, s, head, first + i), *a = b - p.spans.row;
    bool far = false;
    for (int x = 0; x < 2 * p.span_count; x++) far |= std::abs((int64_t)a[x] - b[x]) >= MIN_GAP;
    if (!far) continue;
    if (!together) together = cost(0, most);
    for (int n = i / step * step; n < i + step; n += step) {
      if (n <= before || n >= most) continue;
      before = n;
      if (cost(0, n) + cost(n, most) < together) return n;
    }
  }
  return most;
}

// A block of S: keys j .. j+n-1 against the lanes.
template <class R> struct Block {
  const ft_problem& p;
  const Lanes<R>& lanes;
  int64_t j;
  int n;

  bool is_cut() const { return !lanes.seen.full(j, j + n); }  // by the band or spans
  bool partial() const { return is_cut() || p.mask.data; }    // pairs may be hidden
};

// Part of a block: keys from .. to-1, of which only the lanes in `vectors` vectors see any, from vector `first` on.
struct Piece {
  int from, to, first, vectors;
};
struct Pieces {
  int count = 0;
  Piece piece[2 * NV];
  void add(const Piece& x) { piece[count++] = x; }
  const Piece* begin() const { return piece; }
  const Piece* end() const { return piece + count; }
};
// The pieces of a block that is cut: what no vector sees is in none. They begin and end at multiples of PIECE_KEYS.
template <class R> NOINLINE Pieces pieces_of_cut(const Block<R>& b) {
  const Lanes<R>& lanes = b.lanes;
  const int vectors = lanes.padded / W<R>;
  int begin[NV], end[NV];
  for (int v = 0; v < vectors; v++) {
    int64_t least = b.n, most = 0;
    for (int r = 0; r < lanes.seen.count; r++) {
      if (lanes.seen.count > 1 && !lanes.is_near(r, b.j, b.j + b.n)) continue;
      for (int l = v * W<R>; l < (v + 1) * W<R>; l++) {
        const int64_t from = std::max<int64_t>(lanes.span_begin(l, r) - b.j, 0), to = lanes.span_end(l, r) - b.j;
        if (from < to) least = std::min(least, from), most = std::max(most, to);
      }
    }
    begin[v] = (int)least / PIECE_KEYS * PIECE_KEYS;
    end[v] = (int)std::min<int64_t>(round_up(most, PIECE_KEYS), b.n);
  }
  Pieces found;
  for (int from = 0, to; from < b.n; from = to) {
    int first = vectors, last = 0;
    to = b.n;
    for (int v = 0; v < vectors; v++) {
      if (begin[v] > from && begin[v] < end[v]) to = std::min(to, begin[v]);
      if (end[v] > from) to = std::min(to, end[v]);
      if (begin[v] <= from && from < end[v]) first = std::min(first, v), last = v + 1;
    }
    if (first < last) found.add({from, to, first, last - first});
  }
  return found;
}
template <class R> INLINE Pieces pieces_of(const Block<R>& b) {
  if (b.is_cut()) return pieces_of_cut(b);
  Pieces whole;
  whole.add({0, b.n, 0, b.lanes.padded / W<R>});
  return whole;
}

// S <- c * tanh(S), where score_scale() has divided by c; slope[key][lane], if not null, is 1 - tanh^2.
template <class R> NOINLINE void softcap(const Block<R>& b, R* S, R* slope = nullptr) {
  const Vec<R> c = splat((R)b.p.softcap);
  for (int x = 0; x < b.n * b.lanes.padded; x += W<R>) {
    const Vec<R> t = tanh_of<R>(load(S + x));
    if (slope) store(slope + x, splat(R(1)) - t * t);
    store(S + x, c * t);
  }
}
template <class R> NOINLINE void add_bias(const Block<R>& b, R* S) {
  const int L = b.lanes.padded;
  dispatch_type<R>(b.p.bias_dtype, [&](auto t) {
    using T = decltype(t);
    for (int l0 = 0; l0 < L; l0 += W<R>) {
      const T* rows[W<R>];
      for (int l = 0; l < W<R>; l++) rows[l] = (const T*)b.lanes.bias[l0 + l] + b.j * b.p.bias.column;
      for_each_column<R>(rows, b.p.bias.column, b.n, [=](int k, Vec<R> a) {
        R* s = S + k * L + l0;
        store(s, load(s) + a);
      });
    }
  });
}
template <class R> NOINLINE void add_alibi(const Block<R>& b, R* S) {
  const int L = b.lanes.padded;
  for (int l0 = 0; l0 < L; l0 += W<R>) {
    Vec<R> position, slope = load(b.lanes.slope + l0);
    for (int l = 0; l < W<R>; l++) position[l] = (R)(b.lanes.position[l0 + l] - b.j);
    for (int k = 0; k < b.n; k++) {
      R* s = S + k * L + l0;
      const Vec<R> distance = position - splat((R)k);
      store(s, load(s) - slope * max(distance, -distance));
    }
  }
}
// Apply the options that change scores, before any is hidden.
template <class R> INLINE void adjust_scores(const Block<R>& b, R* S, R* slope = nullptr) {
  if (b.p.softcap > 0) softcap(b, S, slope);
  if (b.p.bias.data) add_bias(b, S);
  if (b.p.alibi.data) add_alibi(b, S);
}

// x[key][lane] <- value where neither the band nor, if there are any, a span of the lane holds the key.
template <class R> NOINLINE void hide_cut(const Block<R>& b, R* x, R value) {
  const Lanes<R>& lanes = b.lanes;
  const int L = lanes.padded;
  int near[FT_MAX_SPANS] = {0}, count = lanes.seen.count == 1;  // the spans that have keys in this block
  if (lanes.seen.count > 1)
    for (int r = 0; r < lanes.seen.count; r++)
      if (lanes.is_near(r, b.j, b.j + b.n)) near[count++] = r;
  const Cuts& cut = lanes.seen.span[near[0]];
  const int full_begin = (int)clip(cut.full_begin - b.j, 0, b.n);
  const int full_end = (int)clip(cut.full_end - b.j, full_begin, b.n);
  for (int l0 = 0; l0 < L; l0 += W<R>) {
    Mask<R> begin, end, begins[FT_MAX_SPANS], ends[FT_MAX_SPANS];
    const auto limits = [&](int r, Mask<R>& begin, Mask<R>& end) {
      for (int l = 0; l < W<R>; l++) {
        begin[l] = (MaskInt<R>)clip(lanes.span_begin(l0 + l, r) - b.j, 0, b.n);
        end[l] = (MaskInt<R>)clip(lanes.span_end(l0 + l, r) - b.j, 0, b.n);
      }
    };
    limits(near[0], begin, end);
    for (int x = 1; x < count; x++) limits(near[x], begins[x], ends[x]);
    const auto hide = [&](int from, int to) {
      for (int k = from; k < to; k++) {
        R* at = x + k * L + l0;
        const Mask<R> key = splat_int<R>(k);
        Mask<R> hidden = (key < begin) | (key >= end);
        for (int x = 1; x < count; x++) hidden &= (key < begins[x]) | (key >= ends[x]);
        store(at, hidden ? splat(value) : load(at));
      }
    };
    hide(0, full_begin);
    hide(full_end, b.n);
  }
}
template <class R> NOINLINE void hide_mask(const Block<R>& b, R* x, R value) {
  const int L = b.lanes.padded;
  for (int l0 = 0; l0 < L; l0 += W<R>) {
    const uint8_t* rows[W<R>];
    for (int l = 0; l < W<R>; l++) rows[l] = b.lanes.mask[l0 + l] + b.j * b.p.mask.column;
    for_each_column<R>(rows, b.p.mask.column, b.n, [=](int k, Vec<R> a) {
      R* at = x + k * L + l0;
      store(at, (Mask<R>)a == Mask<R>{} ? splat(value) : load(at));
    });
  }
}
// x[key][lane] <- value where the band, the spans or the mask hide the key from the lane.
template <class R> INLINE void hide(const Block<R>& b, R* x, R value) {
  if (b.is_cut()) hide_cut(b, x, value);
  if (b.p.mask.data) hide_mask(b, x, value);
}
// Where values are not finite, 0 * x is not 0, so hidden pairs must be left out of a product, not weighted by 0.
// hide(b, P, HIDDEN) marks them: no visible weight is -0, since 0 is first added to weights that might be.
template <class R> constexpr R HIDDEN = R(-0.0);
template <class R> INLINE Mask<R> is_hidden(Vec<R> x) { return (Mask<R>)x == (Mask<R>)splat(HIDDEN<R>); }
// What a weight is multiplied by: x, or 0 where hidden. The sum then has the same steps and the same bits as one over
// finite values.
template <class R> INLINE Vec<R> unless_hidden(Vec<R> weight, Vec<R> x) { return is_hidden<R>(weight) ? Vec<R>{} : x; }

// for_each_kept() of keys that are not in fours: one random block serves those neighbours that share it.
template <class R, class F> NOINLINE void for_each_kept_apart(const Block<R>& b, uint32_t threshold, F&& f) {
  const int L = b.lanes.padded;
  for (int l0 = 0; l0 < L; l0 += W<R>) {
    Mask<R> query, head, kept[4];
    memcpy(&query, b.lanes.query + l0, sizeof query);
    memcpy(&head, b.lanes.head + l0, sizeof head);
    for (int64_t k = 0, quad = -1; k < b.n; k++) {
      const int64_t key = b.p.origin_key + (b.j + k) * b.p.key_step;
      if (key / 4 != quad) keep_four<R>(b.p.seed, threshold, (uint32_t)(quad = key / 4), query, head, kept);
      f(k * L + l0, kept[key % 4]);
    }
  }
}
// f(offset in a [key][lane] array, which of W lanes keep their weight): dropout has the same bits for any tiling.
template <class R, class F> INLINE void for_each_kept(const Block<R>& b, F&& f) {
  const int L = b.lanes.padded;
  const uint32_t threshold = keep_threshold(b.p.dropout);
  if (b.p.key_step != 1 || b.p.origin_key % 4) return for_each_kept_apart(b, threshold, f);
  const int64_t before = b.p.origin_key / 4;
  for (int l0 = 0; l0 < L; l0 += W<R>) {
    Mask<R> query, head, kept[4];
    memcpy(&query, b.lanes.query + l0, sizeof query);
    memcpy(&head, b.lanes.head + l0, sizeof head);
    for (int64_t quad = b.j / 4; quad * 4 < b.j + b.n; quad++) {
      keep_four<R>(b.p.seed, threshold, (uint32_t)(before + quad), query, head, kept);
      for (int r = 0; r < 4; r++) {
        const int64_t k = quad * 4 + r - b.j;
        if (k >= 0 && k < b.n) f(k * L + l0, kept[r]);
      }
    }
  }
}
