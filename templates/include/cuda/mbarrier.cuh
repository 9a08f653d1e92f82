// Barriers in shared memory that count arrivals of threads and bytes of bulk copies. A barrier's phase ends when both
// counts are complete; phases alternate parity 0, 1, 0, ..., and waiting for parity 1 of a fresh barrier returns at
// once. sm_90 and later.
namespace device {

// One thread initializes, fences, and lets the others know through block_sync.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Shows the initialized barriers to bulk copies.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, after adding `bytes` to what the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Whether the phase of this parity has ended; never waits.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}
// Waits for the end of the phase of this parity. With -DWAIT_LIMIT=n a wait that fails n times ends the kernel.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#ifdef WAIT_LIMIT
    uint32_t failed = 0;
#endif
    uint32_t done = 0;
#pragma unroll 1  // nvcc would unroll a loop with a trap 32 times
    while (done == 0) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
#ifdef WAIT_LIMIT
        if (done == 0 && ++failed == WAIT_LIMIT) __trap();
#endif
    }
}

}  // namespace device
