#include "drive.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 4 << 20, PARTS = 8, PART = 4096, IN_FLIGHT = 32, MESSAGES = 400 };

/* Both ends of one connection, driven by one thread. */
struct link {
  const struct interface* net;
  void *ctx, *listener, *sender, *receiver;
  unsigned char *out, *in;
  void *out_memory, *in_memory;
};

#define STALE ((void*)0x5a5a5a58)
#define OK(call) CHECK((call) == ncclSuccess, "%s", #call)

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A call that makes no progress for 120 s counts as a hang. This is not a measurement. */
static void check_not_hung(double since_s, const char* what) { CHECK(now_s() - since_s < 120, "%s hangs", what); }

static void connect_pair(struct link* l, int traffic_class) {
  char handle[NCCL_NET_HANDLE_MAXSIZE];
  OK(l->net->listen(l->ctx, 0, handle, &l->listener));
  CHECK(l->listener, "listen gave no comm");
  double since_s = now_s();
  while (!l->sender || !l->receiver) {
    if (!l->sender) OK(l->net->connect(l->ctx, traffic_class, 0, handle, &l->sender));
    if (!l->receiver) OK(l->net->accept(l->listener, &l->receiver));
    check_not_hung(since_s, "connecting");
  }
}

static unsigned char* buffer(void) {
  void* memory = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED, "mmap");
  return memory;
}

static void open_link(struct link* l, const struct interface* net, int traffic_class) {
  *l = (struct link){.net = net};
  OK(net->init(&l->ctx, traffic_class, log_line));
  CHECK(net->version < 11 || l->ctx, "init made no context");
  connect_pair(l, traffic_class);
  l->out = buffer(), l->in = buffer();
  OK(net->reg_mr(l->sender, l->out, BUFFER, NCCL_PTR_HOST, &l->out_memory));
  OK(net->reg_mr(l->receiver, l->in, BUFFER, NCCL_PTR_HOST, &l->in_memory));
  CHECK(l->out_memory && l->in_memory, "regMr made no mhandle");
}

static void close_link(struct link* l) {
  OK(l->net->dereg_mr(l->sender, NULL));
  OK(l->net->dereg_mr(l->sender, l->out_memory));
  OK(l->net->dereg_mr(l->receiver, l->in_memory));
  OK(l->net->close_send(l->sender));
  OK(l->net->close_recv(l->receiver));
  OK(l->net->close_listen(l->listener));
  OK(l->net->finalize(l->ctx));
  munmap(l->out, BUFFER), munmap(l->in, BUFFER);
}

static void fill(unsigned char* data, size_t bytes, unsigned seed) {
  for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)(seed + i * 7 + (i >> 8) * 13 + (i >> 16));
}

/* Posts until the plugin accepts. NCCL does the same: a NULL request means "not yet". */
static void* send_part(struct link* l, size_t at, size_t bytes, int tag) {
  void* request = STALE;
  for (double since_s = now_s(); ; check_not_hung(since_s, "isend")) {
    OK(l->net->isend(l->sender, l->out + at, bytes, tag, l->out_memory, &request));
    CHECK(request != STALE, "isend did not write the request");
    if (request) return request;
  }
}

static void* receive(struct link* l, int n, size_t at, size_t bytes, int first_tag, void* on_entry) {
  void *data[PARTS], *memory[PARTS], *request = on_entry;
  size_t sizes[PARTS];
  int tags[PARTS];
  for (int i = 0; i < n; i++) {
    data[i] = l->in + at + (size_t)i * bytes;
    memory[i] = l->in_memory;
    sizes[i] = bytes;
    tags[i] = first_tag + i;
  }
  double since_s = now_s();
  do {
    request = on_entry;
    OK(l->net->irecv(l->receiver, n, data, sizes, tags, memory, &request));
    CHECK(!on_entry || request != on_entry, "irecv did not write the request");
    check_not_hung(since_s, "irecv");
  } while (!request);
  return request;
}

static void finish(struct link* l, void* request, int* sizes) {
  int done = 0;
  for (double since_s = now_s(); !done; check_not_hung(since_s, "test")) OK(l->net->test(request, &done, sizes));
}

/* One message into a buffer of `room` bytes: it arrives whole, the bytes behind it are unchanged, and
 * both ends get its size. */
