// D = A B + C for one 16 x 8 tile of bf16 inputs, 16 channels deep, FP32 accumulator.
namespace device {

__device__ __forceinline__ void mma_io(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const float* c) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace device
