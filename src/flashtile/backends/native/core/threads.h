// parallel_for, and scratch memory for its threads.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
inline void pause_thread() { __builtin_ia32_pause(); }
#elif defined(__aarch64__)
inline void pause_thread() { asm volatile("yield"); }
#else
inline void pause_thread() {}
#endif

// For a forked child: it has no workers, neither the pool's nor OpenMP's, and starts a pool of its own.
void after_fork();

// Run body(context, thread, task) for every task in [0, tasks), started in order, on at most `threads` threads
// including the caller's; thread numbers are below `threads`. A task may wait for earlier ones.
void run_tasks(int64_t threads, int64_t tasks, void (*body)(void*, int64_t, int64_t), void* context);

template <class F> void parallel_for(int64_t threads, int64_t tasks, F&& f) {
  run_tasks(threads, tasks, [](void* c, int64_t thread, int64_t task) { (*(F*)c)(thread, task); }, &f);
}

// Memory in `pieces` pieces, each on its own cache lines. The last block freed is kept for the next call, since fresh
// pages cost more than the computation of a small call.
class Scratch {
 public:
  Scratch(int64_t pieces, size_t bytes_each);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  bool ok() const { return block_; }
  template <class R> R* piece(int64_t i) const { return (R*)(block_ + i * each_); }

 private:
  char* block_;
  size_t each_, size_;
};
