// mma.sync: the lanes' fragments are gathered into whole matrices, multiplied, and handed back (PTX ISA, "mma").
#include <cstring>

#include "engine.hpp"
#include "fp8_products.hpp"
#include "fragments.hpp"
#include "numerics.hpp"

#include "emulator.cuh"

namespace emulator {

namespace {

// D = combine(A B, C), elements where m16n8 accumulators hold them.
template <typename Element, typename Combine>
void multiply(void* const* lanes, Combine combine) {
    const Operands<Element> operands(lanes);
    for (int index = 0; index < WARP; ++index) {
        const Lane& lane = *static_cast<Lane*>(lanes[index]);
        for (int i = 0; i < 4; ++i) {
            const double product = operands.dot(index / 4 + i / 2 * 8, index % 4 * 2 + i % 2);
            lane.d[i] = combine(product, lane.c[i]);
        }
    }
}

uint32_t add_fp32(double product, uint32_t c) { return float_bits(static_cast<float>(product + bits_float(c))); }

void perform_s8(Engine&, int, void* const* lanes) {
    // unsigned: INT32 accumulators wrap
    multiply<Int8>(lanes, [](double product, uint32_t c) { return c + static_cast<uint32_t>(static_cast<int>(product)); });
}
void perform_f16(Engine&, int, void* const* lanes) { multiply<Half>(lanes, add_fp32); }
void perform_bf16(Engine&, int, void* const* lanes) { multiply<Bfloat16>(lanes, add_fp32); }
// Native FP8 products. The fragments are those of Operands; here the bytes themselves are wanted.
void perform_e4m3_native(void* const* lanes) {
    constexpr int DEPTH = 32;
    uint8_t a[ROWS][DEPTH];
    uint8_t b[COLUMNS][DEPTH];
    for (int index = 0; index < WARP; ++index) {
        const Lane& lane = *static_cast<Lane*>(lanes[index]);
        for (int half = 0; half < 2; ++half) {
            const int k = 16 * half + index % 4 * 4;
            memcpy(&a[index / 4][k], &lane.a[2 * half], 4);
            memcpy(&a[index / 4 + 8][k], &lane.a[2 * half + 1], 4);
            memcpy(&b[index / 4][k], &lane.b[half], 4);
        }
    }
    const E4m3Columns columns(b[0], DEPTH, COLUMNS);
    float sums[ROWS][COLUMNS];
    for (int index = 0; index < WARP; ++index) {
        const Lane& lane = *static_cast<Lane*>(lanes[index]);
        for (int i = 0; i < 4; ++i) sums[index / 4 + i / 2 * 8][index % 4 * 2 + i % 2] = bits_float(lane.c[i]);
    }
    for (int row = 0; row < ROWS; ++row) columns.add_products(a[row], sums[row]);
    for (int index = 0; index < WARP; ++index) {
        const Lane& lane = *static_cast<Lane*>(lanes[index]);
        for (int i = 0; i < 4; ++i) lane.d[i] = float_bits(sums[index / 4 + i / 2 * 8][index % 4 * 2 + i % 2]);
    }
}

void perform_e4m3(Engine& engine, int, void* const* lanes) {
    if (has_fp22_mma(engine.launch().architecture)) {
        perform_e4m3_native(lanes);
    } else {
        multiply<E4m3>(lanes, add_fp32);
    }
}

}  // namespace

void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int* c, int line) {
    Lane lane = make_lane(d, a, b0, b1, c);
    engine().meet("mma_s8", EMULATOR_SITE(line), &lane, perform_s8);
}
void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float* c, int line) {
    Lane lane = make_lane(d, a, b0, b1, c);
    engine().meet("mma_f16", EMULATOR_SITE(line), &lane, perform_f16);
}
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float* c, int line) {
    Lane lane = make_lane(d, a, b0, b1, c);
    engine().meet("mma_bf16", EMULATOR_SITE(line), &lane, perform_bf16);
}
void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float* c, int line) {
    Lane lane = make_lane(d, a, b0, b1, c);
    engine().meet("mma_e4m3", EMULATOR_SITE(line), &lane, perform_e4m3);
}

}  // namespace emulator
