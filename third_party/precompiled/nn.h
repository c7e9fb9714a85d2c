// For files that use the layers of torch::nn, as fulgur.h does.
#include <torch/nn.h>

#include "module.h"
