// Vectors of float or double, exp2 and tanh on them, and the register tile that every product is made of.
// They use the vector extensions of GCC and Clang and a few intrinsics, so one source compiles for every processor.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // registers are allocated best for one loop nest at a time
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, NV = 3, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32, NV = 3, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, NV = 4, REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, NV = 3, REGISTERS = 16;
#endif
template <class R> constexpr int W = VECTOR_BYTES / (int)sizeof(R);  // lanes per vector
template <class R> constexpr int LANES = NV * W<R>;                  // lanes per group: queries side by side

// Rows of the register tile for n vectors of lanes: registers are left for a row of B and a scalar of A.
constexpr int tile_rows(int n) {
  return REGISTERS == 32 ? (n >= 4 ? 6 : n == 3 ? 8 : 12) : (n >= 3 ? 4 : n == 2 ? 6 : 8);
}

// The same for n vectors of more that are side by side: few rows, since hidden scores are skipped tile by tile.
constexpr int PIECE_KEYS = 8;
constexpr int piece_rows(int n, int of) {
  return n == of ? tile_rows(n) : (n + 1) * PIECE_KEYS <= REGISTERS ? PIECE_KEYS : 4;
}

template <class R> struct VectorOf;
template <> struct VectorOf<float> {
  typedef float type __attribute__((vector_size(VECTOR_BYTES)));
  typedef float unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t bits __attribute__((vector_size(VECTOR_BYTES)));
};
template <> struct VectorOf<double> {
  typedef double type __attribute__((vector_size(VECTOR_BYTES)));
  typedef double unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint64_t bits __attribute__((vector_size(VECTOR_BYTES)));
};
enum __attribute__((may_alias)) Pair : uint32_t {};  // two bfloat16 numbers: see factors.h
template <class T> constexpr int FACTOR_SIZE = std::is_same_v<T, Pair> ? 2 : 1;  // numbers per factor
template <> struct VectorOf<Pair> {
  typedef uint32_t type __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
};
template <class R> using Vec = typename VectorOf<R>::type;
template <class R> using Mask = typename VectorOf<R>::mask;  // the result of comparing two Vec<R>: -1 where true
template <class R> using Bits = typename VectorOf<R>::bits;
template <class R> using MaskInt = std::conditional_t<sizeof(R) == 4, int32_t, int64_t>;

template <class R> INLINE Vec<R> load(const R* p) { return *(const typename VectorOf<R>::unaligned*)p; }
template <class R> INLINE void store(R* p, Vec<R> v) { *(typename VectorOf<R>::unaligned*)p = v; }
template <class R> INLINE Vec<R> splat(R x) { return x - Vec<R>{}; }
template <> INLINE Vec<Pair> splat(Pair x) { return (uint32_t)x - Vec<Pair>{}; }
template <class R> INLINE Mask<R> splat_int(MaskInt<R> x) { return x - Mask<R>{}; }
template <class R> INLINE Mask<R> lane_index() {
  Mask<R> v = {};
  for (int i = 0; i < W<R>; i++) v[i] = i;
  return v;
}
template <class R> INLINE bool any(Mask<R> m) {
  MaskInt<R> r = 0;
  for (int i = 0; i < W<R>; i++) r |= m[i];
  return r != 0;
}
template <class R> INLINE R sum_lanes(Vec<R> v) {
  for (int h = W<R> / 2; h > 0; h /= 2)
    for (int i = 0; i < h; i++) v[i] += v[i + h];
  return v[0];
}

// The maximum; b where either is NaN. Intrinsics, since GCC does not compile a > b ? a : b to one instruction. (The
// masks of ones fold away; GCC 12 warns of an uninitialised value in the unmasked forms.)
#if defined(__AVX512F__)
INLINE Vec<float> max(Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
INLINE Vec<double> max(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm512_maskz_max_pd(0xff, (__m512d)a, (__m512d)b);
}
#elif defined(__AVX2__)
INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b); }
#else
INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return a > b ? a : b; }
INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return a > b ? a : b; }
#endif

template <class R> constexpr R LOG2E = (R)1.4426950408889634074;

