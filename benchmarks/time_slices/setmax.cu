// setmax.cu: does a program whose warps trade registers survive time slicing? No memory copies, no wgmma, no Triton.
//   nvcc -O2 -gencode=arch=compute_90a,code=sm_90a -o setmax setmax.cu   (see HOPPER.md)
//   ./setmax worker SECONDS MODE GRID    MODE 0: as the decode kernel's programs without work (trade, meet, exit)
//                                        MODE 1: the same without the trade   MODE 2: trade, then 20 us of work
//   ./setmax disturb SECONDS             another context, always busy: run one or two of these beside it
// A worker prints a line a second; where no launch ends in 10 s it says WEDGED and how many programs had begun and ended.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <unistd.h>
#include <cuda_runtime.h>
#define OK(x) do { cudaError_t oops = (x); if (oops != cudaSuccess && oops != cudaErrorNotReady) { printf("%s: %s\n", #x, cudaGetErrorString(oops)); exit(2); } } while (0)
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <int MODE>
__global__ void __launch_bounds__(256, 4) trade(volatile unsigned* counts, const int* len) {
  if (threadIdx.x >= 128) {
    if (MODE != 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    asm volatile("barrier.sync 1;" ::: "memory");
  } else {
    if (MODE != 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    if (threadIdx.x == 0) atomicAdd((unsigned*)counts, 1);
    int n = *(volatile const int*)len;
    if (MODE == 2) { long long t = clock64(); while (clock64() - t < 40000) n += 0; }
    if (n == 12345 && threadIdx.x == 0) counts[2] = n;
    if (threadIdx.x == 0) atomicAdd((unsigned*)counts + 1, 1);
    asm volatile("barrier.sync 1;" ::: "memory");
  }
}

__global__ void burn(float* x, int n) {
  float a = threadIdx.x;
  for (int i = 0; i < n; i++) a = a * 1.0001f + 0.5f;
  if (a == 42.f) *x = a;
}

int main(int argc, char** argv) {
  if (argc < 3) return 1;
  double end = now() + atof(argv[2]);
  OK(cudaFree(0));
  if (!strcmp(argv[1], "disturb")) {
    float* x; OK(cudaMalloc(&x, 4));
    while (now() < end) { for (int i = 0; i < 20; i++) burn<<<132 * 8, 256>>>(x, 200000); OK(cudaGetLastError()); OK(cudaDeviceSynchronize()); }
    return 0;
  }
  int mode = argc > 3 ? atoi(argv[3]) : 0, grid = argc > 4 ? atoi(argv[4]) : 1024;
  cudaFuncAttributes a; OK(cudaFuncGetAttributes(&a, trade<0>));
  printf("registers at entry: %d (64 is meant; look for USETMAXREG in cuobjdump -sass)\n", a.numRegs);
  unsigned *counts, *seen; int* len;
  OK(cudaHostAlloc(&seen, 16, cudaHostAllocMapped)); memset(seen, 0, 16);
  OK(cudaHostGetDevicePointer(&counts, seen, 0));
  OK(cudaMalloc(&len, 4)); OK(cudaMemset(len, 0, 4));
  cudaStream_t s; OK(cudaStreamCreate(&s));
  cudaGraph_t g; cudaGraphExec_t e;
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < 100; i++) {
    if (mode == 0) trade<0><<<grid, 256, 43 * 1024, s>>>(counts, len);
    else if (mode == 1) trade<1><<<grid, 256, 43 * 1024, s>>>(counts, len);
    else trade<2><<<grid, 256, 43 * 1024, s>>>(counts, len);
  }
  OK(cudaStreamEndCapture(s, &g)); OK(cudaGraphInstantiate(&e, g, 0));
  cudaEvent_t ev; OK(cudaEventCreateWithFlags(&ev, cudaEventDisableTiming));
  long replays = 0; double said = now();
  while (now() < end) {
    memset(seen, 0, 16);
    OK(cudaGraphLaunch(e, s)); OK(cudaEventRecord(ev, s));
    double t = now();
    while (cudaEventQuery(ev) == cudaErrorNotReady) {
      if (now() - t > 10) { printf("WEDGED mode %d grid %d after %ld replays: %u begun, %u ended of %d\n", mode, grid, replays, seen[0], seen[1], 100 * grid); fflush(stdout); sleep(60); _exit(3); }
      usleep(50);
    }
    OK(cudaGetLastError());
    replays++;
    if (now() - said > 1) { printf("mode %d: %ld replays\n", mode, replays); fflush(stdout); said = now(); }
  }
  printf("mode %d grid %d: ENDED WELL, %ld replays of 100 launches\n", mode, grid, replays);
  return 0;
}
