#include "fulgur/checkpoint/formats/torch_archive.h"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/pickle.h"
#include "fulgur/checkpoint/formats/write_archive.h"
#include "fulgur/checkpoint/formats/zip_directory.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::PyTorchStreamWriter;

constexpr const char* kLightningVersion = "2.6.0";  // the version whose layout is written

constexpr std::pair<std::string_view, at::ScalarType> kStorageTypes[] = {{"BoolStorage", at::kBool},
                                                                         {"ByteStorage", at::kByte},
                                                                         {"CharStorage", at::kChar},
                                                                         {"ShortStorage", at::kShort},
                                                                         {"IntStorage", at::kInt},
                                                                         {"LongStorage", at::kLong},
                                                                         {"HalfStorage", at::kHalf},
                                                                         {"BFloat16Storage", at::kBFloat16},
                                                                         {"FloatStorage", at::kFloat},
                                                                         {"DoubleStorage", at::kDouble},
                                                                         {"ComplexFloatStorage", at::kComplexFloat},
                                                                         {"ComplexDoubleStorage", at::kComplexDouble}};

[[noreturn]] void fail(const fs::path& path, std::string_view reason) {
  throw CheckpointError(fmt::format("{}: {}", path.string(), reason));
}

// The storages of the file. Every tensor gets its own storage, except that identical views share one.
class Storages {
 public:
  explicit Storages(const fs::path& path) : path_(path) {}

  PickledTensor add(const std::string& name, const at::Tensor& given) {
    const at::Tensor tensor = given.detach().resolve_conj().resolve_neg();
    const View view{tensor.const_data_ptr(), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
    const auto [known, is_new] = keys_.try_emplace(view, std::to_string(tensors_.size()));
    if (is_new) tensors_.push_back(tensor);
    PickledTensor pickled{.storage_type = storage_type(name, tensor.scalar_type()),
                          .storage_key = known->second,
                          .storage_numel = tensor.numel(),
                          .offset = 0,
                          .shape = tensor.sizes().vec(),
                          .strides = std::vector<int64_t>(static_cast<size_t>(tensor.dim()))};
    int64_t stride = 1;
    for (size_t i = pickled.shape.size(); i > 0; --i) {
      pickled.strides[i - 1] = stride;
      stride *= std::max<int64_t>(pickled.shape[i - 1], 1);
    }
    return pickled;
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // the index is the storage key

 private:
  using View = std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;

  std::string storage_type(const std::string& name, at::ScalarType dtype) const {
    for (const auto& [type, of_type] : kStorageTypes) {
      if (of_type == dtype) return std::string(type);
    }
    fail(path_,
         fmt::format("tensor '{}' has dtype {}, which Python has no storage type for", name, c10::toString(dtype)));
  }

  fs::path path_;
  std::map<View, std::string> keys_;
  std::vector<at::Tensor> tensors_;
};

void write_records(PyTorchStreamWriter& archive, const std::string& pickle, const Storages& storages) {
  constexpr std::string_view kByteOrder = "little";
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("byteorder", kByteOrder.data(), kByteOrder.size());
  for (size_t i = 0; i < storages.tensors().size(); ++i) {
    const at::Tensor data = storages.tensors()[i].detach().cpu().contiguous();
    archive.writeRecord(fmt::format("data/{}", i), data.const_data_ptr(), data.nbytes());
  }
}

void write_dict(PickleWriter& pickle, Storages& storages, const NamedTensors& tensors) {
  std::set<std::string_view> names;
  pickle.begin_dict();
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second) throw CheckpointError(fmt::format("there are two tensors '{}'", name));
    pickle.text(name);
    pickle.tensor(storages.add(name, tensor));
  }
  pickle.end_dict();
}

void write_dict(PickleWriter& pickle, const std::vector<std::pair<std::string, std::function<void()>>>& items) {
  pickle.begin_dict();
  for (const auto& [name, write] : items) {
    pickle.text(name);
    write();
  }
  pickle.end_dict();
}

