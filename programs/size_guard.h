#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur::program {

// A condition on the sizes of inputs under which Python has traced a program, as torch.export writes it:
//   (L['x'].size()[0] % 4) == 0 and L['x'].size()[1]*L['pair']['left'].size()[0] > 24
// Other sizes would have taken another branch. It is of whole numbers, + - * // %, comparisons, not, and, or.
class SizeGuard {
 public:
  // A size of an input, by the name that the input has in nn::Program ("pair.left").
  struct InputSize {
    std::string input;
    size_t dim;
  };

  // Gives nothing for any other text.
  static std::optional<SizeGuard> parse(std::string_view text);

  const std::string& text() const { return text_; }
  const std::vector<InputSize>& sizes() const { return sizes_; }  // what the condition reads, perhaps several times

  // Whether the condition holds; `values` has one for each of sizes(). A division by zero, or a number that is too
  // large, is a condition that does not hold.
  bool holds(const std::vector<int64_t>& values) const;

 private:
  friend class SizeGuardParser;
  using Value = std::optional<int64_t>;  // null: there is none, as after a division by zero
  using Term = std::function<Value(const std::vector<int64_t>& values)>;

  std::string text_;
  std::vector<InputSize> sizes_;
  Term condition_;
};

}  // namespace fulgur::program
