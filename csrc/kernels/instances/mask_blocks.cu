#include "kernels/mask_blocks.cuh"
