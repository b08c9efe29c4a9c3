#include "log.h"

#include <pthread.h>
#include <stdarg.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int warned;
static char last[4096] = "none";

void log_line(ncclDebugLogLevel level, unsigned long flags, const char* file, int line, const char* fmt, ...) {
  char text[4096];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  CHECK(strcmp(fmt, "%s") == 0, "the plugin's own text is the format: %s", fmt);
  CHECK(strncmp(text, "NET/Spark: ", 11) == 0, "the line does not name the network: %s", text);
  CHECK(file && *file && line >= 0 && flags, "file %s line %d flags %lx", file, line, flags);
  CHECK(level == NCCL_LOG_WARN || level == NCCL_LOG_INFO || level == NCCL_LOG_TRACE, "level %d", level);
  if (getenv("SPARK_TEST_VERBOSE")) fprintf(stderr, "[%d] %s:%d %s\n", level, file, line, text);
  if (level != NCCL_LOG_WARN) return;
  pthread_mutex_lock(&lock);
  warned++;
  memcpy(last, text, sizeof last);
  pthread_mutex_unlock(&lock);
}

int warnings(void) {
  pthread_mutex_lock(&lock);
  int count = warned;
  warned = 0;
  pthread_mutex_unlock(&lock);
  return count;
}

int last_warning_has(const char* word) { return strstr(last, word) != NULL; }

const char* last_warning(void) { return last; }
