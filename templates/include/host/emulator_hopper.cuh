// The runtime behind the device layer's other parts: INT4 and FP16-accumulator products, packed arithmetic, atomics,
// and what sm_90 brought. As in emulator.cuh, `line` is that of whoever called the wrapper.
namespace emulator {

// Matrix products of one warp.
void mma_s4(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int* c, int line);
void mma_f16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const uint32_t* c, int line);
void mma_e4m3_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const uint32_t* c, int line);

// Arithmetic as the hardware does it, and two to a word.
float e4m3_to_float(uint8_t bits);
uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector);
uint32_t max3_s16x2(uint32_t a, uint32_t b, uint32_t c);
uint32_t add_max_s16x2(uint32_t a, uint32_t b, uint32_t c);
uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c);
uint32_t max_half2(uint32_t a, uint32_t b);

void store_matrix(uint32_t row_address, const uint32_t (&matrix)[4], bool transposed, int line);
void named_barrier(int barrier, int threads, bool waits, int line);
uint32_t atomic_add(uint32_t* address, uint32_t value, int line);
void atomic_max(uint32_t* address, uint32_t value, int line);

// mbarriers; a bulk copy that completes on one lands when a thread waits for it and nothing else can go on.
void mbarrier_init(uint64_t* barrier, uint32_t arrivals, int line);
void mbarrier_init_fence();
void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes, int line);
bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity, int line);
void mbarrier_wait(uint64_t* barrier, uint32_t parity, int line);

void fence_proxy_async();
void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, int line);
void bulk_store(void* global, const void* shared, uint32_t bytes, int line);
void bulk_commit();
void bulk_wait(int pending, bool only_reads, int line);

// Products of a warpgroup; they are computed at the wait that covers them, from shared memory as it is then.
void wgmma_list_registers(const void* registers, int bytes);
void wgmma_fence(int line);
void wgmma_s8(int* d, int columns, uint64_t a, uint64_t b, bool accumulate, int line);
void wgmma_e4m3(float* d, int columns, uint64_t a, uint64_t b, bool accumulate, int line);
void wgmma_e4m3(float* d, int columns, const uint32_t (&a)[4], uint64_t b, bool accumulate, int line);
void wgmma_commit(int line);
void wgmma_wait(int pending, int line);

int grid_size();
void set_registers(int registers, bool is_raise, int line);
void wait_for_predecessor();

}  // namespace emulator
