// What the kernels include, ahead of the pragma that names their target: an inline function of the standard library
// compiled for AVX-512 could otherwise be the copy that the linker keeps for the whole program.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "attention/dropout.h"
#include "attention/key_range.h"
#include "attention/mask.h"
#include "attention/online_softmax.h"
#include "cpu/attention.h"
#include "cpu/work_plan.h"
#include "params.h"
