// mbarriers, as sm_90 adds to them: transaction bytes, try_wait, arrivals by the count.
#include "async_sm90.cuh"

extern "C" __global__ void transactions(b32* log) {
  __shared__ b64 place;
  const b32 barrier = shared_address(&place);
  init_for_copies(barrier, 2);
  *log++ = try_parity(barrier, 1);
  const b64 state = arrive_expect(barrier, 96);
  *log++ = test(barrier, state);
  arrive(barrier);  // all have arrived, bytes are missing
  *log++ = test(barrier, state);
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 32;" ::"r"(barrier) : "memory");
  *log++ = test(barrier, state);
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 64;" ::"r"(barrier) : "memory");
  *log++ = test(barrier, state);
  *log++ = try_parity(barrier, 0);
  *log++ = test_parity(barrier, 1);
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(barrier) : "memory");
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" ::"r"(barrier) : "memory");
  *log++ = test_parity(barrier, 1);
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(barrier) : "memory");
  *log++ = test_parity(barrier, 1);
  b32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 1, 1000;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier)
               : "memory");
  *log++ = done;
  const b64 last = arrive(barrier);
  arrive(barrier);
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "l"(last)
               : "memory");
  *log++ = done;
}
