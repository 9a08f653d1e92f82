// Matrix products of a warpgroup: D = A B, or D + A B, 64 rows by N columns, 32 bytes deep; all four warps take part.
// They run asynchronously: wgmma_fence before the first one after registers were touched, wgmma_commit after the last,
// wgmma_wait before accumulators or registers of A are touched and before operands in shared memory are overwritten.
// Warp w has rows 16 * w to 16 * w + 15. Of those its lane l holds, in d[i], row 8 * (i / 2 % 2) + l / 4 and column
// 8 * (i / 4) + 2 * (l % 4) + i % 2; in a[i] of an A in registers, row 8 * (i % 2) + l / 4 and the four bytes from
// 16 * (i / 2) + 4 * (l % 4). The FP32 accumulators keep 13 mantissa bits (FP22). sm_90a.
namespace device {

// Descriptor of an operand: rows of K, ROW_BYTES (32, 64 or 128) apart, swizzled in groups of 8 rows, which start at a
// multiple of 8 * ROW_BYTES. Swizzled: the 16-byte chunk of a row is exclusive-ored with row % 8 where rows have 128
// bytes, with row / 2 % 4 where they have 64, and with row / 4 % 2 where they have 32.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
    static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES == 128, "a row is as wide as a swizzle");
    constexpr uint32_t mode = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
    constexpr uint32_t group_stride = 8 * ROW_BYTES / 16;
    constexpr uint32_t high = mode << 30 | group_stride;
    const uint32_t low = 1u << 16 | address / 16 % (1u << 14);
    return static_cast<uint64_t>(high) << 32 | low;
}
// The same rows, `bytes` (a multiple of 32) further along K.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
    return descriptor + static_cast<uint32_t>(bytes) / 16;
}

// The same value in all lanes of a warp, known as such to the compiler.
__device__ __forceinline__ int uniform(int value) { return value; }
// The same address in shared memory, found once: left alone, ptxas finds the block's window again in every loop.
__device__ __forceinline__ uint8_t* settle(uint8_t* shared) { return shared; }

// `registers`: the accumulators, and A if it is in registers, that the products to come touch.
__device__ __forceinline__ void wgmma_fence(int line = __builtin_LINE()) { emulator::wgmma_fence(line); }
template <typename A>
__device__ __forceinline__ void wgmma_fence(A& registers, int line = __builtin_LINE()) {
    emulator::wgmma_list_registers(&registers, sizeof(A));
    emulator::wgmma_fence(line);
}
template <typename A, typename B>
__device__ __forceinline__ void wgmma_fence(A& registers, B& more, int line = __builtin_LINE()) {
    emulator::wgmma_list_registers(&registers, sizeof(A));
    emulator::wgmma_list_registers(&more, sizeof(B));
    emulator::wgmma_fence(line);
}
template <typename A, typename B, typename C>
__device__ __forceinline__ void wgmma_fence(A& registers, B& more, C& last, int line = __builtin_LINE()) {
    emulator::wgmma_list_registers(&registers, sizeof(A));
    emulator::wgmma_list_registers(&more, sizeof(B));
    emulator::wgmma_list_registers(&last, sizeof(C));
    emulator::wgmma_fence(line);
}
__device__ __forceinline__ void wgmma_commit(int line = __builtin_LINE()) { emulator::wgmma_commit(line); }
// Waits until at most PENDING committed groups are unfinished. `registers`: those that the finished products touched.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait(int line = __builtin_LINE()) {
    emulator::wgmma_wait(PENDING, line);
}
template <int PENDING, typename A>
__device__ __forceinline__ void wgmma_wait(A&, int line = __builtin_LINE()) {
    emulator::wgmma_wait(PENDING, line);
}
template <int PENDING, typename A, typename B>
__device__ __forceinline__ void wgmma_wait(A&, B&, int line = __builtin_LINE()) {
    emulator::wgmma_wait(PENDING, line);
}
template <int PENDING, typename A, typename B, typename C>
__device__ __forceinline__ void wgmma_wait(A&, B&, C&, int line = __builtin_LINE()) {
    emulator::wgmma_wait(PENDING, line);
}

// Keeps the compiler from moving, copying or reusing registers across this place.
template <typename T>
__device__ __forceinline__ void pin(T&) {}

// Read and zero one element of an accumulator whose others stay with the products: after an ordinary read or write
// ptxas copies the whole accumulator around every product.
__device__ __forceinline__ float accumulator_element(const float& element) { return element; }
__device__ __forceinline__ void zero_accumulator_element(float& element) { element = 0.0f; }

// Unless `accumulate`, D starts at zero.
template <int COUNT>
__device__ __forceinline__ void wgmma_s8(int (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate,
                                         int line = __builtin_LINE()) {
    emulator::wgmma_s8(d, 2 * COUNT, a, b, accumulate, line);
}
template <int COUNT>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate,
                                           int line = __builtin_LINE()) {
    emulator::wgmma_e4m3(d, 2 * COUNT, a, b, accumulate, line);
}
template <int COUNT>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                                           int line = __builtin_LINE()) {
    emulator::wgmma_e4m3(d, 2 * COUNT, a, b, accumulate, line);
}

}  // namespace device