// 2^x = 2^n 2^f with integer n, |f| <= 1/2 and 2^f = 1 + f q(f). The coefficients of q, highest first: EXP2 minimizes
// the error of 2^f, EXPM1 the relative error of f q(f).
template <class R> struct Exp2Constants;
template <> struct Exp2Constants<float> {  // relative error of exp2 1.5e-7
  static constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: adding it leaves n in the low bits
  static constexpr float LOWEST = -127.f;     // 2^n is exactly 0 there
  static constexpr int SHIFT = 23;
  static constexpr float EXP2[] = {1.3264727198e-3f, 9.6715126396e-3f, 5.5507337432e-2f, 2.4022242085e-1f,
                                   6.9314697760e-1f};
  static constexpr float EXPM1[] = {1.54531629451e-4f, 1.33908633647e-3f, 9.61808255728e-3f,
                                    5.55035711422e-2f, 2.40226507606e-1f, 6.93147188026e-1f};
};
template <> struct Exp2Constants<double> {  // the polynomial's own error is 8e-18
  static constexpr double ROUND = 6755399441055744.;  // 1.5 * 2^52
  static constexpr double LOWEST = -1023.;
  static constexpr int SHIFT = 52;
  static constexpr double EXPM1[] = {4.45496059818651839e-10, 7.0725859492692237e-9,  1.01780624458457735e-7,
                                     1.32154425879216897e-6,  1.52527338298361184e-5, 1.54035304417360502e-4,
                                     1.33335581464169353e-3,  9.61812910760688853e-3, 5.55041086648215943e-2,
                                     2.40226506959100982e-1,  6.93147180559945309e-1};
  static constexpr const double (&EXP2)[11] = EXPM1;
};

// x becomes f, z holds n in its low bits, q = q(f). N vectors interleaved: a quarter faster than one after another.
template <class R, int N, int C>
INLINE void split_exponent(Vec<R> (&x)[N], Vec<R> (&z)[N], Vec<R> (&q)[N], const R (&coefficients)[C]) {
  UNROLL for (int j = 0; j < N; j++) z[j] = x[j] + splat(Exp2Constants<R>::ROUND);
  UNROLL for (int j = 0; j < N; j++) x[j] = x[j] - (z[j] - splat(Exp2Constants<R>::ROUND));
  UNROLL for (int j = 0; j < N; j++) q[j] = splat(coefficients[0]);
  UNROLL for (int c = 1; c < C; c++)
    UNROLL for (int j = 0; j < N; j++) q[j] = q[j] * x[j] + splat(coefficients[c]);
}
// y * 2^n, by adding n to its exponent. The result for a NaN is arbitrary.
template <class R> INLINE Vec<R> times_power_of_two(Vec<R> y, Vec<R> z) {
  return (Vec<R>)((Bits<R>)y + ((Bits<R>)z << Exp2Constants<R>::SHIFT));
}
// x <- 2^x for x <= 127. Exactly 0 at or below LOWEST (so -inf gives 0) and 1 at 0; NaN stays NaN.
template <class R, int N> INLINE void exp2_each(Vec<R> (&x)[N]) {
  Vec<R> z[N], q[N];
  UNROLL for (int j = 0; j < N; j++) x[j] = max(splat(Exp2Constants<R>::LOWEST), x[j]);
  split_exponent<R>(x, z, q, Exp2Constants<R>::EXP2);
  // A NaN has no exponent to add to, so the addition may turn it into a number; adding x * 0 makes it NaN again.
  UNROLL for (int j = 0; j < N; j++) x[j] = x[j] * splat(R(0)) + times_power_of_two<R>(q[j] * x[j] + splat(R(1)), z[j]);
}
// x <- e^x, with the same special values. Subtract scores before converting to base 2: they may be huge, and cancel.
template <class R, int N> INLINE void exp_each(Vec<R> (&x)[N]) {
  UNROLL for (int j = 0; j < N; j++) x[j] *= splat(LOG2E<R>);
  exp2_each<R>(x);
}
// tanh x = e / (e + 2) with e = exp(2x) - 1, which keeps its relative accuracy near 0.
template <class R> INLINE Vec<R> tanh_of(Vec<R> x) {
  Vec<R> t[1], z[1], q[1];
  t[0] = max(splat(R(-64)), x * splat(2 * LOG2E<R>));  // beyond +-64 the result is +-1
  t[0] = -max(splat(R(-64)), -t[0]);
  split_exponent<R>(t, z, q, Exp2Constants<R>::EXPM1);
  const Vec<R> power = times_power_of_two<R>(splat(R(1)), z[0]), e = power * (q[0] * t[0]) + (power - splat(R(1)));
  return e / (e + splat(R(2)));
}

