#pragma once

// Forward declarations for headers that only pass modules on. A file that includes the definition of torch::nn::Module
// takes ten seconds longer to compile.

namespace torch::nn {
class Module;
}

namespace fulgur {
class Module;
class ModuleHandle;
}  // namespace fulgur
