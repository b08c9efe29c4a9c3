/*
 * Drives the library's tuner as NCCL does.
 *   tuner LIBRARY VERSION SCENE
 * Scenes: without-network (it is not started, then fails to start), with-network
 * (NCCL_SPARK_TUNER=on and a table with the one row all_reduce@2:1000-1999=ring/ll/2).
 */
#include "log.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ALGORITHMS = 7, PROTOCOLS = 3, ENTRIES = ALGORITHMS * PROTOCOLS, RING = 1, LL = 0, UNTOUCHED = 77 };

/* Initial value of a pointer that the tuner has to set to NULL. */
#define STALE ((void*)(uintptr_t)0x5a5a5a58)
#define OK(call) CHECK((call) == ncclSuccess, "%s", #call)

static int version;
static const ncclTuner_v4_t* v4;
static const ncclTuner_v5_t* v5;
static const ncclTuner_v6_t* v6;
static const ncclTuner_v7_t* v7;
static const ncclNet_v10_t* v10;
static const ncclNet_v11_t* v11;

static void find_tables(void* library) {
  v4 = dlsym(library, "ncclTunerPlugin_v4"), v5 = dlsym(library, "ncclTunerPlugin_v5");
  v6 = dlsym(library, "ncclTunerPlugin_v6"), v7 = dlsym(library, "ncclTunerPlugin_v7");
  v10 = dlsym(library, "ncclNetPlugin_v10"), v11 = dlsym(library, "ncclNetPlugin_v11");
  CHECK(v4 && v5 && v6 && v7 && v10 && v11, "the library lacks a table");
  CHECK(!v6->getChunkSize && !v7->getChunkSize, "NCCL would call getChunkSize");
  const char* names[] = {v4->name, v5->name, v6->name, v7->name};
  const char* name = names[version - 4];
  CHECK(strcmp(name, "Spark") == 0, "the tuner is called %s", name);
}

/* The arguments that all versions have. v4 ignores the id. */
static ncclResult_t init(void** ctx, uint64_t id, size_t ranks, size_t nodes, ncclDebugLogger_t log) {
  static ncclNvlDomainInfo_v5_t domains = {2, 1, 1};
  static ncclTunerConstants_v5_t constants;
  static ncclTunerConstants_v7_t constants_v7;
  switch (version) {
  case 4: return v4->init(ranks, nodes, log, ctx);
  case 5: return v5->init(ctx, id, ranks, nodes, log, &domains, &constants);
  case 6: return v6->init(ctx, id, ranks, nodes, log, NULL, NULL);
  default: return v7->init(ctx, id, ranks, nodes, log, &domains, &constants_v7);
  }
}

static ncclResult_t ask(void* ctx, ncclFunc_t collective, size_t bytes, float* costs, int algorithms, int protocols,
                        int* channels) {
  float** table = (float**)costs;
  switch (version) {
  case 4: return v4->getCollInfo(ctx, collective, bytes, 1, table, algorithms, protocols, 0, channels);
  case 5: return v5->getCollInfo(ctx, collective, bytes, 1, table, algorithms, protocols, 0, channels);
  case 6: return v6->getCollInfo(ctx, collective, bytes, 1, table, algorithms, protocols, 0, channels);
  default: return v7->getCollInfo(ctx, collective, bytes, 1, table, algorithms, protocols, 0, channels);
  }
}

static ncclResult_t finalize(void* ctx) {
  switch (version) {
  case 4: return v4->destroy(ctx);
  case 5: return v5->finalize(ctx);
  case 6: return v6->finalize(ctx);
  default: return v7->finalize(ctx);
  }
}

/* NCCL's table of costs with guard entries behind it, and a copy from before the tuner's call. */
struct question {
  float costs[ENTRIES + PROTOCOLS], before[ENTRIES + PROTOCOLS];
  int channels;
};

static struct question fresh(void) {
  struct question q = {.channels = UNTOUCHED};
  for (int i = 0; i < ENTRIES + PROTOCOLS; i++) q.before[i] = i % 4 == 1 ? -1.0f : 10.0f + (float)i;
  q.before[RING * PROTOCOLS + LL] = 12.5f;
  memcpy(q.costs, q.before, sizeof q.costs);
  return q;
}

