#pragma once

#include <cstdint>
#include <span>

namespace fulgur {

// The orientation that the EXIF segment of a JPEG file gives, from 1 (upright) to 8: how the picture has to be turned
// or mirrored to be seen as it was taken. Returns 1 if there is no such segment or it is damaged: metadata is no reason
// to refuse a picture. Reads nothing outside `jpeg` and allocates nothing.
// Source: CIPA DC-008 (EXIF 2.3), section 4.6; TIFF 6.0, section 2.
int exif_orientation(std::span<const uint8_t> jpeg);

}  // namespace fulgur
