// Kernels for floats and on GGUF's blocks of 32.
#include "kernel.h"

namespace paceline::PACELINE_ISA::formats {

const Format f32 = format_of<StoreF32>, bf16 = format_of<StoreBF16>, f16 = format_of<StoreF16>;
const Format q8_0 = format_of<StoreBlocks<8, 128, false>>, q4_0 = format_of<StoreBlocks<4, 8, false>>,
             q4_1 = format_of<StoreBlocks<4, 0, true>>,
             q4_1_near = format_of<StoreBlocks<4, 0, true, WIDE == 16>>;  // elsewhere the same

}  // namespace paceline::PACELINE_ISA::formats
