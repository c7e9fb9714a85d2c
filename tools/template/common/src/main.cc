// Trains the model; --help lists commands and options.
#include "data.h"
#include "fulgur.h"
#include "model.h"

int main(int argc, char** argv) {
  return fulgur::cli::run<Model, Data>(argc, argv,
                                       {.trainer = {.max_epochs = 20, .checkpoint = {.monitor = "val_loss"}}});
}
