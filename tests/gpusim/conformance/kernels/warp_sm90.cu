// What sm_90 adds to the exchange between lanes.
#include "form.cuh"

extern "C" __global__ void elect_sync(b32 mask, b32* leader, b32* elected) {
  if (!(mask >> (threadIdx.x % 32) & 1)) return;
  b32 d, p;
  asm volatile("{\n.reg .pred p;\nelect.sync %0|p, %2;\nselp.b32 %1, 1, 0, p;\n}" : "=r"(d), "=r"(p) : "r"(mask));
  leader[INDEX] = d;
  elected[INDEX] = p;
}
