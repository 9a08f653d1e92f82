// Matrix stores to shared memory, the inverse of the matrix loads. sm_90 and later.
namespace device {

// Four 8x8 matrices of 16-bit elements; lane l gives the shared address of row l % 8 of matrix l / 8 and holds
// elements 2 * (l % 4) and one more of row l / 4 of every matrix.
__device__ __forceinline__ void store_matrix_x4(uint32_t row_address, const uint32_t (&matrix)[4],
                                                int line = __builtin_LINE()) {
    emulator::store_matrix(row_address, matrix, false, line);
}
// The lane's elements are of column l / 4 instead.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t row_address, const uint32_t (&matrix)[4],
                                                           int line = __builtin_LINE()) {
    emulator::store_matrix(row_address, matrix, true, line);
}

}  // namespace device
