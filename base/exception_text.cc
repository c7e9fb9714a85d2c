#include "fulgur/base/exception_text.h"

#include <c10/util/Exception.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "fulgur/base/type_name.h"

namespace fulgur {
namespace {

struct Places {
  struct Noted {
    std::exception_ptr error;
    std::string place;
  };
  static constexpr size_t kRemembered = 16;
  std::mutex mutex{};
  std::deque<Noted> noted{};

  static Places& instance() {
    static auto* const never_destroyed = new Places;
    return *never_destroyed;
  }
  auto find(const std::exception_ptr& error) { return std::ranges::find(noted, error, &Noted::error); }
};

std::string place_of(const std::exception_ptr& error) {
  Places& places = Places::instance();
  const std::lock_guard lock(places.mutex);
  const auto noted = places.find(error);
  return noted == places.noted.end() ? "" : noted->place + ": ";
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& c10_error) {
    return c10_error.what_without_backtrace();
  } catch (const std::exception& std_error) {
    return std_error.what();
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    return "an exception of type " + (type == nullptr ? "unknown" : type_name(*type));
  }
}

}  // namespace

std::string text_of(const std::exception_ptr& error) { return place_of(error) + message_of(error); }

void note_place(const std::exception_ptr& error, std::string place) {
  Places& places = Places::instance();
  const std::lock_guard lock(places.mutex);
  if (places.find(error) != places.noted.end()) return;
  places.noted.push_back({error, std::move(place)});
  if (places.noted.size() > Places::kRemembered) places.noted.pop_front();
}

}  // namespace fulgur
