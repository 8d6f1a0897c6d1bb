// Products of bfloat16 in tiles, with weights that stay in their blocks (see amx.h).
//
// Of a unit of inputs that share d and m, sum (d u + m) x = d sum(u x) + m sum(x), where u is a whole number below 256,
// which bfloat16 has exactly: weights are not rounded, inputs are. sum(u x) comes from tdpbf16ps (its order: amx.cpp),
// for digits of more than five bits from two of them, of the low four bits and of those above. What follows is the
// same at any number of tokens: total = fma(d, sum(u x), fma(m, sum(x), total)), unit after unit.
//
// Blocking. A tile of up to sixteen tokens by four panels, a block of 32 inputs at a time. Digits become tiles of
// weights in the L1 cache, sums leave their tiles through it, and neither waits for the other: while a block is
// multiplied, the next one is unpacked and the one before it is added to the totals.
#include <algorithm>
#include <bit>
#include <utility>

#include "amx.h"
#include "amx_tiles.h"
#include "storage.h"
#include "storage_k.h"

namespace paceline::PACELINE_ISA {

#if defined(PACELINE_HAS_TILES)
namespace {

constexpr int PANELS = TILE_BLOCK_PANELS;
constexpr uint32_t UPPER = 0xffff0000u;

// times * digit in bfloat16, by the lowest five bits of a word: the digit's, and others that do not count.
struct Table {
    alignas(64) uint16_t words[32];
    constexpr Table(int bits, int times) : words() {
        for (int i = 0; i < 32; i++) {
            const int digit = i & ((1 << bits) - 1);
            words[i] = std::bit_cast<uint32_t>((float)(times * digit)) >> 16;
        }
    }
    __m512i at(__m512i places) const { return _mm512_permutexvar_epi16(places, _mm512_load_si512(words)); }
};

inline __m512i join(wu low, wu high) { return (__m512i)((low & ~UPPER) | (high & UPPER)); }

// The digits of a unit as rows of tiles: in row 4v + i those of inputs 8v + i and 8v + 4 + i, sixteen outputs.
template <class D>
struct Unpack {
    static constexpr int low_bits = D::bits > 5 ? 4 : D::bits, tiles = 1 + (D::bits > 5);
    static constexpr Table low{low_bits, 1}, high{4, 16};

    // Inputs 8v to 8v + 7.
    static void rows(const uint8_t* numbers, int v, uint8_t* to) {
        if constexpr (D::bits > 4) {  // bytes: two inputs of each half, then the other two
            const wu first = D::four(numbers, 2 * v, 0), second = D::four(numbers, 2 * v + 1, 0);
            two(join(first, second << 16), to), two(join(first >> 16, second), to + 2 * LINE);
        } else {
            const wu word = load_word(numbers, v);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) put(low.at(_mm512_srli_epi16((__m512i)word, D::bits * i)), to + i * LINE);
        }
    }

  private:
    static wu load_word(const uint8_t* numbers, int v) {
        if constexpr (D::bits == 4) return load<wu>(numbers + v * PANEL * 4);
        const wu word = load<wu>(numbers);  // two bits of sixteen inputs
        return (wu)(v ? join(word >> 16, word >> 8) : join(word, word << 8));
    }
    static void two(__m512i bytes, uint8_t* to) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, to += LINE) {
            put(low.at(_mm512_srli_epi16(bytes, 8 * i)), to);
            if (tiles > 1) put(high.at(_mm512_srli_epi16(bytes, 8 * i + 4)), to + ROWS * LINE);
        }
    }
    static void put(__m512i row, uint8_t* to) { _mm512_store_si512(to, row); }
};

// One tile of tokens by up to four panels, whose totals begin as they stand in `acc`.
//
// An item is what a product is made of: a unit of inputs by a panel. A turn multiplies one, unpacks the same one of the
// next block, and adds up an earlier one: a sum leaves its tile four turns after the product, which takes that long.
template <class S>
class TokenTile {
    using U = Unpack<typename S::D>;
    static constexpr int UNITS = BLOCK / S::unit, ITEMS = PANELS * UNITS, LAG = 6;  // from product to total

