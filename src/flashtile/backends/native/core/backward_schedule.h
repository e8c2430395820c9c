// The schedule of the backward pass: which key blocks make a task, and in which order the tasks start.
#pragma once
#include <vector>

#include "band.h"
#include "flashtile.h"
#include "vectors.h"

constexpr int BLOCK_GROUPS = 2;                                            // groups of lanes per query block
template <class R> constexpr int BLOCK_QUERIES = BLOCK_GROUPS * LANES<R>;  // queries per block
template <class R> constexpr int MAX_GROUPS = BLOCK_QUERIES<R> / W<R>;      // where spans divide groups
template <class R> constexpr int TILE_KEYS = 96;                           // keys per tile of a key block

// A task: key blocks [b0, b1) of the key heads [h0, h1) of the sequences [s0, s1).
struct BackwardTask {
  int64_t s0, s1, h0, h1, b0, b1;
};

// Keys of a sequence, used or not.
inline int64_t key_slots(const ft_problem& p, int64_t s) { return p.cu_k ? p.cu_k[s + 1] - p.cu_k[s] : p.kv_len; }

// Key blocks depend on the shape only, so that sums do not depend on the number of threads. dK, dV, K and V of a block
// stay in L2, and there are enough blocks to keep about 32 threads busy. If several heads, sequences or key blocks add
// to the same element of dbias, one task holds all of them.
template <class R> struct BackwardSchedule {
  int64_t block_keys;               // keys per key block
  std::vector<BackwardTask> tasks;  // in the order they start

  explicit BackwardSchedule(const ft_problem& p) {
    const ft_tensor& bias = p.dbias;
    const bool all_s = bias.data && bias.sequence == 0, all_h = bias.data && bias.head == 0;
    const bool all_b = bias.data && bias.column == 0;
    const int64_t columns = (all_s ? 1 : p.sequences) * (all_h ? 1 : p.kv_heads), tile = TILE_KEYS<R>;
    const int64_t in_cache = 196608 / (int64_t)sizeof(R) / std::max(p.dim, p.v_dim) / tile * tile;
    block_keys = std::max(tile, std::min(in_cache, round_up(p.kv_len, tile)));
    const int64_t least = p.kv_len < 2 * tile && 2 * tile <= in_cache ? 2 * tile : tile;  // halves would be too small
    while (block_keys > least && columns * ceil_div(p.kv_len, block_keys) < 32) block_keys -= tile;
    const int64_t count = std::max<int64_t>(1, ceil_div(p.kv_len, block_keys));
    block_keys = std::max<int64_t>(24, round_up(ceil_div(p.kv_len, count), 24));  // even blocks, whole register tiles

    // As many heads are interleaved as there are threads, so that a task seldom waits for its turn to add to dQ.
    struct Column {
      int64_t s0, s1, h0, h1, blocks;
    };
    std::vector<Column> interleaved;
    const auto flush = [&] {
      int64_t longest = 0;
      for (const Column& c : interleaved) longest = std::max(longest, c.blocks);
      for (int64_t b = 0; b < (all_b ? std::min<int64_t>(longest, 1) : longest); b++)
        for (const Column& c : interleaved)
          if (b < c.blocks) tasks.push_back({c.s0, c.s1, c.h0, c.h1, b, all_b ? c.blocks : b + 1});
      interleaved.clear();
    };
    for (int64_t s = 0; s < (all_s ? std::min<int64_t>(p.sequences, 1) : p.sequences); s++)
      for (int64_t h = 0; h < (all_h ? 1 : p.kv_heads); h++) {
        int64_t longest = key_slots(p, s);
        if (all_s)
          for (int64_t other = 0; other < p.sequences; other++) longest = std::max(longest, key_slots(p, other));
        interleaved.push_back(
            {s, all_s ? p.sequences : s + 1, h, all_h ? p.kv_heads : h + 1, ceil_div(longest, block_keys)});
        if ((int64_t)interleaved.size() >= p.threads) flush();
      }
    flush();
  }
};
