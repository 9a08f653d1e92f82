// D = A B + C for one 16 x 8 tile, 64 int4 channels deep, INT32 accumulator. Native on sm_80, sm_86 and sm_89; later
// architectures have no INT4 units and call a routine of some 190 instructions.
namespace device {

// A register holds 8 channels of a row, the first in the lowest 4 bits: lane l has rows l / 4 (a[0], a[2]) and
// l / 4 + 8 (a[1], a[3]), channels 8 * (l % 4) (a[0], a[1], b0) and 32 more (a[2], a[3], b1); b's column is l / 4.
__device__ __forceinline__ void mma_s4(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int* c,
                                       int line = __builtin_LINE()) {
    emulator::mma_s4(d, a, b0, b1, c, line);
}

}  // namespace device
