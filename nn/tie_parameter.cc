#include "fulgur/nn/tie_parameter.h"

#include <c10/util/Exception.h>

#include <typeinfo>

#include "fulgur/base/type_name.h"

namespace fulgur {
namespace {

// torch has no public way to replace a registered parameter; a derived class may name the protected list.
struct Access : torch::nn::Module {
  static auto parameters_of(torch::nn::Module& module) -> decltype(auto) { return (module.*&Access::parameters_); }
};

}  // namespace

void tie_parameter(torch::nn::Module& module, const std::string& name, at::Tensor& member, const at::Tensor& weight) {
  const std::string type = type_name(typeid(module));
  auto& parameters = Access::parameters_of(module);
  at::Tensor* registered = parameters.find(name);
  TORCH_CHECK_VALUE(registered != nullptr, type, " has no parameter '", name, "' of its own to tie");
  TORCH_CHECK_VALUE(registered->is_same(member), "the member given with '", name, "' is not that parameter of ", type,
                    "; give the module's own handle, such as head->weight");
  TORCH_CHECK_VALUE(weight.defined() && weight.sizes() == member.sizes(), "'", name, "' of ", type, " is ",
                    member.sizes(), ", but the tensor to tie it to is ",
                    weight.defined() ? weight.sizes() : at::IntArrayRef(), "; tied tensors have one shape");
  TORCH_CHECK_VALUE(weight.dtype() == member.dtype() && weight.device() == member.device(), "'", name, "' of ", type,
                    " and the tensor to tie it to differ in dtype or device");
  *registered = weight;
  member = weight;
}

}  // namespace fulgur
