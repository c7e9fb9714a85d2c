// A fit of several ranks in which one rank misbehaves as the flags say; see faults.py.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "fulgur.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

struct FaultOptions {
  TrainerOptions trainer{.accelerator = "cpu",
                         .strategy = Ddp{.timeout_s = 5, .connect_timeout_s = 60},
                         .max_epochs = 3,
                         .num_sanity_val_steps = 0};
  std::string fault = "none";
  std::string at = "training_step";
  int64_t victim = 1;
  int64_t after = 0;
  int64_t exit_code = 7;
  int64_t batches = 10, more_batches = 0;
  bool sized = true;
  int64_t fits = 1;
  bool swallow = false;
  bool in_thread = false;
  bool saves = false;
  double busy_s = 0;
  double ending_s = 0;
  std::string folder;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "fault",
           .help = "what the victim does",
           .choices = {"none", "throw", "throw_usage_error", "throw_int", "exit", "_exit", "kill", "terminate", "abort",
                       "stop", "spin", "skip", "print", "throw_in_a_thread", "exit_in_a_thread", "fork_and_exit"}},
          &fault);
    visit({.name = "at", .help = "hook or other place where the victim misbehaves"}, &at);
    visit({.name = "victim", .help = "rank that misbehaves"}, &victim);
    visit({.name = "after", .help = "times that the victim passes `at` before it misbehaves", .min = 0}, &after);
    visit({.name = "exit_code", .help = "exit code of exit and _exit", .min = 0}, &exit_code);
    visit({.name = "batches", .help = "batches of each rank in an epoch", .min = 1}, &batches);
    visit({.name = "more_batches", .help = "additional batches of each rank compared with the one before", .min = 0},
          &more_batches);
    visit({.name = "sized", .help = "the loaders know their lengths"}, &sized);
    visit({.name = "fits", .help = "number of fits in turn, each with a Trainer of its own", .min = 1}, &fits);
    visit({.name = "swallow", .help = "an exception of a fit does not end the program"}, &swallow);
    visit({.name = "in_thread", .help = "every fit runs on a thread of its own"}, &in_thread);
    visit({.name = "saves", .help = "save a checkpoint after every step"}, &saves);
    visit({.name = "busy_s", .help = "seconds for which the other ranks compute where the victim misbehaves", .min = 0},
          &busy_s);
    visit({.name = "ending_s", .help = "seconds that the victim needs to tidy up after its failure", .min = 0},
          &ending_s);
    visit({.name = "folder", .help = "folder in which the ranks leave notes"}, &folder);
  }
};

int64_t number_in_environment(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* value = std::getenv(name)) return std::stoll(value);
  }
  return 0;
}

// The rank of this process, which may itself start the other ranks of its host; TrainerControl does not provide it.
int64_t this_rank(const FaultOptions& options) {
  if (std::getenv("RANK") == nullptr && std::getenv("NODE_RANK") != nullptr)
    return number_in_environment({"NODE_RANK"}) * std::stoll(options.trainer.devices.to_string());
  return number_in_environment({"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"});
}

// A child that cannot become another program ends by exit(), which runs the handlers that it has inherited.
void fork_and_exit() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::execlp("no-such-program", "no-such-program", nullptr);
    std::exit(1);
  }
  ::waitpid(child, nullptr, 0);
}

class Saboteur {
 public:
  explicit Saboteur(const FaultOptions& options) : options_(options), rank_(this_rank(options)) {}

  int64_t rank() const { return rank_; }
  const FaultOptions& options() const { return options_; }

  // Writes a file that appears only once it is complete.
  void note(const std::string& name, const std::string& text) const {
    if (options_.folder.empty()) return;
    const std::string file = options_.folder + "/" + name;
    std::ofstream(file + fmt::format(".part{}", rank_)) << text;
    std::filesystem::rename(file + fmt::format(".part{}", rank_), file);
  }

  // Returns false if the victim must skip what comes next.
  bool reach(std::string_view place) {
    if (options_.fault == "none" || place != options_.at || reached_++ != options_.after) return true;
    if (rank_ == options_.victim) return misbehave(place);
    if (options_.busy_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(options_.busy_s));
    return true;
  }

