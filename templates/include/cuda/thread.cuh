// Thread indices, block and warp collectives.
namespace device {

__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }

__device__ __forceinline__ void block_sync() { __syncthreads(); }

template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
__device__ __forceinline__ bool warp_any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }
__device__ __forceinline__ uint32_t warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

}  // namespace device