// W x W transpose in registers, in log2(W) stages.
template <int H, class V, int... I> INLINE void transpose_stage(V* a, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I);
  for (int i = 0; i < n; i++)
    if (!(i & H)) {
      V x = a[i], y = a[i + H];
      a[i] = __builtin_shufflevector(x, y, ((I & H) ? n + I - H : I)...);
      a[i + H] = __builtin_shufflevector(x, y, ((I & H) ? n + I : I + H)...);
    }
}
template <class R> INLINE void transpose(Vec<R>* a) {
  constexpr auto lanes = std::make_integer_sequence<int, W<R>>{};
  transpose_stage<1>(a, lanes);
  if constexpr (W<R> > 2) transpose_stage<2>(a, lanes);
  if constexpr (W<R> > 4) transpose_stage<4>(a, lanes);
  if constexpr (W<R> > 8) transpose_stage<8>(a, lanes);
}

// sum + a * b, rounded once where an instruction does that. Intrinsics, since a compiler that may fuse does not always,
// and scores must be bitwise equal wherever they are computed.
#if defined(__AVX512F__)
INLINE Vec<float> add_product(Vec<float> sum, Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}
INLINE Vec<double> add_product(Vec<double> sum, Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
}
#elif defined(__FMA__)
INLINE Vec<float> add_product(Vec<float> sum, Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
}
INLINE Vec<double> add_product(Vec<double> sum, Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
}
#elif defined(__aarch64__)
INLINE Vec<float> add_product(Vec<float> sum, Vec<float> a, Vec<float> b) {
  return (Vec<float>)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}