 private:
  bool misbehave(std::string_view place) {
    fmt::print("rank {} is about to {}\n", rank_, options_.fault);
    note("fault", fmt::format("{}", std::chrono::duration<double>(Clock::now().time_since_epoch()).count()));
    if (options_.fault == "throw") throw std::runtime_error(fmt::format("boom in {}", place));
    if (options_.fault == "throw_usage_error") throw UsageError(fmt::format("boom in {}", place));
    if (options_.fault == "throw_int") throw 7;
    if (options_.fault == "exit") std::exit(static_cast<int>(options_.exit_code));
    if (options_.fault == "_exit") ::_exit(static_cast<int>(options_.exit_code));
    if (options_.fault == "kill") ::kill(::getpid(), SIGKILL);
    if (options_.fault == "terminate") ::raise(SIGTERM);
    if (options_.fault == "abort") std::abort();
    if (options_.fault == "stop") ::raise(SIGSTOP);
    if (options_.fault == "fork_and_exit") fork_and_exit();
    if (options_.fault == "throw_in_a_thread") std::thread([] { throw std::runtime_error("boom in a thread"); }).join();
    if (options_.fault == "exit_in_a_thread")
      std::thread([this] { std::exit(static_cast<int>(options_.exit_code)); }).join();
    for (std::atomic<bool> forever = options_.fault == "spin" || options_.fault == "print"; forever;) {
      if (options_.fault == "print") fmt::print("{:100}\n", rank_);
    }
    return options_.fault != "skip";
  }

  const FaultOptions& options_;
  const int64_t rank_;
  int64_t reached_ = 0;
};

class Regression final : public Module {
 public:
  explicit Regression(Saboteur& saboteur) : saboteur_(saboteur) {
    seed_everything(1);
    hidden_ = register_module("hidden", torch::nn::Linear(4, 64));
    out_ = register_module("out", torch::nn::Linear(64, 1));
  }

  const std::string& losses() const { return losses_; }

  void setup(EntryPoint) override { saboteur_.reach("setup"); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    saboteur_.reach("training_step");
    const at::Tensor loss = loss_of(batch);
    loss.register_hook([this](const at::Tensor&) { saboteur_.reach("backward"); });
    losses_ += fmt::format("{:.17g}\n", loss.item<double>());
    log("train_loss", loss, {.prog_bar = true, .on_step = true, .on_epoch = true});
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // a step's work
    return loss;
  }
  void validation_step(const Batch& batch, int64_t) override {
    saboteur_.reach("validation_step");
    log("val_loss", loss_of(batch), {.prog_bar = true});
  }
  Optimizers configure_optimizers() override {
    saboteur_.reach("configure_optimizers");
    return optim::AdamW(parameters(), {.lr = 1e-2});
  }

 private:
  at::Tensor loss_of(const Batch& batch) {
    return torch::nn::functional::mse_loss(out_->forward(hidden_->forward(batch["x"]).tanh()), batch["y"]);
  }

  Saboteur& saboteur_;
  std::string losses_;
  torch::nn::Linear hidden_{nullptr}, out_{nullptr};
};

class InCallbacks final : public Callback {
 public:
  explicit InCallbacks(Saboteur& saboteur) : saboteur_(saboteur) {}

  void setup(TrainerControl&, EntryPoint) override { saboteur_.reach("callback_setup"); }
  void on_train_start(TrainerControl&) override {
    saboteur_.note(fmt::format("{}.trains", saboteur_.rank()), "");
    saboteur_.reach("on_train_start");
  }
  void on_before_optimizer_step(TrainerControl&, Optimizer&) override { saboteur_.reach("on_before_optimizer_step"); }
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) override {
    saboteur_.reach("on_train_batch_end");
    if (!saboteur_.options().saves) return;
    const auto folder = trainer.run_dir() / fmt::format("step={}", trainer.state().global_step);
    if (saboteur_.reach("save_checkpoint")) trainer.save_checkpoint(folder);
    saboteur_.reach("after_save_checkpoint");
  }
  void on_validation_start(TrainerControl&) override { saboteur_.reach("on_validation_start"); }
  void on_validation_end(TrainerControl&) override { saboteur_.reach("on_validation_end"); }
  void on_train_epoch_end(TrainerControl&) override { saboteur_.reach("on_train_epoch_end"); }
  void on_train_end(TrainerControl&) override { saboteur_.reach("on_train_end"); }
  void on_fit_end(TrainerControl&) override { saboteur_.reach("on_fit_end"); }
  void on_exception(TrainerControl&, const std::exception&) override {
    saboteur_.reach("on_exception");
    const FaultOptions& options = saboteur_.options();
    if (saboteur_.rank() == options.victim)
      std::this_thread::sleep_for(std::chrono::duration<double>(options.ending_s));
  }
  void teardown(TrainerControl&, EntryPoint) override { saboteur_.reach("teardown"); }

 private:
  Saboteur& saboteur_;
};

