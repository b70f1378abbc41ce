// Code that nvcc compiles for both sides, and that a plain C++ compiler takes as it is.
#pragma once

#ifdef __CUDACC__
#define MHA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MHA_HOST_DEVICE inline
#endif
