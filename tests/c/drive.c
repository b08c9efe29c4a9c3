/*
 * Drives the plugin's network tables as NCCL does.
 *   drive LIBRARY
 * With SPARK_TEST_RDMA=1 in the environment it moves data over the machine's RDMA devices.
 * Otherwise it expects that the plugin finds none, and that every call then fails cleanly.
 */
#include "drive.h"

#include <dlfcn.h>
#include <string.h>

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library, "%s", dlerror());
  const char* rdma = getenv("SPARK_TEST_RDMA");
  int with_device = rdma && strcmp(rdma, "1") == 0;
  for (int version = OLDEST; version <= NEWEST; version++) {
    const struct interface* net = interface_of(library, version);
    CHECK(net, "the library does not export version %d", version);
    CHECK(strcmp(net->name, "Spark") == 0, "version %d calls the network %s", version, net->name);
    if (with_device) drive_with_device(net);
    else drive_without_device(net);
    printf("v%d ok\n", version);
  }
  if (with_device) {
    drive_fork(interface_of(library, NEWEST));
  } else {
    CHECK(dlclose(library) == 0, "%s", dlerror());
    drive_reload(argv[1]);
  }
  printf("done\n");
  return 0;
}