INLINE Vec<double> add_product(Vec<double> sum, Vec<double> a, Vec<double> b) {
  return (Vec<double>)vfmaq_f64((float64x2_t)sum, (float64x2_t)a, (float64x2_t)b);
}
#else
template <class V> INLINE V add_product(V sum, V a, V b) { return sum + a * b; }
#endif
typedef uint16_t halfwords __attribute__((vector_size(VECTOR_BYTES)));
#if defined(__AVX512BF16__)
#define FT_PAIRS 1
INLINE Vec<float> add_product(Vec<float> sum, Vec<Pair> a, Vec<Pair> b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
template <int... I> INLINE halfwords interleave(halfwords x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (I / 2 + (I & 1) * W<float>)...);
}
// The pair of two numbers in each lane, rounded. Here and in sums, numbers below 2^-126 are flushed to 0.
INLINE Vec<Pair> make_pairs(Vec<float> first, Vec<float> second) {
  const halfwords rounded = (halfwords)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Vec<Pair>)interleave(rounded, std::make_integer_sequence<int, 2 * W<float>>{});
}
// x, hidden from the optimizer: a product is then rounded before it is subtracted from, not fused.
INLINE Vec<float> opaque(Vec<float> x) {
  asm("" : "+v"(x));
  return x;
}
// Store W numbers, rounded to bfloat16.
INLINE void store_bf16(void* to, Vec<float> x) {
  const auto rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(to, &rounded, sizeof rounded);
}
#endif
// acc[i][j] += sum over k of A[i*ai + k*ak] * B[k*bk + j*W ...] for j from FIRST to LAST-1: scalars of A, read in
// place, times vectors of B. T: R, or Pair.
template <class R, int FIRST, int LAST, class T, int M, int N>
INLINE void multiply_columns(Vec<R> (&acc)[M][N], const T* A, ptrdiff_t ai, ptrdiff_t ak, const T* B, ptrdiff_t bk,
                             int K) {
  for (int k = 0; k < K; k++, A += ak, B += bk) {
    Vec<T> b[N];
    UNROLL for (int j = FIRST; j < LAST; j++) b[j] = load(B + j * W<R>);
    UNROLL for (int i = 0; i < M; i++) {
      const Vec<T> a = splat(A[i * ai]);
      UNROLL for (int j = FIRST; j < LAST; j++) acc[i][j] = add_product(acc[i][j], a, b[j]);
    }
  }
}
template <class R, class T, int M, int N>
INLINE void multiply_tile(Vec<R> (&acc)[M][N], const T* A, ptrdiff_t ai, ptrdiff_t ak, const T* B, ptrdiff_t bk,
                          int K) {
  multiply_columns<R, 0, N>(acc, A, ai, ak, B, bk, K);
}
template <class R, int M, int N> INLINE void zero_tile(Vec<R> (&acc)[M][N]) {
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int j = 0; j < N; j++) acc[i][j] = Vec<R>{};
}
// The same from zero, for a sum over the head dim, along which A is contiguous. Longer sums are made of partial sums:
// one long chain of additions would lose twice the digits. each_step() is called every DOT_STEP factors.
constexpr int PARTIAL_SUM = 128;  // numbers per partial sum
constexpr int DOT_STEP = 16;
template <class R, class T, int M, int N, class F>
INLINE void dot_tile(Vec<R> (&acc)[M][N], const T* A, ptrdiff_t ai, const T* B, ptrdiff_t bk, int K, F&& each_step) {
  constexpr int MOST = PARTIAL_SUM / FACTOR_SIZE<T>;
  Vec<R> sum[M][N];
  for (int at = 0;;) {
    zero_tile<R>(acc);
    int k = at;
    for (const int end = K - at < MOST ? K : at + MOST; k < end; k += DOT_STEP) {
      each_step();
      multiply_tile<R>(acc, A + k, ai, 1, B + k * bk, bk, end - k < DOT_STEP ? end - k : DOT_STEP);
    }
    if (at)
      UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < N; j++) acc[i][j] += sum[i][j];
    if ((at += MOST) >= K) return;
    UNROLL for (int i = 0; i < M; i++)
      UNROLL for (int j = 0; j < N; j++) sum[i][j] = acc[i][j];
    asm("" : "+m"(sum));  // so that it stays in memory: acc takes the registers
  }
}
template <class R, int M, int N> INLINE void store_tile(const Vec<R> (&acc)[M][N], R* C, ptrdiff_t row) {
  UNROLL for (int i = 0; i < M; i++)
    UNROLL for (int j = 0; j < N; j++) store(C + i * row + j * W<R>, acc[i][j]);
}
// C = alpha C + acc with alpha[lane]; C += acc if alpha is null
template <class R, int M, int N>
INLINE void add_tile(const Vec<R> (&acc)[M][N], R* C, ptrdiff_t row, const R* alpha = nullptr) {
  UNROLL for (int j = 0; j < N; j++) {
    const Vec<R> a = alpha ? load(alpha + j * W<R>) : splat(R(1));
    UNROLL for (int i = 0; i < M; i++) {
      R* c = C + i * row + j * W<R>;
      store(c, add_product(acc[i][j], load(c), a));
    }
  }
}
// Cover rows [at, n) with tiles of M rows, the rest with tiles of a power of two: f(rows as a constant, first row).
template <int M, class F> INLINE void for_tiles(int at, int n, F&& f) {
  for (; at + M <= n; at += M) f(std::integral_constant<int, M>{}, at);
  constexpr int REST = M > 8 ? 8 : M > 4 ? 4 : M / 2;
  if constexpr (REST > 0) for_tiles<REST>(at, n, f);
}
// f(n as a constant), n from 1 to NV: the vectors of lanes in a group.
template <int N = NV, class F> INLINE void dispatch_vectors(int n, F&& f) {
  if constexpr (N > 1)
    if (n < N) return dispatch_vectors<N - 1>(n, f);
  f(std::integral_constant<int, N>{});
}