// A loader of this rank alone: it does not shard, so that ranks may have any number of batches.
class OwnLoader final : public Loader {
 public:
  OwnLoader(Saboteur& saboteur, std::string place, int64_t num_batches, uint64_t seed)
      : saboteur_(saboteur), place_(std::move(place)), num_batches_(num_batches), seed_(seed) {}

  void begin_epoch(int64_t epoch) override {
    generator_ = at::make_generator<at::CPUGeneratorImpl>(seed_ + 1000 * static_cast<uint64_t>(epoch));
    given_ = 0;
  }
  std::optional<Batch> next() override {
    if (given_ == num_batches_) return std::nullopt;
    ++given_;
    saboteur_.reach(place_);
    const at::Tensor x = torch::randn({8, 4}, generator_);
    return Batch{{"x", x}, {"y", x.sum(1, /*keepdim=*/true).sin()}};
  }
  std::optional<int64_t> num_batches() const override {
    return saboteur_.options().sized ? std::optional(num_batches_) : std::nullopt;
  }
  bool set_shard(const DataShard&) override { return true; }

 private:
  Saboteur& saboteur_;
  const std::string place_;
  const int64_t num_batches_;
  const uint64_t seed_;
  at::Generator generator_{};
  int64_t given_ = 0;
};

void fit(const FaultOptions& options, Saboteur& saboteur, int64_t number) {
  const auto module = make_module<Regression>(saboteur);
  const int64_t num_batches = options.batches + saboteur.rank() * options.more_batches;
  const auto loader = [&](const char* place) {
    return std::make_shared<OwnLoader>(saboteur, place, num_batches, static_cast<uint64_t>(saboteur.rank()));
  };
  TrainerOptions trainer_options = options.trainer;
  trainer_options.callbacks = {std::make_shared<InCallbacks>(saboteur)};
  Trainer trainer(trainer_options);
  const auto fit = [&] { trainer.fit(module, {.train = loader("train_loader"), .val = loader("val_loader")}); };
  if (options.in_thread) {
    std::async(std::launch::async, fit).get();
  } else {
    fit();
  }
  saboteur.note(fmt::format("{}.losses{}", saboteur.rank(), number), module->losses());
}

void run(FaultOptions options) {
  Saboteur saboteur(options);
  if (!options.folder.empty()) options.trainer.default_root_dir = options.folder;
  saboteur.note(fmt::format("{}.pid", saboteur.rank()), std::to_string(::getpid()));
  if (!saboteur.reach("before_fit")) return;
  for (int64_t number = 0; number < options.fits; ++number) {
    if (number > 0 && !saboteur.reach("between_fits")) return;
    try {
      fit(options, saboteur, number);
    } catch (const std::exception& error) {
      if (!options.swallow) throw;
      fmt::print(stderr, "swallowed: {}\n", error.what());
    }
  }
  saboteur.reach("after_fit");
  fmt::print("rank {} is done\n", saboteur.rank());
}

// A main() without run_command_line().
int plain_main(int argc, char** argv) {
  FaultOptions options;
  const std::vector<std::string> arguments(argv + 2, argv + argc);
  if (parse_flags(arguments, argv[0], [&](FieldVisitor& visit) { options.describe(visit); })) run(std::move(options));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "plain") return plain_main(argc, argv);
  return run_command_line(argc, argv, run);
}
