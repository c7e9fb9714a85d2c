#include "tools/scaling/machine.h"

#include <algorithm>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur::scaling {
namespace {

// Peak figures are those of data sheets. What forward and backward reach of the peak is taken to be 40%, which is what
// large transformers are reported to reach; for the V100 it is the 40 TFLOPS of the ZeRO-Offload article. The host's
// memory is that of the hosts that such devices are sold in, divided by the devices of a host.
std::vector<Device> known_devices() {
  return {
      {"h100", 0.4 * 989e12, 80e9, 3.35e12, 64e9, 614e9 / 8,
       "data sheet of the H100 SXM (989 TFLOPS, 3.35 TB/s, PCIe 5); hosts with two processors of 8 DDR5-4800 channels"},
      {"h200", 0.4 * 989e12, 141e9, 4.8e12, 64e9, 614e9 / 8,
       "data sheet of the H200 SXM (989 TFLOPS, 4.8 TB/s, PCIe 5); hosts as for the H100"},
      {"a100", 0.4 * 312e12, 80e9, 2.04e12, 32e9, 410e9 / 8,
       "data sheet of the A100 SXM 80 GB (312 TFLOPS, 2.04 TB/s, PCIe 4); hosts with two processors of 8 DDR4-3200 "
       "channels"},
      {"v100", 40e12, 32e9, 900e9, 12e9, 256e9 / 16,
       "ZeRO-Offload (arXiv:2101.06840) and the data sheet of the DGX-2 (16 V100 of 32 GB, two processors of 6 "
       "DDR4-2666 channels)"},
      {"cpu", 50e9, 0, 10e9, 10e9, 10e9,
       "one core of a common server in fp32, assumed; --tflops and --host_memory_gb_s replace it"},
  };
}

std::vector<Link> known_links() {
  return {
      {"nvlink", 300e9, 5e-6, "half of 600 GB/s both ways (A100); an H100 has 450e9, a V100 150e9"},
      {"nvlink4", 450e9, 5e-6, "half of 900 GB/s both ways (H100, H200)"},
      {"nvlink2", 150e9, 5e-6, "half of 300 GB/s both ways (V100)"},
      {"pcie", 25e9, 10e-6, "PCIe 4 x16, of whose 32 GB/s programs get about 25"},
      {"shared_memory", 10e9, 20e-6, "two copies by a core, assumed; --within_gb_s replaces it"},
      {"100g", 12.5e9, 10e-6, "100 Gbit/s of a host"},
      {"200g", 25e9, 10e-6, "200 Gbit/s of a host"},
      {"400g", 50e9, 10e-6, "400 Gbit/s of a host"},
      {"800g", 100e9, 10e-6, "800 Gbit/s of a host; the DGX-2 has 8 times 100 Gbit/s"},
      {"3200g", 400e9, 10e-6, "8 times 400 Gbit/s of a host, as the DGX H100 has them"},
  };
}

template <class T>
std::vector<std::string> names_of(const std::vector<T>& known) {
  std::vector<std::string> names;
  for (const T& one : known) names.push_back(one.name);
  return names;
}

template <class T>
T find(std::string_view kind, std::string_view name, const std::vector<T>& known) {
  const std::string canonical = canonical_name(name);
  const auto found = std::ranges::find(known, canonical, &T::name);
  if (found != known.end()) return *found;
  throw UsageError(unknown_name_message(kind, name, names_of(known)));
}

}  // namespace

double Machine::turns(int64_t ranks) const {
  if (cores_per_host == 0) return 1.0;
  const auto on_host = static_cast<double>(std::min(ranks, ranks_per_host));
  return std::max(1.0, on_host / static_cast<double>(cores_per_host));
}

bool Machine::has_core_for_exchanges(int64_t ranks) const {
  return cores_per_host == 0 || std::min(ranks, ranks_per_host) < cores_per_host;
}

Device device_of(std::string_view name) { return find("device", name, known_devices()); }
Link link_of(std::string_view name) { return find("link", name, known_links()); }
std::vector<std::string> device_names() { return names_of(known_devices()); }
std::vector<std::string> link_names() { return names_of(known_links()); }

}  // namespace fulgur::scaling
