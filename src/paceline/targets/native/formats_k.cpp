// Kernels for GGUF's K-quants, and on what stands in for them where rows are not made of blocks of 256.
#include "kernel.h"
#include "storage_k.h"

namespace paceline::PACELINE_ISA::formats {

const Format q5_0 = format_of<StoreBlocks<5, 16, false>>, q5_1 = format_of<StoreBlocks<5, 0, true>>;
const Format q2_k = format_of<StoreK<FileQ2K>>, q3_k = format_of<StoreK<FileQ3K>>;
const Format q4_k = format_of<StoreK<FileQ4K>>, q5_k = format_of<StoreK<FileQ5K>>, q6_k = format_of<StoreK<FileQ6K>>;

}  // namespace paceline::PACELINE_ISA::formats
