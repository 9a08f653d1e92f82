// Kernels with bugs: each is a template over BUG, right with NONE.

struct Params {
    const uint32_t* input;
    uint32_t* output;
    int64_t padding;  // the emulator takes only structs of more than 16 bytes
};

extern __shared__ __align__(1024) uint8_t shared_memory[];

constexpr int NONE = 0;
#define BUGGY(KERNEL, THREADS, BUG)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) KERNEL##_##BUG(const __grid_constant__ Params p) { \
        KERNEL<BUG>(p);                                                                                  \
    }

// ---- mbarriers and bulk copies ----

enum PipelineBug {
    no_init = 1, init_twice, no_init_fence, no_init_sync, short_expect, long_expect, no_full_wait, wrong_parity,
    no_empty_wait, empty_count, missing_arrival, misaligned_copy, odd_size, past_source, past_end, store_unfenced,
    store_unordered, store_not_waited, store_reused, no_producer
};

constexpr int STAGES = 2;
constexpr int TILES = 5;
constexpr int WORDS = 512;  // of a tile
constexpr int CONSUMERS = 128;

template <int BUG>
__device__ __forceinline__ void produce(const Params& p, uint64_t* full, uint64_t* empty) {
    constexpr int COUNT = BUG == past_end ? TILES + 1 : TILES;
    constexpr uint32_t BYTES = 4 * WORDS;
    for (int tile = 0; tile < COUNT; ++tile) {
        const int s = tile % STAGES;
        if (BUG != no_empty_wait) device::mbarrier_wait(&empty[s], (tile / STAGES + 1) % 2);
        const uint32_t expected = BUG == short_expect ? BYTES - 16 : BUG == long_expect ? BYTES + 16 : BYTES;
        device::mbarrier_arrive_expect_tx(&full[s], expected);
        const int source = BUG == past_end ? tile % TILES : BUG == past_source ? tile + 1 : tile;
        const uint32_t bytes = BUG == odd_size ? BYTES - 8 : BYTES;
        uint8_t* const stage = shared_memory + s * BYTES + (BUG == misaligned_copy ? 8 : 0);
        device::bulk_load(stage, p.input + source * WORDS, bytes, &full[s]);
    }
}

template <int BUG>
__device__ __forceinline__ void consume(const Params& p, uint64_t* full, uint64_t* empty) {
    const int thread = device::thread_index();
    uint32_t sum[WORDS / CONSUMERS] = {};
    for (int tile = 0; tile < TILES; ++tile) {
        const int s = tile % STAGES;
        const uint32_t parity = (tile / STAGES + (BUG == wrong_parity)) % 2;
        if (BUG != no_full_wait || tile < STAGES) device::mbarrier_wait(&full[s], parity);
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(shared_memory) + s * WORDS;
        for (int i = 0; i < WORDS / CONSUMERS; ++i) sum[i] += words[i * CONSUMERS + thread];
        if (BUG != missing_arrival || thread > 0) device::mbarrier_arrive(&empty[s]);
    }
    uint32_t* const sums = reinterpret_cast<uint32_t*>(shared_memory) + STAGES * WORDS;
    for (int i = 0; i < WORDS / CONSUMERS; ++i) sums[i * CONSUMERS + thread] = sum[i];
    if (BUG != store_unfenced) device::fence_proxy_async();
    if (BUG != store_unordered) device::named_barrier_sync(1, CONSUMERS);
    if (thread > 0) return;
    device::bulk_store(p.output, sums, 4 * WORDS);
    device::bulk_commit();
    if (BUG == store_reused) sums[5] = 0;
    if (BUG != store_not_waited) device::bulk_wait_read<0>();
}

