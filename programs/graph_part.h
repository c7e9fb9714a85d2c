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

// Leaves out the operators and the outputs that depend on an input at one of `places`. An operator depends on an input
// if it reads the input, the result of a dependent operator, or a tensor (or a view of one) to which a dependent
// operator has written. A size of such an input is no dependency if another input has the same symbol as a size; the
// part reads it there. tools/compile_step.py decides as this function does.
GraphPart without_inputs(const ExportedProgram& program, const std::vector<size_t>& places);

}  // namespace fulgur::program
