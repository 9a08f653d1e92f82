// The arithmetic of wgmma.
#include <vector>

#include "fp8_products.hpp"
#include "numerics.hpp"
#include "wgmma.hpp"

namespace emulator {


void multiply_s8(uint32_t* d, const uint8_t* a, const uint8_t* b, int columns, bool accumulates) {
    const auto* const left = reinterpret_cast<const int8_t*>(a);
    const auto* const right = reinterpret_cast<const int8_t*>(b);
    for (int row = 0; row < TILE_ROWS; ++row) {
        for (int column = 0; column < columns; ++column) {
            int sum = 0;
            for (int k = 0; k < DEPTH; ++k) sum += left[row * DEPTH + k] * right[column * DEPTH + k];
            uint32_t& element = d[row * columns + column];
            element = (accumulates ? element : 0u) + static_cast<uint32_t>(sum);  // wraps
        }
    }
}

void multiply_e4m3(uint32_t* d, const uint8_t* a, const uint8_t* b, int columns, bool accumulates) {
    const E4m3Columns right(b, DEPTH, columns);
    std::vector<float> sums(static_cast<size_t>(columns));
    for (int row = 0; row < TILE_ROWS; ++row) {
        for (int column = 0; column < columns; ++column) {
            sums[static_cast<size_t>(column)] = accumulates ? bits_float(d[row * columns + column]) : 0.0f;
        }
        right.add_products(a + row * DEPTH, sums.data());
        for (int column = 0; column < columns; ++column) {
            d[row * columns + column] = float_bits(sums[static_cast<size_t>(column)]);
        }
    }
}

}  // namespace emulator
