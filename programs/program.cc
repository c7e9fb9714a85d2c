#include "fulgur/programs/program.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/programs/code.h"
#include "fulgur/programs/compiled_call.h"
#include "fulgur/programs/exported_program.h"
#include "fulgur/programs/graph_part.h"
#include "fulgur/programs/input_checker.h"
#include "fulgur/programs/program_archive.h"

namespace fulgur::nn {
namespace {

using c10::IValue;
using program::Argument;
using program::Graph;
using program::Input;
using program::Node;
using program::Output;

// What the nodes of a program say about the mode in which it was exported.
struct ExportedModes {
  std::map<std::string, bool> of_modules{};  // by path: whether any of its flags says that it was training
  std::vector<std::string> attention{};      // nodes whose dropout is a plain number
  std::set<std::string> multihead{};  // paths of nn.MultiheadAttention, which has no node for dropout in eval mode
  std::vector<std::string> random{};  // nodes that draw random numbers, whatever the mode
  bool any_training = false;
};

bool draws_random_numbers(const std::string& target) {
  constexpr std::string_view kNames[] = {"bernoulli",   "bernoulli_",  "cauchy_",  "exponential_", "geometric_",
                                         "log_normal_", "multinomial", "normal",   "normal_",      "poisson",
                                         "rand",        "rand_like",   "randint",  "randint_like", "randn",
                                         "randn_like",  "random_",     "randperm", "uniform_"};
  constexpr std::string_view kAten = "torch.ops.aten.";
  if (!target.starts_with(kAten)) return false;
  const std::string name = target.substr(kAten.size(), target.find('.', kAten.size()) - kAten.size());
  return std::ranges::find(kNames, name) != std::end(kNames);
}

void collect(const Graph& graph, ExportedModes& modes) {
  for (const Node& node : graph.nodes) {
    const std::string path = node.modules.empty() ? "" : node.modules.back().path;
    if (draws_random_numbers(node.target)) modes.random.push_back(node.name);
    const bool is_attention = node.target.find(".scaled_dot_product_attention.") != std::string::npos;
    if (is_attention) modes.attention.push_back(node.name);
    if (!node.modules.empty() && node.modules.back().type.ends_with("MultiheadAttention")) modes.multihead.insert(path);
    for (const auto& [name, argument] : node.arguments) {
      const auto* inner = std::get_if<std::shared_ptr<const Graph>>(&argument.what);
      if (inner != nullptr) collect(**inner, modes);
      const auto* constant = std::get_if<IValue>(&argument.what);
      if (constant == nullptr) continue;
      if (is_attention && name == "dropout_p" && constant->isDouble()) {
        modes.any_training |= constant->toDouble() > 0;
      }
      if (!constant->isBool() || !program::follows_mode(node, name)) continue;
      modes.of_modules[path] |= constant->toBool();
      modes.any_training |= constant->toBool();
    }
  }
}

// The paths of modules with batch norms that take the statistics of a batch in training. An instance norm that Python
// has decomposed has the operator of a batch norm without running statistics.
void collect_batch_norms(const Graph& graph, std::vector<std::string>& paths) {
  for (const Node& node : graph.nodes) {
    const bool is_whole = node.target.starts_with("torch.ops.aten.batch_norm.");
    const bool is_part = node.target.find("batch_norm") != std::string::npos &&
                         node.target.find("no_training") == std::string::npos &&
                         program::follows_mode(node, "training");
    const std::string path = node.modules.empty() ? "" : node.modules.back().path;
    if ((is_whole || is_part) && std::ranges::find(paths, path) == paths.end()) paths.push_back(path);
    for (const auto& [name, argument] : node.arguments) {
      const auto* inner = std::get_if<std::shared_ptr<const Graph>>(&argument.what);
      if (inner != nullptr) collect_batch_norms(**inner, paths);
    }
  }
}

// The paths of all modules that the program calls.
void collect_modules(const Graph& graph, std::set<std::string>& paths) {
  for (const Node& node : graph.nodes) {
    for (const program::ModuleCall& module : node.modules) paths.insert(module.path);
    for (const auto& [name, argument] : node.arguments) {
      const auto* inner = std::get_if<std::shared_ptr<const Graph>>(&argument.what);
      if (inner != nullptr) collect_modules(**inner, paths);
    }
  }
}

void check_that_a_module_matches(const std::string& glob, const Graph& graph) {
  std::set<std::string> paths;
  collect_modules(graph, paths);
  const auto matches = [&](const std::string& path) { return ::fnmatch(glob.c_str(), path.c_str(), 0) == 0; };
  if (std::ranges::any_of(paths, matches)) return;
  throw UsageError(unknown_name_message("module in ProgramOptions::checkpoint", glob,
                                        std::vector<std::string>(paths.begin(), paths.end())));
}

std::string shorten(std::vector<std::string> names) {
  constexpr size_t kMost = 3;
  const size_t num_names = names.size();
  names.resize(std::min(num_names, kMost));
  return fmt::format("{}{}", fmt::join(names, ", "),
                     num_names > kMost ? fmt::format(" and {} more", num_names - kMost) : "");
}

at::Tensor to_tensor(const IValue& value) {
  if (value.isTensor()) return value.toTensor();
  if (value.isScalar()) {
    const at::Scalar number = value.toScalar();
    return at::full({}, number, at::TensorOptions(number.type()));
  }
  return {};
}

}  // namespace

Program::Program(const std::filesystem::path& file, ProgramOptions options)
    : ModuleHolder(std::make_shared<ProgramImpl>(file, std::move(options))) {}

ProgramImpl::ProgramImpl(const std::filesystem::path& file, ProgramOptions options)
    : file_(file), options_(std::move(options)), archive_(std::make_shared<const ProgramArchive>(file)) {
  register_tensors();
  set_modes();
  name_unread_guards();
  if (!options_.checkpoint.empty()) check_that_a_module_matches(options_.checkpoint, archive_->program().graph);
  find_inputs_of_loss();
  compile();
  load_compiled();
}

ProgramImpl::~ProgramImpl() = default;

void ProgramImpl::register_tensors() {
  const program::ExportedProgram& program = archive_->program();
  std::map<std::string, at::Tensor> by_place;  // so that tied tensors are one
  std::optional<at::ScalarType> dtype;
  for (const Input& input : program.inputs) {
    at::Tensor& tensor = tensors_.emplace_back();
    constants_.emplace_back();
    if (!input.is_weight()) continue;
    const ProgramArchive::Tensor stored = archive_->weight(input.name);
    try {
      const std::string place = fmt::format("{} {} {} {}", stored.entry, stored.tensor.sizes(), stored.tensor.strides(),
                                            stored.tensor.storage_offset());
      const at::Tensor& shared = by_place.try_emplace(place, stored.tensor).first->second;
      if (input.kind == Input::Kind::buffer) {
        tensor = tree_.add_buffer(input.name, shared);
        continue;
      }
      tensor = tree_.add_parameter(input.name, shared, stored.requires_grad);
    } catch (const c10::Error& error) {
      throw CheckpointError(fmt::format("{}: tensor '{}' cannot be registered: {}", file_.string(), input.name,
                                        error.what_without_backtrace()));
    }
    if (!dtype && tensor.is_floating_point()) dtype = tensor.scalar_type();
  }
  exported_dtype_ = dtype_ = dtype.value_or(at::kFloat);
}

void ProgramImpl::set_modes() {
  ExportedModes modes;
  collect(archive_->program().graph, modes);
  for (const auto& [path, is_training] : modes.of_modules) {
    torch::nn::Module& module = tree_.at(path);
    if (modes.any_training) module.train(is_training);  // parents come first: it sets the children, too
  }
  modes.attention.insert(modes.attention.end(), modes.multihead.begin(), modes.multihead.end());
  if (!modes.any_training && !modes.of_modules.empty() && !modes.attention.empty()) {
    log_info(
        "{} was exported in eval mode: dropout inside of attention ({}) stays off in training; to have it, export the "
        "model in train mode",
        file_.string(), shorten(modes.attention));
  }
  if (!modes.random.empty()) {
    log_info("{} draws random numbers in eval mode, too, because Python has written them into the graph: {}",
             file_.string(), shorten(modes.random));
  }
}

void ProgramImpl::name_unread_guards() const {
  const std::vector<std::string>& guards = archive_->program().unread_guards;
  if (guards.empty()) return;
  log_info(
      "{} was exported under conditions that are not checked here, so that inputs for which they do not hold run "
      "as if they did: {}",
      file_.string(), shorten(guards));
}

at::Tensor ProgramImpl::first_parameter() const {
  const std::vector<Input>& inputs = archive_->program().inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].kind == Input::Kind::parameter && tensors_[i].is_floating_point()) return tensors_[i];
  }
  return {};
}

