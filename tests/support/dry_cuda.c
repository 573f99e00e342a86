// A CUDA runtime, driver and BLAS that compute nothing: device memory is the host's, kernels are not run, copies are.
// PyTorch's CUDA build runs on it without a GPU, and asks its allocator for what it would ask there.
// Compiled with -DDRIVER it is libcuda.so.1, otherwise the rest; `dry_cuda.py` adds what is not here.
#define _GNU_SOURCE
#include <stdlib.h>
static size_t device_bytes(void) {  // of the one device there is
  const char* said = getenv("DRY_CUDA_BYTES");
  return said ? strtoull(said, 0, 10) : (size_t)16 << 30;
}
#ifdef DRIVER
#include <sys/mman.h>
int cuInit(unsigned flags) { return 0; }
// Addresses without memory, and memory that is counted: what expandable segments ask for. Nothing is written there.
static size_t created, sizes[1 << 16];
static unsigned handles;
int cuMemAddressReserve(unsigned long long* at, size_t size, size_t align, unsigned long long hint, unsigned long long f) {
  void* found = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *at = (unsigned long long)found, found == MAP_FAILED ? 2 : 0;
}
int cuMemAddressFree(unsigned long long at, size_t size) { return munmap((void*)at, size); }
int cuMemCreate(unsigned long long* handle, size_t size, const void* properties, unsigned long long flags) {
  if (created + size > device_bytes() || handles + 1 == 1 << 16) return 2;
  created += size;
  sizes[*handle = ++handles] = size;
  return 0;
}
size_t dry_created(void) { return created; }
int cuMemRelease(unsigned long long handle) { return created -= sizes[handle], 0; }
int cuMemMap(unsigned long long at, size_t size, size_t offset, unsigned long long h, unsigned long long f) { return 0; }
int cuMemUnmap(unsigned long long at, size_t size) { return 0; }
int cuMemSetAccess(unsigned long long at, size_t size, const void* description, size_t count) { return 0; }
#else
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#undef cudaGetDeviceProperties

// ---- what was asked of streams, for who wants to know

enum { RECORD = 1, WAIT, COPY, KERNEL, SYNC };
typedef struct {
  long long kind, stream, event, to, source, size;
} Call;
static Call calls[1 << 20];
static int called, logging;

static int note(long long kind, const void* stream, const void* event, const void* to, const void* from, size_t n) {
  if (!logging) return 0;
  if (called == 1 << 20) abort();
  calls[called++] = (Call){kind, (long long)stream, (long long)event, (long long)to, (long long)from, (long long)n};
  return 0;
}
void dry_log(int on) { logging = on, called = 0; }
Call* dry_calls(int* count) {  // since the last time
  *count = called;
  called = 0;
  return calls;
}

// ---- memory

typedef struct {
  char* data;
  size_t size;
} Block;
static Block blocks[1 << 20];
static int count;
static size_t live;

static int find(const char* data) {
  for (int i = count - 1; i >= 0; i--)
    if (data >= blocks[i].data && data < blocks[i].data + blocks[i].size) return i;
  return -1;
}
cudaError_t cudaMalloc(void** data, size_t size) {
  size = size ? size : 1;
  if (count == 1 << 20 || live + size > device_bytes()) return cudaErrorMemoryAllocation;
  if (posix_memalign(data, 512, size)) return cudaErrorMemoryAllocation;
  memset(*data, 0, size);
  blocks[count++] = (Block){*data, size};
  live += size;
  return 0;
}
cudaError_t cudaFree(void* data) {
  if (!data) return 0;
  int i = find(data);
  if (i < 0 || blocks[i].data != data) {
    fprintf(stderr, "dry CUDA: cudaFree of what cudaMalloc did not give\n");
    abort();
  }
  live -= blocks[i].size;
  blocks[i] = blocks[--count];
  free(data);
  return 0;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = device_bytes();
  size_t (*created)(void) = getenv("DRY_CUDA_DRIVER") ? dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "dry_created") : NULL;
  *free_bytes = *total - live - (created ? created() : 0);
  return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* data) {
  memset(a, 0, sizeof *a);
  a->type = find(data) < 0 ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
  a->devicePointer = (void*)data;
  return 0;
}
cudaError_t cudaHostAlloc(void** data, size_t size, unsigned flags) {
  return posix_memalign(data, 512, size ? size : 1) ? cudaErrorMemoryAllocation : 0;
}
cudaError_t cudaFreeHost(void* data) { return free(data), 0; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, enum cudaMemcpyKind kind) {
  return memmove(to, from, n), 0;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return memmove(to, from, n), note(COPY, stream, 0, to, from, n);
}
cudaError_t cudaMemset(void* to, int value, size_t n) { return memset(to, value, n), 0; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) { return memset(to, value, n), 0; }
cudaError_t cudaGetSymbolAddress(void** data, const void* symbol) {
  static char bytes[1 << 20];
  *data = bytes;
  return 0;
}

