#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace fulgur::testing {

// The message of the `Error` that `body` throws; a failed test if it throws none.
template <class Error, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace fulgur::testing
