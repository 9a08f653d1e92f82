// mma.sync with INT4 operands or FP16 accumulators.
#include "engine.hpp"
#include "fragments.hpp"
#include "numerics.hpp"

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

void perform_s4(Engine&, int, void* const* lanes) {
    const Operands<Int4> operands(lanes);
    for (int index = 0; index < WARP; ++index) {
        const Lane& lane = *static_cast<Lane*>(lanes[index]);
        for (int i = 0; i < 4; ++i) {
            const double product = operands.dot(index / 4 + i / 2 * 8, index % 4 * 2 + i % 2);
            lane.d[i] = lane.c[i] + static_cast<uint32_t>(static_cast<int>(product));  // wraps
        }
    }
}

// An FP16 accumulator takes `steps` equal parts of the depth, one rounded addition each.
template <typename Element>
void multiply_f16(void* const* lanes, int steps, bool rounds_products) {
    const Operands<Element> operands(lanes);
    const int depth = Operands<Element>::DEPTH / steps;
    for (int index = 0; index < WARP; ++index) {
        const Lane& lane = *static_cast<Lane*>(lanes[index]);
        for (int i = 0; i < 4; ++i) {
            const int row = index / 4 + i / 2 * 8;
            const int column = index % 4 * 2 + i % 2;
            const int shift = 16 * (i % 2);
            uint16_t sum = static_cast<uint16_t>(lane.c[i / 2] >> shift);
            for (int step = 0; step < steps; ++step) {
                double product = operands.dot(row, column, step * depth, (step + 1) * depth);
                if (rounds_products) product = half_to_float(double_to_half(product));
                sum = double_to_half(product + half_to_float(sum));
            }
            lane.d[i / 2] = (lane.d[i / 2] & ~(0xffffu << shift)) | static_cast<uint32_t>(sum) << shift;
        }
    }
}

void perform_f16_f16(Engine&, int, void* const* lanes) { multiply_f16<Half>(lanes, 1, false); }
void perform_e4m3_f16(Engine& engine, int, void* const* lanes) {
    // emulated: two FP16 MMAs from zero, and their sums added in FP16
    const bool is_native = has_fp22_mma(engine.launch().architecture);
    multiply_f16<E4m3>(lanes, is_native ? 1 : 2, !is_native);
}

}  // namespace

void mma_s4(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int* c, int line) {
    Lane lane = make_lane(d, a, b0, b1, c);
    engine().meet("mma_s4", EMULATOR_SITE(line), &lane, perform_s4);
}
void mma_f16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const uint32_t* c, int line) {
    uint32_t sums[2] = {c[0], c[1]};  // d may be c
    Lane lane = make_lane(d, a, b0, b1, sums);
    engine().meet("mma_f16_f16", EMULATOR_SITE(line), &lane, perform_f16_f16);
}
void mma_e4m3_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const uint32_t* c, int line) {
    uint32_t sums[2] = {c[0], c[1]};
    Lane lane = make_lane(d, a, b0, b1, sums);
    engine().meet("mma_e4m3_f16", EMULATOR_SITE(line), &lane, perform_e4m3_f16);
}

}  // namespace emulator
