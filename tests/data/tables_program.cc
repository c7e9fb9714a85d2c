// Makes tensors of a table for training and one for validation: tables_program <train> <val> <tensors.safetensors>. The
// target is the column "y".
#include <arrow/table.h>

#include <string>

#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/data/tables/read_table.h"
#include "fulgur/data/tables/table_schema.h"

int main(int argc, char** argv) {
  using namespace fulgur;
  if (argc != 4) return 2;
  const auto train = read_table(argv[1]), val = read_table(argv[2]);
  const TableSchema schema = TableSchema::fit(*train, {.target = "y", .has_missing_indicators = true});
  NamedTensors tensors;
  for (const auto& [name, tensor] : schema.encode(*train)) tensors.emplace_back("train/" + name, tensor);
  for (const auto& [name, tensor] : schema.encode(*val)) tensors.emplace_back("val/" + name, tensor);
  write_safetensors(argv[3], tensors);
}
