#pragma once

#include <cstddef>
#include <vector>

#include "fulgur/programs/exported_program.h"
#include "fulgur/programs/graph.h"

namespace fulgur::program {

// The part of a program's graph that does not depend on some of its inputs.
struct GraphPart {
  Graph graph;                  // still has those inputs, but nothing reads them
  std::vector<size_t> outputs;  // the places that the outputs have in the whole graph
};

// An operator depends on an input also by what is written: if one that depends on it writes to a tensor, so does
// whatever reads that tensor, or a view of it, later. A size of a left-out input is no dependency if another input has
// the same symbol as a size; the part reads it there. tools/compile_step.py decides as this function does.
GraphPart without_inputs(const ExportedProgram& program, const std::vector<size_t>& places);

}  // namespace fulgur::program
