/* A CUDA driver (libcuda.so) without a GPU, for the tests of nccl-spark memory: "GPUs" that are the processor.
 *
 * It knows the two kernels by name and does what they do, is strict about how it is driven (a current context, addresses that
 * were allocated, nothing left when a context is let go: it says "LEAK" then), and has faults that the environment plants:
 *   FAKE_GPUS=N      how many there are (default 1)         FAKE_PAGEABLE=0  they do not reach malloc's memory
 *   FAKE_FREE=BYTES  what cuMemGetInfo says                 FAKE_MANAGED=0   they have no managed memory
 *   FAKE_BLIND       the checking kernel counts nothing     FAKE_NO_PINNED   cuMemHostAlloc fails
 *   FAKE_WILD        the writing kernel writes another pattern
 * Device memory cannot be touched by the processor, as on a discrete GPU: its pages are opened only inside of these calls. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700 };
enum { DEVICE, MANAGED, PINNED, REGISTERED, ROOM = 64 };
/* What a GPU calls pinned memory: not its address, so that who confuses the two is found out. */
#define MAPPED ((uint64_t)1 << 60)

typedef struct {
  char *start;
  size_t bytes;
  int kind;
} area_t;

static area_t areas[ROOM];
static int retained[16], modules, current; /* contexts and devices are numbers; context 0 is none */

static long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value ? atol(value) : otherwise;
}

static area_t *add(char *start, size_t bytes, int kind) {
  for (area_t *area = areas; area < areas + ROOM; area++)
    if (!area->start) return *area = (area_t){start, bytes, kind}, area;
  abort();
}

static area_t *find(const void *start, int kind) {
  for (area_t *area = areas; area < areas + ROOM; area++)
    if (area->start && area->start == start && area->kind == kind) return area;
  return NULL;
}

static void open_device(int protection) {
  for (area_t *area = areas; area < areas + ROOM; area++)
    if (area->start && area->kind == DEVICE) mprotect(area->start, area->bytes, protection);
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : setting("FAKE_GPUS", 1) ? OK : NO_DEVICE; }

int cuGetErrorName(int code, const char **name) {
  *name = code == NO_DEVICE         ? "CUDA_ERROR_NO_DEVICE"
          : code == OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                    : NULL;
  return *name ? OK : INVALID_VALUE;
}

int cuDeviceGetCount(int *count) { return *count = (int)setting("FAKE_GPUS", 1), OK; }

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < setting("FAKE_GPUS", 1) ? OK : INVALID_VALUE;
}

int cuDeviceGetName(char *name, int room, int device) { return snprintf(name, room, "Fake %d", device), OK; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 88 ? (int)setting("FAKE_PAGEABLE", 1) : attribute == 83 ? (int)setting("FAKE_MANAGED", 1) : 0;
  return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  retained[device]++;
  *context = (void *)(intptr_t)(device + 1);
  return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  int contexts = 0, left = modules;
  if (--retained[device] < 0) fprintf(stderr, "LEAK: a context was let go twice\n");
  for (int at = 0; at < 16; at++) contexts += retained[at];
  for (area_t *area = areas; area < areas + ROOM; area++) left += area->start != NULL;
  if (contexts == 0 && left) fprintf(stderr, "LEAK: %d things are left without a context\n", left);
  return OK;
}

int cuCtxSetCurrent(void *context) {
  current = (int)(intptr_t)context;
  return current && retained[current - 1] > 0 ? OK : INVALID_CONTEXT;
}

int cuCtxSynchronize(void) { return current ? OK : INVALID_CONTEXT; }

int cuModuleLoadData(void **module, const void *image) {
  modules++;
  *module = (void *)8;
  return current && strstr(image, ".target sm_75") ? OK : INVALID_VALUE;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  *function = !strcmp(name, "nccl_spark_fill") ? (void *)1 : !strcmp(name, "nccl_spark_check") ? (void *)2 : NULL;
  return *function ? OK : INVALID_VALUE;
}

int cuModuleUnload(void *module) { return modules--, module == (void *)8 ? OK : INVALID_VALUE; }

int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = (size_t)setting("FAKE_FREE", 1 << 30), OK; }