template <int BUG>
__device__ __forceinline__ void pipeline(const Params& p) {
    __shared__ uint64_t full[STAGES];
    __shared__ uint64_t empty[STAGES];
    if (device::thread_index() == 0) {
        for (int s = 0; s < STAGES; ++s) {
            if (BUG != no_init) device::mbarrier_init(&full[s], 1);
            if (BUG == init_twice) device::mbarrier_init(&full[s], 1);
            device::mbarrier_init(&empty[s], BUG == empty_count ? CONSUMERS / 2 : CONSUMERS);
        }
        if (BUG != no_init_fence) device::mbarrier_init_fence();
    }
    if (BUG != no_init_sync) device::block_sync();
    if (BUG == no_producer && device::thread_index() >= CONSUMERS) return;
    if (device::thread_index() == CONSUMERS) produce<BUG>(p, full, empty);
    if (device::thread_index() >= CONSUMERS) return;
    // with a bug in the initialization the producer meets it first
    if (BUG == no_init || BUG == no_init_sync) return;
    consume<BUG>(p, full, empty);
}
BUGGY(pipeline, CONSUMERS + 32, NONE)
BUGGY(pipeline, CONSUMERS + 32, no_init)
BUGGY(pipeline, CONSUMERS + 32, init_twice)
BUGGY(pipeline, CONSUMERS + 32, no_init_fence)
BUGGY(pipeline, CONSUMERS + 32, no_init_sync)
BUGGY(pipeline, CONSUMERS + 32, short_expect)
BUGGY(pipeline, CONSUMERS + 32, long_expect)
BUGGY(pipeline, CONSUMERS + 32, no_full_wait)
BUGGY(pipeline, CONSUMERS + 32, wrong_parity)
BUGGY(pipeline, CONSUMERS + 32, no_empty_wait)
BUGGY(pipeline, CONSUMERS + 32, empty_count)
BUGGY(pipeline, CONSUMERS + 32, missing_arrival)
BUGGY(pipeline, CONSUMERS + 32, misaligned_copy)
BUGGY(pipeline, CONSUMERS + 32, odd_size)
BUGGY(pipeline, CONSUMERS + 32, past_source)
BUGGY(pipeline, CONSUMERS + 32, past_end)
BUGGY(pipeline, CONSUMERS + 32, store_unfenced)
BUGGY(pipeline, CONSUMERS + 32, store_unordered)
BUGGY(pipeline, CONSUMERS + 32, store_not_waited)
BUGGY(pipeline, CONSUMERS + 32, store_reused)
BUGGY(pipeline, CONSUMERS + 32, no_producer)

// ---- wgmma ----

enum ProductBug {
    unfenced = 1, late_fence, no_sync, no_wgmma_fence, written_after_fence, no_commit, no_wait, wait_one,
    overwritten, never_waited, missing_warp, other_descriptor, unwritten_operand, past_shared, no_swizzle,
    half_block
};

template <int BUG>
__device__ __forceinline__ void product(const Params& p) {
    constexpr int N = 64, ROW_BYTES = 64, WORDS_A = 64 * ROW_BYTES / 4;
    const int thread = device::thread_index();
    uint32_t* const words = reinterpret_cast<uint32_t*>(shared_memory);
    const int count = BUG == unwritten_operand ? 2 * WORDS_A - 128 : 2 * WORDS_A;
    for (int i = thread; i < count; i += 128) words[i] = p.input[i];
    if (BUG != unfenced && BUG != late_fence) device::fence_proxy_async();
    if (BUG != no_sync) device::block_sync();
    if (BUG == late_fence) device::fence_proxy_async();
    uint64_t a = device::wgmma_descriptor<ROW_BYTES>(device::shared_address(words));
    uint64_t b = device::wgmma_descriptor<ROW_BYTES>(device::shared_address(words + WORDS_A));
    if (BUG == other_descriptor && device::warp_index() == 2) b = device::advance_descriptor(b, 32);
    if (BUG == past_shared) b = device::advance_descriptor(b, 8192);
    if (BUG == no_swizzle) b &= ~(uint64_t{3} << 62);
    int d[N / 2] = {};
    uint32_t a_registers[4] = {};
    if (BUG != no_wgmma_fence) device::wgmma_fence(d, a_registers);
    if (BUG == written_after_fence) d[3] = 1;
    device::wgmma_s8(d, a, b, true);
    if (BUG != missing_warp || device::warp_index() != 3) {
        device::wgmma_s8(d, device::advance_descriptor(a, 32), device::advance_descriptor(b, 32), true);
    }
    if (BUG != no_commit) device::wgmma_commit();
    if (BUG == overwritten && thread == 100) words[WORDS_A] = 0;
    if (BUG == wait_one) {
        device::wgmma_wait<1>(d);
    } else if (BUG != no_wait && BUG != never_waited) {
        device::wgmma_wait<0>(d);
    }
    if (BUG == never_waited) return;
    for (int i = 0; i < N / 2; ++i) p.output[thread * N / 2 + i] = static_cast<uint32_t>(d[i]);
}
BUGGY(product, 128, NONE)
BUGGY(product, 128, unfenced)
BUGGY(product, 128, late_fence)
BUGGY(product, 128, no_sync)
BUGGY(product, 128, no_wgmma_fence)
BUGGY(product, 128, written_after_fence)
BUGGY(product, 128, no_commit)
BUGGY(product, 128, no_wait)
BUGGY(product, 128, wait_one)
BUGGY(product, 128, overwritten)
BUGGY(product, 128, never_waited)
BUGGY(product, 128, missing_warp)
BUGGY(product, 128, other_descriptor)
BUGGY(product, 128, unwritten_operand)
BUGGY(product, 128, past_shared)
BUGGY(product, 128, no_swizzle)
BUGGY(product, 128, half_block)

