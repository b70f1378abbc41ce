// Names shared by integers, floats and packed halves: the type decides which file describes the instruction.
#include "decoder.h"

namespace gpusim {

namespace {

void select_arithmetic(Decoder& d) {
  switch (d.peek_type()) {
    case Type::f32:
    case Type::f64: return float_arithmetic(d);
    case Type::f16:
    case Type::f16x2:
    case Type::bf16:
    case Type::bf16x2: return half_arithmetic(d);
    default: return integer_arithmetic(d);
  }
}

}  // namespace

void add_arithmetic(InstructionTable& t) {
  for (const char* name : {"add", "sub", "mul", "mad", "fma", "div", "abs", "neg", "min", "max", "ex2", "tanh"}) {
    t[name] = select_arithmetic;
  }
}

}  // namespace gpusim
