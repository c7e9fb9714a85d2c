// The functions of the fmt whose headers come with libtorch; without this each file would compile them again, for two
// seconds. What is instantiated here is declared `extern template` there, or called by what is.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
template locale_ref::locale_ref(const std::locale&);
template std::locale locale_ref::get<std::locale>() const;
namespace detail {
template dragonbox::decimal_fp<float> dragonbox::to_decimal(float) noexcept;
template dragonbox::decimal_fp<double> dragonbox::to_decimal(double) noexcept;
template thousands_sep_result<char> thousands_sep_impl(locale_ref);
template char decimal_point_impl(locale_ref);
}  // namespace detail
FMT_END_NAMESPACE
