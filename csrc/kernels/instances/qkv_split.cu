#include "kernels/qkv_split.cuh"
