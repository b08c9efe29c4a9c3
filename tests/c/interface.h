/* One interface over all versions of the plugin's table, so that one program drives them all. */
#ifndef INTERFACE_H
#define INTERFACE_H

#include "nccl_net_spark.h"

enum { OLDEST = 8 };
extern const int NEWEST;

/* The device properties that all versions have. */
struct device {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, speed, port, max_comms, max_recvs, device_type, device_version;
  float latency;
};

/* A version without an argument ignores it; a version without finalize returns success for it.
 * `traffic_class` is passed to init from v11 on, and to connect in v10. */
struct interface {
  int version;
  const char* name;
  ncclResult_t (*init)(void** ctx, int traffic_class, ncclDebugLogger_t log);
  ncclResult_t (*finalize)(void* ctx);
  ncclResult_t (*devices)(int* ndev);
  ncclResult_t (*properties)(int dev, struct device* device);
  ncclResult_t (*null_properties)(int dev);
  ncclResult_t (*listen)(void* ctx, int dev, void* handle, void** listen_comm);
  ncclResult_t (*connect)(void* ctx, int traffic_class, int dev, void* handle, void** send_comm);
  ncclResult_t (*accept)(void* listen_comm, void** recv_comm);
  ncclResult_t (*reg_mr)(void* comm, void* data, size_t size, int type, void** mhandle);
  ncclResult_t (*dereg_mr)(void* comm, void* mhandle);
  ncclResult_t (*isend)(void* comm, void* data, size_t size, int tag, void* mhandle, void** request);
  ncclResult_t (*irecv)(void* comm, int n, void** data, size_t* sizes, int* tags, void** mhandles, void** request);
  ncclResult_t (*iflush)(void* comm, int n, void** data, int* sizes, void** mhandles, void** request);
  ncclResult_t (*test)(void* request, int* done, int* sizes);
  ncclResult_t (*close_send)(void* comm);
  ncclResult_t (*close_recv)(void* comm);
  ncclResult_t (*close_listen)(void* comm);
};

/* Finds the table of a version in a loaded library. Only the latest result for a version is
 * valid. */
const struct interface* interface_of(void* library, int version);

#endif
