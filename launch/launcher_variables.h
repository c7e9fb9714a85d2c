#pragma once

#include <string_view>

namespace fulgur {

// Whether launchers set this environment variable to tell a process its place in a run: torchrun (RANK,
// TORCHELASTIC_RUN_ID, ...), SLURM (SLURM_*), Open MPI (OMPI_*, PMIX_*, ...) and fulgur's own launcher. A program that
// unsets all of them can start a run of its own, of which detect_cluster_environment() sees nothing.
bool is_launcher_variable(std::string_view name);

}  // namespace fulgur
