// D = A B + C for one 16 x 8 tile, 32 int8 channels deep, INT32 accumulator.
namespace device {

__device__ __forceinline__ void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int* c,
                                       int line = __builtin_LINE()) {
    emulator::mma_s8(d, a, b0, b1, c, line);
}

}  // namespace device