void write_value(PickleWriter& pickle, Storages& storages, const std::string& name, const State::Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return pickle.boolean(*flag);
  if (const auto* integer = std::get_if<int64_t>(&value)) return pickle.integer(*integer);
  if (const auto* real = std::get_if<double>(&value)) return pickle.real(*real);
  if (const auto* text = std::get_if<std::string>(&value)) return pickle.text(*text);
  pickle.tensor(storages.add(name, std::get<at::Tensor>(value)));
}

// Lightning reads its step and epoch from the counters of its loops: lightning/pytorch/loops/progress.py.
class LoopCounters {
 public:
  LoopCounters(PickleWriter& pickle, int64_t epoch, int64_t global_step)
      : pickle_(pickle), epoch_(epoch), global_step_(global_step) {}

  void write() {
    const auto empty = [this] { write_dict(pickle_, {}); };
    write_dict(pickle_, {{"fit_loop", [this] { fit_loop(); }},
                         {"validate_loop", empty},
                         {"test_loop", empty},
                         {"predict_loop", empty}});
  }

 private:
  void fit_loop() {
    write_dict(pickle_, {{"epoch_loop.state_dict",
                          [this] { write_dict(pickle_, {{"_batches_that_stepped", count(global_step_)}}); }},
                         {"epoch_loop.batch_progress", [this] { batch_progress(); }},
                         {"epoch_loop.automatic_optimization.optim_progress", [this] { optimizer_progress(); }},
                         {"epoch_progress", progress(epoch_, {"ready", "completed", "started", "processed"})}});
  }

  void batch_progress() {
    const auto total_and_current = counters(global_step_, {"ready", "completed", "started", "processed"});
    write_dict(pickle_, {{"total", total_and_current}, {"current", total_and_current}, {"is_last_batch", [this] {
                                                                                          pickle_.boolean(true);
                                                                                        }}});
  }

  void optimizer_progress() {
    write_dict(pickle_, {{"optimizer", [this] {
                            write_dict(pickle_,
                                       {{"step", progress(global_step_, {"ready", "completed"})},
                                        {"zero_grad", progress(global_step_, {"ready", "completed", "started"})}});
                          }}});
  }

  std::function<void()> count(int64_t value) {
    return [this, value] { pickle_.integer(value); };
  }

  std::function<void()> counters(int64_t value, std::vector<std::string> names) {
    return [this, value, names = std::move(names)] {
      std::vector<std::pair<std::string, std::function<void()>>> items;
      for (const std::string& name : names) items.emplace_back(name, count(value));
      write_dict(pickle_, items);
    };
  }

  std::function<void()> progress(int64_t value, const std::vector<std::string>& names) {
    const auto both = counters(value, names);
    return [this, both] { write_dict(pickle_, {{"total", both}, {"current", both}}); };
  }

  PickleWriter& pickle_;
  int64_t epoch_, global_step_;
};

std::string_view as_text(const std::tuple<at::DataPtr, size_t>& record) {
  return {static_cast<const char*>(std::get<0>(record).get()), std::get<1>(record)};
}

// Returns `path` after checking that libtorch's reader can safely open the file.
const fs::path& checked(const fs::path& path, uint64_t file_bytes) {
  std::ifstream file(path, std::ios::binary);
  const auto read = [&](uint64_t begin, uint64_t num_bytes) {
    std::string bytes(num_bytes, '\0');
    file.seekg(static_cast<std::streamoff>(begin));
    if (!file.read(bytes.data(), static_cast<std::streamsize>(num_bytes))) fail(path, "it cannot be read");
    return bytes;
  };
  check_zip_directory(read, file_bytes, path.string());
  return path;
}

// A zip file written by torch.save().
class Archive {
 public:
  explicit Archive(const fs::path& path)
      : path_(path), unread_bytes_(fs::file_size(path)), reader_(checked(path, unread_bytes_).string()) {
    if (!reader_.hasRecord("data.pkl")) fail(path_, "there is no data.pkl in it: it is not from torch.save()");
    if (reader_.hasRecord("byteorder") && as_text(record("byteorder")) != "little") fail(path_, "it is big-endian");
  }

  NamedTensors tensors() {
    const auto pickle = record("data.pkl");
    NamedTensors tensors;
    for (const auto& [name, pickled] : read_pickled_state_dict(as_text(pickle), path_.string())) {
      tensors.emplace_back(name, tensor(name, pickled));
    }
    return tensors;
  }

