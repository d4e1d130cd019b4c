/* See hash.c. */

#include <stdint.h>

#define WIDEST 2

uint64_t reshard_hash(const void *data, int64_t nbytes, int widest);
