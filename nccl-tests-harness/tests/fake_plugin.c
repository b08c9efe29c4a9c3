/* A network plugin (ncclNet v11) over loopback TCP, for the tests of nccl-spark.
 *
 * It moves data like a real plugin, and refuses wrong calls. Environment variables plant faults.
 * The value of a variable is the number of the isend, or of the received message, that has the
 * fault, counted from 1 in each process:
 *   FAKE_CORRUPT   one byte of the message is flipped        FAKE_STALE    the message never reaches its buffer
 *   FAKE_SWAP      the halves of the message are swapped     FAKE_SHORT    test reports a byte too few
 *   FAKE_FAIL      isend fails                               FAKE_HANG     isend never returns
 *   FAKE_LOSE      isend drops the message                   FAKE_DIE      isend kills the process
 *   FAKE_EXIT      isend leaves the process with status 3    FAKE_UNKNOWN  isend returns an unknown code
 * These need no number: FAKE_INIT_FAILS, FAKE_INIT_HANGS, FAKE_NO_DEVICE, FAKE_DEVICE_ONLY (no host
 * memory), FAKE_SLOW (isend takes a second), FAKE_NO_OPTIONAL (an optional receive fails),
 * FAKE_TORN (of each 128 bytes of an optional receive the upper 64 come 20 ms before the lower).
 * An optional receive completes when its bytes have arrived, like any other receive. Its bytes are
 * stored in order, as 8-byte words. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "nccl_net_spark.h"

enum { REQUESTS = 8 };

typedef struct {
  uint32_t magic;
  uint16_t port;
  uint8_t calls; /* connect must be called again with this very memory */
} handle_t;

typedef struct {
  uint64_t size;
  int64_t tag;
} header_t;

struct comm;
typedef struct {
  struct comm *comm;
  header_t header;
  char *data;
  size_t room, moved; /* moved counts the header, too */
  int tag, used, done, optional;
} request_t;

typedef struct comm {
  int fd, sends, registrations;
  request_t requests[REQUESTS];
  unsigned first, next; /* running numbers of the oldest unfinished and of the next request */
  unsigned refused;
} comm_t;

typedef struct {
  comm_t *comm;
  char *data;
  size_t size;
} mr_t;

static ncclDebugLogger_t logger;
static int open_objects;
static long sent, received;

static ncclResult_t fail(ncclResult_t code, const char *text) {
  logger(NCCL_LOG_WARN, 0x10, __FILE__, __LINE__, "%s", text);
  return code;
}

static int strikes(const char *fault, long number) {
  const char *value = getenv(fault);
  return value != NULL && atol(value) == number;
}

static ncclResult_t fake_init(void **context, uint64_t id, ncclNetCommConfig_v11_t *config, ncclDebugLogger_t log,
                              ncclProfilerCallback_t profiler) {
  (void)id, (void)config, (void)profiler;
  logger = log;
  if (getenv("FAKE_INIT_HANGS")) fail(ncclSystemError, "NET/Fake: planted: no port has a link");
  while (getenv("FAKE_INIT_HANGS")) pause();
  if (getenv("FAKE_INIT_FAILS")) return fail(ncclSystemError, "NET/Fake: planted: no such hardware");
  logger(NCCL_LOG_INFO, 0x10, __FILE__, __LINE__, "%s", "NET/Fake: merged 2 rails into one device: lo0 lo1");
  *context = &open_objects;
  open_objects++;
  return ncclSuccess;
}

static ncclResult_t fake_devices(int *count) {
  *count = getenv("FAKE_NO_DEVICE") ? 0 : 1;
  return ncclSuccess;
}

static ncclResult_t fake_properties(int dev, ncclNetProperties_v11_t *properties) {
  if (dev != 0) return fail(ncclInvalidArgument, "NET/Fake: no such device");
  memset(properties, 0, sizeof *properties);
  properties->name = "Fake0";
  properties->ptrSupport = getenv("FAKE_DEVICE_ONLY") ? NCCL_PTR_CUDA : NCCL_PTR_HOST;
  properties->speed = 40000;
  properties->port = 1;
  properties->maxComms = 1024;
  properties->maxRecvs = 1;
  return ncclSuccess;
}

static int loopback(uint16_t port, struct sockaddr_in *address) {
  memset(address, 0, sizeof *address);
  address->sin_family = AF_INET;
  address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address->sin_port = port;
  return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

static ncclResult_t fake_listen(void *context, int dev, void *handle, void **comm) {
  if (context != &open_objects || dev != 0) return fail(ncclInvalidArgument, "NET/Fake: listen: wrong context or device");
  struct sockaddr_in address;
  socklen_t length = sizeof address;
  int fd = loopback(0, &address);
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, length) || listen(fd, 8) ||
      getsockname(fd, (struct sockaddr *)&address, &length))
    return fail(ncclSystemError, "NET/Fake: cannot listen");
  fcntl(fd, F_SETFL, O_NONBLOCK);
  handle_t filled = {.magic = 0xfa4e, .port = address.sin_port};
  memset(handle, 0xaa, NCCL_NET_HANDLE_MAXSIZE);
  memcpy(handle, &filled, sizeof filled);
  comm_t *made = calloc(1, sizeof *made);
  made->fd = fd;
  *comm = made;
  open_objects++;
  return ncclSuccess;
}

