// Finds the PTX text in the fat binary that nvcc puts into an object file.
#pragma once

#include <string>

namespace gpusim {

// `wrapper` is what __cudaRegisterFatBinary receives. Throws Error that says why when there is no plain PTX.
std::string ptx_of_fat_binary(const void* wrapper);

}  // namespace gpusim
