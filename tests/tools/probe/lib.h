#pragma once
#include <ATen/core/Tensor.h>
at::Tensor two();