static void one_message(struct link* l, size_t bytes, size_t room, unsigned seed) {
  fill(l->out, bytes, seed);
  memset(l->in, 0xee, BUFFER);
  int sent = -1, received = -1;
  void* incoming = receive(l, 1, 0, room, 3, STALE);
  void* outgoing = send_part(l, 0, bytes, 3);
  int out_done = 0, in_done = 0;
  for (double since_s = now_s(); !out_done || !in_done; check_not_hung(since_s, "a message")) {
    if (!out_done) OK(l->net->test(outgoing, &out_done, &sent));
    if (!in_done) OK(l->net->test(incoming, &in_done, &received));
  }
  CHECK(sent == (int)bytes && received == (int)bytes, "%zu bytes: sent %d, received %d", bytes, sent, received);
  CHECK(memcmp(l->in, l->out, bytes) == 0, "%zu bytes arrived changed", bytes);
  for (size_t i = bytes; i < bytes + 256 && i < BUFFER; i++) CHECK(l->in[i] == 0xee, "byte %zu behind the message", i);
}

static void many_in_flight(struct link* l) {
  void *incoming[IN_FLIGHT], *outgoing[IN_FLIGHT];
  for (int posted = 0, done = 0; done < MESSAGES; done++) {
    for (; posted < MESSAGES && posted < done + IN_FLIGHT; posted++) {
      size_t at = (size_t)(posted % IN_FLIGHT) * PART;
      fill(l->out + at, PART, (unsigned)posted);
      memset(l->in + at, 0, PART);
      incoming[posted % IN_FLIGHT] = receive(l, 1, at, PART, 0, NULL);
      outgoing[posted % IN_FLIGHT] = send_part(l, at, PART, 0);
    }
    size_t at = (size_t)(done % IN_FLIGHT) * PART;
    finish(l, incoming[done % IN_FLIGHT], NULL);
    finish(l, outgoing[done % IN_FLIGHT], NULL);
    CHECK(memcmp(l->in + at, l->out + at, PART) == 0, "message %d arrived changed", done);
  }
}

/* Eight buffers in one receive. The sends have another order and other sizes: the tag chooses the
 * buffer. */
static void grouped(struct link* l) {
  int sizes[PARTS], sent[PARTS];
  void* outgoing[PARTS];
  fill(l->out, PARTS * PART, 9);
  memset(l->in, 0xee, PARTS * PART);
  void* incoming = receive(l, PARTS, 0, PART, 40, NULL);
  for (int i = 0; i < PARTS; i++) {
    int part = (i * 3 + 5) % PARTS;
    outgoing[i] = send_part(l, (size_t)part * PART, (size_t)(PART - part * 100), 40 + part);
  }
  finish(l, incoming, sizes);
  for (int i = 0; i < PARTS; i++) finish(l, outgoing[i], &sent[i]);
  for (int part = 0; part < PARTS; part++) {
    size_t at = (size_t)part * PART;
    CHECK(sizes[part] == PART - part * 100, "part %d: %d bytes", part, sizes[part]);
    CHECK(memcmp(l->in + at, l->out + at, (size_t)sizes[part]) == 0, "part %d arrived changed", part);
    CHECK(part == 0 || l->in[at + (size_t)sizes[part]] == 0xee, "behind part %d", part);
  }
}

/* From v9 on a 1 on entry makes the receive optional: it is done before anything is sent (after a
 * retry, if another thread holds the connection for a moment), and the data still arrives. In v8 a 1
 * on entry has no meaning. */
static void optional_receive(struct link* l) {
  enum { ROUNDS = 3 * IN_FLIGHT };
  for (int round = 0; round < ROUNDS; round++) {
    fill(l->out, PART, (unsigned)round + 1);
    l->out[PART - 1] = (unsigned char)(round % 251 + 1);
    memset(l->in, 0, PART);
    void* incoming = receive(l, 1, 0, PART, 0, (void*)(uintptr_t)NCCL_NET_OPTIONAL_RECV_COMPLETION);
    int early = -1;
    OK(l->net->test(incoming, &early, NULL));
    if (l->net->version >= 9) {
      for (double since_s = now_s(); !early; check_not_hung(since_s, "an optional receive")) OK(l->net->test(incoming, &early, NULL));
    }
    CHECK(early == (l->net->version >= 9), "a receive in v%d was done before anything was sent", l->net->version);
    finish(l, send_part(l, 0, PART, 0), NULL);
    if (!early) finish(l, incoming, NULL);
    volatile unsigned char* flag = l->in + PART - 1;
    for (double since_s = now_s(); *flag != l->out[PART - 1]; check_not_hung(since_s, "optional data")) {}
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (double since_s = now_s(); memcmp(l->in, l->out, PART); check_not_hung(since_s, "optional data")) {}
  }
}

