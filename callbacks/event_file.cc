#include "fulgur/callbacks/event_file.h"

#include <bit>
#include <cstddef>
#include <limits>
#include <variant>
#include <vector>

#include "fulgur/base/crc32.h"
#include "fulgur/callbacks/png.h"

namespace fulgur::events {
namespace {

// A message of protocol buffers (https://protobuf.dev/programming-guides/encoding). Each member adds one field.
class Message {
 public:
  Message& integer(int field, int64_t value) {
    tag(field, 0);
    varint(static_cast<uint64_t>(value));
    return *this;
  }
  Message& real(int field, double value) {
    tag(field, 1);
    fixed(std::bit_cast<uint64_t>(value));
    return *this;
  }
  Message& single(int field, float value) {
    tag(field, 5);
    fixed(std::bit_cast<uint32_t>(value));
    return *this;
  }
  Message& bytes(int field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    encoded_ += value;
    return *this;
  }
  Message& message(int field, const Message& value) { return bytes(field, value.encoded_); }
  Message& packed(int field, const std::vector<double>& values) {
    tag(field, 2);
    varint(values.size() * sizeof(double));
    for (const double value : values) fixed(std::bit_cast<uint64_t>(value));
    return *this;
  }
  const std::string& encoded() const { return encoded_; }

 private:
  void tag(int field, unsigned wire_type) { varint(static_cast<uint64_t>(field) << 3 | wire_type); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) encoded_ += static_cast<char>(value | 0x80);
    encoded_ += static_cast<char>(value);
  }
  template <class Unsigned>
  void fixed(Unsigned value) {
    for (size_t i = 0; i < sizeof(value); ++i) encoded_ += static_cast<char>(value >> (8 * i));
  }

  std::string encoded_;
};

template <class Unsigned>
void append(std::string& text, Unsigned value) {
  for (size_t i = 0; i < sizeof(value); ++i) text += static_cast<char>(value >> (8 * i));
}

// TFRecord's check: a CRC32C of data that holds CRC32Cs would be weak, so that it is rotated and shifted.
uint32_t masked_check(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8; }

std::string framed(const Message& event) {
  std::string frame;
  append(frame, uint64_t{event.encoded().size()});
  append(frame, masked_check(frame));
  frame += event.encoded();
  append(frame, masked_check(event.encoded()));
  return frame;
}

Message event_at(double time, int64_t step) { return Message().real(1, time).integer(2, step); }

// SummaryMetadata that names the plugin that shows a value, with the plugin's own message.
Message shown_by(std::string_view plugin, const Message& content) {
  return Message().message(1, Message().bytes(1, plugin).bytes(2, content.encoded()));
}

// A google.protobuf.Value.
Message value_of(const State::Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return Message().integer(4, *flag ? 1 : 0);
  if (const auto* whole = std::get_if<int64_t>(&value)) return Message().real(2, static_cast<double>(*whole));
  if (const auto* number = std::get_if<double>(&value)) return Message().real(2, *number);
  if (const auto* text = std::get_if<std::string>(&value)) return Message().bytes(3, *text);
  return Message().bytes(3, "a tensor");
}

// The Summary.Value of a record.
struct SummaryValue {
  const std::string& name;
  double time;

  Message operator()(const Histogram& histogram) const {
    std::vector<double> counts(histogram.counts.begin(), histogram.counts.end());
    const Message proto = Message()
                              .real(1, histogram.min)
                              .real(2, histogram.max)
                              .real(3, static_cast<double>(histogram.count))
                              .real(4, histogram.sum)
                              .real(5, histogram.sum_of_squares)
                              .packed(6, histogram.limits)
                              .packed(7, counts);
    return Message().bytes(1, name).message(5, proto);
  }
  Message operator()(const Image& image) const {
    const at::Tensor& pixels = image.pixels;
    const Message proto = Message()
                              .integer(1, pixels.size(1))
                              .integer(2, pixels.size(2))
                              .integer(3, pixels.size(0))
                              .bytes(4, to_png(image));
    return Message().bytes(1, name).message(4, proto);
  }
  Message operator()(const Text& text) const {
    constexpr int64_t kStringType = 7;
    const Message shape = Message().message(2, Message().integer(1, 1));  // one dimension of size 1
    const Message tensor = Message().integer(1, kStringType).message(2, shape).bytes(8, text.text);
    return Message().bytes(1, name + "/text_summary").message(8, tensor).message(9, shown_by("text", {}));
  }
  Message operator()(const HyperParameters& parameters) const {
    Message start;  // a SessionStartInfo
    for (const auto& [parameter, value] : parameters.values.values()) {
      start.message(1, Message().bytes(1, parameter).message(2, value_of(value)));
    }
    start.real(5, time);
    const Message tensor = Message().integer(1, 1).message(2, Message()).single(5, 0.0F);  // TensorBoard wants a value
    return Message()
        .bytes(1, "_hparams_/session_start_info")
        .message(8, tensor)
        .message(9, shown_by("hparams", Message().message(3, start)));
  }
};

}  // namespace

std::string file_version(double time) { return framed(Message().real(1, time).bytes(3, "brain.Event:2")); }

std::string session_start(double time, int64_t step) {
  constexpr int64_t kStart = 1;
  return framed(event_at(time, step).message(7, Message().integer(1, kStart)));
}

std::string scalars(double time, int64_t step, const Metrics& metrics) {
  Message summary;
  for (const auto& [name, value] : metrics) {
    summary.message(1, Message().bytes(1, name).single(2, static_cast<float>(value)));
  }
  return framed(event_at(time, step).message(5, summary));
}

std::string record(double time, int64_t step, const Record& record) {
  const Message value = std::visit(SummaryValue{record.name, time}, record.content);
  return framed(event_at(time, step).message(5, Message().message(1, value)));
}

}  // namespace fulgur::events
