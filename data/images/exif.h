#pragma once

#include <cstdint>
#include <span>

namespace fulgur {

// The orientation that the EXIF segment of a JPEG file gives, from 1 (upright) to 8: how the picture has to be turned
// or mirrored to be seen as it was taken. 1 if there is no such segment or it cannot be understood: the picture is the
// same, whatever its notes say. Reads nothing outside `jpeg` and allocates nothing.
// Source: CIPA DC-008 (EXIF 2.3), section 4.6; TIFF 6.0, section 2.
int exif_orientation(std::span<const uint8_t> jpeg);

}  // namespace fulgur
