#include "interface.h"

#include "log.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Sizes are int in v8. */
typedef int size_v8;
typedef size_t size_v9, size_v10, size_v11, size_v12;

#define EACH(V, INIT, INIT_CALL, FINALIZE, LISTEN, CONNECT_CTX, PH, PHS, PROPS)                                              \
  static const ncclNet_v##V##_t* table_v##V;                                                                                 \
  static ncclResult_t init_v##V(void** ctx, int traffic_class, ncclDebugLogger_t log) {                                      \
    (void)ctx, (void)traffic_class;                                                                                          \
    INIT return table_v##V->init INIT_CALL;                                                                                  \
  }                                                                                                                          \
  static ncclResult_t finalize_v##V(void* ctx) {                                                                             \
    (void)ctx;                                                                                                               \
    FINALIZE                                                                                                                 \
  }                                                                                                                          \
  static ncclResult_t devices_v##V(int* ndev) { return table_v##V->devices(ndev); }                                          \
  static ncclResult_t properties_v##V(int dev, struct device* d) {                                                           \
    ncclNetProperties_v##V##_t p;                                                                                            \
    memset(&p, 0xa5, sizeof p);                                                                                              \
    ncclResult_t result = table_v##V->getProperties(dev, &p);                                                                \
    if (result != ncclSuccess) return result;                                                                                \
    memset(d, 0, sizeof *d);                                                                                                 \
    d->name = p.name, d->pci_path = p.pciPath, d->guid = p.guid, d->ptr_support = p.ptrSupport;                              \
    d->reg_is_global = p.regIsGlobal, d->speed = p.speed, d->port = p.port, d->max_comms = p.maxComms;                       \
    d->max_recvs = p.maxRecvs, d->device_type = p.netDeviceType, d->device_version = p.netDeviceVersion;                     \
    d->latency = p.latency;                                                                                                  \
    PROPS return result;                                                                                                     \
  }                                                                                                                          \
  static ncclResult_t null_properties_v##V(int dev) { return table_v##V->getProperties(dev, NULL); }                         \
  static ncclResult_t listen_v##V(void* ctx, int dev, void* handle, void** listen_comm) {                                    \
    (void)ctx;                                                                                                               \
    return table_v##V->listen(LISTEN dev, handle, listen_comm);                                                              \
  }                                                                                                                          \
  static ncclResult_t connect_v##V(void* ctx, int traffic_class, int dev, void* handle, void** send_comm) {                  \
    (void)ctx, (void)traffic_class;                                                                                          \
    ncclNetDeviceHandle_v##V##_t* none = NULL;                                                                               \
    return table_v##V->connect(CONNECT_CTX, handle, send_comm, &none);                                                       \
  }                                                                                                                          \
  static ncclResult_t accept_v##V(void* listen_comm, void** recv_comm) {                                                     \
    ncclNetDeviceHandle_v##V##_t* none = NULL;                                                                               \
    return table_v##V->accept(listen_comm, recv_comm, &none);                                                                \
  }                                                                                                                          \
  static ncclResult_t isend_v##V(void* comm, void* data, size_t size, int tag, void* mhandle, void** request) {              \
    return table_v##V->isend(comm, data, (size_v##V)size, tag, mhandle PH, request);                                         \
  }                                                                                                                          \
  static ncclResult_t irecv_v##V(void* comm, int n, void** data, size_t* sizes, int* tags, void** mhandles,                  \
                                 void** request) {                                                                           \
    size_v##V own[16];                                                                                                       \
    for (int i = 0; sizes && i < n && i < 16; i++) own[i] = (size_v##V)sizes[i];                                             \
    return table_v##V->irecv(comm, n, data, sizes ? own : NULL, tags, mhandles PHS, request);                                \
  }                                                                                                                          \
  static const struct interface* open_v##V(void* library) {                                                                  \
    static struct interface it;                                                                                              \
    table_v##V = dlsym(library, "ncclNetPlugin_v" #V);                                                                       \
    if (!table_v##V) return NULL;                                                                                            \
    it = (struct interface){V, table_v##V->name, init_v##V, finalize_v##V, devices_v##V, properties_v##V,                    \
                            null_properties_v##V, listen_v##V, connect_v##V, accept_v##V, table_v##V->regMr,                 \
                            table_v##V->deregMr, isend_v##V, irecv_v##V, table_v##V->iflush, table_v##V->test,               \
                            table_v##V->closeSend, table_v##V->closeRecv, table_v##V->closeListen};                          \
    return &it;                                                                                                              \
  }

#define NOTHING
#define NONE return ncclSuccess;
/* Checks of the properties that not all versions have. */
#define SINCE_9                                                                                                              \
  CHECK(p.forceFlush == 0 && p.vProps.ndevs == 1 && p.vProps.devs[0] == dev, "merged from itself");                          \
  CHECK(p.maxP2pBytes >= 1 << 30 && p.maxP2pBytes <= 1ULL << 40, "max %zu", p.maxP2pBytes);                                  \
  CHECK(p.maxCollBytes >= 1 << 20 && p.maxCollBytes <= 1ULL << 40, "max %zu", p.maxCollBytes);
#define SINCE_11 SINCE_9 CHECK(p.maxMultiRequestSize == 1, "%d requests in one", p.maxMultiRequestSize);
#define SINCE_12 SINCE_11 CHECK(p.railId == -1 && p.planeId == -1, "rail %d, plane %d", p.railId, p.planeId);
#define CONFIG(V) ncclNetCommConfig_v##V##_t config = {traffic_class};
#define CONFIG_10 (&(ncclNetCommConfig_v10_t){traffic_class})
#define COMMA ,
#define PHANDLE COMMA NULL

EACH(8, NOTHING, (log), NONE, NOTHING, dev, NOTHING, NOTHING, NOTHING)
EACH(9, NOTHING, (log), NONE, NOTHING, dev, NOTHING, NOTHING, SINCE_9)
EACH(10, NOTHING, (log, NULL), NONE, NOTHING, dev COMMA CONFIG_10, PHANDLE, PHANDLE, SINCE_9)
EACH(11, CONFIG(11), (ctx, 1, &config, log, NULL), return table_v11->finalize(ctx);, ctx COMMA, ctx COMMA dev, PHANDLE,
     PHANDLE, SINCE_11)
EACH(12, CONFIG(12), (ctx, 1, &config, log, NULL), return table_v12->finalize(ctx);, ctx COMMA, ctx COMMA dev, PHANDLE,
     PHANDLE, SINCE_12)

static const struct interface* (*const open_version[])(void* library) = {open_v8, open_v9, open_v10, open_v11, open_v12};
const int NEWEST = OLDEST + sizeof open_version / sizeof *open_version - 1;

const struct interface* interface_of(void* library, int version) {
  return version < OLDEST || version > NEWEST ? NULL : open_version[version - OLDEST](library);
}
