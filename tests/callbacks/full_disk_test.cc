// Loggers on a disk that is full for a while: training goes on, one warning, and the file stays readable. CSVLogger has
// tests of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "fulgur/callbacks/json_lines_logger.h"
#include "fulgur/callbacks/tensorboard_logger.h"
#include "fulgur/checkpoint/file_system.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/testing/fake_trainer_control.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

// Logs 20 steps, of which 5 to 14 find no room. Returns what the file has.
std::string log_with_full_disk(Callback& logger, std::string& warned) {
  const testing::TempDir dir;
  testing::FakeTrainerControl trainer(dir.path());
  const auto log = [&](int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      logger.on_metrics(trainer, {{std::string(1000, 'x'), static_cast<double>(step)}}, step);
    }
  };
  log(0, 5);
  fs::path file;
  for (const auto& entry : fs::recursive_directory_iterator(dir.path())) {
    if (entry.is_regular_file()) file = entry.path();
  }
  ::testing::internal::CaptureStderr();
  {
    const testing::FileSizeLimit full_disk(
        static_cast<rlim_t>(fs::file_size(file) + 20));  // a part of the next step still fits
    log(5, 15);
  }
  warned = ::testing::internal::GetCapturedStderr();
  log(15, 20);
  logger.teardown(trainer, EntryPoint::fit);
  return read_text_file(file, /*max_bytes=*/1 << 20);
}

TEST(FullDisk, JsonLinesStayReadable) {
  JsonLinesLogger logger;
  std::string warned;
  std::istringstream lines(log_with_full_disk(logger, warned));
  std::vector<int64_t> steps;
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line).at("step"));
  EXPECT_THAT(steps, ::testing::ElementsAre(0, 1, 2, 3, 4, 15, 16, 17, 18, 19));
  EXPECT_THAT(warned, ::testing::HasSubstr("JsonLinesLogger: cannot write"));
  EXPECT_EQ(std::ranges::count(warned, '\n'), 1);
}

// Each record is its length, that length's checksum, the event, and its checksum.
TEST(FullDisk, TensorBoardEventsStayReadable) {
  TensorBoardLogger logger;
  std::string warned;
  const std::string file = log_with_full_disk(logger, warned);
  int64_t num_records = 0;
  size_t begin = 0;
  while (begin + sizeof(uint64_t) <= file.size()) {
    uint64_t length = 0;
    std::memcpy(&length, file.data() + begin, sizeof(length));
    begin += sizeof(length) + sizeof(uint32_t) + length + sizeof(uint32_t);
    ++num_records;
  }
  EXPECT_EQ(begin, file.size());
  EXPECT_EQ(num_records, 1 + 10);  // the version of the format comes first
  EXPECT_THAT(warned, ::testing::HasSubstr("TensorBoardLogger: cannot write"));
  EXPECT_EQ(std::ranges::count(warned, '\n'), 1);
}

}  // namespace
}  // namespace fulgur
