// D = A B + C for one 16 x 8 tile, 32 e4m3 tokens deep, FP16 accumulator. Native on sm_89 and sm_120; on sm_90 the
// instruction is emulated with FP16 MMAs and FP16 adds.
namespace device {

// d[0] and c[0] hold the two columns of row lane / 4, d[1] and c[1] those of row lane / 4 + 8, as fp16 pairs.
__device__ __forceinline__ void mma_pv(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const uint32_t* c, int line = __builtin_LINE()) {
    emulator::mma_e4m3_f16(d, a, b0, b1, c, line);
}

}  // namespace device
