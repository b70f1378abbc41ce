#include "kernels/attention_bwd_delta.cuh"
