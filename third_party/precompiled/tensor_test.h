// For tests that use tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensor.h"