  public:
    TokenTile(const uint8_t* weights, size_t panel_bytes, int panels, const float* x, int ldx, int tokens, float* acc)
        : x_(x), acc_(acc), panels_(panels), ldx_(ldx), tokens_(tokens), stride_(panels * PANEL) {
        // What stands in for a panel that is not there is multiplied as well, and not added up.
        for (int panel = 0; panel < PANELS; panel++) at_[panel] = weights + std::min(panel, panels - 1) * panel_bytes;
        if (UNITS > 1) std::memset(made_, 0, sizeof made_);  // half of a tile stays so, the half of the other unit
    }

    void run(int blocks, const uint8_t* next, int lines) {
        each_item([&]<int ITEM>() { unpack<ITEM>(0); });
        for (int block = 0; block < blocks; block++) {
            load_tile<LEFT>(x_ + block * BLOCK, ldx_ * sizeof(float));
            for (int line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next, 0, 2);
            each_item([&]<int ITEM>() {
                if (block * ITEMS + ITEM >= 4) store_tile<ITEM % 4>(sums_[(ITEM + ITEMS - 4) % ITEMS], LINE);
                zero_tile<ITEM % 4>();
                for (int part = 0; part < U::tiles; part++) {
                    load_tile<RIGHT + ITEM % 2>(made_[block % 2][ITEM] + part * ROWS * LINE, LINE);
                    multiply<ITEM % 4, LEFT, RIGHT + ITEM % 2>();
                }
                if (block + 1 < blocks) unpack<ITEM>(block + 1);
                finish<ITEM>(block);
            });
        }
        each_item([&]<int ITEM>() {  // what is still on its way
            if (ITEM < 4) store_tile<ITEM>(sums_[ITEM + ITEMS - 4], LINE);
            if (ITEM < LAG) finish<ITEM>(blocks);
        });
        if (LAG > ITEMS) each_item([&]<int ITEM>() { if (ITEM < LAG - ITEMS) finish<ITEM>(blocks + 1); });
    }

  private:
    template <class Do>
    static void each_item(Do what) {
        [&]<int... ITEM>(std::integer_sequence<int, ITEM...>) {
            (what.template operator()<ITEM>(), ...);
        }(std::make_integer_sequence<int, ITEMS>());
    }

    template <int ITEM>
    void unpack(int block) {
        constexpr int panel = ITEM / UNITS, unit = ITEM % UNITS;
        const int k = block * BLOCK + unit * S::unit;
        wf d[1], m[1];
        const uint8_t* numbers = S::unit_at(at_[panel] + (size_t)(k / S::block) * S::bytes, k % S::block, d, m);
        store(scales_[block % 4][ITEM][0], d[0]);
        store(scales_[block % 4][ITEM][1], S::D::raised ? fma(d[0], splat<wf>(S::D::raised), m[0]) : m[0]);
        uint8_t* to = made_[block % 2][ITEM] + unit * S::unit / 2 * LINE;
#pragma GCC unroll 4
        for (int v = 0; v < S::unit / 8; v++) U::rows(numbers, v, to + 4 * v * LINE);
    }

    // In turn ITEM of a block: of the item LAG turns before.
    template <int ITEM>
    void finish(int block) {
        constexpr int back = (LAG - ITEM + ITEMS - 1) / ITEMS, item = ITEM - LAG + back * ITEMS;
        if (block >= back && item / UNITS < panels_) total<item>(block - back);
    }

