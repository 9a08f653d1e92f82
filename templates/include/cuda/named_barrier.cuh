// Barriers of some of a block's warps. Barrier 0 is block_sync's; 1 to 15 are free. `threads`, a multiple of 32, counts
// all that take part, those that wait and those that only arrive.
namespace device {

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Orders the memory accesses of a warp's lanes.
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

}  // namespace device
