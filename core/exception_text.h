#pragma once

#include <exception>
#include <string>

namespace fulgur {

// What an exception says: without libtorch's stack trace, and with the type of one that is no std::exception. If it
// came out of a Trainer, that begins with its place:
//   in validation_step (sanity check, epoch 0, batch 0 with x [50, 16] float): mat1 and mat2 shapes cannot be
//   multiplied
// For a program that catches what fit throws: text_of(std::current_exception()).
std::string text_of(const std::exception_ptr& error);

// Notes where an exception came from, for text_of(). The exception itself travels as it was thrown: C++ has no way to
// add to one of any type, and callers catch it by its type. The first place stays, which is the innermost. A process
// remembers the places of the last few exceptions. From any thread.
void note_place(const std::exception_ptr& error, std::string place);

}  // namespace fulgur
