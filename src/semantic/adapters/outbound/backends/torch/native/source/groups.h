/* Groups of 32 integers of a row, as `pack.c` lays them out.
 *
 * A block is LANES rows of 32 columns. Its integers are eight vectors of four columns of each row, one
 * byte each; those of less than eight bits share bytes:
 *
 *   4 bits   four vectors of pairs: vectors 0 to 3 in the lower halves, 4 to 7 in the upper ones
 *   5 bits   the same, and a vector of the fifth bits: bit v is of vector v
 *   6 bits   the same, and two vectors of the other two bits, each of four vectors in turn
 *   MXFP4    as 4 bits; an integer is the number of a multiple of half the group's power of two
 *
 * Each row's scale and bias follow in half precision; the bias of MXFP4 is -12 times the scale.
 */
#ifndef SEMANTIC_GROUPS_H
#define SEMANTIC_GROUPS_H

/* Kinds of matrices; those of plain integers are their numbers of bits. */
enum { FULL = 0, FOUR_BITS = 4, FIVE_BITS = 5, SIX_BITS = 6, EIGHT_BITS = 8, MXFP4 = 12 };

/* Multiples of one half, plus 12, by the codes of MXFP4. */
#define MXFP4_VALUES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

/* Bytes of a block's integers, and of the whole block. */
INLINE size_t integers_size(int kind) { return 4 * LANES * (size_t)(kind == MXFP4 ? 4 : kind); }
INLINE size_t group_size(int kind) {
    return integers_size(kind) + (kind == MXFP4 ? 2 : 4) * LANES;
}

/* One integer of a block. */
INLINE int weight_at(const uint8_t *block, int kind, int lane, int column) {
    static const uint8_t values[] = {MXFP4_VALUES};
    int vector = column / 4, width = 4 * LANES;
    const uint8_t *w = block + lane * 4 + column % 4;
    if (kind == EIGHT_BITS) return w[vector * width] ^ (IS_SIGNED ? 128 : 0);
    int low = vector < 4 ? w[vector * width] & 15 : w[(vector - 4) * width] >> 4;
    if (kind == MXFP4) return values[low];
    if (kind == FIVE_BITS) return low + 16 * (w[4 * width] >> vector & 1);
    if (kind == SIX_BITS) return low + 16 * (w[(4 + vector / 4) * width] >> 2 * (vector % 4) & 3);
    return low;
}

#ifndef SEMANTIC_SCALAR

/* Words, as not every instruction set shifts bytes. */
typedef uint16_t vw __attribute__((vector_size(4 * LANES)));

INLINE vw load_words(const uint8_t *p) {
    vw v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vw look_up(vw codes); /* the values of MXFP4's codes */

/* Vector `v` of a block's integers, one byte each. */
INLINE vw weights_of(const uint8_t *block, int kind, int v) {
    enum { WIDTH = 4 * LANES };
    if (kind == EIGHT_BITS) return load_words(block + WIDTH * v); /* minus 128 if IS_SIGNED */
    vw pairs = load_words(block + WIDTH * (v % 4));
    vw low = (v < 4 ? pairs : pairs >> 4) & 0x0f0f;
    if (kind == FOUR_BITS) return low;
    if (kind == MXFP4) return look_up(low);
    int place = kind == FIVE_BITS ? v : 2 * (v % 4);
    vw high = load_words(block + WIDTH * (kind == FIVE_BITS ? 4 : 4 + v / 4));
    high = place < 4 ? high << (4 - place) : high >> (place - 4);
    return low | (kind == FIVE_BITS ? high & 0x1010 : high & 0x3030);
}

#endif
#endif