// ---- registers, barriers, atomics, launches ----

enum ControlBug {
    raise_first = 1, unequal_warps, wrong_way, odd_budget, barrier_count, barrier_id, no_warp_sync, unsynced_matrix,
    plain_counter, unset_counter, no_dependency
};

template <int BUG>
__device__ __forceinline__ void control(const Params& p) {
    __shared__ uint32_t words[384];
    __shared__ __align__(16) uint32_t rows[32][4];
    const int thread = device::thread_index();
    if (device::warp_index() < 4) {
        if (BUG == wrong_way) device::lower_registers<240>();
        if (BUG == odd_budget) device::lower_registers<100>();
        if (BUG != raise_first && (BUG != unequal_warps || device::warp_index() != 1)) {
            device::lower_registers<24>();
        }
    } else {
        if (BUG != unequal_warps) device::raise_registers<240>();
    }
    words[thread] = 0;
    device::block_sync();
    words[thread] = p.input[thread];
    if (BUG != no_warp_sync) device::warp_sync();
    const uint32_t neighbour = words[thread ^ 1];
    if (BUG == barrier_id) device::named_barrier_sync(16, 384);
    if (thread < 128) {
        device::named_barrier_arrive(1, 256);
    } else if (thread < 256) {
        device::named_barrier_sync(1, BUG == barrier_count ? 128 : 256);
    }
    if (device::warp_index() == 0) {
        const uint32_t matrix[4] = {neighbour, 1, 2, 3};
        device::store_matrix_x4(device::shared_address(rows[thread]), matrix);
        if (BUG != unsynced_matrix) device::warp_sync();
        if (rows[31 - thread][0] == 77) words[thread] = 0;
    }
    device::block_sync();
    if (BUG == unset_counter && thread == 0) device::atomic_add(p.output + 384, 1);
    if (BUG == plain_counter && thread == 0) {
        p.output[384] = 0;
        device::atomic_add(p.output + 384, 1);
        if (p.output[384] == 77) return;
    }
    if (BUG != no_dependency) device::wait_for_predecessor();
    p.output[thread] = neighbour;
}
BUGGY(control, 384, NONE)
BUGGY(control, 384, raise_first)
BUGGY(control, 384, unequal_warps)
BUGGY(control, 384, wrong_way)
BUGGY(control, 384, odd_budget)
BUGGY(control, 384, barrier_count)
BUGGY(control, 384, barrier_id)
BUGGY(control, 384, no_warp_sync)
BUGGY(control, 384, unsynced_matrix)
BUGGY(control, 384, plain_counter)
BUGGY(control, 384, unset_counter)
BUGGY(control, 384, no_dependency)