    template <int ITEM>
    void total(int block) {
        const auto& [scale, least] = scales_[block % 4][ITEM];
        const wf d = load<wf>(scale), m = load<wf>(least);
        const float* inputs = ((const PairedBlock*)(x_ + block * BLOCK))->sums + (UNITS > 1 ? ITEM % UNITS : 2);
        const float* sums = sums_[ITEM];
        float* to = acc_ + ITEM / UNITS * PANEL;
#pragma GCC unroll 4
        for (int t = 0; t < tokens_; t++, sums += PANEL, to += stride_, inputs += ldx_)
            store(to, fma(d, load<wf>(sums), fma(m, splat<wf>(*inputs), load<wf>(to))));
    }

    const uint8_t* at_[PANELS];
    const float* x_;
    float* acc_;
    const int panels_, ldx_, tokens_, stride_;
    alignas(64) uint8_t made_[2][ITEMS][U::tiles * ROWS * LINE];
    alignas(64) float sums_[ITEMS][ROWS * PANEL];
    alignas(64) float scales_[4][ITEMS][2][PANEL];
};

template <class S>
void products(const uint8_t* weights, int panels, const float* x, int ldx, int tokens, int inputs, float* acc,
              const uint8_t* next) {
    const size_t panel_bytes = (size_t)inputs / S::block * S::bytes;
    const int lines = PANELS * S::bytes * BLOCK / S::block / LINE;  // of the next weights, a block
    const Cut cut(tokens, ROWS);
    const int stride = panels * PANEL;
    std::fill_n(acc, (size_t)tokens * stride, 0.0f);
    Tiles tiles;
    for (int tile = 0; tile < cut.count; tile++) {
        const int first = cut(tile), count = cut(tile + 1) - first;
        tiles.shape(count, 0);
        TokenTile<S> some(weights, panel_bytes, panels, x + (size_t)first * ldx, ldx, count, acc + first * stride);
        some.run(inputs / BLOCK, next, tile ? 0 : lines);
    }
}

using Products = decltype(&products<StoreBlocks<4, 0, true>>);

Products products_of(int32_t kind) {
    switch (kind) {
        case Q8_0: return products<StoreBlocks<8, 128, false>>;
        case Q4_0: return products<StoreBlocks<4, 8, false>>;
        case Q4_1: return products<StoreBlocks<4, 0, true>>;
        case Q5_0: return products<StoreBlocks<5, 16, false>>;
        case Q5_1: return products<StoreBlocks<5, 0, true>>;
        case Q2_K: return products<StoreK<FileQ2K>>;
        case Q3_K: return products<StoreK<FileQ3K>>;
        case Q4_K: return products<StoreK<FileQ4K>>;
        case Q5_K: return products<StoreK<FileQ5K>>;
        default: return products<StoreK<FileQ6K>>;
    }
}

}  // namespace

void pair_row_for_blocks(float* x, int count) {
    using Words = Lanes<32>::h;
    const Words order = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15,
                         16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31};
    for (int i = 0; i < count; i += BLOCK) {
        const __m512i words = (__m512i)_mm512_cvtne2ps_pbh((__m512)load<wf>(x + i + WIDE), (__m512)load<wf>(x + i));
        wf sums[2];
        for (int half = 0; half < 2; half++) {
            const __m256i some = half ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words);
            sums[half] = fold((wf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16), [](wf a, wf b) { return a + b; });
        }
        auto& made = *(PairedBlock*)(x + i);
        _mm512_storeu_si512(made.pairs, _mm512_permutexvar_epi16((__m512i)order, words));
        made.sums[0] = sums[0][0], made.sums[1] = sums[1][0], made.sums[2] = sums[0][0] + sums[1][0];
    }
}

void tile_block_products(int32_t kind, const uint8_t* weights, int panels, const float* x, int ldx, int tokens,
                         int inputs, float* acc, const uint8_t* next) {
    products_of(kind)(weights, panels, x, ldx, tokens, inputs, acc, next);
}

#else

void pair_row_for_blocks(float*, int) {}
void tile_block_products(int32_t, const uint8_t*, int, const float*, int, int, int, float*, const uint8_t*) {}

#endif

}  // namespace paceline::PACELINE_ISA