// Compiles the graph for the device and the precision that the parameters have now.
void ProgramImpl::compile() {
  const program::ExportedProgram& program = archive_->program();
  const at::Tensor parameter = first_parameter();
  if (parameter.defined()) {
    device_ = parameter.device();
    dtype_ = parameter.scalar_type();
  }
  std::vector<std::string> buffers;
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const Input& input = program.inputs[i];
    buffers.push_back(input.kind == Input::Kind::buffer ? input.name : "");
    if (!input.is_constant()) continue;
    const bool is_buffer = input.kind == Input::Kind::buffer;
    const at::Tensor stored = archive_->constant(input.name).tensor;
    const bool follows = is_buffer && dtype_ != exported_dtype_ && stored.is_floating_point();
    const at::Tensor current = is_buffer && constants_[i].defined() ? constants_[i] : stored;  // calls change buffers
    constants_[i] = current.to(device_, follows ? dtype_ : stored.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  const program::CodeOptions options{.file = file_.string(),
                                     .device = device_,
                                     .exported_dtype = exported_dtype_,
                                     .dtype = dtype_,
                                     .submodule = [this](std::string_view path) { return &tree_.at(path); },
                                     .checkpoint = options_.checkpoint};
  code_ = std::make_unique<const program::Code>(program.graph, options, buffers);
  if (inputs_of_loss_.empty()) return;
  const program::GraphPart part = program::without_inputs(program, inputs_of_loss_);
  code_without_loss_ = std::make_unique<const program::Code>(part.graph, options, buffers);
}

// Finds the inputs on which no output but "loss" depends.
void ProgramImpl::find_inputs_of_loss() {
  const program::ExportedProgram& program = archive_->program();
  const auto is_loss = [](const Output& output) { return output.kind == Output::Kind::user && output.name == "loss"; };
  const auto loss = static_cast<size_t>(std::ranges::find_if(program.outputs, is_loss) - program.outputs.begin());
  if (loss == program.outputs.size() || program.output_names().size() == 1) return;
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    if (program.inputs[i].kind != Input::Kind::user) continue;
    const std::vector<size_t> left = program::without_inputs(program, {i}).outputs;
    const bool has_loss = std::ranges::find(left, loss) != left.end();
    if (!has_loss && left.size() + 1 == program.outputs.size()) inputs_of_loss_.push_back(i);
  }
  if (inputs_of_loss_.empty()) return;
  outputs_without_loss_ = program::without_inputs(program, inputs_of_loss_).outputs;
  // Two inputs may each have a size for the other that no third one has.
  if (outputs_without_loss_.size() + 1 != program.outputs.size()) inputs_of_loss_.clear();
}