// ---- the device

cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, 0; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, 0; }
cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : 0; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, 0; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, 0; }
const char* cudaGetErrorString(cudaError_t error) { return "an error of the dry CUDA runtime"; }
const char* cudaGetErrorName(cudaError_t error) { return "dry"; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {  // those of a Hopper GPU
  memset(p, 0, sizeof *p);
  strcpy(p->name, "dry");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->totalGlobalMem = device_bytes();
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = 1;
  p->textureAlignment = 512;
  p->maxBlocksPerMultiProcessor = 32;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    default: *value = 0;
  }
  return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int device) { return strncpy(text, "0000:00:00.0", n), 0; }

// ---- streams, events, kernels

static char handles[1 << 20];
static unsigned used;
static void* handle(void) { return &handles[used++ % sizeof handles]; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -1, 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int p) { return *s = handle(), 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return *s = handle(), 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) { return *e = handle(), 0; }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = handle(), 0; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { return *ms = 0.02, 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return note(RECORD, s, e, 0, 0, 0); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return note(RECORD, s, e, 0, 0, 0); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return note(WAIT, s, e, 0, 0, 0); }
cudaError_t cudaDeviceSynchronize(void) { return note(SYNC, 0, 0, 0, 0, 0); }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* argument) { return function(argument), 0; }
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t s) {
  return note(KERNEL, s, 0, 0, 0, 0);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* n) {
  return *status = cudaStreamCaptureStatusNone, 0;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void* kernel) {
  memset(a, 0, sizeof *a);
  a->ptxVersion = a->binaryVersion = 90;
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* kernel, int block, size_t shared,
                                                                   unsigned flags) {
  return *n = 2, 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* kernel, int block, size_t shared) {
  return *n = 2, 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
  *found = getenv("DRY_CUDA_DRIVER") ? dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name) : NULL;
  if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *found ? cudaSuccess : cudaErrorSymbolNotFound;
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) { return *kernel = (void*)function, 0; }
void** __cudaRegisterFatBinary(void* image) {
  static void* registered;
  return &registered;
}
static __thread cudaStream_t launch_stream;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  return launch_stream = stream, 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  grid->x = grid->y = grid->z = block->x = block->y = block->z = 1;
  *shared = 0;
  *(void**)stream = launch_stream;
  return 0;
}
cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t s) {
  return note(KERNEL, s, 0, 0, 0, 0);
}

// ---- BLAS

int cublasCreate_v2(void** h) { return *h = handle(), 0; }
int cublasGetMathMode(void* h, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void* h, int* mode) { return *mode = 0, 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(void** d, int compute, int scale) { return *d = handle(), 0; }
int cublasLtMatmulPreferenceCreate(void** d) { return *d = handle(), 0; }
int cublasLtMatrixLayoutCreate(void** d, int type, unsigned long long rows, unsigned long long columns, long long ld) {
  return *d = handle(), 0;
}
int cublasLtMatmulAlgoGetHeuristic(void* h, void* op, void* a, void* b, void* c, void* d, void* preference, int asked,
                                   void* results, int* found) {
  memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t: an algorithm, no workspace, success
  return *found = 1, 0;
}
#endif
