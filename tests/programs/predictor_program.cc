// predictor_program <program.pt2> <checkpoint> <another checkpoint>: more threads than the machine has cores ask a
// Predictor while its weights are exchanged 200 times. Every answer must be, bit for bit, that of one of the
// checkpoints, and after an exchange the new one's. Prints how many answers there were.
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/programs/predictor.h"

int main(int argc, char** argv) {
  using fulgur::Batch;
  using fulgur::Predictor;
  if (argc != 4) return 2;
  constexpr int kExchanges = 200;
  const unsigned num_threads = 2 * std::thread::hardware_concurrency() + 2;
  torch::manual_seed(7);
  const Batch batch{{"x", torch::randn({5, 4})}};
  const std::array<std::string, 2> checkpoints{argv[2], argv[3]};
  Predictor predictor(std::filesystem::path(argv[1]), {.weights = checkpoints[0]});
  std::array<at::Tensor, 2> answers;
  for (const size_t i : {1, 0}) {
    predictor.set_weights(checkpoints[i]);
    answers[i] = predictor.run(batch)["y"].clone();
  }
  if (answers[0].equal(answers[1])) return 3;
  std::atomic<bool> done = false;
  std::atomic<int64_t> num_answers = 0, num_wrong = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < num_threads; ++i) {
    threads.emplace_back([&] {
      while (!done) {
        const at::Tensor y = predictor.run(batch)["y"];
        if (!y.equal(answers[0]) && !y.equal(answers[1])) ++num_wrong;
        ++num_answers;
      }
    });
  }
  for (int i = 0; i < kExchanges; ++i) {
    const size_t next = i % 2 == 0 ? 1 : 0;
    predictor.set_weights(checkpoints[next]);
    if (!predictor.run(batch)["y"].equal(answers[next])) ++num_wrong;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  fmt::print("{} answers, {} wrong\n", num_answers.load(), num_wrong.load());
  return num_wrong == 0 && num_answers > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
