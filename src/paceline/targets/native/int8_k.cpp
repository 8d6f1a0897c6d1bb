// Products with inputs of 8 bits, for the kinds of formats_k.cpp.
#include "int8_kernel.h"
#include "storage_k.h"

namespace paceline::PACELINE_ISA {

const ByteKernels* byte_kernels_k(int32_t kind) {
    switch (kind) {
        case Q5_0: return fastest_byte_kernels<StoreBlocks<5, 16, false>>();
        case Q5_1: return fastest_byte_kernels<StoreBlocks<5, 0, true>>();
        case Q2_K: return fastest_byte_kernels<StoreK<FileQ2K>>();
        case Q3_K: return fastest_byte_kernels<StoreK<FileQ3K>>();
        case Q4_K: return fastest_byte_kernels<StoreK<FileQ4K>>();
        case Q5_K: return fastest_byte_kernels<StoreK<FileQ5K>>();
        case Q6_K: return fastest_byte_kernels<StoreK<FileQ6K>>();
        default: return nullptr;
    }
}

}  // namespace paceline::PACELINE_ISA
