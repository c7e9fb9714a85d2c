#pragma once

#include <exception>
#include <string>

namespace fulgur {

// The message of an exception, without libtorch's stack trace; for an exception that is not a std::exception, its
// type. If a Trainer threw the exception, the text begins with its place:
//   in validation_step (sanity check, epoch 0, batch 0 with x [50, 16] float): mat1 and mat2 shapes cannot be
//   multiplied
// For a program that catches what fit throws: text_of(std::current_exception()).
std::string text_of(const std::exception_ptr& error);

// Notes where an exception came from, for text_of(). The exception itself travels as it was thrown: C++ cannot add
// text to an exception of an arbitrary type, and callers catch it by its type. The first place is kept, which is the
// innermost. A process remembers the places of the last few exceptions. Threading: any thread.
void note_place(const std::exception_ptr& error, std::string place);

// Notes what the exception was about, such as "sample 17 of Photos", which is told after its place. The first detail is
// kept. Threading: any thread.
void note_detail(const std::exception_ptr& error, std::string detail);

}  // namespace fulgur
