// D = A B + C for one 16 x 8 tile of scores, 32 e4m3 channels deep. The accumulator keeps 13 mantissa bits (FP22) on
// sm_89 and sm_120; on sm_90 the instruction is emulated with FP16 MMAs and FP32 adds.
namespace device {

__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const float* c, int line = __builtin_LINE()) {
    emulator::mma_e4m3(d, a, b0, b1, c, line);
}

}  // namespace device
