#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

#include "fulgur/checkpoint/formats/safetensors.h"

namespace fulgur {

// The array of a file of numpy.save(), as a view of the mapped file (MemoryMap): nothing is read before it is used, and
// the file may be larger than memory. An array in Fortran order keeps its shape, and has the strides of that order.
// Throws std::runtime_error that names the file and the reason; parse_npy_header() says what is refused.
at::Tensor read_npy(const std::filesystem::path& file);

// The arrays of a file of numpy.savez() or numpy.savez_compressed(), in the file's order, under numpy's names. All of
// them are read, and their CRC-32 is checked. An array that is stored uncompressed and happens to lie aligned in the
// file, as bytes always do, is a view of the mapped file; every other array is a copy: save arrays that should not be
// in memory as .npy. Throws std::runtime_error that names the file, the entry and the reason: the file is no zip or
// damaged, or an entry is no .npy file, is there twice, has a path that leaves the archive, is encrypted, or claims
// more bytes than its deflated data can hold.
NamedTensors read_npz(const std::filesystem::path& file);

}  // namespace fulgur
