#include "drive.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char somewhere[64];
#define STALE ((void*)(somewhere + 1))

void drive_without_device(const struct interface* net) {
  void* ctx = NULL;
  void* comm = STALE;
  char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};
  int ndev = 77;
  struct device device;

  REFUSED(net->init(&ctx, -1, log_line), ncclSystemError, "init", "");
  CHECK(ctx == NULL, "a failed init left a context");
  REFUSED(net->init(&ctx, -1, log_line), ncclSystemError, "init", "");

  CHECK(net->devices(&ndev) != ncclSuccess && ndev == 0, "devices after a failed init: %d", ndev);
  CHECK(net->properties(0, &device) != ncclSuccess, "properties after a failed init");
  CHECK(net->listen(NULL, 0, handle, &comm) != ncclSuccess && comm == NULL, "listen after a failed init");
  comm = STALE;
  CHECK(net->connect(NULL, -1, 0, handle, &comm) != ncclSuccess && comm == NULL, "connect after a failed init");

  drive_null_arguments(net);

  for (int i = 0; i < 3; i++) CHECK(net->finalize(NULL) == ncclSuccess, "finalize after a failed init");

  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0, "fork");
  if (child == 0) {
    int failed = net->init(&ctx, -1, log_line) != ncclSuccess && net->devices(&ndev) != ncclSuccess;
    _exit(failed ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child: %x", status);
  REFUSED(net->init(&ctx, -1, log_line), ncclSystemError, "init", "");
}

void drive_null_arguments(const struct interface* net) {
  void *comm = STALE, *mhandle = STALE, *request = STALE, *data[1] = {somewhere}, *mhandles[1] = {NULL};
  size_t sizes[1] = {8};
  int int_sizes[1] = {8}, tags[1] = {0}, done = 7;
  char handle[NCCL_NET_HANDLE_MAXSIZE] = {0};

  if (net->version >= 11) REFUSED(net->init(NULL, -1, log_line), ncclInvalidArgument, "init", "ctx is NULL");
  REFUSED(net->devices(NULL), ncclInvalidArgument, "devices", "ndev is NULL");
  REFUSED(net->null_properties(0), ncclInvalidArgument, "getProperties", "props is NULL");
  REFUSED(net->listen(NULL, 0, handle, NULL), ncclInvalidArgument, "listen", "listenComm is NULL");
  REFUSED(net->listen(NULL, 0, NULL, &comm), ncclInvalidArgument, "listen", "handle is NULL");
  CHECK(comm == NULL, "listen refused and left a comm");
  REFUSED(net->connect(NULL, -1, 0, handle, NULL), ncclInvalidArgument, "connect", "sendComm is NULL");
  comm = STALE;
  REFUSED(net->connect(NULL, -1, 0, NULL, &comm), ncclInvalidArgument, "connect", "handle is NULL");
  CHECK(comm == NULL, "connect refused and left a comm");
  comm = STALE;
  REFUSED(net->accept(NULL, &comm), ncclInvalidArgument, "accept", "listenComm is NULL");
  CHECK(comm == NULL, "accept refused and left a comm");
  REFUSED(net->accept(NULL, NULL), ncclInvalidArgument, "accept", "recvComm is NULL");
  REFUSED(net->reg_mr(NULL, somewhere, 8, NCCL_PTR_HOST, &mhandle), ncclInvalidArgument, "regMr", "comm is NULL");
  CHECK(mhandle == NULL, "regMr refused and left an mhandle");
  REFUSED(net->reg_mr(NULL, somewhere, 8, NCCL_PTR_HOST, NULL), ncclInvalidArgument, "regMr", "mhandle is NULL");
  REFUSED(net->dereg_mr(NULL, NULL), ncclInvalidArgument, "deregMr", "comm is NULL");
  REFUSED(net->isend(NULL, somewhere, 8, 0, NULL, &request), ncclInvalidArgument, "isend", "sendComm is NULL");
  CHECK(request == NULL, "isend refused and left a request");
  REFUSED(net->isend(NULL, somewhere, 8, 0, NULL, NULL), ncclInvalidArgument, "isend", "request is NULL");
  request = STALE;
  REFUSED(net->irecv(NULL, 1, data, sizes, tags, mhandles, &request), ncclInvalidArgument, "irecv", "recvComm is NULL");
  CHECK(request == NULL, "irecv refused and left a request");
  REFUSED(net->irecv(NULL, 1, data, sizes, tags, mhandles, NULL), ncclInvalidArgument, "irecv", "request is NULL");
  request = STALE;
  REFUSED(net->iflush(NULL, 1, data, int_sizes, mhandles, &request), ncclInvalidArgument, "iflush", "recvComm is NULL");
  CHECK(request == NULL, "iflush refused and left a request");
  REFUSED(net->test(NULL, &done, int_sizes), ncclInvalidArgument, "test", "request is NULL");
  CHECK(done == 0, "test refused and said done");
  REFUSED(net->test(NULL, NULL, NULL), ncclInvalidArgument, "test", "done is NULL");
  CHECK(net->close_send(NULL) == ncclSuccess, "NULL may be closed");
  CHECK(net->close_recv(NULL) == ncclSuccess, "NULL may be closed");
  CHECK(net->close_listen(NULL) == ncclSuccess, "NULL may be closed");
}

static void* use_and_unload(void* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  CHECK(library, "%s", dlerror());
  for (int version = OLDEST; version <= NEWEST; version++) {
    const struct interface* net = interface_of(library, version);
    void* ctx = NULL;
    int ndev;
    CHECK(net && net->init(&ctx, -1, log_line) != ncclSuccess, "init");
    CHECK(net->devices(&ndev) != ncclSuccess, "devices");
    CHECK(net->finalize(NULL) == ncclSuccess, "finalize");
  }
  CHECK(dlclose(library) == 0, "%s", dlerror());
  /* The library stays loaded: thread-local values of its code are destroyed later than this. */
  CHECK(dlopen(path, RTLD_NOW | RTLD_NOLOAD), "dlclose unloaded the library");
  return NULL;
}

void drive_reload(const char* path) {
  for (int i = 0; i < 100; i++) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use_and_unload, (void*)path) == 0, "pthread_create");
    CHECK(pthread_join(thread, NULL) == 0, "pthread_join");
  }
}
