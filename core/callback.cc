#include "fulgur/core/callback.h"

#include <utility>

#include "fulgur/base/first_error.h"

namespace fulgur {

void TrainerControl::log_histogram(std::string_view name, const at::Tensor& values) {
  if (takes_records()) send({std::string(name), histogram_of(values)});
}

void TrainerControl::log_text(std::string_view name, std::string text) {
  if (takes_records()) send({std::string(name), Text{std::move(text)}});
}

void TrainerControl::log_image(std::string_view name, const at::Tensor& pixels) {
  if (takes_records()) send({std::string(name), image_of(name, pixels)});
}

// After an exception other ranks would not take part in going back.
void TrainerControl::with_evaluated_weights(const std::function<void()>& body) {
  const bool was_shown = show_evaluated(true);
  FirstError error;
  error.run(body);
  const bool goes_back = error.get() == nullptr || world_size() == 1;
  if (!was_shown && goes_back) error.run([&] { show_evaluated(false); });
  error.rethrow();
}

}  // namespace fulgur
