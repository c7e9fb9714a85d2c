#include "fulgur/trainer/callback_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/early_stopping.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

// Keeps a number, unless it is 0.
template <class Kind>
class Keeps final : public Callback {
 public:
  explicit Keeps(int64_t value, std::string key = "") : value_(value), key_(std::move(key)) {}
  int64_t value() const { return value_; }
  std::string state_key() const override { return key_; }
  State state() const override {
    State state;
    if (value_ != 0) state.set("value", value_);
    return state;
  }
  void load_state(const State& state) override { value_ = state.get<int64_t>("value"); }

 private:
  int64_t value_;
  std::string key_;
};
struct A {};
struct B {};

using Made = std::vector<std::shared_ptr<Keeps<A>>>;

CallbackList list_of(const Made& made) { return {made.begin(), made.end()}; }

std::shared_ptr<Keeps<A>> keeps(int64_t value, std::string key = "") {
  return std::make_shared<Keeps<A>>(value, std::move(key));
}

// The values of fresh callbacks with these keys, after they got what `saved` has for them.
std::vector<int64_t> loaded(const State& saved, const std::vector<std::string>& keys) {
  Made made;
  for (const std::string& key : keys) made.push_back(keeps(-1, key));
  load_states(list_of(made), saved, /*warns=*/true);
  std::vector<int64_t> values;
  for (const auto& callback : made) values.push_back(callback->value());
  return values;
}

std::string warning_of(const State& saved, const std::vector<std::string>& keys) {
  ::testing::internal::CaptureStderr();
  loaded(saved, keys);
  return ::testing::internal::GetCapturedStderr();
}

TEST(CallbackStates, BelongToTheOptionsNotToTheOrder) {
  const State saved = states_of(list_of({keeps(1, "a=1"), keeps(2, "monitor=val/loss"), keeps(3)}));
  EXPECT_THAT(loaded(saved, {"a=1", "monitor=val/loss", ""}), ElementsAre(1, 2, 3));
  EXPECT_THAT(loaded(saved, {"", "monitor=val/loss", "a=1"}), ElementsAre(3, 2, 1));
  EXPECT_THAT(loaded(saved, {"monitor=val/loss"}), ElementsAre(2));
  EXPECT_THAT(loaded(saved, {"b=1", "a=1"}), ElementsAre(-1, 1));
}

TEST(CallbackStates, TheOnlyOneOfATypeMayChangeItsOptions) {
  EXPECT_THAT(loaded(states_of(list_of({keeps(5, "a=1")})), {"a=2"}), ElementsAre(5));
  EXPECT_THAT(loaded(states_of(list_of({keeps(5)})), {"a=2"}), ElementsAre(5));
  const auto other = std::make_shared<Keeps<B>>(-1);
  load_states({other}, states_of(list_of({keeps(5)})), /*warns=*/false);
  EXPECT_EQ(other->value(), -1);
}

TEST(CallbackStates, WarnsOfStatesThatNobodyTakes) {
  const State saved = states_of(list_of({keeps(1, "a=1"), keeps(2, "a=2")}));
  EXPECT_THAT(warning_of(saved, {"a=2"}),
              HasSubstr("the state of Keeps<fulgur::(anonymous namespace)::A>{a=1}, which"));
  EXPECT_EQ(warning_of(saved, {"a=2", "a=1"}), "");
}

TEST(CallbackStates, ReadsThoseOfVersion0ByTheirOrder) {
  State saved, value;
  for (const auto& [key, number] : {std::pair{"", 1}, {"-2", 2}, {"-3", 3}}) {
    value.set("value", int64_t{number});
    saved.set_child(std::string("Keeps<fulgur::(anonymous namespace)::A>") + key, value);
  }
  EXPECT_THAT(loaded(saved, {"a=1", "", "a=2"}), ElementsAre(1, 2, 3));
  EXPECT_THAT(loaded(saved, {"a=1"}), ElementsAre(1));
}

// Equal callbacks without a state at the start are no error, and lose nothing if they get one later.
TEST(CallbackStates, NumbersEqualKeys) {
  check_state_keys(list_of({keeps(0), keeps(0)}));
  const State saved = states_of(list_of({keeps(1), keeps(2), keeps(3, "a=1")}));
  EXPECT_THAT(loaded(saved, {"", "", "a=1"}), ElementsAre(1, 2, 3));
}

TEST(CallbackStates, RefusesEqualKeys) {
  check_state_keys(list_of({keeps(1), keeps(2, "a=1")}));
  check_state_keys({ModelCheckpoint::make(), ModelCheckpoint::make({.monitor = "val_loss"}),
                    ModelCheckpoint::make({.dirpath = "elsewhere"}), EarlyStopping::make({.monitor = "val_loss"})});
  EXPECT_THAT(message_of<SetupError>([] {
                check_state_keys({ModelCheckpoint::make({.monitor = "val_loss"}), ModelCheckpoint::make(),
                                  ModelCheckpoint::make({.monitor = "val_loss"})});
              }),
              HasSubstr("under the same name, ModelCheckpoint{monitor=val_loss}; give them different options"));
}

}  // namespace
}  // namespace fulgur
