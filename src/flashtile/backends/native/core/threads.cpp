// Threads from an OpenMP runtime that is already in the process (torch loads one), else from a pool.
// Two sets of workers that both spin after each call would compete for the cores. The pool's workers spin briefly, then
// sleep.
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

struct Job {
  int64_t tasks;
  void (*body)(void*, int64_t, int64_t);
  void* context;
  std::atomic<int64_t> next_thread{0}, next_task{0};

  Job(int64_t tasks, void (*body)(void*, int64_t, int64_t), void* context)
      : tasks(tasks), body(body), context(context) {}
  void work() {
    const int64_t thread = next_thread.fetch_add(1, std::memory_order_relaxed);
    for (int64_t t; (t = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(context, thread, t);
  }
};

// Block all signals in a scope: threads started in it inherit that.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t every;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

class Pool {
 public:
  void run(Job& job, int64_t threads) {
    const int64_t helpers = start(threads - 1);
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      busy_.store(helpers, std::memory_order_relaxed);
      unclaimed_.store(helpers, std::memory_order_release);
      generation_.fetch_add(1, std::memory_order_release);
      wake = sleeping_ > 0;
    }
    if (wake) awake_.notify_all();
    job.work();
    // Take back the places that no worker has claimed, so that no sleeping worker is waited for.
    const int64_t left = unclaimed_.exchange(0, std::memory_order_acq_rel);
    if (left > 0) busy_.fetch_sub(left, std::memory_order_acq_rel);
    while (busy_.load(std::memory_order_acquire) > 0) pause_thread();
  }

 private:
  // Start as many workers as possible, with all signals blocked: signals are for the program's own threads.
  int64_t start(int64_t wanted) {
    if (workers_ >= wanted) return wanted;
    const BlockedSignals blocked;
    try {
      for (; workers_ < wanted; workers_++) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // no more threads can be started: make do with those there are
    }
    return std::min(workers_, wanted);
  }
  void serve() {
    constexpr int SPINS = 2000;
    for (uint32_t seen = 0;;) {
      for (int i = 0; i < SPINS && generation_.load(std::memory_order_acquire) == seen; i++) pause_thread();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_++;
        awake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        sleeping_--;
      }
      seen = generation_.load(std::memory_order_acquire);
      if (claim_place()) {
        job_->work();
        busy_.fetch_sub(1, std::memory_order_acq_rel);
      }
    }
  }
  bool claim_place() {
    int64_t n = unclaimed_.load(std::memory_order_acquire);
    while (n > 0)
      if (unclaimed_.compare_exchange_weak(n, n - 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  std::mutex mutex_;
  std::condition_variable awake_;
  std::atomic<uint32_t> generation_{0};             // incremented for each job; workers wait for a change
  std::atomic<int64_t> unclaimed_{0}, busy_{0};  // places no helper has claimed yet; helpers at work
  Job* job_ = nullptr;
  int64_t workers_ = 0, sleeping_ = 0;
};

// The function that compilers call to open a parallel region, and the default number of its threads. LLVM's and Intel's
// runtimes have both too.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads)() = nullptr;
};

OpenMP load_openmp(const char* path) {
  OpenMP found;
  if (void* library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY)) {
    found.parallel = (decltype(found.parallel))dlsym(library, "GOMP_parallel");
    found.max_threads = (decltype(found.max_threads))dlsym(library, "omp_get_max_threads");
  }
  return found.max_threads ? found : OpenMP();
}
#if defined(__linux__)
// Search the loaded libraries by name, since wheels add a hash to it; search again only after more were loaded.
OpenMP find_openmp() {
  static struct {
    unsigned long long loaded;
    char path[4096];
  } seen;
  const auto look = [](dl_phdr_info* library, size_t, void*) {
    const char* slash = strrchr(library->dlpi_name, '/');
    for (const char* runtime : {"/libgomp", "/libiomp5", "/libomp"})
      if (slash && !strncmp(slash, runtime, strlen(runtime)) && strlen(library->dlpi_name) < sizeof seen.path)
        return strcpy(seen.path, library->dlpi_name), 1;
    return 0;
  };
  const auto count = [](dl_phdr_info* library, size_t, void* n) {
    *(unsigned long long*)n = library->dlpi_adds;
    return 1;
  };
  unsigned long long loaded = 0;
  dl_iterate_phdr(count, &loaded);
  if (loaded == seen.loaded) return {};
  seen.loaded = loaded;
  return dl_iterate_phdr(look, nullptr) ? load_openmp(seen.path) : OpenMP();
}
#else
OpenMP find_openmp() {
  for (const char* name : {"libomp.dylib", "libiomp5.dylib"})
    if (const OpenMP found = load_openmp(name); found.parallel) return found;
  return {};
}
#endif

// Whether this many threads can be started, by starting them: an OpenMP runtime that cannot ends the process.
bool can_start(int64_t wanted) {
  const BlockedSignals blocked;
  std::mutex start_gate;
  std::unique_lock<std::mutex> closed(start_gate);
  std::vector<std::thread> started;
  try {
    started.reserve(wanted);
    while ((int64_t)started.size() < wanted)
      started.emplace_back([&] { std::lock_guard<std::mutex> wait(start_gate); });
  } catch (const std::exception&) {  // no more threads, or no more memory
  }
  closed.unlock();
  for (std::thread& each : started) each.join();
  return (int64_t)started.size() == wanted;
}
// The most threads that OpenMP was asked for, including the caller's. It keeps a team for each calling thread.
thread_local int64_t largest_team = 1;

std::mutex call_mutex;
Pool* pool = nullptr;
OpenMP openmp;
bool forked = false;
const int fork_handler = pthread_atfork(nullptr, nullptr, after_fork);

// The block kept for the next call; its first bytes hold its size.
std::atomic<char*> spare_block{nullptr};
constexpr size_t LINE = 64, PAGE = 4096, MAX_KEPT = size_t(64) << 20;

}  // namespace