static comm_t *new_comm(int fd, int sends) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd, F_SETFL, O_NONBLOCK);
  comm_t *comm = calloc(1, sizeof *comm);
  comm->fd = fd;
  comm->sends = sends;
  open_objects++;
  return comm;
}

static ncclResult_t fake_connect(void *context, int dev, void *memory, void **comm,
                                 ncclNetDeviceHandle_v11_t **device_comm) {
  handle_t *handle = memory;
  *comm = NULL;
  if (context != &open_objects || dev != 0) return fail(ncclInvalidArgument, "NET/Fake: connect: wrong context or device");
  if (device_comm == NULL) return fail(ncclInvalidArgument, "NET/Fake: connect: NULL sendDevComm");
  if (handle->magic != 0xfa4e) return fail(ncclInvalidUsage, "NET/Fake: not a handle of this network");
  if (handle->calls++ < 2) return ncclSuccess;
  struct sockaddr_in address;
  int fd = loopback(handle->port, &address);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address))
    return fail(ncclSystemError, "NET/Fake: cannot connect");
  logger(NCCL_LOG_INFO, 0x10, __FILE__, __LINE__, "%s", "NET/Fake: connected with loopback over 2 rails");
  *comm = new_comm(fd, 1);
  return ncclSuccess;
}

static ncclResult_t fake_accept(void *listener, void **comm, ncclNetDeviceHandle_v11_t **device_comm) {
  (void)device_comm;
  *comm = NULL;
  int fd = accept4(((comm_t *)listener)->fd, NULL, NULL, SOCK_CLOEXEC);
  if (fd < 0) return errno == EAGAIN ? ncclSuccess : fail(ncclSystemError, "NET/Fake: cannot accept");
  *comm = new_comm(fd, 0);
  return ncclSuccess;
}

static ncclResult_t fake_reg_mr(void *comm, void *data, size_t size, int type, void **mhandle) {
  if (type != NCCL_PTR_HOST) return fail(ncclInvalidUsage, "NET/Fake: host memory only");
  if ((uintptr_t)data % 4096 != 0) return fail(ncclInvalidUsage, "NET/Fake: memory is not page-aligned");
  mr_t *mr = malloc(sizeof *mr);
  *mr = (mr_t){comm, data, size};
  ((comm_t *)comm)->registrations++;
  *mhandle = mr;
  return ncclSuccess;
}

static ncclResult_t fake_dereg_mr(void *comm, void *mhandle) {
  comm_t *of = comm;
  if (((mr_t *)mhandle)->comm != of) return fail(ncclInvalidArgument, "NET/Fake: registration of another comm");
  if (of->first != of->next) return fail(ncclInvalidUsage, "NET/Fake: deregMr with requests under way");
  of->registrations--;
  free(mhandle);
  return ncclSuccess;
}

/* Returns NULL where a real plugin may: when it is full, and every third time without a reason. */
static request_t *start(comm_t *comm, void *data, size_t size, int tag) {
  if (comm->refused++ % 3 == 1) return NULL;
  request_t *request = &comm->requests[comm->next % REQUESTS];
  if (request->used) return NULL;
  comm->next++;
  *request = (request_t){.comm = comm, .header = {size, tag}, .data = data, .room = size, .tag = tag, .used = 1};
  return request;
}

static int outside(const comm_t *comm, const mr_t *mr, const char *data, size_t size) {
  return mr->comm != comm || data < mr->data || data + size > mr->data + mr->size;
}

static ncclResult_t fake_isend(void *opaque, void *data, size_t size, int tag, void *mhandle, void *phandle, void **result) {
  comm_t *comm = opaque;
  (void)phandle;
  *result = NULL;
  if (!comm->sends || outside(comm, mhandle, data, size)) return fail(ncclInvalidArgument, "NET/Fake: isend: wrong memory");
  request_t *request = start(comm, data, size, tag);
  if (request == NULL) return ncclSuccess;
  sent++;
  if (strikes("FAKE_FAIL", sent)) return fail(ncclRemoteError, "NET/Fake: planted: the cable is gone");
  if (strikes("FAKE_UNKNOWN", sent)) return 99;
  if (strikes("FAKE_DIE", sent)) raise(SIGKILL);
  if (strikes("FAKE_EXIT", sent)) _exit(3);
  if (strikes("FAKE_LOSE", sent)) request->done = 1, comm->first++;
  while (strikes("FAKE_HANG", sent)) pause();
  if (getenv("FAKE_SLOW")) sleep(1);
  *result = request;
  return ncclSuccess;
}

