#include "fulgur/base/exception_text.h"

#include <c10/util/Exception.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "fulgur/base/type_name.h"

namespace fulgur {
namespace {

struct Places {
  struct Noted {
    std::exception_ptr error;
    std::string place{};   // empty: not noted
    std::string detail{};  // empty: not noted
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

// Notes a text unless there is one.
void note(const std::exception_ptr& error, std::string Places::Noted::* member, std::string text) {
  Places& places = Places::instance();
  const std::lock_guard lock(places.mutex);
  auto noted = places.find(error);
  if (noted == places.noted.end()) {
    if (places.noted.size() == Places::kRemembered) places.noted.pop_front();
    places.noted.push_back({.error = error});
    noted = std::prev(places.noted.end());
  }
  std::string& known = (*noted).*member;
  if (known.empty()) known = std::move(text);
}

std::string place_of(const std::exception_ptr& error) {
  Places& places = Places::instance();
  const std::lock_guard lock(places.mutex);
  const auto noted = places.find(error);
  if (noted == places.noted.end()) return "";
  const bool has_both = !noted->place.empty() && !noted->detail.empty();
  return noted->place + (has_both ? ", " : "") + noted->detail + ": ";
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
  note(error, &Places::Noted::place, std::move(place));
}

void note_detail(const std::exception_ptr& error, std::string detail) {
  note(error, &Places::Noted::detail, std::move(detail));
}

}  // namespace fulgur