void after_fork() {
  new (&call_mutex) std::mutex;
  pool = nullptr;
  openmp = {};
  forked = true;
}

void run_tasks(int64_t threads, int64_t tasks, void (*body)(void*, int64_t, int64_t), void* context) {
  threads = std::min(threads, tasks);
  Job job(tasks, body, context);
  std::unique_lock<std::mutex> lock(call_mutex, std::defer_lock);
  if (threads <= 1 || !lock.try_lock()) return job.work();  // a second caller works alone: no waiting, no crowding
  if (!openmp.parallel && !forked) openmp = find_openmp();
  // An OpenMP runtime that cannot start the threads it is asked for ends the process, while the pool makes do with
  // fewer. So OpenMP is asked for no more threads than its default, and for more than before only after as many could
  // be started.
  if (openmp.parallel && threads <= openmp.max_threads() &&
      (threads <= largest_team || can_start(threads - largest_team))) {
    largest_team = std::max(largest_team, threads);
    return openmp.parallel([](void* j) { ((Job*)j)->work(); }, &job, (unsigned)threads, 0);
  }
  if (!pool) pool = new (std::nothrow) Pool;
  if (!pool) return job.work();
  pool->run(job, threads);
}

// A piece ends one cache line past a page, so that pieces do not fall on the same cache sets.
Scratch::Scratch(int64_t pieces, size_t bytes_each) : each_((bytes_each + PAGE - 1) / PAGE * PAGE + LINE) {
  size_ = (LINE + each_ * (size_t)pieces + PAGE - 1) / PAGE * PAGE;
  char* start = spare_block.exchange(nullptr);
  if (start && *(size_t*)start < size_) {
    free(start);
    start = nullptr;
  }
  if (!start && (start = (char*)aligned_alloc(LINE, size_))) *(size_t*)start = size_;
  block_ = start ? start + LINE : nullptr;
}
Scratch::~Scratch() {
  if (!block_) return;
  char* start = block_ - LINE;
  if (*(size_t*)start <= MAX_KEPT) start = spare_block.exchange(start);
  free(start);
}