static void refusals(struct link* l) {
  const struct interface* net = l->net;
  void *mhandle = STALE, *request = STALE, *comm = STALE;
  void *data[PARTS + 1], *memory[PARTS + 1];
  size_t sizes[PARTS + 1];
  int tags[PARTS + 1] = {0}, int_sizes[PARTS + 1] = {0}, done;
  char foreign[NCCL_NET_HANDLE_MAXSIZE];
  for (int i = 0; i <= PARTS; i++) data[i] = l->in, memory[i] = l->in_memory, sizes[i] = 8;

  REFUSED(net->reg_mr(l->sender, l->out, 4096, NCCL_PTR_CUDA, &mhandle), ncclInvalidUsage, "regMr", "CUDA");
  CHECK(mhandle == NULL, "a refused registration left an mhandle");
  REFUSED(net->reg_mr(l->sender, l->out, 4096, 16, &mhandle), ncclInvalidArgument, "regMr", "type 16");
  REFUSED(net->reg_mr(l->sender, NULL, 4096, NCCL_PTR_HOST, &mhandle), ncclInvalidArgument, "regMr", "data");
  REFUSED(net->reg_mr(l->listener, l->out, 8, NCCL_PTR_HOST, &mhandle), ncclInvalidArgument, "regMr", "listen comm");

  memset(foreign, 0x77, sizeof foreign);
  (void)warnings();
  CHECK(net->connect(l->ctx, -1, 0, foreign, &comm) != ncclSuccess && comm == NULL, "a foreign handle was taken");
  CHECK(warnings() == 1 && last_warning_has("connect: "), "the refusal of a foreign handle");
  memset(foreign, 0, sizeof foreign);
  REFUSED(net->connect(l->ctx, -1, 0, foreign, &comm), ncclInvalidUsage, "connect", "network");
  CHECK(net->listen(l->ctx, 1, foreign, &comm) != ncclSuccess && comm == NULL, "there is no device 1");

  REFUSED(net->isend(l->receiver, l->out, 8, 0, l->out_memory, &request), ncclInvalidArgument, "isend", "receive comm");
  CHECK(request == NULL, "a refused send left a request");
  REFUSED(net->isend(l->sender, l->out, 8, 0, NULL, &request), ncclInvalidArgument, "isend", "mhandle is NULL");
  REFUSED(net->isend(l->sender, NULL, 8, 0, l->out_memory, &request), ncclInvalidArgument, "isend", "data is NULL");
  request = STALE;
  REFUSED(net->irecv(l->receiver, 0, data, sizes, tags, memory, &request), ncclInvalidArgument, "irecv", "n is 0");
  CHECK(request == NULL, "a refused receive left a request");
  REFUSED(net->irecv(l->receiver, 9, data, sizes, tags, memory, &request), ncclInvalidArgument, "irecv", "n is 9");
  REFUSED(net->irecv(l->receiver, -1, data, sizes, tags, memory, &request), ncclInvalidArgument, "irecv", "n is -1");
  REFUSED(net->irecv(l->receiver, 1, NULL, sizes, tags, memory, &request), ncclInvalidArgument, "irecv", "data is NULL");
  REFUSED(net->irecv(l->receiver, 1, data, NULL, tags, memory, &request), ncclInvalidArgument, "irecv", "sizes is NULL");
  REFUSED(net->irecv(l->receiver, 1, data, sizes, NULL, memory, &request), ncclInvalidArgument, "irecv", "tags is NULL");
  REFUSED(net->irecv(l->receiver, 1, data, sizes, tags, NULL, &request), ncclInvalidArgument, "irecv", "mhandles is NULL");
  if (net->version == 8) {
    sizes[0] = (size_t)-1;
    REFUSED(net->isend(l->sender, l->out, sizes[0], 0, l->out_memory, &request), ncclInvalidArgument, "isend", "size is -1");
    REFUSED(net->irecv(l->receiver, 1, data, sizes, tags, memory, &request), ncclInvalidArgument, "irecv", "size is -1");
  }
  request = STALE;
  OK(net->iflush(l->receiver, 1, data, int_sizes, memory, &request));
  CHECK(request == NULL, "iflush has nothing to wait for");
  REFUSED(net->test(l->sender, &done, NULL), ncclInvalidArgument, "test", "a send comm");
  REFUSED(net->close_send(l->receiver), ncclInvalidArgument, "closeSend", "a receive comm");
  REFUSED(net->close_recv(l->sender), ncclInvalidArgument, "closeRecv", "a send comm");
  REFUSED(net->close_listen(l->sender), ncclInvalidArgument, "closeListen", "a send comm");
}

static void properties(const struct interface* net) {
  struct device d;
  int ndev = 0;
  OK(net->devices(&ndev));
  CHECK(ndev == 1, "%d devices", ndev);
  OK(net->properties(0, &d));
  CHECK(d.name && *d.name && !d.pci_path && d.guid, "name %s", d.name ? d.name : "NULL");
  CHECK(d.ptr_support == NCCL_PTR_HOST && d.reg_is_global == 0 && d.port == 1, "fixed properties");
  CHECK(d.device_type == NCCL_NET_DEVICE_HOST && d.device_version == 0, "device code");
  CHECK(d.speed > 0 && d.latency >= 0 && d.max_comms > 0 && d.max_recvs >= 1 && d.max_recvs <= PARTS, "speed %d", d.speed);
  CHECK(net->properties(1, &d) != ncclSuccess && net->properties(-1, &d) != ncclSuccess, "there is one device");
}

