// For tests that use the layers of torch::nn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nn.h"
