#include "fulgur/device/gpu_spans.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <string>

#include "fulgur/base/trace.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The trace of a process of its own in which `body` runs.
template <class Body>
std::string trace_of(const std::string& name, const Body& body) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / name;
  ::setenv("FULGUR_TRACE", folder.c_str(), /*overwrite=*/1);
  EXPECT_EXIT(
      {
        body();
        std::exit(0);  // writes the trace
      },
      ::testing::ExitedWithCode(0), "");
  return testing::read_file(folder / "rank-0.json");
}

TEST(GpuSpans, OfACpuAreNone) {
  const std::string trace = trace_of("cpu", [] {
    GpuSpans spans(c10::kCPU);
    const trace::Span span("forward");
    const ScopedGpuSpan on_gpu(spans, "forward");
  });
  EXPECT_THAT(trace, HasSubstr("\"forward\""));
  EXPECT_THAT(trace, Not(HasSubstr("on the GPU")));
}

TEST(GpuSpans, LastAsLongAsTheDeviceWorks) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  const std::string trace = trace_of("gpu", [] {
    const c10::Device gpu(c10::kCUDA, 0);
    at::Tensor product = torch::eye(4096, gpu);
    static_cast<void>(product.mm(product).sum().item<float>());
    GpuSpans spans(gpu);
    const trace::Span span("in all");
    {
      const ScopedGpuSpan on_gpu(spans, "forward");
      for (int i = 0; i < 40; ++i) product = product.mm(product);
    }
    static_cast<void>(product.sum().item<float>());
  });
  const auto duration_of = [&](const std::string& name) {
    std::smatch found;
    const bool is_there = std::regex_search(trace, found, std::regex("\"" + name + "\".*\"dur\": ([0-9.]+)"));
    return is_there ? std::stod(found[1]) : 0.0;
  };
  EXPECT_GT(duration_of("forward on the GPU"), 0.5 * duration_of("in all"));
  EXPECT_LE(duration_of("forward on the GPU"), duration_of("in all"));
}

}  // namespace
}  // namespace fulgur
