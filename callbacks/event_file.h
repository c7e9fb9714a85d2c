#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fulgur/core/metric_log.h"
#include "fulgur/core/record.h"

namespace fulgur::events {

// The records of a TensorBoard event file: messages of type tensorflow.Event (tensorflow/core/util/event.proto,
// tensorflow/core/framework/summary.proto), each framed by its length and CRC32C checks (TFRecord). `time` is in
// seconds since 1970. https://github.com/tensorflow/tensorboard/tree/master/tensorboard/compat/proto has the messages.

std::string file_version(double time);                 // the first record of a file
std::string session_start(double time, int64_t step);  // TensorBoard drops what it has read from this step on
std::string scalars(double time, int64_t step, const Metrics& metrics);
std::string record(double time, int64_t step, const Record& record);

}  // namespace fulgur::events
