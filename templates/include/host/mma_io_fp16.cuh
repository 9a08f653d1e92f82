// D = A B + C for one 16 x 8 tile of f16 inputs, 16 channels deep, FP32 accumulator.
namespace device {

__device__ __forceinline__ void mma_io(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const float* c, int line = __builtin_LINE()) {
    emulator::mma_f16(d, a, b0, b1, c, line);
}

}  // namespace device