static int map(uint64_t *address, size_t bytes, int kind, int protection) {
  if (!current || bytes == 0) return INVALID_VALUE;
  void *start = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = (uint64_t)(uintptr_t)add(start, bytes, kind)->start;
  return OK;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) { return map(address, bytes, DEVICE, PROT_NONE); }

int cuMemAllocManaged(uint64_t *address, size_t bytes, unsigned flags) {
  return flags == 1 ? map(address, bytes, MANAGED, PROT_READ | PROT_WRITE) : INVALID_VALUE;
}

int cuMemFree_v2(uint64_t address) {
  void *start = (void *)(uintptr_t)address;
  area_t *area = find(start, DEVICE);
  if (!area) area = find(start, MANAGED);
  if (!current || !area) return INVALID_VALUE;
  munmap(area->start, area->bytes);
  area->start = NULL;
  return OK;
}

int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
  uint64_t address = 0;
  if (getenv("FAKE_NO_PINNED")) return OUT_OF_MEMORY;
  int code = flags == 3 ? map(&address, bytes, PINNED, PROT_READ | PROT_WRITE) : INVALID_VALUE;
  *start = (void *)(uintptr_t)address;
  return code;
}

int cuMemFreeHost(void *start) {
  area_t *area = find(start, PINNED);
  if (!current || !area) return INVALID_VALUE;
  munmap(area->start, area->bytes);
  area->start = NULL;
  return OK;
}

int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
  if (!current || flags != 3 || find(start, REGISTERED)) return INVALID_VALUE;
  add(start, bytes, REGISTERED);
  return OK;
}

int cuMemHostUnregister(void *start) {
  area_t *area = find(start, REGISTERED);
  if (!current || !area) return INVALID_VALUE;
  area->start = NULL;
  return OK;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *start, unsigned flags) {
  *address = (uint64_t)(uintptr_t)start | MAPPED;
  return current && flags == 0 && (find(start, PINNED) || find(start, REGISTERED)) ? OK : INVALID_VALUE;
}

static int copy(void *to, const void *from, size_t bytes) {
  open_device(PROT_READ | PROT_WRITE);
  memcpy(to, from, bytes);
  open_device(PROT_NONE);
  return current ? OK : INVALID_CONTEXT;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { return copy((void *)(uintptr_t)to, from, bytes); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { return copy(to, (void *)(uintptr_t)from, bytes); }

/* Whether a GPU reaches these bytes by this address. */
static int reached(char *from, size_t bytes, int is_mapped) {
  for (area_t *area = areas; area < areas + ROOM; area++) {
    int pinned = area->kind == PINNED || area->kind == REGISTERED;
    if (area->start && from >= area->start && from + bytes <= area->start + area->bytes) return pinned == is_mapped;
  }
  return !is_mapped && setting("FAKE_PAGEABLE", 1);
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  uint64_t memory = *(uint64_t *)parameters[0];
  uint32_t first = *(uint32_t *)parameters[1], count = *(uint32_t *)parameters[2];
  uint32_t seed = *(uint32_t *)parameters[3], flip = *(uint32_t *)parameters[4];
  if (!current || !gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || stream || extra)
    return INVALID_VALUE;
  uint8_t *bytes = (uint8_t *)(uintptr_t)(memory & ~MAPPED);
  if (!reached((char *)bytes, count, (memory & MAPPED) != 0)) return ILLEGAL_ADDRESS;
  open_device(PROT_READ | PROT_WRITE);
  for (uint32_t at = 0; at < count; at++) {
    uint32_t x = (first + at) * 0x9e3779b1u ^ seed;
    x ^= x >> 15;
    x *= 0x85ebca77u;
    x ^= x >> 13;
    uint8_t byte = (uint8_t)(x ^ flip);
    if (function == (void *)1) {
      bytes[at] = getenv("FAKE_WILD") ? byte + 1 : byte;
    } else if (bytes[at] != byte && !getenv("FAKE_BLIND")) {
      uint32_t *tally = (uint32_t *)(uintptr_t) * (uint64_t *)parameters[5];
      tally[0]++;
      if (first + at < tally[1]) tally[1] = first + at;
    }
  }
  open_device(PROT_NONE);
  return OK;
}
