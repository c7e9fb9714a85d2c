#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fulgur {

// A tensor in the pickle of a torch.save() file: a view of a storage, which is a separate record.
struct PickledTensor {
  std::string storage_type;  // "FloatStorage"
  std::string storage_key;   // the storage is the record data/<key>
  int64_t storage_numel = 0;
  int64_t offset = 0;  // position of the first element in the storage, in elements
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  bool is_conjugated = false;  // the values are the conjugates of the storage's
  bool is_negated = false;     // the values are the negatives of the storage's
};

using PickledTensors = std::vector<std::pair<std::string, PickledTensor>>;

// Writes a pickle of plain values, which Python's torch.load() accepts with weights_only=True, its default.
//   PickleWriter pickle;
//   pickle.begin_dict();
//   pickle.text("epoch");
//   pickle.integer(3);
//   pickle.end_dict();
//   std::string bytes = pickle.finish();
class PickleWriter {
 public:
  void none() { bytes_ += 'N'; }
  void boolean(bool value) { bytes_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value);
  void real(double value);
  void text(std::string_view utf8);  // throws CheckpointError for other bytes
  void tensor(const PickledTensor& tensor);

  void begin_dict() { bytes_ += "}("; }  // then name, value, name, value, ...
  void end_dict() { bytes_ += 'u'; }
  void begin_list() { bytes_ += "]("; }
  void end_list() { bytes_ += 'e'; }

  std::string finish();  // exactly one value must have been written

 private:
  void global(std::string_view module, std::string_view name);
  void integers(const std::vector<int64_t>& values);  // as a tuple

  std::string bytes_ = "\x80\x02";
};

// How much memory reading a pickle may cost. A value takes about 100 bytes.
struct PickleLimits {
  size_t max_values = 4 << 20;          // limits the values, and also the stack, the memo and the marks
  size_t max_copied_bytes = 256 << 20;  // bounds copies, as a few bytes may refer to a long text again and again
};

// Reads the state dict in a pickle: a dict of tensors by name, or the dict under "state_dict" in a dict, as Lightning
// writes it. Executes nothing from the pickle: only calls that make a tensor, a Parameter, a torch.Size or an
// OrderedDict are understood; other objects outside the state dict are skipped. Nested values need no stack. Throws
// CheckpointError, naming `file` and the reason: also if a name occurs twice, or a limit is exceeded. Source: Python's
// pickletools.py (the opcodes), torch/_utils.py.
PickledTensors read_pickled_state_dict(std::string_view bytes, std::string_view file, PickleLimits limits = {});

}  // namespace fulgur
