#pragma once

// Declares what headers pass on without looking into it. The definition of torch::nn::Module makes a file that sees it
// compile for ten seconds longer.

namespace torch::nn {
class Module;
}

namespace fulgur {
class Module;
class ModuleHandle;
}  // namespace fulgur
