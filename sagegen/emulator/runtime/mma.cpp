// mma.sync: the lanes' fragments are gathered into whole matrices, multiplied, and handed back (PTX ISA, "mma").
#include <vector>

#include "engine.hpp"
#include "numerics.hpp"

#include "emulator.cuh"

namespace emulator {

namespace {

constexpr int ROWS = 16;
constexpr int COLUMNS = 8;

// What one lane brings: registers as 32-bit words, whatever they hold.
struct Lane {
    uint32_t* d;
    const uint32_t* a;
    uint32_t b[2];
    const uint32_t* c;
};

template <typename D>
Lane make_lane(D (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const D* c) {
    return {reinterpret_cast<uint32_t*>(d), a, {b0, b1}, reinterpret_cast<const uint32_t*>(c)};
}

struct Int8 {
    static constexpr int BITS = 8;
    static float value(uint32_t word) { return static_cast<int8_t>(word & 0xff); }
};
struct E4m3 {
    static constexpr int BITS = 8;
    static float value(uint32_t word) {
        static const std::vector<float> values = [] {
            std::vector<float> all(256);
            for (int i = 0; i < 256; ++i) all[i] = e4m3_to_float(static_cast<uint8_t>(i));
            return all;
        }();
        return values[word & 0xff];
    }
};
struct Half {
    static constexpr int BITS = 16;
    static float value(uint32_t word) {
        static const std::vector<float> values = [] {
            std::vector<float> all(65536);
            for (int i = 0; i < 65536; ++i) all[i] = half_to_float(static_cast<uint16_t>(i));
            return all;
        }();
        return values[word & 0xffff];
    }
};
struct Bfloat16 {
    static constexpr int BITS = 16;
    static float value(uint32_t word) { return bits_float(word << 16); }
};

// The matrices of one product. A register holds 32 / BITS neighbours along k; a fragment's k is 4 lanes wide, twice.
template <typename Element>
struct Operands {
    static constexpr int PER_WORD = 32 / Element::BITS;
    static constexpr int DEPTH = 8 * PER_WORD;
    float a[ROWS][DEPTH];
    float b[COLUMNS][DEPTH];

    explicit Operands(void* const* lanes) {
        for (int index = 0; index < WARP; ++index) {
            const Lane& lane = *static_cast<Lane*>(lanes[index]);
            const int group = index / 4;
            const int k = index % 4 * PER_WORD;
            for (int half = 0; half < 2; ++half) {
                unpack(&a[group][k + half * DEPTH / 2], lane.a[2 * half]);
                unpack(&a[group + 8][k + half * DEPTH / 2], lane.a[2 * half + 1]);
                unpack(&b[group][k + half * DEPTH / 2], lane.b[half]);
            }
        }
    }
    static void unpack(float* target, uint32_t word) {
        for (int i = 0; i < PER_WORD; ++i) target[i] = Element::value(word >> (Element::BITS * i));
    }
    // Exact but for the rounding of a double: products of these formats have at most 22 bits.
    double dot(int row, int column) const {
        double sum = 0;
        for (int k = 0; k < DEPTH; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
        return sum;
    }
};

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
uint32_t add_fp22(double product, uint32_t c) { return float_bits(cut_to_fp22(product + bits_float(c))); }

void perform_s8(Engine&, int, void* const* lanes) {
    // unsigned: INT32 accumulators wrap
    multiply<Int8>(lanes, [](double product, uint32_t c) { return c + static_cast<uint32_t>(static_cast<int>(product)); });
}
void perform_f16(Engine&, int, void* const* lanes) { multiply<Half>(lanes, add_fp32); }
void perform_bf16(Engine&, int, void* const* lanes) { multiply<Bfloat16>(lanes, add_fp32); }
void perform_e4m3(Engine& engine, int, void* const* lanes) {
    multiply<E4m3>(lanes, has_fp22_mma(engine.launch().architecture) ? add_fp22 : add_fp32);
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
