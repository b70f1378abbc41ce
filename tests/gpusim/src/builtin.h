// Functions a kernel may call that the driver provides: printf and the report of a failed assert.
#pragma once

#include <string>

#include "program.h"

namespace gpusim {

// Null when there is none of this name. Operands: op.list holds constants with the places of results and
// parameters in local memory.
Handler find_builtin(const std::string& name);

}  // namespace gpusim
