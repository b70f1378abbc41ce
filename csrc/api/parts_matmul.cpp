// matmul: check -> allocate -> fill params -> call the launcher.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>

#include "api/checks.h"
#include "api/device.h"
#include "api/parts.h"
#include "kernels/matmul.h"

namespace mha_ext {

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, bool transpose_a, bool transpose_b, double alpha,
                  int64_t num_heads_out, at::ScalarType out_dtype, bool allow_tf32,
                  const std::optional<at::Tensor>& k_lengths) {
  check_rank(a, "a", 4);
  check_rank(b, "b", 4);
  check_floating(a, "a");
  check_dtype(b, "b", {a.scalar_type()});
  check_device(b, "b", a, "a");
  check_unit_last_stride(a, "a");
  check_unit_last_stride(b, "b");
  check_dtype(out_dtype, "out_dtype", {a.scalar_type(), accumulator(a.scalar_type())});
  TORCH_CHECK_VALUE(!(transpose_a && transpose_b), "transpose_a, transpose_b: expected at most one of them, got both");

  const int64_t batch = a.size(0), m = a.size(transpose_a ? 3 : 2), k = a.size(transpose_a ? 2 : 3);
  const int64_t n = b.size(transpose_b ? 2 : 3), b_k = b.size(transpose_b ? 3 : 2);
  TORCH_CHECK_VALUE(b.size(0) == batch && b_k == k, "a, b: expected the same batch size and length of k, got shapes ",
                    a.sizes(), transpose_a ? " (transposed)" : "", " and ", b.sizes(),
                    transpose_b ? " (transposed)" : "");
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  const auto too_long = [](int64_t size) { return size > kMaxSize; };
  TORCH_CHECK_VALUE(std::none_of(a.sizes().begin(), a.sizes().end(), too_long) &&
                        std::none_of(b.sizes().begin(), b.sizes().end(), too_long),
                    "a, b: expected axes below 2^31, got shapes ", a.sizes(), " and ", b.sizes());
  check_operand(k_lengths, "k_lengths", {batch}, at::kLong, a, "a");

  // Which heads an output head reads: its share of each operand, or a group that it sums.
  const int64_t heads_a = a.size(1), heads_b = b.size(1);
  const auto divides = [](int64_t part, int64_t whole) { return part == whole || (part > 0 && whole % part == 0); };
  const bool shares =
      num_heads_out == std::max(heads_a, heads_b) && divides(heads_a, num_heads_out) && divides(heads_b, num_heads_out);
  const bool sums = heads_a == heads_b && num_heads_out > 0 && divides(num_heads_out, heads_a);
  const bool none = num_heads_out == 0 && (heads_a == 0 || heads_b == 0);
  TORCH_CHECK_VALUE(shares || sums || none,
                    "num_heads_out: expected the larger head count, a multiple of the other, or a divisor of both when "
                    "they are equal, or 0 when an operand has no heads; got ",
                    num_heads_out, " for ", heads_a, " heads of a and ", heads_b, " of b");

  const c10::DeviceGuard guard(a.device());
  at::Tensor c = at::empty({batch, num_heads_out, m, n}, a.options().dtype(out_dtype));
  if (c.numel() == 0) return c;

  MatmulParams params = {};
  params.a = a.const_data_ptr();
  params.b = b.const_data_ptr();
  params.c = c.mutable_data_ptr();
  params.a_strides = strides3(a);
  params.b_strides = strides3(b);
  params.c_strides = strides3(c);
  params.batch = batch;
  params.heads_c = num_heads_out;
  params.m = m;
  params.n = n;
  params.k = k;
  params.k_lengths = int64_pointer(k_lengths);
  params.a_divisor = static_cast<int>(shares ? num_heads_out / heads_a : 1);
  params.b_divisor = static_cast<int>(shares ? num_heads_out / heads_b : 1);
  params.group_sum = static_cast<int>(shares ? 1 : heads_a / num_heads_out);
  params.alpha = alpha;
  params.transpose_a = transpose_a;
  params.transpose_b = transpose_b;
  params.allow_tf32 = allow_tf32;
  params.in_dtype = to_dtype(a.scalar_type());
  params.out_dtype = to_dtype(out_dtype);
  matmul(params, device::current_stream(a.device()));
  return c;
}

}  // namespace mha_ext
