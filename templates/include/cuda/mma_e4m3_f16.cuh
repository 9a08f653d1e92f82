// D = A B + C for one 16 x 8 tile, 32 e4m3 tokens deep, FP16 accumulator. Native on sm_89 and sm_120; on sm_90 the
// instruction is emulated with FP16 MMAs and FP16 adds.
namespace device {

// d[0] and c[0] hold the two columns of row lane / 4, d[1] and c[1] those of row lane / 4 + 8, as fp16 pairs.
__device__ __forceinline__ void mma_pv(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const uint32_t* c) {
    asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]));
}

}  // namespace device
