#pragma once

#include <cstdint>
#include <string_view>

namespace fulgur {

// Cyclic redundancy checks of 32 bits, reflected, with all ones as initial value and final XOR.
uint32_t crc32(std::string_view bytes);   // polynomial 0x04C11DB7: PNG, zip (ISO 3309)
uint32_t crc32c(std::string_view bytes);  // polynomial 0x1EDC6F41, Castagnoli's: TFRecord (RFC 3720, B.4)

}  // namespace fulgur
