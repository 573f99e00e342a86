/* A stand-in for the CUDA runtime: memory of the host, counted, with a limit for each device. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 2, BLOCKS = 4096 };

long long fake_mallocs, fake_frees, fake_syncs, fake_switches, fake_live[DEVICES], fake_limit[DEVICES];
static int current, last;
static struct { void *data; size_t size; int device; } blocks[BLOCKS];

int cudaMalloc(void **data, size_t size) {
  ++fake_mallocs;
  if (fake_limit[current] && fake_live[current] + (long long)size > fake_limit[current]) return last = 2;
  if (posix_memalign(data, 512, size)) return last = 2;
  for (int k = 0; k < BLOCKS; ++k)
    if (!blocks[k].data) {
      blocks[k].data = *data, blocks[k].size = size, blocks[k].device = current;
      fake_live[current] += (long long)size;
      return 0;
    }
  return last = 2;
}

int cudaFree(void *data) {
  ++fake_frees;
  for (int k = 0; k < BLOCKS; ++k)
    if (data && blocks[k].data == data) {
      if (blocks[k].device != current) return last = 1;
      fake_live[current] -= (long long)blocks[k].size;
      memset(data, 0xdd, blocks[k].size);
      free(data);
      blocks[k].data = NULL;
      return 0;
    }
  return last = 1;
}

int cudaGetDevice(int *device) { return *device = current, 0; }
int cudaSetDevice(int device) { return ++fake_switches, current = device, 0; }
int cudaDeviceSynchronize(void) { return ++fake_syncs, 0; }
int cudaGetLastError(void) { int was = last; return last = 0, was; }
