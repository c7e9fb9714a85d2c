#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace fulgur {

// What a source says about one option.
struct Setting {
  // A place in a list of objects: "[[callbacks]]".
  struct Element {
    size_t index;
    std::string key;
    bool begins = false;  // the element begins here; there is no key
  };

  // How a file writes a value, if that says more than the text does.
  enum class Form : uint8_t {
    any,
    quoted,       // a string, which cannot mean a number
    real,         // a number with a fraction or an exponent, whose text may have lost digits: 1.10
    empty_list,   // []
    empty_table,  // a section without an option
  };

  std::string path;                  // the option's name, after those of its sections: "trainer.max_epochs"
  std::optional<std::string> text;   // the value, as set_field() reads it; nullopt: a value that no option can have
  std::string origin;                // "run.toml:3:1", "FULGUR_TRAINER__MAX_EPOCHS", "--max_epochs"
  std::string name;                  // the option as the user wrote it; the same as `origin` if that shows it
  std::optional<Element> element{};  // unset: the option itself
  Form form = Form::any;
};

}  // namespace fulgur
