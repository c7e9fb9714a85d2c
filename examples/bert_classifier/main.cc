// Fine-tunes a BERT on labelled texts: by default, of which licence is this paragraph?
//   ./bazelw run //examples/bert_classifier
#include "examples/bert_classifier/bert_classifier.h"

#include <filesystem>

#include "examples/bert_classifier/labelled_texts.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using namespace bert_classifier;

// The folder of all-MiniLM-L6-v2, which the build has downloaded for this program.
std::string default_weights() { return std::filesystem::read_symlink("/proc/self/exe").string() + ".runfiles/minilm"; }

}  // namespace

int main(int argc, char** argv) {
  return cli::run<BertClassifier, LabelledTextsData>(
      argc, argv,
      {.trainer = {.max_epochs = 6, .gradient_clip_val = 1.0, .checkpoint = {.monitor = "val_acc", .mode = "max"}},
       .model = {.weights = default_weights()},
       .link = link_options});
}
