// Size of the grid.
namespace device {

__device__ __forceinline__ int grid_size() { return static_cast<int>(gridDim.x); }

}  // namespace device
