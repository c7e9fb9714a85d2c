#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace fulgur {

// What a source says about one option.
struct Setting {
  // A place in a list of objects: "[[callbacks]]". The first setting of an element has no key.
  struct Element {
    size_t index;
    std::string key;
  };

  std::string path;                  // the option's name, after those of its sections: "trainer.max_epochs"
  std::optional<std::string> text;   // the value, as set_field() reads it; nullopt: a value that no option can have
  std::string origin;                // "run.toml:3:1", "FULGUR_TRAINER__MAX_EPOCHS", "--max_epochs"
  std::string name;                  // the option as the user wrote it; where that says enough, it is the origin
  std::optional<Element> element{};  // unset: the option itself
  bool is_quoted = false;            // a file has it as a string, so that it cannot mean a number
};

}  // namespace fulgur
