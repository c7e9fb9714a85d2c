// For tests that use torch::nn::Module.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "module.h"