// Loads the native code for the device of the parameters. They may move to another one before the program runs, so that
// it is said then what is not used.
void ProgramImpl::load_compiled() {
  unused_calls_.clear();
  has_to_name_unused_calls_ = true;
  for (auto* call : {&compiled_step_, &compiled_forward_, &compiled_predict_}) call->reset();
  if (!options_.compiled) return;
  if (options_.checkpoint.empty()) {
    compiled_step_ = compiled_call("step");
  } else if (program::CompiledCall::is_in(file_, *archive_, "step")) {
    unused_calls_.emplace_back("step", "activations are to be computed again (ProgramOptions::checkpoint)");
  }
  compiled_forward_ = compiled_call("forward");
  if (!inputs_of_loss_.empty()) compiled_predict_ = compiled_call("predict", inputs_of_loss_);
}

std::unique_ptr<program::CompiledCall> ProgramImpl::compiled_call(const std::string& name,
                                                                  const std::vector<size_t>& left_out) {
  using program::CompiledCall;
  if (!CompiledCall::is_in(file_, *archive_, name)) return nullptr;
  if (const std::string reason = CompiledCall::why_not_here(file_, *archive_, name, device_); !reason.empty()) {
    unused_calls_.emplace_back(name, reason);
    return nullptr;
  }
  const auto submodule = [this](std::string_view path) { return &tree_.at(path); };
  return std::make_unique<CompiledCall>(file_, *archive_, name, left_out, device_, submodule);
}

// The parameters may be elsewhere, or in another precision, than at the last run: to() of a parent moves them, too.
void ProgramImpl::compile_if_moved() {
  const at::Tensor parameter = first_parameter();
  if (!parameter.defined() || (parameter.device() == device_ && parameter.scalar_type() == dtype_)) return;
  const c10::Device before = device_;
  compile();
  if (device_ != before) load_compiled();
}

std::vector<std::string> ProgramImpl::input_names() const { return archive_->program().input_names(); }

std::vector<std::string> ProgramImpl::output_names() const { return archive_->program().output_names(); }

bool ProgramImpl::lacks_inputs_of_loss(const Batch& batch) const {
  const auto is_missing = [&](size_t place) { return !batch.contains(archive_->program().inputs[place].name); };
  return !inputs_of_loss_.empty() && std::ranges::all_of(inputs_of_loss_, is_missing);
}

