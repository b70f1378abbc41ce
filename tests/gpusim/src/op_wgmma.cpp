#include "decoder.h"

namespace gpusim {

void add_wgmma(InstructionTable&) {}

}  // namespace gpusim
