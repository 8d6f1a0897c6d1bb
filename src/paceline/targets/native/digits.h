// Unsigned numbers of 2, 4, 5, 6 or 8 bits for each output of a panel, and their way into registers as floats.
#pragma once

#include "vectors.h"

namespace paceline::PACELINE_ISA {

constexpr int TURN = 8;

// The digits of UNIT inputs. A word, which is a 32-bit lane, holds as many of one output as fit: of 4 bits those of 8
// inputs. Of digits of 5 and 6 bits it holds the low 4, those of a turn's inputs 0 to 3 in the low halves of its bytes,
// of 4 to 7 in the high ones; the bits above are in one more word, which comes first, for all turns: those of an input
// in the same half of the same byte, from the first turn's at the bottom. Four digits at a time are then put together.
template <int BITS, int UNIT>
struct Digits {
    static constexpr int bits = BITS;
    static constexpr int low = BITS == 5 || BITS == 6 ? 4 : BITS, high = BITS - low;
    static constexpr int words = 32 / low;  // inputs of a word
    static constexpr int bytes = UNIT * PANEL * BITS / 8;
    static_assert(UNIT % words == 0 && (!high || UNIT == 32 / high));

    // With 512 bits digits become numbers without a conversion, which would take the multiply-adds' place. Up to five
    // bits choose one of 16 or 32 floats, whatever bits stand above them; more bits, put into the fraction of `raised`,
    // make raised + digit: at the fraction's end or, of eight, in the word's second byte. Where all of a digit is in
    // one word it is moved there by where the word is loaded from, instead of by a shift, which would take the
    // multiply-adds' place as well. Such a word begins up to a byte before the panel's and ends up to three after it.
    static constexpr int raised = WIDE < 16 || BITS <= 5 ? 0 : BITS == 8 ? 1 << 15 : 1 << BITS;

    // Of input turn + i, for the panel's vector v of outputs.
    static wf number(const uint8_t* p, int turn, int i, int v) {
#if defined(__AVX512F__)
        if constexpr (low == BITS && words <= TURN) {
            const uint8_t* at = p + ((turn / words + i / words) * PANEL + v * WIDE) * 4;
            const int place = i % words * low;
            return BITS == 8 ? as_float(load<wu>(at + place / 8 - 1), 8) : as_float(load<wu>(at + place / 8), place % 8);
        }
#endif
        const wu word = load<wu>(p + (high ? PANEL * 4 : 0) + ((turn / words + i / words) * PANEL + v * WIDE) * 4);
        if constexpr (words > TURN) return as_float(word >> (turn % words * low), i * low);
        if constexpr (!high) return as_float(word, i % words * low);
        const wu above = load<wu>(p + v * WIDE * 4);
        const int place = turn / TURN * high;
        const wu both = i < 4 ? choose(word, above << (4 - place)) : choose(word >> 4, above >> place);
        return as_float(both, i % 4 * 8);
    }

    static constexpr int lift = 1 << 11;
#if defined(__AVX512F__)
    // lift + the digit of 4 bits, of inputs 1, 3, 5, 7: the upper half of a byte, in a fraction's middle without a shift.
    static wf lifted(const uint8_t* p, int turn, int i, int v) {
        const wu word = load<wu>(p + ((turn / words + i / words) * PANEL + v * WIDE) * 4 + i % words / 2 - 1);
        return in_fraction(word, 0xf000, lift);
    }
#endif

    // Of four inputs, a byte each: first, first + stride, ... with first = group / stride * 4 stride + group % stride.
    static constexpr int stride = high ? 1 : words / 4;
    static wu four(const uint8_t* p, int group, int v) {
        const int at = high ? group / 2 : group / stride;
        const wu word = load<wu>(p + (high ? PANEL * 4 : 0) + (at * PANEL + v * WIDE) * 4);
        constexpr uint32_t mask = EACH * ((1 << BITS) - 1);
        if constexpr (BITS == 8) return word;
        if constexpr (!high) return word >> (group % stride * low) & mask;
        const wu above = load<wu>(p + v * WIDE * 4);
        const int place = at * high;
        return (group % 2 ? choose(word >> 4, above >> place) : choose(word, above << (4 - place))) & mask;
    }