/* A traffic class is passed where the version has an argument for it; an invalid number is refused at
 * connect and not before. */
static void traffic_class(const struct interface* net) {
  struct link l;
  open_link(&l, net, 106);
  one_message(&l, 1000, 1000, 5);
  close_link(&l);
  if (net->version < 10) return;
  char handle[NCCL_NET_HANDLE_MAXSIZE];
  void *ctx = NULL, *listener, *comm = STALE;
  OK(net->init(&ctx, 300, log_line));
  OK(net->listen(ctx, 0, handle, &listener));
  REFUSED(net->connect(ctx, 300, 0, handle, &comm), ncclInvalidUsage, "connect", "trafficClass");
  CHECK(comm == NULL, "connect refused and left a comm");
  OK(net->close_listen(listener));
  OK(net->finalize(ctx));
  if (net->version < 11) return;
  REFUSED(net->connect(handle, -1, 0, handle, &comm), ncclInvalidArgument, "connect", "ctx");
}

void drive_with_device(const struct interface* net) {
  struct link l;
  open_link(&l, net, -1);
  properties(net);
  static const size_t sizes[] = {0, 1, 7, 8, 63, 64, 65, 4096, 4097, 65536, 1000003, 1 << 20, BUFFER - 1, BUFFER};
  for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) one_message(&l, sizes[i], sizes[i], i);
  one_message(&l, 0, 8192, 20);
  one_message(&l, 100, 1 << 20, 21);
  one_message(&l, 700001, BUFFER, 22);
  many_in_flight(&l);
  grouped(&l);
  grouped(&l);
  optional_receive(&l);
  refusals(&l);
  drive_null_arguments(net);
  one_message(&l, 12345, 12345, 23);

  /* A communicator from a split shares its parent's context, and either may end first. */
  struct link split = {.net = net, .ctx = l.ctx};
  OK(net->finalize(l.ctx));
  connect_pair(&split, -1);
  OK(net->close_listen(split.listener));
  OK(net->close_recv(split.receiver));
  OK(net->close_send(split.sender));
  close_link(&l);
  traffic_class(net);
}

static int refused_in_child(ncclResult_t result) { return result == ncclSystemError; }

static int child(struct link* l) {
  const struct interface* net = l->net;
  void *request = STALE, *mhandle = STALE, *comm = STALE, *ctx = NULL, *data[1] = {l->in}, *memory[1] = {l->in_memory};
  size_t sizes[1] = {8};
  int tags[1] = {0}, ndev = 7;
  char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
  struct device device;
  int good = refused_in_child(net->init(&ctx, -1, log_line)) && refused_in_child(net->devices(&ndev)) && ndev == 0;
  good = good && refused_in_child(net->properties(0, &device));
  good = good && refused_in_child(net->listen(NULL, 0, handle, &comm)) && comm == NULL;
  comm = STALE;
  good = good && refused_in_child(net->connect(NULL, -1, 0, handle, &comm)) && comm == NULL;
  comm = STALE;
  good = good && refused_in_child(net->accept(l->listener, &comm)) && comm == NULL;
  good = good && refused_in_child(net->reg_mr(l->sender, l->out, 8, NCCL_PTR_HOST, &mhandle)) && mhandle == NULL;
  good = good && refused_in_child(net->isend(l->sender, l->out, 8, 0, l->out_memory, &request)) && request == NULL;
  request = STALE;
  good = good && refused_in_child(net->irecv(l->receiver, 1, data, sizes, tags, memory, &request)) && request == NULL;
  good = good && refused_in_child(net->dereg_mr(l->sender, l->out_memory));
  good = good && refused_in_child(net->close_send(l->sender));
  good = good && refused_in_child(net->close_recv(l->receiver));
  good = good && refused_in_child(net->close_listen(l->listener));
  good = good && refused_in_child(net->finalize(l->ctx));
  return good ? 0 : 1;
}

void drive_fork(const struct interface* net) {
  struct link l;
  open_link(&l, net, -1);
  one_message(&l, 50000, 50000, 1);
  fflush(NULL);
  for (int orderly = 0; orderly < 2; orderly++) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
      int status = child(&l);
      if (orderly) exit(status);
      _exit(status);
    }
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child: %x", status);
    one_message(&l, 500000, 500000, 2);
  }
  close_link(&l);
}
