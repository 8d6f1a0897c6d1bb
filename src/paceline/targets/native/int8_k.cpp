// Products with inputs of 8 bits, for the kinds of formats_k.cpp.
#include "int8_kernel.h"
#include "storage_k.h"

namespace paceline::PACELINE_ISA {

const ByteKernels* byte_kernels_k(int32_t kind) {
    switch (kind) {
        case Q5_0: return &byte_kernels_of<StoreBlocks<5, 16, false>>;
        case Q5_1: return &byte_kernels_of<StoreBlocks<5, 0, true>>;
        case Q2_K: return &byte_kernels_of<StoreK<FileQ2K>>;
        case Q3_K: return &byte_kernels_of<StoreK<FileQ3K>>;
        case Q4_K: return &byte_kernels_of<StoreK<FileQ4K>>;
        case Q5_K: return &byte_kernels_of<StoreK<FileQ5K>>;
        case Q6_K: return &byte_kernels_of<StoreK<FileQ6K>>;
        default: return nullptr;
    }
}

}  // namespace paceline::PACELINE_ISA
