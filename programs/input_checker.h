#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "fulgur/core/batch.h"
#include "fulgur/programs/exported_program.h"

namespace fulgur::program {

// Checks the inputs of one call against those for which the program was exported. Borrows the program.
class InputChecker {
 public:
  // `file` is where the program is from, for messages.
  InputChecker(const ExportedProgram& program, std::string file) : program_(program), file_(std::move(file)) {}

  // The tensor or number that the batch has for a user's input. Throws c10::ValueError that names the input if it is
  // missing, has another data type (floating-point types count as one) or number of dimensions than at export, or a
  // size that was not exported or contradicts the size of an earlier input.
  c10::IValue value_of(const Input& input, const Batch& batch);

  // Throws c10::ValueError if the batch has another number for an input that was fixed at export, by its place.
  void check_fixed(size_t place, const Batch& batch) const;

  // Throws c10::ValueError that names the condition and the sizes if Python would have refused the sizes of the inputs,
  // each of which value_of() has checked. A condition on an input that the batch lacks is not checked.
  void check_guards(const Batch& batch) const;

 private:
  struct Place {  // a size of an input
    const Input* input;
    std::optional<size_t> dim;  // null: the input is a number

    std::string text() const;
  };

  [[noreturn]] void fail_by_missing(const Input& input, const Batch& batch) const;
  c10::IValue number_of(const Input& input, const at::Tensor& tensor);
  void check_size(int64_t size, const Size& exported, Place place);
  void check_symbol(int64_t size, const SymbolicSize& exported, Place place);

  const ExportedProgram& program_;
  const std::string file_;
  std::map<std::string, std::pair<int64_t, Place>> known_;  // by symbol: its value, and where that is from
};

}  // namespace fulgur::program