static ncclResult_t fake_irecv(void *opaque, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **phandles,
                               void **result) {
  comm_t *comm = opaque;
  int optional = *result == (void *)NCCL_NET_OPTIONAL_RECV_COMPLETION;
  *result = NULL;
  if (optional && getenv("FAKE_NO_OPTIONAL")) return fail(ncclInvalidUsage, "NET/Fake: planted: no optional receives");
  if (n != 1 || phandles == NULL) return fail(ncclInvalidArgument, "NET/Fake: irecv: one part, and its profiler handle");
  if (comm->sends || outside(comm, mhandles[0], data[0], sizes[0]))
    return fail(ncclInvalidArgument, "NET/Fake: irecv: wrong memory");
  request_t *request = start(comm, data[0], sizes[0], tags[0]);
  if (request) request->optional = optional;
  *result = request;
  return ncclSuccess;
}

/* Moves the remaining header and data. Returns 1 when all is moved, 0 when the socket has no more, and
 * -1 on error. */
static int move(comm_t *comm, request_t *request) {
  while (request->moved < sizeof(header_t) + request->header.size) {
    int head = request->moved < sizeof(header_t);
    size_t at = head ? request->moved : request->moved - sizeof(header_t);
    char *from = (head ? (char *)&request->header : request->data) + at;
    size_t left = (head ? sizeof(header_t) : request->header.size) - at;
    ssize_t count = comm->sends ? send(comm->fd, from, left, MSG_NOSIGNAL) : recv(comm->fd, from, left, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (count <= 0) return -1;
    request->moved += count;
    if (!comm->sends && request->moved == sizeof(header_t) &&
        (request->header.size > request->room || request->header.tag != request->tag))
      return -1;
  }
  return 1;
}

static void plant(request_t *request) {
  size_t size = request->header.size;
  received++;
  if (strikes("FAKE_CORRUPT", received)) request->data[size / 2] ^= 1;
  if (strikes("FAKE_SHORT", received)) request->header.size--;
  if (strikes("FAKE_SWAP", received))
    for (size_t at = 0; at < size / 2; at++) {
      char low = request->data[at];
      request->data[at] = request->data[at + size / 2];
      request->data[at + size / 2] = low;
    }
}

/* Stores `count` 8-byte words of each 128-byte line, from word `at` of the line on. */
static void place(const request_t *request, const char *from, size_t at, size_t count) {
  uint64_t *to = (uint64_t *)request->data, word;
  for (size_t line = 0; line < request->header.size / 128; line++)
    for (size_t index = line * 16 + at; index < line * 16 + at + count; index++) {
      memcpy(&word, from + index * 8, 8);
      __atomic_store_n(to + index, word, __ATOMIC_RELEASE);
    }
}

static void arrive(const request_t *request, const char *from) {
  if (!getenv("FAKE_TORN")) return place(request, from, 0, 16);
  place(request, from, 8, 8);
  usleep(20000);
  place(request, from, 0, 8);
}

static ncclResult_t progress(comm_t *comm) {
  for (; comm->first != comm->next; comm->first++) {
    request_t *request = &comm->requests[comm->first % REQUESTS];
    static char nowhere[16 << 20];
    int stale = !comm->sends && strikes("FAKE_STALE", received + 1);
    char *data = request->data;
    if (stale || request->optional) request->data = nowhere;
    int moved = move(comm, request);
    request->data = data;
    if (moved > 0 && request->optional && !stale) arrive(request, nowhere);
    if (moved < 0) return fail(ncclRemoteError, "NET/Fake: the peer is gone");
    if (moved == 0) return ncclSuccess;
    if (!comm->sends) plant(request);
    request->done = 1;
  }
  return ncclSuccess;
}

static ncclResult_t fake_test(void *opaque, int *done, int *sizes) {
  request_t *request = opaque;
  if (!request->used) return fail(ncclInvalidUsage, "NET/Fake: a request that is done was tested again");
  ncclResult_t code = progress(request->comm);
  if (code != ncclSuccess) return code;
  *done = request->done;
  if (request->done) {
    request->used = 0;
    if (sizes) *sizes = (int)request->header.size;
  }
  return ncclSuccess;
}

static ncclResult_t close_comm(void *opaque) {
  comm_t *comm = opaque;
  if (comm->registrations != 0) return fail(ncclInvalidUsage, "NET/Fake: closed with memory registered");
  close(comm->fd);
  free(comm);
  open_objects--;
  return ncclSuccess;
}

static ncclResult_t fake_finalize(void *context) {
  if (context != &open_objects) return fail(ncclInvalidArgument, "NET/Fake: finalize: wrong context");
  return --open_objects == 0 ? ncclSuccess : fail(ncclInvalidUsage, "NET/Fake: finalize with something open");
}

const ncclNet_v11_t ncclNetPlugin_v11 = {
    .name = "Fake",
    .init = fake_init,
    .devices = fake_devices,
    .getProperties = fake_properties,
    .listen = fake_listen,
    .connect = fake_connect,
    .accept = fake_accept,
    .regMr = fake_reg_mr,
    .deregMr = fake_dereg_mr,
    .isend = fake_isend,
    .irecv = fake_irecv,
    .test = fake_test,
    .closeSend = close_comm,
    .closeRecv = close_comm,
    .closeListen = close_comm,
    .finalize = fake_finalize,
};
