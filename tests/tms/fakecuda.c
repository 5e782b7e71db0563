/* A CUDA driver (-DDRIVER) and runtime (-DRUNTIME) without a device, for what torch_memory_saver's hook calls.

   Virtual memory management is done by mmap and mprotect: what the hook pauses cannot be touched. Everything the hook
   tracks passes through cuMemCreate, everything that it leaves alone through the runtime's cudaMalloc, so two counters
   tell what really happened. ncclMemAlloc stands for memory that reaches the driver past every hook. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long Device;
enum { OK = 0, OUT_OF_MEMORY = 2 };

#ifdef DRIVER
int fake_tracked, fake_unmapped;

int cuInit(unsigned flags) { return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return OK; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the fake driver"; return OK; }
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = 2 << 20; return OK; }

int cuMemAddressReserve(Device *address, size_t bytes, size_t alignment, Device wanted, unsigned long long flags) {
  void *place = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (Device)place;
  return OK;
}
int cuMemAddressFree(Device address, size_t bytes) { munmap((void *)address, bytes); return OK; }
int cuMemCreate(Device *handle, size_t bytes, const void *properties, unsigned long long flags) {
  __sync_fetch_and_add(&fake_tracked, 1);
  *handle = bytes;
  return OK;
}
int cuMemRelease(Device handle) { return OK; }
int cuMemMap(Device address, size_t bytes, size_t offset, Device handle, unsigned long long flags) {
  return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
}
int cuMemSetAccess(Device address, size_t bytes, const void *access, size_t count) { return OK; }
int cuMemUnmap(Device address, size_t bytes) {
  __sync_fetch_and_add(&fake_unmapped, 1);
  madvise((void *)address, bytes, MADV_DONTNEED);
  return mprotect((void *)address, bytes, PROT_NONE);
}
#endif

#ifdef RUNTIME
int fake_plain, fake_windows, fake_synchronized;

int cudaMalloc(void **pointer, size_t bytes) {
  __sync_fetch_and_add(&fake_plain, 1);
  *pointer = malloc(bytes);
  return OK;
}
int cudaFree(void *pointer) { free(pointer); return OK; }
int ncclMemAlloc(void **pointer, size_t bytes) {
  __sync_fetch_and_add(&fake_windows, 1);
  *pointer = malloc(bytes);
  return OK;
}
int cudaMallocHost(void **pointer, size_t bytes) { *pointer = malloc(bytes); return OK; }
int cudaFreeHost(void *pointer) { free(pointer); return OK; }
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { memcpy(to, from, bytes); return OK; }
int cudaDeviceSynchronize(void) { __sync_fetch_and_add(&fake_synchronized, 1); return OK; }
int cudaGetDevice(int *device) { *device = 0; return OK; }
int cudaSetDevice(int device) { return OK; }
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) { *free_bytes = *total_bytes = (size_t)80 << 30; return OK; }
const char *cudaGetErrorString(int error) { return "an error of the fake runtime"; }
#endif
