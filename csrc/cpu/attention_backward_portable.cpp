// The backward for what every processor of an architecture has: vectors of 16 bytes, SSE2 on x86-64 and NEON on
// aarch64.
#include "cpu/backward_plan.h"
#include "cpu/kernel/includes.h"

#define MHA_CPU_TARGET portable
#define MHA_CPU_VECTOR_BYTES 16
#include "cpu/kernel/backward.h"
