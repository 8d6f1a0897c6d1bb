// Products of bfloat16 in tiles (see amx.h).
//
// tdpbf16ps adds to each sum the products of 16 pairs of inputs: the first ones of all pairs as one chain of fused
// multiply-adds from zero, the second ones as another, then both. That is one order at any number of tokens, so
// decoding stays exact; but it is not the order of gemm.cpp's chains, so that the bits are not those of other
// instruction sets. Numbers below 2^-126 count as zero.
//
// A panel of weights as StoreBF16 has it is a column of such tiles already, 1 KiB each.
//
// Blocking. Four sums of tokens x panels stay in tiles, of which two or more are always in flight: one tile of tokens
// by four panels where that is all there are, so that narrow passes read four streams of weights; else two by two,
// which loads as much as it multiplies. All inputs at once, as in bfloat16.cpp.
#include "amx.h"

#include "amx_tiles.h"
#include "tiles.h"

namespace paceline::PACELINE_ISA {

int tile_panels(int tokens) { return tokens <= PANEL ? 4 : 2; }

#if defined(PACELINE_HAS_TILES)
namespace {

struct Panels {
    const uint8_t* weights;
    size_t bytes;  // of a panel
    const uint8_t* at(const uint8_t* first, int panel, int pair) const { return first + panel * bytes + pair * LINE; }
    const uint8_t* at(int panel, int pair) const { return at(weights, panel, pair); }
};

void prefetch_tile(const uint8_t* next) {
    for (int row = 0; row < ROWS; row++) __builtin_prefetch(next + row * LINE, 0, 2);
}

// One tile of tokens by `count` panels, at most four.
void flat(const Panels& w, int count, const float* x, size_t ldx, int pairs, float* acc, size_t stride,
          const uint8_t* next) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int k = 0; k < pairs; k += ROWS) {
        load_tile<LEFT>(x + k, ldx);
        for (int panel = 0; next && panel < count; panel++) prefetch_tile(w.at(next, panel, k));
        load_tile<RIGHT>(w.at(0, k), LINE), multiply<0, LEFT, RIGHT>();
        if (count > 1) load_tile<RIGHT + 1>(w.at(1, k), LINE), multiply<1, LEFT, RIGHT + 1>();
        if (count > 2) load_tile<RIGHT>(w.at(2, k), LINE), multiply<2, LEFT, RIGHT>();
        if (count > 3) load_tile<RIGHT + 1>(w.at(3, k), LINE), multiply<3, LEFT, RIGHT + 1>();
    }
    store_tile<0>(acc, stride);
    if (count > 1) store_tile<1>(acc + PANEL, stride);
    if (count > 2) store_tile<2>(acc + 2 * PANEL, stride);
    if (count > 3) store_tile<3>(acc + 3 * PANEL, stride);
}

// Two tiles of tokens by two panels.
void square(const Panels& w, const float* x, const float* below, size_t ldx, int pairs, float* acc, float* acc_below,
            size_t stride, const uint8_t* next) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    for (int k = 0; k < pairs; k += ROWS) {
        if (next) prefetch_tile(w.at(next, 0, k)), prefetch_tile(w.at(next, 1, k));
        load_tile<RIGHT>(w.at(0, k), LINE), load_tile<LEFT>(x + k, ldx), multiply<0, LEFT, RIGHT>();
        load_tile<LEFT + 1>(below + k, ldx), multiply<2, LEFT + 1, RIGHT>();
        load_tile<RIGHT + 1>(w.at(1, k), LINE), multiply<1, LEFT, RIGHT + 1>(), multiply<3, LEFT + 1, RIGHT + 1>();
    }
    store_tile<0>(acc, stride), store_tile<1>(acc + PANEL, stride);
    store_tile<2>(acc_below, stride), store_tile<3>(acc_below + PANEL, stride);
}

}  // namespace

void tile_products(const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int pairs, float* acc,
                   const uint8_t* next) {
    const Panels w{weights, (size_t)pairs * LINE};
    const Cut cut(tokens, ROWS);
    const size_t row = ldx * sizeof(float), width = panels * PANEL, stride = width * sizeof(float);
    Tiles tiles;
    int tile = 0;
    for (; panels == 2 && tile + 1 < cut.count; tile += 2, next = nullptr) {
        const int upper = cut(tile), lower = cut(tile + 1), end = cut(tile + 2);
        tiles.shape(lower - upper, end - lower);
        square(w, x + (size_t)upper * ldx, x + (size_t)lower * ldx, row, pairs, acc + upper * width,
               acc + lower * width, stride, next);
    }
    for (; tile < cut.count; tile++, next = nullptr) {
        const int first = cut(tile);
        tiles.shape(cut(tile + 1) - first, 0);
        flat(w, panels, x + (size_t)first * ldx, row, pairs, acc + first * width, stride, next);
    }
}

double tile_multiply_add(int64_t turns) {
    Tiles tiles;
    tiles.shape(ROWS, ROWS);
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>(), zero_tile<LEFT>(), zero_tile<RIGHT>();
    for (int64_t turn = 0; turn < turns; turn++)
        multiply<0, LEFT, RIGHT>(), multiply<1, LEFT, RIGHT>(), multiply<2, LEFT, RIGHT>(), multiply<3, LEFT, RIGHT>();
    return 2.0 * turns * 4 * ROWS * PANEL * 2 * ROWS;
}

#else

void tile_products(const uint8_t*, int, const float*, int, int, int, float*, const uint8_t*) {}
double tile_multiply_add(int64_t) { return 0; }

#endif

}  // namespace paceline::PACELINE_ISA
