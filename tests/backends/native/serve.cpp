// The C++ core behind a pipe, for emulated processors: a call arrives with its memory, which is sent back after it.
#include <cstdio>
#include <cstring>
#include <vector>

#include "flashtile.h"

static bool take(void* to, size_t n) { return n == 0 || std::fread(to, n, 1, stdin) == 1; }
static uint64_t number() {
  uint64_t x = 0;
  take(&x, sizeof x);
  return x;
}

int main() {
  uint64_t backward;
  while (take(&backward, sizeof backward)) {
    std::vector<std::vector<char>> regions(number());
    for (auto& region : regions) region.resize(number() + 1);
    ft_problem p;
    take(&p, sizeof p);
    for (uint64_t left = number(); left; left--) {
      const uint64_t field = number(), region = number(), offset = number();
      const char* at = regions[region].data() + offset;
      std::memcpy((char*)&p + field, &at, sizeof at);
    }
    for (auto& region : regions) take(region.data(), region.size() - 1);
    const int64_t status = backward ? ft_backward(&p) : ft_forward(&p);
    std::fwrite(&status, sizeof status, 1, stdout);
    for (auto& region : regions) std::fwrite(region.data(), 1, region.size() - 1, stdout);
    std::fflush(stdout);
  }
}
