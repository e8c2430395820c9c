// Flash attention, forward, in CUDA C: tiles in shared memory, statistics in registers, a single write at the end.
// q, k, v and out are [heads, n, DIM] floats, contiguous. A block of BLOCK_Q threads computes BLOCK_Q rows of one head,
// one row per thread. DIM, BLOCK_Q, BLOCK_K and CAUSAL are defined at compile time.

extern "C" __global__ void __launch_bounds__(BLOCK_Q)
    attention(const float* q, const float* k, const float* v, float* out, int n, float scale) {
  __shared__ __align__(16) float tile_k[BLOCK_K][DIM];
  __shared__ __align__(16) float tile_v[BLOCK_K][DIM];
  const float minus_infinity = __int_as_float(0xff800000);
  const long long head = (long long)blockIdx.y * n * DIM;
  const int first = blockIdx.x * BLOCK_Q;
  const int i = first + threadIdx.x;  // this thread's query

  // A thread keeps its query and the three running statistics throughout the loop over keys.
  float query[DIM], o[DIM], m = minus_infinity, l = 0.0f;
#pragma unroll
  for (int d = 0; d < DIM; ++d) {
    query[d] = i < n ? q[head + (long long)i * DIM + d] * scale : 0.0f;
    o[d] = 0.0f;
  }

  const int end = CAUSAL ? min(n, first + BLOCK_Q) : n;  // none of these queries sees later tiles
  for (int j0 = 0; j0 < end; j0 += BLOCK_K) {
    // The threads load the tile together. Each element is read from the large memory once and used BLOCK_Q times.
    for (int e = threadIdx.x; e < BLOCK_K * DIM; e += BLOCK_Q) {
      const int j = e / DIM, d = e % DIM;
      const long long at = head + (long long)(j0 + j) * DIM + d;
      tile_k[j][d] = j0 + j < n ? k[at] : 0.0f;
      tile_v[j][d] = j0 + j < n ? v[at] : 0.0f;
    }
    __syncthreads();  // wait until the tile is complete

    float s[BLOCK_K], m_new = m;
#pragma unroll
    for (int j = 0; j < BLOCK_K; ++j) {
      float score = 0.0f;
#pragma unroll
      for (int d = 0; d < DIM; ++d) score += query[d] * tile_k[j][d];
      const bool seen = j0 + j < n && (!CAUSAL || j0 + j <= i);
      s[j] = seen ? score : minus_infinity;
      m_new = fmaxf(m_new, s[j]);
    }

    const float factor = expf(m - m_new);  // rescales the sums so far to the new maximum
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < BLOCK_K; ++j) {
      s[j] = expf(s[j] - m_new);
      sum += s[j];
    }
    m = m_new;
    l = l * factor + sum;
#pragma unroll
    for (int d = 0; d < DIM; ++d) {
      float weighted = 0.0f;
#pragma unroll
      for (int j = 0; j < BLOCK_K; ++j) weighted += s[j] * tile_v[j][d];
      o[d] = o[d] * factor + weighted;
    }
    __syncthreads();  // do not overwrite the tile while another thread still reads it
  }

  if (i < n) {
#pragma unroll
    for (int d = 0; d < DIM; ++d) out[head + (long long)i * DIM + d] = o[d] / l;
  }
}
