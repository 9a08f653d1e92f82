// Size of the grid.
namespace device {

__device__ __forceinline__ int grid_size() { return emulator::grid_size(); }

}  // namespace device