    // Of one output; `digits[UNIT]`.
    static void write(uint8_t* to, const uint8_t* digits, int lane) {
        uint32_t above = 0;
        for (int first = 0; first < UNIT; first += words) {
            uint32_t word = 0;
            for (int i = 0; i < words; i++) {
                const uint32_t digit = digits[first + i];
                const int place = high ? i % 4 * 8 + i / 4 * 4 : i * low;
                word |= (digit & ((1 << low) - 1)) << place;
                above |= digit >> low << (place + first / words * high);
            }
            std::memcpy(to + ((first / words + (high > 0)) * PANEL + lane) * 4, &word, 4);
        }
        if (high) std::memcpy(to + lane * 4, &above, 4);
    }

  private:
    // The low halves of the bytes of `word`, and `above` in their high ones.
    static wu choose(wu word, wu above) {
#if defined(__AVX512F__)
        constexpr int either = 0xca;  // first ? second : third
        return (wu)_mm512_ternarylogic_epi32(_mm512_set1_epi32(EACH * 15), (__m512i)word, (__m512i)above, either);
#else
        return (word & EACH * 15) | (above & EACH * (((1 << high) - 1) << 4));
#endif
    }

#if defined(__AVX512F__)
    // These bits of the word in the fraction of `power`.
    static wf in_fraction(wu word, int bits, int power) {
        const __m512i unit = _mm512_castps_si512(_mm512_set1_ps(power));
#if defined(PACELINE_ZEN)  // where an operation with three inputs takes a multiply-add's place, and these two do not
        if constexpr (BITS != 6) return (wf)((wu)keep((__m512i)word & _mm512_set1_epi32(bits)) | (wu)unit);
#endif
        constexpr int pick_or = 0xea;  // (first & second) | third
        return (wf)_mm512_ternarylogic_epi32((__m512i)word, _mm512_set1_epi32(bits), unit, pick_or);
    }
#endif

    static wf as_float(wu word, int place) {
        constexpr int mask = (1 << BITS) - 1;
#if defined(__AVX512F__)
        const __m512i shifted = (__m512i)(word >> place);
        const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4 & mask, 5 & mask, 6 & mask, 7 & mask, 8 & mask, 9 & mask,
                                              10 & mask, 11 & mask, 12 & mask, 13 & mask, 14 & mask, 15 & mask);
        if constexpr (BITS <= 4) return (wf)_mm512_permutexvar_ps(shifted, numbers);
        const __m512 more = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
        if constexpr (BITS == 5) return (wf)_mm512_permutex2var_ps(numbers, shifted, more);
        constexpr int unit_bit = BITS == 8 ? 8 : 23 - BITS;  // of the fraction: worth 1 beside `raised`
        const wu moved = place < unit_bit ? word << (unit_bit - place) : word >> (place - unit_bit);
        return in_fraction(moved, mask << unit_bit, raised);
#else
        const wu digit = BITS > 4 ? byte(word, place / 8) : place + BITS == 32 ? word >> place : word >> place & mask;
        return __builtin_convertvector((wi)digit, wf);
#endif
    }

    static wu byte(wu word, int which) {  // of every lane
#if defined(__AVX2__) && !defined(__AVX512F__)
        const __m256i lanes = _mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12);  // a shuffle keeps to its half
        return (wu)_mm256_shuffle_epi8((__m256i)word, _mm256_add_epi32(lanes, _mm256_set1_epi32(NONE + which)));
#else
        return which == 3 ? word >> 24 : word >> (which * 8) & 255;
#endif
    }

    static constexpr uint32_t EACH = 0x01010101;   // of four bytes
    static constexpr int NONE = (int)0x80808000u;  // of a shuffle's bytes: the upper three are 0
};

}  // namespace paceline::PACELINE_ISA
