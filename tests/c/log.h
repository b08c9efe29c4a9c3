/* This program's implementation of NCCL's logger, and its checks. */
#ifndef LOG_H
#define LOG_H

#include "nccl_net_spark.h"

#include <stdio.h>
#include <stdlib.h>

/* The logger that the plugin calls: counts warnings and keeps the last one's text. Thread-safe. */
void log_line(ncclDebugLogLevel level, unsigned long flags, const char* file, int line, const char* fmt, ...);

/* Number of warnings since the last call of this function. */
int warnings(void);

/* True if the last warning contains the word. */
int last_warning_has(const char* word);

/* The last warning, for messages. */
const char* last_warning(void);

/* Ends the program with status 1, naming place and reason, unless the condition holds. */
#define CHECK(condition, ...)                                          \
  do {                                                                 \
    if (!(condition)) {                                                \
      fprintf(stderr, "%s:%d: check failed: %s: ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                    \
      fprintf(stderr, " (last warning: %s)\n", last_warning());        \
      _Exit(1);                                                        \
    }                                                                  \
  } while (0)

/* Checks that the call returns `result`, with one warning that names `function` and has `word`. */
#define REFUSED(call, result, function, word)                                                                    \
  do {                                                                                                           \
    (void)warnings();                                                                                            \
    ncclResult_t got_ = (call);                                                                                  \
    CHECK(got_ == (result), "%s gave %d", #call, got_);                                                          \
    int count_ = warnings();                                                                                     \
    CHECK(count_ == 1, "%s gave %d warnings", #call, count_);                                                    \
    CHECK(last_warning_has(function ": ") && last_warning_has(word), "%s: its warning lacks %s or %s", #call, function, word); \
  } while (0)

#endif
