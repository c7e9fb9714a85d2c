// Stands in for a Gloo header that the torch wheel lacks; see third_party/BUILD.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#define GLOO_STORE_HAS_STORE_V2 1

namespace gloo::rendezvous {

class Store {  // the virtual functions that c10d's GlooStore overrides, in Gloo's order
 public:
  virtual ~Store();
  virtual void set(const std::string&, const std::vector<char>&) = 0;
  virtual std::vector<char> get(const std::string&) = 0;
  virtual void wait(const std::vector<std::string>&) = 0;
  virtual void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) = 0;
  virtual bool has_v2_support();
  virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string>&);
  virtual void multi_set(const std::vector<std::string>&, const std::vector<std::vector<char>>&);
  virtual void append(const std::string&, const std::vector<char>&);
  virtual int64_t add(const std::string&, int64_t);
};

}  // namespace gloo::rendezvous
