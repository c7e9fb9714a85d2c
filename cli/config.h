#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/environment_variables.h"
#include "fulgur/base/setting.h"

namespace fulgur {

// The options of a program, which sources set in turn. The fields of the section "trainer" are also found without its
// name, unless an option outside of sections has that name: max_epochs, strategy.timeout_s.
class Config {
 public:
  struct Option {
    Field field;       // has the whole path as its name: "trainer.max_epochs"
    FieldValue value;  // in the options struct
    std::string path{}, help{}, unit{};
    std::string origin = "default";  // the last source that set it
    std::string name{};              // as that source has written it
    bool is_default() const { return name.empty(); }
  };

  // The options struct must outlive the Config.
  explicit Config(DescribeFields describe);

  const std::deque<Option>& options() const { return options_; }

  // The name that a flag has: without "trainer." where that is enough.
  std::string flag_of(const Option& option) const;

  // The advice for an unknown option or flag: "did you mean 'max_epochs'?", or where to look.
  std::string advice_for(std::string_view path) const;

  // Sets what `settings` say, in their order. What is wrong is appended to `problems`.
  void set(std::span<const Setting> settings, std::vector<std::string>& problems);

  // Sets what `settings` say of options that nothing has set.
  void fill(std::span<const Setting> settings, std::vector<std::string>& problems);

  // Finds the problems that show only after all options are set: options that the chosen strategy, for example, does
  // not use, and values that it cannot have.
  void check(std::vector<std::string>& problems);

  // Makes the objects of lists and adds them to the options struct, unless there are problems. Appends new problems.
  void make_objects(std::vector<std::string>& problems);

  // All options as a TOML file, each with its origin in a comment. A program that reads it has the same options.
  std::string to_toml() const { return to_toml_of(""); }

 private:
  // An object of a list.
  struct Element {
    std::string origin;
    std::optional<Setting> type{};
    std::vector<Setting> settings{};
    std::unique_ptr<ObjectDraft> draft{};
    std::unique_ptr<Config> options{};  // fields of `draft`
  };
  struct List {
    std::string path;
    ObjectList objects;
    std::vector<Element> elements{};
    std::string named_as{};  // the name that the list has in the file of its elements
    std::string add(const Setting& setting);
  };

  static void make_draft(const List& list, Element& element, std::vector<std::string>& problems);
  Option* find(std::string_view path);
  std::string why_unknown(std::string_view path);
  bool has_section(std::string_view path) const;

  // The text of to_toml(). `table` is the list whose element has the options, such as "trainer.callbacks"; empty: they
  // are the program's own.
  std::string to_toml_of(const std::string& table) const;

  DescribeFields describe_;
  std::deque<Option> options_;  // a deque: fields hold views of paths
  std::vector<List> lists_{};
};

// The settings of variables such as FULGUR_TRAINER__MAX_EPOCHS, which is trainer.max_epochs, and FULGUR__SEED, which is
// the seed outside of sections. Variables of FULGUR_ without "__" are no options.
std::vector<Setting> settings_of(const EnvironmentVariables& variables);

// Adds to `problems` the variables that write an option's dots as "_", or leave out its section:
// FULGUR_TRAINER_MAX_STEPS and FULGUR_MAX_STEPS, where FULGUR_TRAINER__MAX_STEPS is meant, and FULGUR_SEED, where
// FULGUR__SEED is meant. A variable that fulgur itself reads, such as FULGUR_TRACE, is never a problem.
void refuse_variables_without_dots(const EnvironmentVariables& variables, const Config& config,
                                   std::vector<std::string>& problems);

}  // namespace fulgur
