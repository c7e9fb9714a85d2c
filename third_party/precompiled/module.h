// For files that use torch::nn::Module.
#include <torch/nn/module.h>

#include "tensor.h"
