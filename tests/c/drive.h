/* The parts of the program. Each ends the process with status 1 where something is not so. */
#ifndef DRIVE_H
#define DRIVE_H

#include "interface.h"
#include "log.h"

void drive_without_device(const struct interface* net);
void drive_with_device(const struct interface* net);

/* Calls that must be refused whatever the machine has: NULL where nothing may be NULL. */
void drive_null_arguments(const struct interface* net);

/* Loads, uses and unloads the library a hundred times, each in a thread that then ends. */
void drive_reload(const char* path);

/* A child after fork is refused everything and breaks nothing of its parent's. Needs a device. */
void drive_fork(const struct interface* net);

#endif
