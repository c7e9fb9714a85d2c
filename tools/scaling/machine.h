#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur::scaling {

// What a rank computes with. Where the numbers come from is said in machine.cc, and printed with every result.
struct Device {
  std::string name;
  double flops_per_s = 0;          // in 16 bits, of what forward and backward of a large model reach
  double memory_bytes = 0;         // 0: not limited here
  double memory_bytes_per_s = 0;   // the device's own memory
  double to_host_bytes_per_s = 0;  // each way
  double host_bytes_per_s = 0;     // memory of the host, for one rank: what its update on the host gets
  std::string source;
};

// What connects ranks.
struct Link {
  std::string name;
  double bytes_per_s = 0;  // each way: of a rank within a host, of a whole host between hosts
  double latency_s = 0;    // until a small message has arrived
  std::string source;
};

// Hosts of equal devices.
struct Machine {
  Device device;
  Link within;   // between the ranks of a host
  Link between;  // between hosts
  int64_t ranks_per_host = 8;
  int64_t cores_per_host = 0;  // cores that compute, if ranks compute on them; 0: every rank has a device of its own

  // By how much longer a rank computes because it shares a core with others of `ranks` ranks.
  double turns(int64_t ranks) const;

  // Whether exchanges run beside what ranks compute: a device has engines for that, a host needs a core that no rank
  // computes on.
  bool has_core_for_exchanges(int64_t ranks) const;
};

// The device, or link, of that name; case, '-' and '_' do not matter. Throws UsageError for another name, with all that
// are known and the nearest.
Device device_of(std::string_view name);
Link link_of(std::string_view name);

std::vector<std::string> device_names();
std::vector<std::string> link_names();

}  // namespace fulgur::scaling
