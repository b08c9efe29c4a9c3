/* A CUDA driver (libcuda.so) without a GPU, for the tests of nccl-spark memory. Its "GPUs" are the
 * CPU.
 *
 * It recognises the kernels by name and does their work. Those of the litmus test run in threads,
 * because the CPU works at the same time. It checks its caller: a current context, allocated
 * addresses, one kernel at a time on a stream. When the last context is released and something is
 * left, it prints "LEAK". Environment variables plant faults:
 *   FAKE_GPUS=N      number of GPUs (default 1)             FAKE_PAGEABLE=0  no access to malloc's memory
 *   FAKE_FREE=BYTES  the result of cuMemGetInfo             FAKE_MANAGED=0   no managed memory
 *   FAKE_MISCOUNT    the checking kernel counts nothing     FAKE_NO_PINNED   cuMemHostAlloc fails
 *   FAKE_WRONG_PATTERN  the writing kernel writes another pattern
 *   FAKE_TORN_STORE  bytes 32 to 47 of a stored line come 20 us after its flag
 *   FAKE_SHORT_STORE the first 8 bytes of a line are not stored
 *   FAKE_BLIND_LOAD  the kernel that loads lines finds none torn
 *   FAKE_WAIT_MS=N   time limit of the kernel that loads lines, in place of its argument
 * As with a discrete GPU, the CPU cannot access device memory: its pages are accessible only inside
 * the driver's calls. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700 };
enum { DEVICE, MANAGED, PINNED, REGISTERED, ROOM = 64 };
/* Offset of a GPU's addresses of pinned memory. A GPU's address differs from the CPU's, so that
 * code that confuses them fails. */
#define MAPPED ((uint64_t)1 << 60)

typedef struct {
  char *start;
  size_t bytes;
  int kind;
} area_t;

/* A stream, and the kernel on it. */
typedef struct {
  pthread_t thread;
  int context, runs, stores, done; /* done is set by the thread */
  uint64_t memory, limit_ns, tally, found[6];
  uint32_t first, lines, sequence, spins, pause, delay;
} stream_t;

static area_t areas[ROOM];
static int retained[16], modules, streams, current; /* contexts and devices are numbers; context 0 is none */

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
  int contexts = 0, left = modules + streams;
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
  static const char *const names[] = {"fill", "check", "litmus_store", "litmus_load"};
  *function = NULL;
  for (intptr_t at = 0; at < 4; at++)
    if (!strncmp(name, "nccl_spark_", 11) && !strcmp(name + 11, names[at])) *function = (void *)(at + 1);
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

/* Returns 1 if a GPU can access these bytes by an address of this kind. */
static int reached(char *from, size_t bytes, int is_mapped) {
  for (area_t *area = areas; area < areas + ROOM; area++) {
    int pinned = area->kind == PINNED || area->kind == REGISTERED;
    if (area->start && from >= area->start && from + bytes <= area->start + area->bytes) return pinned == is_mapped;
  }
  return !is_mapped && setting("FAKE_PAGEABLE", 1);
}