#define CHECK_UNTOUCHED(q)                                                                   \
  do {                                                                                       \
    CHECK(memcmp((q).costs, (q).before, sizeof (q).costs) == 0, "a cost was changed");       \
    CHECK((q).channels == UNTOUCHED, "nChannels was set to %d", (q).channels);               \
  } while (0)

static struct question asked(void* ctx, ncclFunc_t collective, size_t bytes) {
  struct question q = fresh();
  OK(ask(ctx, collective, bytes, q.costs, ALGORITHMS, PROTOCOLS, &q.channels));
  return q;
}

static void check_inert(void* ctx) {
  CHECK(ctx == NULL, "a communicator that is left to NCCL got a context");
  struct question q = asked(ctx, ncclFuncAllReduce, 1500);
  CHECK_UNTOUCHED(q);
}

/* One entry is 0, the number of channels is the row's, and nothing else changed. */
static void check_acts(void* ctx) {
  CHECK(ctx && ctx != STALE, "init made no context: %p", ctx);
  for (size_t bytes = 1000; bytes <= 1999; bytes += 999) {
    struct question q = asked(ctx, ncclFuncAllReduce, bytes);
    CHECK(q.costs[RING * PROTOCOLS + LL] == 0.0f && q.channels == 2, "costs[ring][ll] %g, %d channels",
          (double)q.costs[RING * PROTOCOLS + LL], q.channels);
    q.costs[RING * PROTOCOLS + LL] = q.before[RING * PROTOCOLS + LL], q.channels = UNTOUCHED;
    CHECK_UNTOUCHED(q);
  }
}

static void check_leaves_the_rest(void* ctx) {
  const size_t outside[] = {0, 1, 999, 2000, (size_t)1 << 40, SIZE_MAX};
  for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
    struct question q = asked(ctx, ncclFuncAllReduce, outside[i]);
    CHECK_UNTOUCHED(q);
  }
  for (int collective = -2; collective < 20; collective++) {
    struct question q = asked(ctx, (ncclFunc_t)collective, 1500);
    if (collective != ncclFuncAllReduce) CHECK_UNTOUCHED(q);
  }
  struct question q = fresh();
  q.costs[RING * PROTOCOLS + LL] = q.before[RING * PROTOCOLS + LL] = -1.0f;
  OK(ask(ctx, ncclFuncAllReduce, 1500, q.costs, ALGORITHMS, PROTOCOLS, &q.channels));
  CHECK_UNTOUCHED(q);
}

/* Expects `told` warnings in total, because each kind of misuse warns once in a process. */
static void check_misuse(void* ctx, int told) {
  const int shapes[][2] = {{6, 3}, {8, 3}, {7, 2}, {7, 4}, {3, 7}, {0, 0}, {-7, -3}};
  (void)warnings();
  for (int again = 0; again < 2; again++) {
    struct question q = fresh();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
      OK(ask(ctx, ncclFuncAllReduce, 1500, q.costs, shapes[i][0], shapes[i][1], &q.channels));
    OK(ask(ctx, ncclFuncAllReduce, 1500, NULL, ALGORITHMS, PROTOCOLS, &q.channels));
    OK(ask(ctx, ncclFuncAllReduce, 1500, q.costs, ALGORITHMS, PROTOCOLS, NULL));
    CHECK_UNTOUCHED(q);
  }
  int count = warnings();
  CHECK(count == told, "%d warnings", count);
}

/* Uses a context that init did not return: a pointer to memory of this program. */
static void check_foreign(void) {
  static uint64_t stray[8];
  (void)warnings();
  for (int again = 0; again < 2; again++) {
    struct question q = asked(stray, ncclFuncAllReduce, 1500);
    CHECK_UNTOUCHED(q);
    q = asked((char*)stray + 1, ncclFuncAllReduce, 1500);
    CHECK_UNTOUCHED(q);
  }
  int count = warnings();
  CHECK(count == 1 && last_warning_has("tuner getCollInfo: context is an unknown object"), "%d warnings", count);
  REFUSED(finalize(stray), ncclSuccess, "tuner finalize", "context is an unknown object");
}

static void check_nulls(void) {
  REFUSED(init(NULL, 1, 2, 2, log_line), ncclSuccess, "tuner init", "context is NULL");
  OK(finalize(NULL));
  (void)warnings();
  OK(ask(NULL, ncclFuncAllReduce, 1500, NULL, ALGORITHMS, PROTOCOLS, NULL));
  CHECK(warnings() == 0, "a NULL context is no misuse");
  check_misuse(NULL, 0);
}

