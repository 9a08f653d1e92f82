// Products of warpgroups: those in flight, and the accumulators that they are on their way to.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine.hpp"

namespace emulator {

constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = GROUP_THREADS / WARP;
constexpr int TILE_ROWS = 64;
constexpr int DEPTH = 32;  // bytes of an operand's row that one product takes

enum class ProductType : uint8_t { s8, e4m3 };

// The arithmetic: D [64, columns] of 32-bit words, A [64, 32] and B [columns, 32] bytes.
void multiply_s8(uint32_t* d, const uint8_t* a, const uint8_t* b, int columns, bool accumulates);
void multiply_e4m3(uint32_t* d, const uint8_t* a, const uint8_t* b, int columns, bool accumulates);

// An accumulator while products are on their way to it.
struct Tile {
    int columns = 0;
    std::vector<uint32_t> values;            // [64, columns]
    uint32_t* registers[GROUP_THREADS] = {};  // by thread; null until the thread has come
    size_t last[GROUP_THREADS] = {};         // number of the last product that the thread gave it to
    bool is_returned[GROUP_THREADS] = {};    // to the thread's registers
    int returned = 0;
};

struct Product {
    ProductType type = ProductType::s8;
    int columns = 0;
    uint64_t a_descriptor = 0;
    uint64_t b_descriptor = 0;
    bool accumulates = false;
    Site site = {};
    int warps = 0;                 // that have come
    Clock since;                   // what is ordered before it for every thread
    std::vector<uint8_t> a_rows;   // [64, 32] out of registers; empty: by descriptor
    std::shared_ptr<Tile> tile;
};

class Wgmma {
   public:
    explicit Wgmma(Engine& engine);

    // For the running thread's next fence.
    void list_registers(const void* registers, int bytes);
    void issue(const Product& product, uint32_t* d, const uint32_t* a);
    void wait(size_t pending, Site site);
    static void perform_fence(Engine& engine, int first_thread, void* const* lanes);
    static void perform_commit(Engine& engine, int first_thread, void* const* lanes);

   private:
    // Registers as they were at a fence.
    struct RegisterCopy {
        const uint8_t* begin;
        std::vector<uint8_t> bytes;
    };
    struct Thread {
        std::vector<RegisterCopy> listed;
        std::vector<RegisterCopy> fenced;
        size_t issued = 0;
        std::vector<size_t> commits;  // products issued before each
        size_t waited = 0;
    };
    struct Group {
        int agent = 0;
        std::vector<Product> products;  // all of the block
        size_t computed = 0;
        std::vector<std::shared_ptr<Tile>> tiles;
        std::vector<int> waiting;       // threads, for other warps
    };

    static void perform_issue(Engine& engine, int first_thread, void* const* lanes);
    static void check_end(Engine& engine);
    static void forget(Thread& state, const void* begin, const void* end);
    void check_fenced(int thread, const void* registers, size_t bytes, const char* what, Site site);
    std::shared_ptr<Tile> find_tile(Group& group, int local, const uint32_t* d, int columns);
    void join(Product& product, int thread, uint32_t* d, const uint32_t* a);
    void read_operands(Group& group, size_t index);
    void compute(Product& product);
    void give_back(Group& group, int thread, size_t covered);

    Engine& engine_;
    std::vector<Thread> threads_;
    std::vector<Group> groups_;
};

}  // namespace emulator
