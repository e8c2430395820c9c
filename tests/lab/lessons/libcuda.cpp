// As much of the CUDA driver as a lesson needs, on the CPU: the lesson's kernel compiled as C++, a thread of the CPU for
// each CUDA thread of a block, one block after another.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

struct Index {
  unsigned x, y;
};
static thread_local Index threadIdx, blockIdx;
static std::barrier<> everyone(BLOCK_Q);
static void __syncthreads() { everyone.arrive_and_wait(); }
static float __int_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
using std::min;

#define __global__
#define __launch_bounds__(threads)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#include "cuda_attention.cu"

namespace {
enum { OK = 0, INVALID = 1 };
char token[1];  // what a context, a module and a function are here
template <class T>
T& at(void* address) {
  return *static_cast<T*>(address);
}
}  // namespace

extern "C" {
int cuInit(unsigned) { return OK; }
int cuDeviceGet(int* device, int number) { return *device = number, OK; }
int cuDeviceGetAttribute(int* value, int which, int) {
  return *value = which == 75 ? 9 : 0, which == 75 || which == 76 ? OK : INVALID;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = token, OK; }
int cuCtxSetCurrent(void* context) { return context == token ? OK : INVALID; }
int cuModuleLoadData(void** module, const char* code) {
  return *module = token, std::memcmp(code, "\177ELF", 4) ? INVALID : OK;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = token, module == token && !std::strcmp(name, "attention") ? OK : INVALID;
}
int cuFuncGetAttribute(int* value, int which, void* function) {
  return *value = 10 * which, function == token ? OK : INVALID;
}
int cuGetErrorString(int, const char** words) { return *words = "something is wrong", OK; }
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** a, void** extra) {
  if (function != token || gz != 1 || bx != BLOCK_Q || by != 1 || bz != 1 || shared || stream || extra) return INVALID;
  for (unsigned y = 0; y < gy; ++y)
    for (unsigned x = 0; x < gx; ++x) {
      std::vector<std::thread> threads;
      for (unsigned t = 0; t < bx; ++t)
        threads.emplace_back([=] {
          threadIdx = {t, 0};
          blockIdx = {x, y};
          attention(at<float*>(a[0]), at<float*>(a[1]), at<float*>(a[2]), at<float*>(a[3]), at<int>(a[4]),
                    at<float>(a[5]));
        });
      for (auto& thread : threads) thread.join();
    }
  return OK;
}
}
