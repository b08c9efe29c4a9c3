/* The parts of the program. Each ends the process with status 1 when a check fails. */
#ifndef DRIVE_H
#define DRIVE_H

#include "interface.h"
#include "log.h"

void drive_without_device(const struct interface* net);
void drive_with_device(const struct interface* net);

/* Calls that must be refused on every machine: NULL where NULL is not allowed. */
void drive_null_arguments(const struct interface* net);

/* Loads, uses and unloads the library a hundred times, each in a thread that then ends. */
void drive_reload(const char* path);

/* In a child after fork every call is refused, and the parent's state stays intact. Needs a
 * device. */
void drive_fork(const struct interface* net);

#endif
