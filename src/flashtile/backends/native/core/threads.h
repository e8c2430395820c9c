// parallel_for on borrowed or own threads, and scratch memory for them.
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

// body(context, thread, task) for every task in [0, tasks), handed out in order, on at most `threads` threads, the
// caller's among them; thread numbers are below `threads`. A task may wait for earlier ones.
// A forked child has no workers, neither ours nor OpenMP's: it starts a pool of its own.
void after_fork();

void run_tasks(int64_t threads, int64_t tasks, void (*body)(void*, int64_t, int64_t), void* context);

template <class F> void parallel_for(int64_t threads, int64_t tasks, F&& f) {
  run_tasks(threads, tasks, [](void* c, int64_t thread, int64_t task) { (*(F*)c)(thread, task); }, &f);
}

// `pieces` pieces of memory, each on cache lines of its own. The last block given back is kept for the next call, since
// fresh pages cost more than a small call computes.
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