static uint64_t word(const stream_t *stream, uint32_t line, uint32_t index) {
  return index == 15 ? stream->sequence : (uint64_t)stream->sequence << 32 | (line * 16 + index);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void put(uint64_t *line, uint32_t index, uint64_t value) { __atomic_store_n(line + index, value, __ATOMIC_RELEASE); }

static void store_lines(stream_t *stream) {
  uint64_t *lines = (uint64_t *)(uintptr_t)(stream->memory & ~MAPPED);
  int is_torn = getenv("FAKE_TORN_STORE") != NULL;
  for (uint32_t at = 0; stream->delay && at < stream->lines; at++) put(lines + at * 16, 15, stream->sequence);
  if (stream->delay) usleep(stream->delay / 1000);
  for (uint32_t at = 0; at < stream->lines; at++) {
    uint64_t *line = lines + at * 16;
    for (uint32_t index = getenv("FAKE_SHORT_STORE") != NULL; index < 16; index++)
      if (!is_torn || index / 2 != 2) put(line, index, word(stream, stream->first + at, index));
    if (!is_torn) continue;
    usleep(20);
    for (uint32_t index = 4; index < 6; index++) put(line, index, word(stream, stream->first + at, index));
  }
}

static uint64_t old_pieces(stream_t *stream, uint32_t at) {
  uint64_t *line = (uint64_t *)(uintptr_t)(stream->memory & ~MAPPED) + at * 16, pieces = 0;
  for (uint32_t index = 0; index < 16; index++)
    if (__atomic_load_n(line + index, __ATOMIC_RELAXED) != word(stream, stream->first + at, index))
      pieces |= (uint64_t)1 << index / 2;
  return pieces;
}

static void load_lines(stream_t *stream) {
  uint64_t *found = stream->found, start = now_ns();
  for (uint32_t at = 0; at < stream->lines; at++) {
    uint64_t *flag = (uint64_t *)(uintptr_t)(stream->memory & ~MAPPED) + at * 16 + 15;
    int is_there, is_late;
    do {
      sched_yield();
      is_late = now_ns() - start > stream->limit_ns;
      is_there = __atomic_load_n(flag, __ATOMIC_ACQUIRE) == stream->sequence;
    } while (!is_there && !is_late);
    found[is_there ? 0 : 3]++;
    if (!is_there || getenv("FAKE_BLIND_LOAD")) continue;
    uint64_t pieces = old_pieces(stream, at), again = old_pieces(stream, at);
    found[1] += pieces != 0, found[2] += again != 0, found[4] |= pieces, found[5] |= again;
  }
}

static void *litmus(void *opaque) {
  stream_t *stream = opaque;
  (stream->stores ? store_lines : load_lines)(stream);
  __atomic_store_n(&stream->done, 1, __ATOMIC_RELEASE);
  return NULL;
}

static int launch_litmus(stream_t *stream, int stores, void **parameters) {
  if (!stream || stream->runs || stream->context != current) return INVALID_VALUE;
  stream->memory = *(uint64_t *)parameters[0];
  stream->first = *(uint32_t *)parameters[1];
  stream->lines = *(uint32_t *)parameters[2];
  stream->sequence = *(uint32_t *)parameters[3];
  stream->pause = stores ? *(uint32_t *)parameters[4] : 0;
  stream->delay = stores ? *(uint32_t *)parameters[5] : 0;
  stream->spins = stores ? 1 : *(uint32_t *)parameters[4];
  stream->limit_ns = stores ? 1 : *(uint64_t *)parameters[5];
  stream->tally = stores ? 0 : *(uint64_t *)parameters[6];
  if (!stream->spins || !stream->limit_ns || !stream->sequence || stream->pause > 1000000 || stream->delay > 1000000)
    return INVALID_VALUE;
  char *bytes = (char *)(uintptr_t)(stream->memory & ~MAPPED);
  if (!reached(bytes, (size_t)stream->lines * 128, (stream->memory & MAPPED) != 0)) return ILLEGAL_ADDRESS;
  long wait_ms = setting("FAKE_WAIT_MS", 0);
  if (wait_ms) stream->limit_ns = (uint64_t)wait_ms * 1000000;
  stream->stores = stores, stream->runs = 1, stream->done = 0;
  memset(stream->found, 0, sizeof stream->found);
  return pthread_create(&stream->thread, NULL, litmus, stream) ? OUT_OF_MEMORY : OK;
}

int cuStreamCreate(void **stream, unsigned flags) {
  if (!current || flags != 1) return INVALID_VALUE;
  stream_t *made = calloc(1, sizeof *made);
  made->context = current;
  *stream = made;
  return streams++, OK;
}

int cuStreamSynchronize(void *opaque) {
  stream_t *stream = opaque;
  if (!stream->runs) return OK;
  pthread_join(stream->thread, NULL);
  stream->runs = 0;
  if (stream->stores) return OK;
  uint64_t *tally = (uint64_t *)(uintptr_t)stream->tally;
  open_device(PROT_READ | PROT_WRITE);
  for (int at = 0; at < 6; at++) tally[at] = at < 4 ? tally[at] + stream->found[at] : tally[at] | stream->found[at];
  open_device(PROT_NONE);
  return OK;
}

int cuStreamQuery(void *opaque) {
  stream_t *stream = opaque;
  if (stream->context != current) return INVALID_CONTEXT;
  if (stream->runs && !__atomic_load_n(&stream->done, __ATOMIC_ACQUIRE)) return NOT_READY;
  return cuStreamSynchronize(stream);
}

int cuStreamDestroy_v2(void *opaque) {
  if (((stream_t *)opaque)->runs) fprintf(stderr, "LEAK: a stream was destroyed with a kernel on it\n");
  free(opaque);
  return streams--, OK;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  uint64_t memory = *(uint64_t *)parameters[0];
  uint32_t first = *(uint32_t *)parameters[1], count = *(uint32_t *)parameters[2];
  uint32_t seed = *(uint32_t *)parameters[3], flip = *(uint32_t *)parameters[4];
  if (!current || !gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra)
    return INVALID_VALUE;
  if ((intptr_t)function > 2) return bx % 32 ? INVALID_VALUE : launch_litmus(stream, function == (void *)3, parameters);
  if (stream) return INVALID_VALUE;
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
      bytes[at] = getenv("FAKE_WRONG_PATTERN") ? byte + 1 : byte;
    } else if (bytes[at] != byte && !getenv("FAKE_MISCOUNT")) {
      uint32_t *tally = (uint32_t *)(uintptr_t) * (uint64_t *)parameters[5];
      tally[0]++;
      if (first + at < tally[1]) tally[1] = first + at;
    }
  }
  open_device(PROT_NONE);
  return OK;
}