/* A second logger, which must not replace that of the network's init. */
static void other_logger(ncclDebugLogLevel level, unsigned long flags, const char* file, int line, const char* fmt, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)fmt;
  CHECK(0, "the tuner's init replaced the logger");
}

static void without_network(void) {
  void* ctx = STALE;
  OK(init(&ctx, 1, 2, 2, log_line));
  check_inert(ctx);
  ctx = STALE;
  OK(init(&ctx, 1, 2, 2, NULL));
  check_inert(ctx);
  check_nulls();
  check_foreign();
  void* net = NULL;
  CHECK(v11->init(&net, 1, NULL, log_line, NULL) != ncclSuccess, "the network came up");
  ctx = STALE;
  OK(init(&ctx, 1, 2, 2, other_logger));
  check_inert(ctx);
  OK(finalize(ctx));
}

/* Starts the network as NCCL does for a communicator. If NCCL has chosen another network, it does
 * not read the properties (`is_taken` is 0). */
static void start_network(uint64_t id, int is_taken) {
  void* net = NULL;
  int count = 0;
  if (version == 4) OK(v10->init(log_line, NULL));
  else OK(v11->init(&net, id, NULL, log_line, NULL));
  OK(v11->devices(&count));
  CHECK(count == 1, "%d devices", count);
  ncclNetProperties_v11_t properties;
  if (is_taken) OK(v11->getProperties(0, &properties));
}

static void* tuner_for(uint64_t id, size_t ranks, size_t nodes) {
  void* ctx = STALE;
  OK(init(&ctx, id, ranks, nodes, other_logger));
  return ctx;
}

/* In the child of a process that uses the network, the tuner changes nothing. It does not call
 * NCCL's logger, because the logger's lock may have been copied while it was held. */
static void check_fork(void* ctx) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0, "fork");
  if (child == 0) {
    (void)warnings();
    void* own = STALE;
    OK(init(&own, 1, 2, 2, other_logger));
    check_inert(own);
    OK(init(NULL, 1, 2, 2, other_logger));
    struct question q = asked(ctx, ncclFuncAllReduce, 1500);
    CHECK_UNTOUCHED(q);
    OK(finalize(ctx));
    OK(finalize(NULL));
    CHECK(warnings() == 0, "the child called NCCL's logger");
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child: %x", status);
  check_acts(ctx);
}

static void with_network(void) {
  start_network(1, 1);
  void* ctx = tuner_for(1, 2, 2);
  check_acts(ctx);
  check_leaves_the_rest(ctx);
  check_misuse(ctx, 2);
  check_foreign();
  check_nulls();

  check_inert(tuner_for(1, 2, 1));
  check_inert(tuner_for(1, 4, 2));
  check_inert(tuner_for(1, 1, 1));
  check_inert(tuner_for(1, 3, 3));
  check_inert(tuner_for(1, 0, 0));
  check_inert(tuner_for(1, SIZE_MAX, SIZE_MAX));
  if (version > 4) {
    check_inert(tuner_for(2, 2, 2));
    start_network(3, 0);
    check_inert(tuner_for(3, 2, 2));
    start_network(4, 1);
    check_inert(tuner_for(3, 2, 2));
  }

  void* more[3] = {tuner_for(1, 2, 2), tuner_for(version > 4 ? 4 : 1, 2, 2), tuner_for(1, 2, 2)};
  for (int i = 0; i < 3; i++) check_acts(more[i]);
  OK(finalize(more[1]));
  check_acts(more[0]), check_acts(more[2]);
  OK(finalize(more[0]));
  OK(finalize(more[2]));
  check_acts(ctx);
  check_fork(ctx);
  OK(finalize(ctx));
}

int main(int argc, char** argv) {
  CHECK(argc == 4, "usage: %s LIBRARY VERSION SCENE", argv[0]);
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library, "%s", dlerror());
  version = atoi(argv[2]);
  CHECK(version >= 4 && version <= 7, "version %s", argv[2]);
  find_tables(library);
  if (strcmp(argv[3], "without-network") == 0) without_network();
  else if (strcmp(argv[3], "with-network") == 0) with_network();
  else CHECK(0, "scene %s", argv[3]);
  printf("done\n");
  return 0;
}