// One value per input of the graph.
std::vector<IValue> ProgramImpl::inputs_of(const Batch& batch, bool without_loss) const {
  const program::ExportedProgram& program = archive_->program();
  std::vector<IValue> values;
  values.reserve(program.inputs.size());
  program::InputChecker checker(program, file_.string());
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const Input& input = program.inputs[i];
    const bool is_left_out = without_loss && std::ranges::find(inputs_of_loss_, i) != inputs_of_loss_.end();
    if (input.is_weight()) {
      values.emplace_back(tensors_[i]);
    } else if (input.is_constant()) {
      values.emplace_back(constants_[i]);
    } else if (input.kind == Input::Kind::fixed) {
      checker.check_fixed(i, batch);
      values.emplace_back();
    } else if (is_left_out) {
      values.emplace_back();
    } else {
      values.push_back(checker.value_of(input, batch));
    }
  }
  checker.check_guards(batch);
  return values;
}

// The compiled code for this call, or null; says once why there is none where one would expect it.
program::CompiledCall* ProgramImpl::compiled_for(const std::vector<IValue>& inputs, bool without_loss) {
  const bool is_step = c10::GradMode::is_enabled();
  if (is_step != is_training() || (is_step && without_loss)) return nullptr;
  program::CompiledCall* call = is_step        ? compiled_step_.get()
                                : without_loss ? compiled_predict_.get()
                                               : compiled_forward_.get();
  if (call == nullptr) return nullptr;
  const std::string reason = call->why_not(inputs);
  if (reason.empty()) return call;
  if (call->is_first_refusal()) {
    log_info("{} runs without its compiled {} where that does not apply: {}", file_.string(), call->name(), reason);
  }
  return nullptr;
}

Batch ProgramImpl::forward(const Batch& batch) {
  compile_if_moved();
  if (has_to_name_unused_calls_.load() && has_to_name_unused_calls_.exchange(false)) {
    for (const auto& [call, reason] : unused_calls_) {
      log_info("the compiled {} of {} is not used: {}", call, file_.string(), reason);
    }
  }
  const program::ExportedProgram& program = archive_->program();
  const bool without_loss = lacks_inputs_of_loss(batch);
  std::vector<IValue> values = inputs_of(batch, without_loss);
  if (program::CompiledCall* call = compiled_for(values, without_loss); call != nullptr) {
    std::vector<at::Tensor> results = call->run(values);
    std::vector<Batch::Entry> outputs;
    for (const std::string& name : call->output_names()) {
      outputs.emplace_back(name, std::move(results[outputs.size()]));
    }
    return Batch(std::move(outputs));
  }
  const std::vector<IValue> results = (without_loss ? code_without_loss_ : code_)->run(std::move(values));
  std::vector<Batch::Entry> outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    const Output& output = program.outputs[without_loss ? outputs_without_loss_[i] : i];
    const at::Tensor tensor = to_tensor(results[i]);
    if (output.kind == Output::Kind::buffer_mutation) {
      const c10::NoGradGuard no_gradient;
      const auto is_buffer = [&](const Input& input) {
        return input.kind == Input::Kind::buffer && input.name == output.name;
      };
      const auto buffer = std::ranges::find_if(program.inputs, is_buffer);
      const auto index = static_cast<size_t>(buffer - program.inputs.begin());
      (buffer->is_weight() ? tensors_ : constants_)[index].copy_(tensor);
    } else if (tensor.defined()) {
      outputs.emplace_back(output.name, tensor);
    }
  }
  return Batch(std::move(outputs));
}

at::Tensor ProgramImpl::forward(const at::Tensor& input) {
  const std::vector<std::string> inputs = input_names(), outputs = output_names();
  TORCH_CHECK_VALUE(inputs.size() == 1 && outputs.size() == 1,
                    fmt::format("{} has the inputs {} and the outputs {}: call forward() with a Batch", file_.string(),
                                fmt::join(inputs, ", "), fmt::join(outputs, ", ")));
  return forward(Batch{{inputs.front(), input}})[outputs.front()];
}

void ProgramImpl::to(torch::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  compile_if_moved();
}

void ProgramImpl::to(torch::Dtype dtype, bool non_blocking) {
  program::set_floating_dtype(*this, dtype, non_blocking);
  compile_if_moved();
}

void ProgramImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

void ProgramImpl::export_program(const std::filesystem::path& file) const {
  std::map<std::string, at::Tensor> weights;
  const std::vector<Input>& inputs = archive_->program().inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].is_weight()) continue;
    weights[inputs[i].name] = tensors_[i].detach().to(at::kCPU, archive_->weight(inputs[i].name).tensor.scalar_type());
  }
  archive_->write_with(file, weights);
}

std::vector<std::string> ProgramImpl::batch_norm_paths() const {
  std::vector<std::string> paths;
  collect_batch_norms(archive_->program().graph, paths);
  return paths;
}

void ProgramImpl::pretty_print(std::ostream& stream) const {
  stream << "fulgur::nn::Program(" << file_.string() << ")";
}

}  // namespace fulgur::nn
