/*
 * Connects with itself by v8 and calls irecv with an uninitialised request word, as NCCL may. Run under
 * valgrind's memcheck, which reports behaviour of the library that depends on such a word.
 *   uninitialised LIBRARY
 */
#include "drive.h"

#include <dlfcn.h>

int main(int argc, char** argv) {
  CHECK(argc == 2, "usage: %s LIBRARY", argv[0]);
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library, "%s", dlerror());
  const ncclNet_v8_t* net = dlsym(library, "ncclNetPlugin_v8");
  CHECK(net, "the library does not export version 8");
  char handle[NCCL_NET_HANDLE_MAXSIZE], data[8] = {0};
  void *listener = NULL, *sender = NULL, *receiver = NULL, *memory = NULL;
  CHECK(net->init(log_line) == ncclSuccess, "init");
  CHECK(net->listen(0, handle, &listener) == ncclSuccess, "listen");
  while (!sender || !receiver) {
    if (!sender) CHECK(net->connect(0, handle, &sender, NULL) == ncclSuccess, "connect");
    if (!receiver) CHECK(net->accept(listener, &receiver, NULL) == ncclSuccess, "accept");
  }
  CHECK(net->regMr(receiver, data, sizeof data, NCCL_PTR_HOST, &memory) == ncclSuccess, "regMr");
  /* memcheck knows that malloc's memory has no value yet. */
  void **request = malloc(sizeof *request), *datas[1] = {data}, *memories[1] = {memory};
  int sizes[1] = {sizeof data}, tags[1] = {0};
  CHECK(request, "malloc");
  CHECK(net->irecv(receiver, 1, datas, sizes, tags, memories, request) == ncclSuccess, "irecv");
  CHECK(*request, "the first receive has room");
  free(request);
  CHECK(net->closeRecv(receiver) == ncclSuccess && net->closeSend(sender) == ncclSuccess, "close");
  CHECK(net->closeListen(listener) == ncclSuccess, "closeListen");
  return 0;
}
