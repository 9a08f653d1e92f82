// Barriers in shared memory that count arrivals of threads and bytes of bulk copies. A barrier's phase ends when both
// counts are complete; phases alternate parity 0, 1, 0, ..., and waiting for parity 1 of a fresh barrier returns at
// once. sm_90 and later.
namespace device {

// One thread initializes, fences, and lets the others know through block_sync.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals, int line = __builtin_LINE()) {
    emulator::mbarrier_init(barrier, arrivals, line);
}
// Shows the initialized barriers to bulk copies.
__device__ __forceinline__ void mbarrier_init_fence() { emulator::mbarrier_init_fence(); }
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, int line = __builtin_LINE()) {
    emulator::mbarrier_arrive(barrier, 0, line);
}
// Arrives, after adding `bytes` to what the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes,
                                                          int line = __builtin_LINE()) {
    emulator::mbarrier_arrive(barrier, bytes, line);
}
// Whether the phase of this parity has ended; never waits.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity, int line = __builtin_LINE()) {
    return emulator::mbarrier_test_wait(barrier, parity, line);
}
// Waits for the end of the phase of this parity. With -DWAIT_LIMIT=n a wait that fails n times ends the kernel.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity, int line = __builtin_LINE()) {
    emulator::mbarrier_wait(barrier, parity, line);
}

}  // namespace device