 private:
  at::Tensor tensor(const std::string& name, const PickledTensor& pickled) {
    const auto* type = std::find_if(std::begin(kStorageTypes), std::end(kStorageTypes),
                                    [&](const auto& each) { return each.first == pickled.storage_type; });
    if (type == std::end(kStorageTypes)) {
      fail(path_, fmt::format("tensor '{}' has a {}, which is not supported", name, pickled.storage_type));
    }
    const c10::Storage& storage = storage_of(pickled.storage_key);
    if (storage.nbytes() / c10::elementSize(type->second) < static_cast<uint64_t>(pickled.storage_numel)) {
      fail(path_, fmt::format("tensor '{}' has a storage of {} bytes, which is too small for {} elements", name,
                              storage.nbytes(), pickled.storage_numel));
    }
    at::Tensor tensor = at::empty({0}, type->second).set_(storage, pickled.offset, pickled.shape, pickled.strides);
    if (pickled.is_conjugated) tensor = tensor.conj().resolve_conj();
    return pickled.is_negated ? tensor.neg() : tensor;
  }

  const c10::Storage& storage_of(const std::string& key) {
    auto known = storages_.find(key);
    if (known == storages_.end()) {
      auto [data, num_bytes] = record("data/" + key);
      const c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, std::move(data));
      known = storages_.emplace(key, storage).first;
    }
    return known->second;
  }

  std::tuple<at::DataPtr, size_t> record(const std::string& name) {
    if (!reader_.hasRecord(name)) fail(path_, fmt::format("there is no '{}' in it", name));
    const size_t num_bytes = reader_.getRecordSize(name);
    if (num_bytes > unread_bytes_) fail(path_, "it names more bytes than it has");  // several names for the same bytes
    unread_bytes_ -= num_bytes;
    return reader_.getRecord(name);
  }

  fs::path path_;
  uint64_t unread_bytes_;
  PyTorchStreamReader reader_;
  std::map<std::string, c10::Storage> storages_;
};

}  // namespace

FileDigest write_torch_file(const fs::path& path, const NamedTensors& state_dict) {
  PickleWriter pickle;
  Storages storages(path);
  write_dict(pickle, storages, state_dict);
  return write_archive(path, [&](PyTorchStreamWriter& archive) { write_records(archive, pickle.finish(), storages); });
}

NamedTensors read_torch_file(const fs::path& path) {
  try {
    return Archive(path).tensors();
  } catch (const c10::Error& error) {
    fail(path, error.what_without_backtrace());
  } catch (const fs::filesystem_error& error) {
    throw_system_error("open", path, error.code().value());
  }
}

FileDigest write_lightning_checkpoint(const fs::path& path, const LightningCheckpoint& checkpoint) {
  PickleWriter pickle;
  Storages storages(path);
  const auto empty_list = [&] {
    pickle.begin_list();
    pickle.end_list();
  };
  std::vector<std::pair<std::string, std::function<void()>>> hyper_parameters;
  for (const auto& [name, value] : checkpoint.hyper_parameters.values()) {
    hyper_parameters.emplace_back(name, [&, &n = name, &v = value] { write_value(pickle, storages, n, v); });
  }
  write_dict(pickle, {{"epoch", [&] { pickle.integer(checkpoint.epoch); }},
                      {"global_step", [&] { pickle.integer(checkpoint.global_step); }},
                      {"pytorch-lightning_version", [&] { pickle.text(kLightningVersion); }},
                      {"state_dict", [&] { write_dict(pickle, storages, checkpoint.state_dict); }},
                      {"loops", [&] { LoopCounters(pickle, checkpoint.epoch, checkpoint.global_step).write(); }},
                      {"callbacks", [&] { write_dict(pickle, {}); }},
                      {"optimizer_states", empty_list},
                      {"lr_schedulers", empty_list},
                      {"hparams_name", [&] { pickle.text("kwargs"); }},
                      {"hyper_parameters", [&] { write_dict(pickle, hyper_parameters); }}});
  return write_archive(path, [&](PyTorchStreamWriter& archive) { write_records(archive, pickle.finish(), storages); });
}

}  // namespace fulgur
